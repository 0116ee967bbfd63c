"""`raycap run`: which stages one fit can run, and the lines that it prints while they train."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycap.jobs.journal_printer import JournalPrinter
from raycap.jobs.run import run_log, stage_groups
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.storage.s3 import StorageError

TRAIN = {"kind": "train", "total": 40, "loss": 2.5, "gradient_norm": 1.2, "lr": 1e-4, "images_per_s": 99.6}
TRAIN |= {"data_wait": 0.034, "memory_mb": 512.4}


def stages(pattern: str) -> tuple[StageSection, ...]:
    """One stage per letter: f trains on frozen features, e end to end."""
    return tuple(
        StageSection(
            name=f"{letter}{number}",
            objective="cross_entropy",
            epochs=1,
            batch_size=8,
            lr=1e-3,
            train_backbone=letter == "e",
        )
        for number, letter in enumerate(pattern)
    )


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        ("ff", ["ff"]),
        ("fefe", ["fe", "fe"]),
        ("feef", ["fee", "f"]),
        ("ffefef", ["ffe", "fe", "f"]),
    ],
)
def test_a_frozen_stage_after_a_trained_backbone_begins_a_group(pattern: str, groups: list[str]) -> None:
    formed = stage_groups(stages(pattern))
    assert ["".join(stage.name[0] for stage in group) for group in formed] == groups
    assert [stage for group in formed for stage in group] == list(stages(pattern)), "each stage once, in order"


class Folder:
    """As much of a run's folder as the printer uses."""

    def __init__(self, path: Path, pull_error: Exception | None = None) -> None:
        self.journal, self.pull_error, self.pulls = path, pull_error, 0
        path.mkdir()

    def pull(self, name: str) -> None:
        self.pulls += 1
        if self.pull_error is not None:
            raise self.pull_error

    def write(self, **entry: Any) -> None:
        with (self.journal / "00001.jsonl").open("a") as file:
            file.write(json.dumps({"stage": "xe"} | entry) + "\n")

    def printer(self) -> JournalPrinter:
        return JournalPrinter(cast(RunFolder, self))


def test_the_lines_of_a_stage(tmp_path: Path, log_lines: list[str]) -> None:
    folder = Folder(tmp_path / "journal")
    with folder.printer():
        folder.write(kind="event", step=0, time=100.0, text="begins")
        folder.write(step=10, time=110.0, **TRAIN)
        folder.write(kind="validation", step=10, time=112.0, seconds=1.96, best=0.5, **{"CIDEr-D": 0.25})
        folder.write(step=20, time=300.0, reward=0.75, length=9.44, **TRAIN)
        folder.write(kind="done", step=40, time=320.0, text="best of step 10")
    numbers = "grad 1.20  lr 1.00e-04  100 images/s  data wait 3 %  512 MiB"
    assert log_lines == [
        "xe  begins",
        f"xe  10/40  loss 2.5000  {numbers}  30 s left",
        "xe  step 10: validation CIDEr-D 0.2500 (best 0.5000), 2.0 s",
        f"xe  20/40  loss 2.5000  reward 0.750  length 9.4  {numbers}  3.3 min left",
        "xe  best of step 10",
    ]


def test_the_last_entries_are_printed_even_if_the_storage_fails(tmp_path: Path, log_lines: list[str]) -> None:
    folder = Folder(tmp_path / "journal", OSError("the storage does not answer"))
    with pytest.raises(ZeroDivisionError), folder.printer():
        folder.write(kind="event", step=3, time=1.0, text="the loss is not finite")
        raise ZeroDivisionError
    assert log_lines == ["xe  the loss is not finite"] and folder.pulls >= 1


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (None, True),
        (JobFailedError("a stage diverged"), True),
        (OSError("the disk is full"), True),
        (StorageError("the storage does not answer"), False),
    ],
)
def test_the_log_file_goes_home_with_the_run(error: Exception | None, sent: bool, tmp_path: Path) -> None:
    pushed: list[str] = []
    folder = cast(RunFolder, SimpleNamespace(path=tmp_path, push=pushed.append))
    try:
        with run_log(folder):
            if error is not None:
                raise error
    except (JobFailedError, OSError) as raised:
        assert raised is error
    assert pushed == (["log/run.log"] if sent else [])
    text = (tmp_path / "log" / "run.log").read_text()
    assert (str(error) in text) == (error is not None)
