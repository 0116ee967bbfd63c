"""The end of a trial: which errors are its own, and what it leaves on its machine."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.tune.features import extract_once
from pipeline.data.loading import find_data
from pipeline.runs.folder import JOURNAL, RunFolder, StageResult
from pipeline.runs.journal import read_journal
from pipeline.runtime.context import LocalContext
from pipeline.search import trial as module
from pipeline.search.spec import SCORE, Search, SearchConfig
from pipeline.search.trial import TrialTask, run_trial
from pipeline.search.trials import SearchPlan
from pipeline.storage.atomic import write_json
from pipeline.storage.s3 import OutageError
from pipeline.training.loop import StageJob, train_stages
from pipeline.training.stage_output import StageOutput
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL, prepare_run


def test_an_outage_is_not_a_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point is not at fault, so that the trial is repeated."""
    error: Exception = ValueError("two heads do not divide 5")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_run_trial", fail)
    task: Any = None
    outcome = run_trial(task, lambda _: None)
    assert (outcome.state, outcome.reason) == ("failed", "two heads do not divide 5")
    full = OSError(errno.ENOSPC, "No space left", "/x")
    for problem in (OutageError("s3://bucket/x: storage failed for 600 s"), full):
        error = problem
        with pytest.raises(OutageError):
            run_trial(task, lambda _: None)


def test_the_captions_of_the_weights_that_were_kept_are_scored(tmp_path: Path) -> None:
    """The last stage made captions worse, and its weights were dropped."""
    folder, _ = prepare_run(tmp_path)
    validation = folder.dataset.split(folder.config.data.val_split)
    right = {image: captions[0] for image, captions in validation.references().items()}
    names = [stage.name for stage in folder.config.stages]
    for name in names:
        folder.stage(name).mkdir(parents=True)
        is_last = name == names[-1]
        result = StageResult(4, 4, 0.1, kept=not is_last, ended_early="")
        write_json(folder.stage(name) / "DONE.json", asdict(result))
        rows = [{"image_id": image, "caption": "nothing" if is_last else text} for image, text in right.items()]
        write_json(folder.stage(name) / "predictions-val.json", rows)
    search: Any = SimpleNamespace(config=SimpleNamespace(metrics=("BLEU-1",)))
    assert folder.last_kept() == folder.config.stages[-2]
    assert module.scores_of(folder, search, [])["BLEU-1"] > 0.9
    write_json(folder.stage(names[-1]) / "DONE.json", asdict(replace(result, kept=True)))
    assert module.scores_of(folder, search, [])["BLEU-1"] < 0.1


@dataclass
class World:
    """A search on S3 with two points of a second each."""

    cache: Path
    search: Search
    tasks: list[TrialTask]

    def copies(self) -> list[str]:
        """The folders of the cache that contain a copy of a run."""
        return sorted(path.parts[len(self.cache.parts)] for path in self.cache.rglob("run.json"))

    def pulled(self) -> RunFolder:
        """The driver's copy of the run, which is brought up to date."""
        (path,) = (self.cache / "storage").glob("*/runs/*/run.json")
        run = RunFolder(path.parent, self.search.base.home(f"runs/{path.parent.name}"))
        run.pull()
        return run


def make_world(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> World:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path))
    storage = {"uri": f"s3://data/{tmp_path.name}", "endpoint_url": s3}
    values = small_config(storage, model=SMALL_MODEL | MESHED_MEMORY)
    values["features"] = {"hdf5": "synthetic", "max_regions": 3}
    del values["backbone"]
    values["stages"] = values["stages"][:1]
    section = {"name": "slots", "base": "base.yaml", "space": {"model.num_memory_slots": [0, 2]}, "algorithm": "grid"}
    values["stages"][0] |= {"epochs": 2, "validate_every_epochs": 1}
    section["objectives"] = {"CIDEr-D": "max"}
    search = Search(SearchConfig.model_validate(section | changes), values)
    store, bad = extract_once(search, find_data(search.base)[0], None, lambda: None)
    plan = SearchPlan(search, None, None, store, bad)
    return World(tmp_path, search, [TrialTask(plan, point, 0) for point in search.space.points()])


def test_a_trial_leaves_no_copy_of_its_run_that_nobody_uses(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial finishes. The second one is stopped, and another process has pulled its run meanwhile."""
    world = make_world(s3, tmp_path, monkeypatch)
    first, second = world.tasks

    def report(metrics: dict[str, Any]) -> None:
        assert world.copies() == ["storage", "workers"]

    outcome = run_trial(first, report)
    assert outcome.state == "finished", outcome
    assert not world.copies() and not list(tmp_path.rglob("*.safetensors"))

    def stop(metrics: dict[str, Any]) -> None:
        world.pulled()
        raise SystemExit

    with pytest.raises(SystemExit):
        run_trial(second, stop)
    assert world.copies() == ["storage"]


@pytest.mark.parametrize("error", [SystemExit(), RuntimeError("a bad point")])
def test_a_trial_that_ends_after_a_validation_sends_its_state_and_leaves_no_copy(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Its last checkpoint is still being written, and its last entries of the journal are not sent."""
    world = make_world(s3, tmp_path, monkeypatch)
    write = StageOutput._write_checkpoint

    def write_late(*arguments: Any) -> None:
        time.sleep(0.5)
        write(*arguments)

    monkeypatch.setattr(StageOutput, "_write_checkpoint", write_late)

    def end(metrics: dict[str, Any]) -> None:
        if SCORE in metrics:
            world.pulled()
            raise error

    with suppress(SystemExit):
        assert run_trial(world.tasks[0], end).state == "failed"
    assert world.copies() == ["storage"]
    run = world.pulled()
    (last,) = [entry for entry in read_journal(run.journal) if entry["kind"] == "validation"]
    assert (run.stage("xe_frozen") / f"step-{last['step']}").is_dir()


@pytest.mark.parametrize("end", ["finished", "failed", "stopped"])
def test_the_workers_of_a_trial_leave_no_copy_of_its_run(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A stopped trial takes its run over from its workers, which are in the middle of a stage."""
    world = make_world(s3, tmp_path, monkeypatch, resources={"workers": 2})

    class Worker(LocalContext):
        def __init__(self, folder: RunFolder) -> None:
            super().__init__()
            self.folder = folder

        def report(self, metrics: dict[str, Any]) -> None:
            assert world.copies() == ["storage", "workers"]
            if end == "failed":
                raise RuntimeError("a bad point")
            if end == "stopped":
                self.folder.new_driver_token()

    def train(job: StageJob, *_: Any) -> None:
        train_stages(Worker(job.folder), job)
        job.folder.pull("stages")
        job.folder.pull(JOURNAL)

    outcome = run_trial(world.tasks[0], lambda _: None, train)
    assert outcome.state == ("finished" if end == "finished" else "failed"), outcome
    assert not world.copies() and not list(tmp_path.rglob("*.safetensors"))
