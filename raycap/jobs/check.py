"""`raycap check`: reports whether a data set is fit to train on, and what is unusual about it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.named_files import check_output_file
from raycap.jobs.options import Config, Set
from raycap.models.config import Values
from raycap.pipeline.config.load import load_config
from raycap.pipeline.runs.check import check_data
from raycap.pipeline.runs.preflight import check_storage
from raycap.pipeline.runtime.names import print_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.atomic import write_bytes


def check(
    config: Config,
    set_: Set = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings to this JSON file.")] = None,
) -> int:
    """Check whether a data set is fit to train on.

    The exit code is 1 when training on the data would be wrong. Every image is read by this machine.

    Example: raycap check photos --set data.root=/path/to/folder
    """
    run_config = load_config(config, set_ or ())
    if json_file is not None:
        check_output_file("--json", json_file)
    check_storage(run_config)
    result = check_data(run_config)
    _print_statistics(result.statistics)
    findings = [replace(finding, text=without_secrets(finding.text)) for finding in result.findings]
    for finding in findings:
        print_line(f"{finding.kind:<8} {finding.text}")
    print("fit to train on" if result.ok else "NOT fit to train on: see the errors above")
    if json_file is not None:
        body = {"ok": result.ok, **result.statistics, "findings": [asdict(finding) for finding in findings]}
        write_bytes(json_file, json.dumps(body, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        print(f"written to {json_file}")
    return 0 if result.ok else 1


def _print_statistics(statistics: Values) -> None:
    """Prints the counts of captions, words and images. statistics: from the result of `check_data`."""
    print_line("splits       " + ", ".join(f"{split} {count}" for split, count in statistics["splits"].items()))
    print_line(f"captions     {statistics['captions']}")
    for split, counts in statistics["captions_per_image"].items():
        print_line(f"  {split:<10} " + ", ".join(f"{images} images with {count}" for count, images in counts.items()))
    print_line(f"vocabulary   {statistics.get('vocabulary', 'empty')} words, specials included")
    print_line(f"images       {len(statistics['unreadable'])} missing or unreadable")
    print_line(f"fingerprint  {statistics['fingerprint']}")
