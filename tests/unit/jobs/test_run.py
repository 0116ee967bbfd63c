"""`raycap run`: which stages one fit can run, and the lines that it prints while they train."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycap.jobs.image_tasks import ImageTasks
from raycap.jobs.journal_printer import JournalPrinter
from raycap.jobs.run import RunDriver, find_run_data, run, run_log, shares_text, stage_groups
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runs.run_bundle import bundle_run, stored_confidences
from raycap.pipeline.storage.s3 import StorageError
from raycap.pipeline.tracking.run_tracker import stored_records
from tests.conftest import small_config
from tests.support.confidence import make_confidence
from tests.support.runs import empty_run

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
        ("", []),
        ("f", ["f"]),
        ("ff", ["ff"]),
        ("fe", ["fe"]),
        ("ee", ["ee"]),
        ("ef", ["e", "f"]),
        ("fefe", ["fe", "fe"]),
        ("feef", ["fee", "f"]),
        ("ffefef", ["ffe", "fe", "f"]),
    ],
)
def test_a_frozen_stage_after_a_trained_backbone_begins_a_group(pattern: str, groups: list[str]) -> None:
    formed = stage_groups(stages(pattern))
    assert ["".join(stage.name[0] for stage in group) for group in formed] == groups
    assert [stage for group in formed for stage in group] == list(stages(pattern)), "each stage once, in order"


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"table": ""}'])
def test_a_damaged_summary_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, log_lines: list[str]
) -> None:
    calls: list[str] = []
    driver = SimpleNamespace(train=lambda: calls.append("train"), evaluate=lambda: calls.append("evaluate"))
    monkeypatch.setattr("raycap.pipeline.runs.prepare.prepare", lambda *_: empty_run(tmp_path))
    monkeypatch.setattr("raycap.jobs.run.RunDriver", lambda *_: driver)
    (tmp_path / "COMPLETE.json").write_text(content)
    run(cast(RunConfig, None), data=cast(Any, "data"))
    assert calls == ["train", "evaluate"], "the driver repeats only what is not finished"
    assert log_lines[0].startswith(f"damaged   {tmp_path}/COMPLETE.json is damaged: ")


def test_a_damaged_bundle_has_no_confidences_to_keep(tmp_path: Path, log_lines: list[str]) -> None:
    folder = prepare(parse_config(small_config(tmp_path)))
    log_lines.clear()
    assert stored_confidences(folder) == () and log_lines == [], "no bundle yet"
    bundle = bundle_run(folder, confidences=[make_confidence("a"), make_confidence("b")])
    assert [fit.search for fit in stored_confidences(folder)] == ["a", "b"] and log_lines == []
    content = (bundle / "confidence.json").read_bytes()
    (bundle / "confidence.json").write_bytes(content.replace(b"100", b"101"))
    assert stored_confidences(folder) == ()
    assert len(log_lines) == 1 and log_lines[0].startswith(f"damaged   {bundle / 'confidence.json'} does not have the")


@pytest.mark.parametrize("content", ["", "[]", '{"http://tracker": 3}'])
def test_a_damaged_record_of_the_tracker_counts_as_empty(tmp_path: Path, content: str, log_lines: list[str]) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "tracked.json").write_text(content)
    assert stored_records(empty_run(tmp_path)) == {}
    (line,) = log_lines
    assert line.startswith(f"damaged   {tmp_path}/log/tracked.json is damaged: ")


@pytest.mark.parametrize(
    ("workers", "batch_size", "steps", "text"),
    [
        ({"num_workers": 2}, 8, 1, "2 workers x 4"),
        ({"num_workers": 2}, 8, 4, "2 workers x 1 x 4 accumulated"),
        ({"num_workers": 3}, 20, 1, "3 workers x 6 to 7"),
        ({"num_workers": 4, "min_workers": 2}, 10, 1, "2 to 4 workers x 2 to 5"),
    ],
)
def test_the_plan_shows_how_workers_share_a_batch(
    workers: dict[str, int], batch_size: int, steps: int, text: str, tmp_path: Path
) -> None:
    values = small_config(tmp_path)
    values["workers"] |= workers
    values["stages"][0] |= {"batch_size": batch_size, "gradient_accumulation_steps": steps}
    config = parse_config(values)
    assert shares_text(config, config.stages[0]) == text


def test_the_disk_needs_no_room_for_features_that_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """48 training and 12 other images of 1/4 GiB each; training images are in two stores, the others in three."""
    config = parse_config(small_config(tmp_path))
    folder, driver = prepare(config), RunDriver.__new__(RunDriver)
    sizes, gib = replace(folder.sizes, feature_width=2**17), 2**30
    monkeypatch.setattr("raycap.jobs.run.shutil.disk_usage", lambda _: SimpleNamespace(free=10 * gib))
    metadata = replace(folder.metadata, num_tokens=2**10, sizes=sizes)
    for stores in ("always", "never"):
        features = config.features.model_copy(update={"store": stores})
        content = {
            "path": folder.path,
            "home": None,
            "config": config.model_copy(update={"features": features}),
            "dataset": folder.dataset,
            "result": lambda _: None,
        }
        driver.folder = cast(RunFolder, SimpleNamespace(metadata=metadata, **content))
        if stores == "always":
            with pytest.raises(UserError, match=r"features \(33\.0 GiB\).*, or features\.store to never"):
                driver._check_disk()
        else:
            driver._check_disk()
    assert log_lines[-1] == "check     disk: 10 GiB free, about 9.0 GiB needed"


@pytest.mark.parametrize("features", [{"store": "never"}, {"views": 2}])
def test_new_images_without_an_extraction_are_read_by_the_cluster(
    tmp_path: Path, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[Any]()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raycap.jobs.run.find_data", lambda _, hash_files: used.append(hash_files))
    config = parse_config(small_config(tmp_path, features=features))
    find_run_data(config, "head:6379")
    find_run_data(config, None)
    tasks, threads = used
    assert tasks.__self__ == ImageTasks(config, "head:6379") and tasks.__name__ == "hash_files"
    assert threads is None


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


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


@pytest.mark.parametrize(("scores", "warns"), [((0.0, 0.00002), True), ((0.0, 0.2), False), ((), False)])
def test_scst_that_cannot_climb_is_named(
    tmp_path: Path, log_lines: list[str], scores: tuple[float, ...], warns: bool
) -> None:
    """Without a known score, as after `init_from`, nothing is said yet."""
    folder = Folder(tmp_path / "journal")
    for step, score in enumerate(scores):
        folder.write(kind="validation", step=step, time=1.0, best=score, seconds=1.0, **{"CIDEr-D": score})
    with folder.printer():
        folder.write(kind="reward", step=0, time=2.0, text="checked", stage="scst")
    found = [line for line in log_lines if "cannot climb" in line]
    assert bool(found) is warns
    if warns:
        assert "CIDEr-D is 0.0000 after xe" in found[0] and "stages.xe.epochs" in found[0] and "check" in found[0]


@pytest.mark.parametrize(("score", "count"), [(0.0, 1), (0.2, 0)])
def test_scst_that_cannot_climb_from_another_model_is_named_once(
    tmp_path: Path, log_lines: list[str], score: float, count: int
) -> None:
    """After `init_from` the first score is that of SCST's own first validation."""
    folder = Folder(tmp_path / "journal")
    with folder.printer():
        folder.write(kind="reward", step=0, time=2.0, text="checked", stage="scst")
        for step in (4, 8):
            values = {"best": score, "seconds": 1.0, "CIDEr-D": score}
            folder.write(kind="validation", step=step, time=3.0, stage="scst", **values)
    found = [line for line in log_lines if "cannot climb" in line]
    assert len(found) == count
    assert all("after its first epochs" in line and "a better model" in line for line in found)


@pytest.mark.parametrize("is_new", [False, True], ids=["late", "new"])
def test_the_score_of_scst_itself_is_not_taken_for_that_of_the_stage_before(
    is_new: bool, tmp_path: Path, log_lines: list[str]
) -> None:
    """The printer is late, or new in a resumed stage, so that the journal has scores of SCST before the warning."""
    folder = Folder(tmp_path / "journal")
    printer = folder.printer()

    def score(step: int, best: float, **values: Any) -> None:
        folder.write(kind="validation", step=step, time=1.0, best=best, seconds=1.0, **{"CIDEr-D": best}, **values)

    score(9, 0.00004)
    folder.write(kind="reward", step=0, time=2.0, text="checked", stage="scst")
    score(4, 0.00001, stage="scst")
    score(2, 0.00002, stage="later")
    if is_new:
        printer = folder.printer()
    with printer:
        score(8, 0.00001, stage="scst")
    found = [line for line in log_lines if "cannot climb" in line]
    assert len(found) == 1 and "is 0.0000 after xe" in found[0] and "(stages.xe.epochs)" in found[0]


def test_scores_of_cross_entropy_do_not_read_the_journal_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    folder, reads = Folder(tmp_path / "journal"), []
    with folder.printer():
        monkeypatch.setattr("raycap.jobs.journal_printer.read_journal", lambda path: reads.append(path) or [])
        for step in range(3):
            folder.write(kind="validation", step=step, time=1.0, best=0.0, seconds=1.0, **{"CIDEr-D": 0.0})
    assert len(log_lines) == 3 and not reads


def test_the_time_left_counts_from_where_a_stage_resumed(tmp_path: Path, log_lines: list[str]) -> None:
    folder = Folder(tmp_path / "journal")
    folder.write(kind="event", step=0, time=100.0, text="of an earlier attempt")
    with folder.printer():
        folder.write(kind="event", step=20, time=1000.0, text="continues from step 20")
        folder.write(step=30, time=1005.0, **TRAIN)
    assert log_lines[0] == "xe  continues from step 20", "lines of an earlier attempt are not repeated"
    assert log_lines[1].endswith("  5 s left") and len(log_lines) == 2


def test_steps_that_are_repeated_after_a_failure_count_as_progress(tmp_path: Path, log_lines: list[str]) -> None:
    folder, changes = Folder(tmp_path / "metrics.jsonl"), []
    printer = JournalPrinter(cast(RunFolder, folder), lambda: changes.append(len(log_lines)))
    with printer:
        folder.write(step=10, time=110.0, **TRAIN)
        while not log_lines:
            time.sleep(0.01)
        folder.write(step=10, time=210.0, **TRAIN)
    assert len(log_lines) == 1 and len(changes) == 2


def test_a_step_without_a_known_beginning_has_no_time_left(tmp_path: Path, log_lines: list[str]) -> None:
    folder = Folder(tmp_path / "journal")
    with folder.printer():
        folder.write(step=0, time=100.0, **TRAIN)
    assert log_lines[0].endswith("  0 s left")


def test_the_last_entries_are_printed_even_if_the_storage_fails(tmp_path: Path, log_lines: list[str]) -> None:
    folder = Folder(tmp_path / "journal", OSError("the storage does not answer"))
    with pytest.raises(ZeroDivisionError), folder.printer():
        folder.write(kind="event", step=3, time=1.0, text="the loss is not finite")
        raise ZeroDivisionError
    assert log_lines == ["xe  the loss is not finite"] and folder.pulls >= 1


def test_an_entry_that_cannot_be_printed_stops_neither_output_nor_progress(
    tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of a key was flipped. `log_lines` has what is logged."""
    monkeypatch.setattr("raycap.jobs.journal_printer.POLL_S", 0.01)
    folder, changes = Folder(tmp_path / "journal"), []
    with JournalPrinter(cast(RunFolder, folder), lambda: changes.append(1)):
        for step in (1, 2, 3):
            folder.write(step=step, time=1.0, **{("losr" if key == "loss" else key): TRAIN[key] for key in TRAIN})
            wait_until(lambda count=step: len(changes) == count)
        folder.write(kind="event", step=4, time=2.0, text="continues")
        wait_until(lambda: len(log_lines) == 2)
    assert log_lines == [f"journal   {folder.journal} cannot be printed: KeyError: 'loss'", "xe  continues"]


def test_a_copy_that_is_refused_is_like_a_storage_that_fails(tmp_path: Path, log_lines: list[str]) -> None:
    folder = Folder(tmp_path / "journal", UserError("a name leads out of the folder"))
    with folder.printer():
        folder.write(kind="event", step=3, time=1.0, text="begins")
    assert log_lines == ["xe  begins"] and folder.pulls >= 1


def test_steps_move_the_bar(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "journal")
    printer, shown = folder.printer(), []
    bar = SimpleNamespace(update=lambda *values: shown.append(values), close=lambda: shown.append("closed"))
    printer.bar = cast(Any, bar)
    with printer:
        folder.write(kind="event", step=0, time=1.0, text="begins")
        folder.write(step=10, time=2.0, **TRAIN)
    assert shown == [("xe", 10, 40), "closed"]


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
