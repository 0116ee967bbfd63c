"""The folder of a run: its paths, its metadata, and the tokens that keep abandoned workers from writing.

A run whose storage is on S3 has its home there; the driver, and each machine with workers, opens a local copy
(`pipeline.storage.mirror`). Rank 0 of a stage writes stages/<stage>/ and the journal; the driver writes all the rest.

runs/<run_id>/  config.yaml run.json data.arrow vocabulary.json init/ stages/<stage>/ log/ predictions/
                scores.json report.html COMPLETE.json
"""

from __future__ import annotations

import fcntl
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.config import ModelSizes
from pipeline.config.load import parse_config
from pipeline.config.run import RunConfig
from pipeline.config.sections import StageSection
from pipeline.data.dataset import Dataset
from pipeline.data.vocabulary import Vocabulary
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.cache import cache_folder
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import StoragePath, storage_path

if TYPE_CHECKING:
    from pipeline.runs.checkpoints import StageResult

JOURNAL = "log/metrics.jsonl"


@contextmanager
def is_alone(folder: Path) -> Iterator[bool]:
    """True when this process gets the folder's lock, which it holds inside the context; False when another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it however the process ends
        except OSError:
            yield False
        else:
            yield True


@dataclass(frozen=True)
class RunMetadata:
    """What `prepare` recorded when it created the run: run.json."""

    run_id: str
    created: str  # ISO 8601, UTC
    data_fingerprint: str
    code: str  # digest of the sources that decide a result
    commit: str
    versions: dict[str, str]  # of Python and of the packages that matter
    splits: dict[str, int]  # number of images
    unreadable: dict[str, str]  # {uri: reason} of the images left out
    sizes: ModelSizes
    num_tokens: int  # image tokens, or at most so many regions
    parameters: dict[str, int]  # of "model" and of "backbone"

    @classmethod
    def load(cls, path: Path) -> RunMetadata:
        values = read_json(path)
        return cls(**values | {"sizes": ModelSizes(**values["sizes"])})

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: a local path, and its home when that is on S3. Workers open it `on_worker`."""

    path: Path
    home: StoragePath | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.path, self.home)  # without the cached properties

    def on_worker(self, driver_token: str | None = None) -> RunFolder:
        """The folder as a worker opens it: for a run on S3 an up-to-date copy for this machine and driver.

        Copies for earlier drivers are deleted: their workers may not write to the run's home any more.
        """
        if self.home is None:
            return self
        copies = cache_folder() / "workers" / self.path.parent.parent.name / self.run_id
        folder = RunFolder(copies / (driver_token or self.driver_token or "first") / self.run_id, self.home)
        folder.pull()
        for other in copies.iterdir():
            if other != folder.path.parent:
                shutil.rmtree(other, ignore_errors=True)
        return folder

    def pull(self, under: str = "") -> None:
        """Brings the local copy below `under` up to date, for a run on S3."""
        if self.home is not None:
            Mirror(self.home, self.path).pull(under)

    def push(self, *names: str, allowed: Callable[[], None] = lambda: None) -> None:
        """Uploads these files and folders in order, for a run on S3; `allowed` as in `Mirror.push`."""
        if self.home is not None:
            for name in names:
                Mirror(self.home, self.path).push(name, allowed)

    @property
    def root(self) -> StoragePath:
        """The run's location as every machine sees it."""
        return self.home or storage_path(self.path)

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

    @cached_property
    def metadata(self) -> RunMetadata:
        return RunMetadata.load(self.path / "run.json")

    @property
    def driver_token(self) -> str:
        """The token of the driver that works on this run now; "" before the first."""
        return self._read_token("driver_token")

    def new_driver_token(self) -> str:
        """Takes the run over: workers of earlier drivers that are still alive may not write any more."""
        return self._new_token("driver_token")

    @property
    def worker_group_token(self) -> str:
        """The token of the worker group that trains now; "" before the first."""
        return self._read_token("worker_group_token")

    def new_worker_group_token(self) -> str:
        """As `new_driver_token`, for the worker groups that one driver starts in turn; rank 0 calls it."""
        return self._new_token("worker_group_token")

    def _read_token(self, name: str) -> str:
        try:
            return (self.root / "log" / name).read_bytes().decode()
        except FileNotFoundError:
            return ""

    def _new_token(self, name: str) -> str:
        token = uuid.uuid4().hex
        (self.root / "log" / name).write_bytes(token.encode())
        return token

    @property
    def sizes(self) -> ModelSizes:
        return self.metadata.sizes

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    def stage(self, name: str) -> Path:
        return self.path / "stages" / name

    def result(self, name: str) -> StageResult | None:
        """The result of a stage; None while it is not finished."""
        from pipeline.runs.checkpoints import stage_result

        return stage_result(self.stage(name))

    def before(self, stage: StageSection) -> list[StageSection]:
        stages = list(self.config.stages)
        return stages[: stages.index(stage)]

    def weights_after(self, stage: StageSection, part: str) -> Path:
        """The file with the best weights of `part` (model or backbone) of a finished stage, kept by the run or not."""
        result = self.result(stage.name)
        if result is None:
            raise FileNotFoundError(f"stage {stage.name} of {self.run_id} is not finished")
        best = self.stage(stage.name) / f"best-{result.best_step}" / f"{part}.safetensors"
        return best if best.is_file() else self.weights_before(stage, part)

    def weights_before(self, stage: StageSection | None, part: str) -> Path:
        """The file with the weights of `part` (model or backbone) that a stage starts from; None: the final weights.

        They come from the newest finished stage that trained the part and was kept, or are the run's initial weights.
        """
        earlier = self.before(stage) if stage is not None else list(self.config.stages)
        for candidate in reversed(earlier):
            result = self.result(candidate.name)
            if result is None or not result.kept:
                continue
            best = self.stage(candidate.name) / f"best-{result.best_step}"
            if not best.is_dir():
                raise FileNotFoundError(f"{best}, the best weights of stage {candidate.name}, does not exist any more")
            if (best / f"{part}.safetensors").is_file():
                return best / f"{part}.safetensors"
        return self.path / "init" / f"{part}.safetensors"
