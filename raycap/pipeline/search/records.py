"""The trials of a search, and the search's folder.

    searches/<name>-<hash>/trials.json    the trials of the last experiment, written when it ends
    searches/<name>-<hash>/tune/          Ray Tune's experiments, one per budget, seeds and resources

A trial is one point with one seed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from raycap.models.config import Values
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.search.space import point_key
from raycap.pipeline.search.spec import COSTS, SCORE, Search
from raycap.pipeline.storage.atomic import decode_json
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path

TRIALS = "trials.json"
TrialState = Literal["running", "finished", "stopped", "failed"]
ENDED: tuple[TrialState, ...] = ("finished", "stopped", "failed")
# (epoch, best validation CIDEr-D so far); a finished trial's last one is that of the weights that were kept
Reports = list[tuple[float, float]]


@dataclass(frozen=True)
class TrialRecord:
    """A trial with what it has reported."""

    trial_id: str  # Ray Tune's
    point: Values
    seed: int
    state: TrialState = "running"
    reason: str = ""
    run: str = ""  # the folder of the trial's run
    reports: Reports = field(default_factory=list)
    # of the captions of a finished trial's weights: `BLEU-4` of the validation split, `test BLEU-4` of another split
    scores: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The best validation CIDEr-D so far; None before the first validation."""
        return self.reports[-1][1] if self.reports else None

    @property
    def epoch(self) -> float:
        """The epoch of the last validation."""
        return self.reports[-1][0] if self.reports else 0.0

    def value(self, objective: str) -> float | None:
        """The value of an objective, score or cost; None when the trial has no value for it."""
        if objective == SCORE:
            return self.score
        return (self.costs if objective in COSTS else self.scores).get(objective)


def read_records(data: bytes, name: str) -> list[TrialRecord]:
    """The trials in the content of a trials.json. Raises DamagedError, which calls the file `name`."""
    try:
        return TypeAdapter(list[TrialRecord]).validate_python(decode_json(data, name))
    except ValidationError as error:
        raise DamagedError(
            f"{name} is damaged: {one_line(error)}; remove it, and the search writes it again"
        ) from error


def by_point(search: Search, records: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    """The trials of each point, which differ in their seeds. Each member of a population forms a separate group."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        member = record.trial_id if search.is_population else ""
        groups.setdefault(member + point_key(record.point), []).append(record)
    return list(groups.values())


def count(records: Sequence[TrialRecord], *states: TrialState) -> int:
    """The number of trials in these states."""
    return sum(record.state in states for record in records)


@dataclass(frozen=True)
class SearchPlan:
    """What the processes of all trials need."""

    search: Search  # without its tracker (`Search.without_tracker`)
    weights: str | None  # the path or URI of the file with the backbone of all trials; None without a backbone
    store: str | None  # the folder with the features; None when trials read images instead
    excluded: list[str]  # the content keys of images without features
    folder: str = ""  # the driver's working folder, to which relative paths in the configuration refer


@dataclass(frozen=True)
class SearchFolder:
    """The folder of one search. The driver writes it.

    path: the local folder, where the results are made. home: the original on S3; None for a local storage.
    """

    path: Path
    home: StoragePath | None = None

    @property
    def root(self) -> StoragePath:
        """The location of the original folder, which every machine can reach."""
        return self.home or storage_path(self.path)

    def push(self) -> None:
        """Uploads the results. Does nothing for a local storage."""
        if self.home is not None:
            Mirror(self.home, self.path).push()

    def records(self) -> list[TrialRecord]:
        """The trials of the last experiment that has ended. Raises DamagedError for a damaged file."""
        file = self.root / TRIALS
        return read_records(file.read_bytes(), str(file)) if file.exists() else []

    def write(self, records: Sequence[TrialRecord]) -> None:
        """Writes trials.json."""
        values = [dataclasses.asdict(record) for record in records]
        (self.root / TRIALS).write_bytes(json.dumps(values, indent=1).encode())
