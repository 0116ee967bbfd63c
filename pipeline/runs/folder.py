"""Where everything of a run lies: the paths, the run's identity, and what it was started from.

A run whose storage is on S3 has its home there; the driver, and each machine with workers, open a local copy
(`pipeline.storage.mirror`). The driver writes everything but what rank 0 of a stage does: its stages/<stage>/ and the
journal.

runs/<run_id>/  config.yaml run.json data.arrow vocabulary.json init/ stages/<stage>/ log/ predictions/
                scores.json report.html COMPLETE.json
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from models.config import ModelSizes
from pipeline.config.run import RunConfig, parse_config
from pipeline.config.sections import StageSection
from pipeline.data.dataset import Dataset
from pipeline.data.vocabulary import Vocabulary
from pipeline.storage.cache import cache_folder
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import StoragePath, place

JOURNAL = "log/metrics.jsonl"


def write_json(path: Path, value: Any) -> None:
    """JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def write_text(path: Path, text: str) -> None:
    """Text under a temporary name of this process, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def is_alone(folder: Path) -> Iterator[bool]:
    """Whether this process is the only one on its machine that works on a folder; it is while this lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # falls with the process, however it ends
        except OSError:
            yield False
        else:
            yield True


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: a local path, and its home when that is on S3. Workers open it `on_worker`."""

    path: Path
    home: StoragePath | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.path, self.home)  # without what was read from it

    def on_worker(self, attempt: str | None = None) -> RunFolder:
        """The folder as a worker opens it: on S3 through a copy of its machine's and attempt's own, brought up to date.

        Copies of earlier attempts go: what they had not sent home is lost, and who works on one is fenced out.
        """
        if self.home is None:
            return self
        copies = cache_folder() / "workers" / self.path.parent.parent.name / self.run_id
        folder = RunFolder(copies / (attempt or self.attempt or "first") / self.run_id, self.home)
        folder.pull()
        for other in copies.iterdir():
            if other != folder.path.parent:
                shutil.rmtree(other, ignore_errors=True)
        return folder

    def pull(self, under: str = "") -> None:
        """Brings the copy below `under` up to date; nothing to do where the folder is the run's home itself."""
        if self.home is not None:
            Mirror(self.home, self.path).pull(under)

    def push(self, *names: str, allowed: Callable[[], None] = lambda: None) -> None:
        """Sends home these files and folders as they are here, one after the other; `allowed` as in `Mirror.push`."""
        if self.home is not None:
            for name in names:
                Mirror(self.home, self.path).push(name, allowed)

    @property
    def root(self) -> StoragePath:
        """Where the run lies for everybody, whatever machine they are on."""
        return self.home or place(self.path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @cached_property
    def config(self) -> RunConfig:
        import yaml

        return parse_config(yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8")))

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset.load(self.path / "data.arrow")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self.path / "vocabulary.json")

    @property
    def facts(self) -> dict[str, Any]:
        """What was found at the start: fingerprint, sizes, commit, versions."""
        return read_json(self.path / "run.json")

    @property
    def attempt(self) -> str:
        """The token of the driver that works on this run now (see `begin_attempt`)."""
        return self._token("attempt")

    def begin_attempt(self) -> str:
        """Takes the run over: workers of earlier attempts that still live may not write any more."""
        return self._take("attempt")

    @property
    def group(self) -> str:
        """The token of the workers that train now: a driver replaces them when one dies (see `begin_group`)."""
        return self._token("group")

    def begin_group(self) -> str:
        """As `begin_attempt`, for the workers that one driver starts one after the other; rank 0 calls it."""
        return self._take("group")

    def _token(self, name: str) -> str:
        try:
            return (self.root / "log" / name).read_bytes().decode()
        except FileNotFoundError:
            return ""

    def _take(self, name: str) -> str:
        token = uuid.uuid4().hex
        (self.root / "log" / name).write_bytes(token.encode())
        return token

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes(**self.facts["sizes"])

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    def stage(self, name: str) -> Path:
        return self.path / "stages" / name

    def result(self, name: str) -> dict[str, Any] | None:
        from pipeline.runs.checkpoints import stage_result

        return stage_result(self.stage(name))

    def before(self, stage: StageSection) -> list[StageSection]:
        stages = list(self.config.stages)
        return stages[: stages.index(stage)]

    def weights_after(self, stage: StageSection, part: str) -> Path:
        """The file with the best weights of `part` that a finished stage ended with, kept by the run or not."""
        result = self.result(stage.name)
        if result is None:
            raise FileNotFoundError(f"stage {stage.name} of {self.run_id} is not finished")
        best = self.stage(stage.name) / f"best-{result['best_step']}" / f"{part}.safetensors"
        return best if best.is_file() else self.weights_before(stage, part)

    def weights_before(self, stage: StageSection | None, part: str) -> Path:
        """The file with the weights of `part` (model or backbone) that a stage starts from; None: the run's end.

        The newest finished stage that trained the part, or the run's initial weights. A stage that asks to be kept
        only when it is better (`keep_if_better`) counts only then.
        """
        earlier = self.before(stage) if stage is not None else list(self.config.stages)
        for candidate in reversed(earlier):
            result = self.result(candidate.name)
            if result is None or not result["kept"]:
                continue
            best = self.stage(candidate.name) / f"best-{result['best_step']}"
            if not best.is_dir():
                raise FileNotFoundError(f"{best} is gone, the weights that stage {candidate.name} ended with")
            if (best / f"{part}.safetensors").is_file():
                return best / f"{part}.safetensors"
        return self.path / "init" / f"{part}.safetensors"
