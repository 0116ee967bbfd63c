"""The folder of a run: its paths, its metadata, and the tokens that keep abandoned workers from writing.

If the storage is on S3, a run has its original folder there (`RunFolder.home`). The driver and each machine with
workers then open a local copy (`pipeline.storage.mirror`).

Rank 0 of a stage writes stages/<stage>/ and the journal. The driver writes everything else. The process of a search's
trial is a driver, and writes the finished trial to trial-<search>.json.

runs/<run_id>/  config.yaml decisions.json run.json data.arrow vocabulary.json init/ stages/<stage>/ log/ predictions/
                scores.json report.html COMPLETE.json
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from raycap.models.config import ModelSizes, Values
from raycap.pipeline.config.load import dump_config, parse_stored_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runs.identity import RESULTS_VERSION
from raycap.pipeline.runtime.names import one_line, printable
from raycap.pipeline.storage.atomic import file_lock, read_json, try_file_lock, write_text
from raycap.pipeline.storage.mirror import Mirror, prune_copies, remove_copy
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path
from raycap.pipeline.storage.untrusted.documents import parse_yaml, read_regular_file, require_mapping

JOURNAL = "log/journal"
# If features.compute_dtype is `auto`, a run chooses it once and stores the choice, so that resuming gives equal bits.
DECISIONS = "decisions.json"


def try_lock(folder: Path) -> AbstractContextManager[bool]:
    """Tries to lock a folder during the context, and yields True if it is locked, or False if another process has it.

    The operating system releases the lock even if the process is killed.
    """
    return try_file_lock(folder / ".lock")


def open_folder(path: Path, home: StoragePath | None = None, config: RunConfig | None = None) -> RunFolder:
    """Opens a run's folder. If the original folder `home` is given, first updates its local copy `path` from it.

    A copy that another process has locked is not updated. config: by default the stored configuration.
    """
    if home is not None:
        prune_copies(keep=path)
        with try_lock(path) as has_lock:
            if has_lock:  # otherwise another process writes to the copy, so the copy is newer than the original
                Mirror(home, path).pull()
    return RunFolder(path, config or stored_config(path), home)


def stored_config(path: Path, variables: Mapping[str, str] = {}) -> RunConfig:
    """The configuration that a run's folder stores, with the decided precision in place of `auto`.

    variables: of the user's configuration. No others are replaced in the stored one.

    Raises DamagedError if a file cannot be read, and UserError if the configuration is not valid.
    """
    file, decided = path / "config.yaml", path / DECISIONS
    with _reading(file, f"restore it from a copy, or remove {path} to start the run over"):
        values = dict(require_mapping(parse_yaml(read_regular_file(file), str(file)), str(file)))
    if decided.is_file():
        with _reading(decided, "remove it, and `raycap run` decides again"):
            for section, precisions in require_mapping(read_json(decided), str(decided)).items():
                values[section] |= precisions
    try:
        return parse_stored_config(values, variables)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def with_decisions_of(config: RunConfig, earlier: RunConfig) -> RunConfig:
    """A copy of `config` in which the precision `auto` is replaced by that of an earlier attempt at the run."""
    is_open = config.features.compute_dtype == "auto"
    return config.with_compute_dtype(earlier.features.compute_dtype) if is_open else config


@dataclass(frozen=True)
class RunMetadata:
    """The values of run.json."""

    run_id: str
    created: str  # ISO 8601, UTC
    data_fingerprint: str
    results_version: int  # RESULTS_VERSION of the code that created the run
    commit: str
    versions: dict[str, str]  # of Python and the main packages, by name
    splits: dict[str, int]  # number of images by split
    unreadable: dict[str, str]  # {uri: reason} of the images that were left out
    sizes: ModelSizes
    num_tokens: int  # feature vectors of the backbone per image, or the largest number of regions per image
    parameters: dict[str, int]  # number of parameters of "model" and of "backbone"

    @staticmethod
    def parse(values: Any, name: str) -> RunMetadata:
        """Converts the values of a run.json to metadata. name: the file's name in messages.

        Raises DamagedError if the values are malformed, and UserError if they have another RESULTS_VERSION.
        """
        try:
            found = values.get("results_version")
            if found == RESULTS_VERSION:
                return METADATA.validate_python(values)
        except (TypeError, AttributeError, ValueError) as error:
            raise DamagedError(f"{name} is damaged: {one_line(error)}") from error
        raise UserError(
            f"{name} was written by a version of raycap with other results (its results_version is {found}, and "
            f"{RESULTS_VERSION} here); use that version, or remove the folder"
        )


METADATA = TypeAdapter(RunMetadata)  # built here, because threads of `raycap runs` cannot build it at the same time


@dataclass(frozen=True)
class StageResult:
    """The result of a finished stage, as DONE.json stores it."""

    steps: int
    best_step: int
    best_score: float  # validation CIDEr-D
    kept: bool  # If false, later stages start from the weights before this stage.
    ended_early: str  # why the stage ended before its last step, or ""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    path: the local folder. config: the configuration of this attempt, with decisions in place of `auto`. home: the
    original folder if the storage is on S3, else None. With `home`, `path` is a copy of it. written: the configuration
    as the user wrote it. None means that the user wrote `config`. A worker gets a pickle of this object, and must open
    the folder with `on_worker`.
    """

    path: Path
    config: RunConfig = field(repr=False, compare=False)
    home: StoragePath | None = None
    written: RunConfig | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the folder without its cached properties and without the tracker, whose address may be secret."""
        return RunFolder, (self.path, self.config.without_tracker(), self.home)

    def write_config(self) -> None:
        """Writes config.yaml as the user wrote it, and the decided precision to decisions.json.

        config.yaml keeps the value `auto`, so that `raycap run` with this file is the same run. A file that already has
        the right content is not written.
        """
        written = self.written or self.config
        is_open = written.features.compute_dtype == "auto"
        decided = {"features": {"compute_dtype": self.config.features.compute_dtype}} if is_open else {}
        for name, text in ((DECISIONS, json.dumps(decided)), ("config.yaml", dump_config(written))):
            path = self.path / name
            if not path.is_file() or path.read_bytes() != text.encode():
                write_text(path, text)
                self.push(name)

    def on_worker(self, driver_token: str | None = None) -> RunFolder:
        """The folder for a worker on this machine. If the run is on S3, the result is an updated local copy.

        driver_token: of the worker's driver; by default of the driver that works on the run now. Each driver's workers
        have a copy of their own. The copies of other drivers are deleted, because their workers must not write.
        """
        if self.home is None:
            return self
        storage_folder = self.path.parent.parent  # `path` is <storage>/runs/<run_id>
        copies = cache_folder() / "workers" / storage_folder.name / self.run_id
        token = driver_token or self.token("driver_token") or "first"  # "first" until a driver has worked on the run
        if not token.isalnum():  # the token becomes a folder's name, so it must not contain a path
            raise UserError(f"{self.root}/log/driver_token is {printable(token)[:80]!r}, not a token; remove this file")
        folder = replace(self, path=copies / token / self.run_id)
        prune_copies(keep=folder.path)
        folder.pull()
        for copy in copies.iterdir():
            if copy.name != token:
                shutil.rmtree(copy, ignore_errors=True)
        return folder

    def remove_copy(self, unused_for_s: float = 0.0) -> None:
        """Removes this copy of a run on S3, unless another process uses it or used it in the last `unused_for_s` s."""
        if self.home is not None:
            remove_copy(self.path, unused_for_s)

    def in_use(self) -> AbstractContextManager[None]:
        """Keeps other processes from removing this copy during the context. Several processes may use one copy."""
        return nullcontext() if self.home is None else file_lock(self.path / ".lock", shared=True)

    def pull(self, under: str = "") -> None:
        """Brings the local copy below `under` up to date. Does nothing for a run on local storage."""
        if self.home is not None:
            Mirror(self.home, self.path).pull(under)

    def push(self, *names: str, check_may_write: Callable[[], None] = lambda: None) -> None:
        """Uploads these files and folders in order. Does nothing for a run on local storage.

        check_may_write: see `Mirror.push`.
        """
        if self.home is not None:
            for name in names:
                Mirror(self.home, self.path).push(name, check_may_write)

    @property
    def root(self) -> StoragePath:
        """The location of the original folder, which every machine can reach."""
        return self.home or storage_path(self.path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @cached_property
    def dataset(self) -> Dataset:
        with self._reading_needed(self.path / "data.arrow"):
            return Dataset.load(self.path / "data.arrow")

    def training_images(self, stage: StageSection) -> Dataset:
        """The images that a stage trains on."""
        return self.dataset.split(*self.training_splits(stage))

    def training_splits(self, stage: StageSection) -> tuple[str, ...]:
        """The splits that a stage trains on. SCST leaves out the sources with `rewarded: false`."""
        data = self.config.data
        return tuple(data.rewarded_splits if stage.objective == "scst" else data.train_splits)

    def num_samples(self, stage: StageSection) -> int:
        """The number of samples per epoch of a stage. A sample is an (image, caption) pair or an image."""
        train = self.training_images(stage)
        return train.num_captions if stage.samples_are_pairs else len(train)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        with self._reading_needed(self.path / "vocabulary.json"):
            return Vocabulary.load(self.path / "vocabulary.json")

    @cached_property
    def metadata(self) -> RunMetadata:
        with self._reading_needed(self.path / "run.json"):
            return RunMetadata.parse(read_json(self.path / "run.json"), str(self.path / "run.json"))

    @property
    def summary(self) -> Values | None:
        """The content of COMPLETE.json, or None if the run is not complete."""
        path = self.path / "COMPLETE.json"
        if not path.is_file():
            return None
        with _reading(path, "remove it, and `raycap run` scores the captions again"):
            values = dict(read_json(path))
            missing = sorted({"table", "tracked", "scores", "durations"} - values.keys())
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            return values

    def _reading_needed(self, path: Path) -> AbstractContextManager[None]:
        """Raises DamagedError, with a remedy, if a file that the run needs cannot be read in the context."""
        return _reading(path, f"restore it from a copy, or remove {self.path} to start the run over")

    def token(self, name: str) -> str:
        """The current token with the name "driver_token" or "worker_group_token", or "" before the first is written.

        A worker compares the current token with the token that it started with. If the two differ, another driver or
        group of workers has taken over the run, so the worker stops writing.
        """
        try:
            return (self.root / "log" / name).read_bytes().decode()
        except FileNotFoundError:
            return ""

    def new_token(self, name: str) -> str:
        """Writes and returns a new token. Workers that started with an earlier token stop at their next write."""
        token = uuid.uuid4().hex
        (self.root / "log" / name).write_bytes(token.encode())
        return token

    @property
    def journal(self) -> Path:
        """The folder of the journal (`pipeline.runs.journal`)."""
        return self.path / JOURNAL

    def stage(self, name: str) -> Path:
        """The folder of a stage."""
        return self.path / "stages" / name

    def result(self, name: str) -> StageResult | None:
        """The result of a stage, or None if the stage is not finished. Raises DamagedError if its file is damaged."""
        path = self.stage(name) / "DONE.json"
        if not path.is_file():
            return None
        with _reading(path, f"remove {path.parent}, and the same command repeats stage {name}"):
            return TypeAdapter(StageResult).validate_python(read_json(path))

    def delivered(self) -> StageSection | None:
        """The stage whose weights the run delivers, or None if no finished stage was kept.

        Of the kept stages, `deliver: last` chooses the last, and `deliver: best` the stage with the highest validation
        CIDEr-D. If two stages have the same score, the later stage is chosen.
        """
        delivered, best_score = None, -math.inf
        for stage in self.config.stages:
            result = self.result(stage.name)
            if result is None or not result.kept:
                continue
            if self.config.deliver == "last" or result.best_score >= best_score:
                delivered, best_score = stage, result.best_score
        return delivered

    def delivered_weights(self, part: str) -> Path:
        """The file with the delivered weights of `part` (model or backbone). Raises DamagedError if it is missing."""
        stage = self.delivered()
        return self._initial_weights(part) if stage is None else self.weights_after(stage, part)

    def before(self, stage: StageSection) -> list[StageSection]:
        """The stages before this one."""
        stages = list(self.config.stages)
        return stages[: stages.index(stage)]

    def weights_after(self, stage: StageSection, part: str) -> Path:
        """The file with the weights of `part` (model or backbone) after a finished stage, even one that was not kept.

        If the stage trained the part, the file has the best weights of the stage. Otherwise it has the weights that the
        stage started from. Raises DamagedError if the file is missing.
        """
        result = self.result(stage.name)
        if result is None:
            raise FileNotFoundError(f"stage {stage.name} of {self.run_id} is not finished")
        return self._best_weights(stage, result, part) or self.weights_before(stage, part)

    def weights_before(self, stage: StageSection, part: str) -> Path:
        """The file with the weights of `part` (model or backbone) that a stage starts from.

        The weights come from the last earlier stage that trained the part and was kept. If there is no such stage, they
        are the run's initial weights. Raises DamagedError if the file is missing.
        """
        for earlier in reversed(self.before(stage)):
            result = self.result(earlier.name)
            weights = self._best_weights(earlier, result, part) if result is not None and result.kept else None
            if weights is not None:
                return weights
        return self._initial_weights(part)

    def _best_weights(self, stage: StageSection, result: StageResult, part: str) -> Path | None:
        """The file with a part's best weights, or None if the stage did not train the part.

        Raises DamagedError if a file with best weights is missing.
        """
        folder = self.stage(stage.name)
        required = ("model", part) if stage.train_backbone else ("model",)
        files = {name: folder / f"best-{result.best_step}" / f"{name}.safetensors" for name in (*required, part)}
        for name in required:
            if not files[name].is_file():
                remedy = f"restore it from a copy, or remove {folder}, and the same command repeats stage {stage.name}"
                raise DamagedError(f"{files[name]} is missing; {remedy}")
        return files[part] if files[part].is_file() else None

    def _initial_weights(self, part: str) -> Path:
        """The file with the weights of `part` that the run starts from. Raises DamagedError if the file is missing."""
        initial = self.path / "init" / f"{part}.safetensors"
        with self._reading_needed(initial):
            initial.stat()
        return initial


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    """Turns errors of reading `path` in the context into DamagedError, with the path and the remedy."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{error}; {remedy}") from error
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing; {remedy}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # the content is not what was written
        reason = one_line(error).removeprefix(f"{path} ")
        raise DamagedError(f"{path} is damaged: {reason}; {remedy}") from error
