"""`raycap check`: whether a data set is fit to train on, and what is unusual about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.options import Config, Set
from pipeline.config.load import load_config
from pipeline.runtime.secrets import without_secrets


def check(
    config: Config,
    set_: Set = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings to this JSON file.")] = None,
) -> int:
    """Check whether a data set is fit to train on.

    The exit code is 1 when training on the data would be wrong.

    Example: raycap check configs/coco_subset.yaml --set data.root=/path/to/folder
    """
    from pipeline.data.loading import planned_data
    from pipeline.runs.check import check_data
    from pipeline.runs.preflight import check_storage

    run_config = load_config(config, set_ or ())
    check_storage(run_config)
    planned_data(run_config)
    result = check_data(run_config)
    _print_statistics(result.statistics)
    for finding in result.findings:
        print(f"{finding.kind:<8} {without_secrets(finding.text)}")
    print("fit to train on" if result.ok else "NOT fit to train on: see the errors above")
    if json_file is not None:
        body = {"ok": result.ok, **result.statistics, "findings": [asdict(finding) for finding in result.findings]}
        json_file.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"written to {json_file}")
    return 0 if result.ok else 1


def _print_statistics(statistics: dict[str, Any]) -> None:
    """Prints counts of captions, words and images. `statistics` is that of `pipeline.runs.check.check_data`."""
    captions, duplicates = statistics["captions"], statistics["duplicates"]
    print("splits       " + ", ".join(f"{split} {count}" for split, count in statistics["splits"].items()))
    print(f"captions     {captions['total']}: {captions['empty']} empty, {captions['huge']} huge, ", end="")
    print(f"{captions['repeated']} images with a repeated one, {captions['not_text']} not text")
    for split, counts in captions["per_image"].items():
        print(f"  {split:<10} " + ", ".join(f"{images} images with {count}" for count, images in counts.items()))
    print(f"vocabulary   {statistics.get('vocabulary', 'empty')} words, specials included")
    print(f"images       {len(statistics['unreadable'])} missing or unreadable; ", end="")
    print(f"{duplicates['across_splits']} in training and held out, {duplicates['elsewhere']} repeated otherwise")
    short_sides = statistics.get("short_side", {})
    print("short side   " + ", ".join(f"{name} px: {count}" for name, count in short_sides.items()))
    print(f"fingerprint  {statistics['fingerprint']}")
