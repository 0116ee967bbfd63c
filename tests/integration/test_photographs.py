"""Photographs with pretrained weights: "Getting started" in a short form, and then a second language."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from raycap.models.encoders.backbone import PACKAGES
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runs.journal import read_journal
from tests.conftest import ROOT
from tests.support.tutorials import Block, run_block, run_page

pytestmark = pytest.mark.ray
RUN = "raycap run photographs.yaml"
SHORT = (
    " --set stages.xe_frozen.epochs=2 --set stages.xe_frozen.batch_size=4"
    " --set stages.xe_frozen.schedule.warmup_iterations=1 --set workers.log_every_steps=1 --set workers.dry_run=false"
)
SIZES = {"train": 24, "val": 4, "test": 4}


def write_table(path: Path, rows: Iterable[tuple[str, str, str]]) -> None:
    """A table with a row (image, caption, split) for each caption."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "caption", "split"), *rows])


def test_getting_started_and_a_second_language(tmp_path: Path, shared: Path) -> None:
    source, photographs = shared / "data" / "flickr8k_subset", tmp_path / "photographs"
    if not source.is_dir():
        pytest.skip(f"no photographs in {source}")
    pytest.importorskip(PACKAGES["tf_efficientnet_lite2"], reason="raycap[photos] is not installed")
    (photographs / "images").mkdir(parents=True)
    entries = json.loads((source / "dataset.json").read_text())["images"]
    chosen = [entry for split, size in SIZES.items() for entry in [e for e in entries if e["split"] == split][:size]]
    for entry in chosen:
        shutil.copy(source / "images" / entry["filename"], photographs / "images")
    images = {f"images/{entry['filename']}": entry for entry in chosen}
    english = [(name, each["raw"], entry["split"]) for name, entry in images.items() for each in entry["sentences"]]
    write_table(photographs / "captions.csv", english)

    outputs = run_page(ROOT / "docs/getting_started.md", tmp_path, {RUN: RUN + SHORT})
    assert outputs[0].endswith(f"next      raycap check photographs.yaml\n          {RUN}\n")
    assert "fit to train on" in outputs[1].splitlines()[-1]
    assert "finished in" in outputs[2].splitlines()[-1]
    (run,) = (tmp_path / "results/runs").iterdir()
    stored = (run / "config.yaml").read_text()
    assert "threads_per_worker: null" in stored, "another machine may have other cores"
    assert "compute_dtype: float32" in stored, "a processor may be faster with bfloat16"
    losses = [entry["loss"] for entry in read_journal(run / JOURNAL) if entry["kind"] == "train"]
    assert len(losses) > 8 and sum(losses[-2:]) < 0.95 * sum(losses[:2])
    lines = [json.loads(line) for line in (tmp_path / "captions.jsonl").read_text().splitlines()]
    assert len(lines) == len(chosen) and sum(bool(line["caption"]) for line in lines) > len(lines) / 2

    with (source / "captions_zh.csv").open(encoding="utf-8", newline="") as file:
        chinese = [(row["image"], row["caption"], row["split"]) for row in csv.DictReader(file)]
    write_table(photographs / "chinese.csv", [row for row in chinese if row[0] in images])
    commands = f"raycap init photographs/chinese.csv --out chinese.yaml\nraycap run chinese.yaml{SHORT}\n"
    code, output = run_block(Block(1, "sh", commands), tmp_path, {})
    assert code == 0, output
    assert "language  zh (Cjk), tokenizer characters" in output
    assert re.search(r"features .*: 28 of 28 images there, 0 to compute", output), output
