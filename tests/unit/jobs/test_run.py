"""The driver of a run: groups of stages, and the journal's lines on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.journal_printer import JournalPrinter, format_duration
from jobs.run import stage_groups
from pipeline.config.sections import StageSection
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import Journal
from tests.support.logs import on_message


@pytest.mark.parametrize(
    ("train_backbone", "sizes"),
    [
        ([False], [1]),
        ([False, False], [2]),
        ([False, True, True], [3]),
        ([True, False], [1, 1]),
        ([False, True, False, True], [2, 2]),
        ([True, False, False, True, False], [1, 3, 1]),
    ],
)
def test_a_frozen_stage_after_one_that_trains_the_backbone_begins_a_group(
    train_backbone: list[bool], sizes: list[int]
) -> None:
    stages = [
        StageSection(
            name=f"s{number}", objective="cross_entropy", train_backbone=trains, epochs=1, batch_size=8, lr=0.1
        )
        for number, trains in enumerate(train_backbone)
    ]
    groups = stage_groups(stages)
    assert [len(group) for group in groups] == sizes
    assert [stage for group in groups for stage in group] == stages


STEP = {
    "total": 50,
    "loss": 2.5,
    "gradient_norm": 1.25,
    "lr": 1e-4,
    "images_per_s": 40.4,
    "data_wait": 0.05,
    "memory_mb": 300,
}


def test_a_training_step_has_rate_and_remaining_time(tmp_path: Path) -> None:
    printer = JournalPrinter(RunFolder(tmp_path))
    event = {"stage": "xe", "kind": "event", "step": 10, "time": 100.0, "text": "continues from step 10"}
    assert printer.line(event) == "xe  continues from step 10"
    step = {"stage": "xe", "kind": "train", "step": 20, "time": 105.0, **STEP}
    expected = "xe  20/50  loss 2.5000  grad 1.25  lr 1.00e-04  40 images/s  data wait 5 %  300 MiB  15 s left"
    assert printer.line(step) == expected, "10 steps in 5 s: 30 more take 15 s"
    scst = printer.line(step | {"reward": 1.2345, "length": 9.87})
    assert "loss 2.5000  reward 1.234  length 9.9  grad" in scst
    validation = {"stage": "xe", "kind": "validation", "step": 20, "CIDEr-D": 0.5, "best": 0.75, "seconds": 1.25}
    assert printer.line(validation) == "xe  step 20: validation CIDEr-D 0.5000 (best 0.7500), 1.2 s"


def test_entries_are_printed_once_and_those_of_earlier_attempts_are_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder.journal, "xe", 0)
    journal.write("event", 1, {"text": "of an earlier attempt"})
    lines: list[str] = []
    with on_message(lines.append):
        with JournalPrinter(folder):
            journal.write("event", 2, {"text": "begins"})
        journal.write("event", 3, {"text": "after the end"})
    assert lines == ["xe  begins"]


def test_durations_are_in_seconds_or_minutes() -> None:
    assert [format_duration(seconds) for seconds in (0.4, 89.4, 90.0, 3600)] == ["0 s", "89 s", "1.5 min", "60.0 min"]
