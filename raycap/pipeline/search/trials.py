"""The log of a search. Each trial has a file, which is rewritten at each event, so that a killed search can resume.

    searches/<name>-<hash>/trials/<number>.json    one trial; the file is created when the trial starts

A trial is one point with one seed. A resumed search first runs the unfinished trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from raycap.models.config import Values
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.search.samplers import Proposal, make_sampler, point_key
from raycap.pipeline.search.spec import COSTS, SCORE, Search
from raycap.pipeline.storage.atomic import decode_json, write_json
from raycap.pipeline.storage.lease import Lease
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path

TrialState = Literal["running", "finished", "stopped", "failed"]
ENDED: tuple[TrialState, ...] = ("finished", "stopped", "failed")
MEMORY_REASON = "out of memory"  # the beginning of the reason of a trial that failed because memory was short
# (epoch, best validation CIDEr-D so far); a finished trial's last one is that of the weights that were kept
Reports = list[tuple[float, float]]


@dataclass(frozen=True)
class TrialOutcome:
    """The end of a trial. A field that is None leaves the trial's record unchanged."""

    state: TrialState
    reason: str | None = None
    run: str | None = None
    reports: Reports | None = None
    scores: dict[str, float] | None = None
    costs: dict[str, float] | None = None
    seconds: float | None = None


@dataclass
class TrialRecord:
    """A trial as its file stores it."""

    number: int
    point: Values
    seed: int
    attributes: Values = field(default_factory=dict)  # the sampler needs them to resume
    state: TrialState = "running"
    reason: str = ""
    run: str = ""  # the folder of the trial's run
    reports: Reports = field(default_factory=list)
    # of the captions of a finished trial's weights: `BLEU-4` of the validation split, `test BLEU-4` of another split
    scores: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # the time of all attempts together
    attempts: int = 0
    took_over: list[tuple[float, int]] = field(default_factory=list)  # (epoch, number of the member it copied)

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


@dataclass(frozen=True)
class SearchPlan:
    """What the processes of all trials need."""

    search: Search  # without its tracker (`Search.without_tracker`)
    weights: Path | None  # the driver's file with the backbone in the form that runs store; None without a backbone
    start: str | None  # the path or URI of a file with the same weights under timm's names
    store: str | None  # the folder with the features; None when trials read images instead
    excluded: list[str]  # the content keys of images without features


@dataclass(frozen=True)
class SearchFolder:
    """The folder of one search. The driver writes it.

    path: the local folder. home: the original on S3, of which `path` is the driver's copy; None for a local storage.
    """

    path: Path
    home: StoragePath | None = None

    @property
    def root(self) -> StoragePath:
        """The location of the original folder, which every machine can reach."""
        return self.home or storage_path(self.path)

    @property
    def handovers(self) -> StoragePath:
        """The folder for copies of the states of a population's members; each member's number names a subfolder."""
        return self.root / "log/handover"

    @property
    def assignments(self) -> StoragePath:
        """The folder with a file for each process of a trial, which names the trial."""
        return self.root / "log/assignments"

    def clear_exchange(self) -> None:
        """Deletes the files that the driver and the processes of trials exchange."""
        self.handovers.delete_folder()
        self.assignments.delete_folder()

    def pull(self) -> None:
        """Brings the driver's copy up to date. Does nothing for a local storage."""
        if self.home is not None:
            Mirror(self.home, self.path).pull()

    def push(self, under: str = "") -> None:
        """Uploads the files below `under`. Does nothing for a local storage."""
        if self.home is not None:
            Mirror(self.home, self.path).push(under)

    def records(self) -> list[TrialRecord]:
        """All trials, ordered by number. Raises DamagedError for a damaged file."""
        try:
            return [_read_record(storage_path(path)) for path in sorted((self.path / "trials").glob("[0-9]*.json"))]
        except DamagedError as error:
            raise DamagedError(
                f"{error}; restore it from a copy, or remove it, and the search runs another trial in its place"
            ) from error

    def write(self, record: TrialRecord) -> None:
        name = f"trials/{record.number:05}.json"
        write_json(self.path / name, dataclasses.asdict(record))
        self.push(name)

    def reopen_failed(self) -> int:
        """Marks failed trials as unfinished, so that they run again; returns how many there were."""
        failed = [record for record in self.records() if record.state == "failed"]
        for record in failed:
            self.write(dataclasses.replace(record, state="running", reason=""))
        return len(failed)


def _read_record(path: StoragePath) -> TrialRecord:
    """The trial in a file. Raises DamagedError."""
    values = decode_json(path.read_bytes(), str(path))
    try:
        return TypeAdapter(TrialRecord).validate_python(values)  # makes tuples of JSON's lists
    except ValidationError as error:
        raise DamagedError(f"{path} is damaged: {one_line(error)}") from error


class TrialLog:
    """All trials of a search. It chooses the trials that start next and records what happens to each trial.

    lease: of a search on S3; None for a local storage. Methods that write raise LostLeaseError when it is lost.
    """

    def __init__(self, folder: SearchFolder, search: Search, lease: Lease | None = None) -> None:
        self.folder, self.search, self.sampler, self.lease = folder, search, make_sampler(search), lease
        self.is_population = search.config.algorithm == "pbt"
        # the seeds of every point; members of a population differ by their points and share the first seed
        self.seeds = search.config.seeds[:1] if self.is_population else search.config.seeds
        stored = folder.records()
        self._last_number = max((record.number for record in stored), default=0)
        # trials of seeds that are no longer listed remain in the folder
        self.records = [record for record in stored if record.seed in self.seeds]
        self.num_trials = search.num_trials()  # None: only budget.hours ends the search
        self.unfinished = [record for record in self.records if record.state not in ENDED]
        self.exhausted = False  # whether the sampler has no more points
        self._pending: list[tuple[Proposal, int]] = []  # (point, seed) of trials that must start next
        # the sampler gets the results of an earlier process in the order in which the points were started
        for records in self.by_point().values():
            proposal = Proposal(records[0].point, records[0].attributes)
            started = {record.seed for record in records}
            self._pending += [(proposal, seed) for seed in self.seeds if seed not in started]
            has_ended = self._has_ended(records)
            self.sampler.restore(proposal, self._means(records) if has_ended else None, ended=has_ended)

    def check_may_write(self) -> None:
        """Raises LostLeaseError when another process works on the search."""
        if self.lease is not None:
            self.lease.check()

    def _write(self, record: TrialRecord) -> None:
        self.check_may_write()
        self.folder.write(record)

    def _has_ended(self, records: Sequence[TrialRecord]) -> bool:
        """Whether the trials of a point have ended and every seed has one; `records` are all its trials so far."""
        return len(records) == len(self.seeds) and all(record.state in ENDED for record in records)

    def by_point(self) -> dict[str, list[TrialRecord]]:
        """The trials of each point, which differ in their seeds. Each member of a population forms a separate group."""
        groups: dict[str, list[TrialRecord]] = {}
        for record in self.records:
            member_prefix = f"{record.number} " if self.is_population else ""
            groups.setdefault(member_prefix + point_key(record.point), []).append(record)
        return groups

    @property
    def remaining(self) -> float:
        """The number of trials that have not started; infinite when only budget.hours ends the search."""
        return math.inf if self.num_trials is None else max(0, self.num_trials - len(self.records))

    @property
    def num_left(self) -> float:
        """The number of trials that `start_next` can still start, as far as the sampler is known to have points."""
        return len(self.unfinished) + (0 if self.exhausted else self.remaining)

    @property
    def num_pending(self) -> int:
        """The number of trials of known points whose seeds have not started."""
        return len(self._pending)

    def start_next(self) -> TrialRecord | None:
        """Records the start of a trial and returns it; None when no trial is left.

        The unfinished trials of an earlier process come first, then new ones.
        """
        if self.unfinished:
            record = self.unfinished.pop(0)
            record.attempts += 1
            self._write(record)
            return record
        if self.remaining <= 0 or self.exhausted:
            return None
        if not self._pending:
            proposal = self.sampler.ask()
            if proposal is None:
                self.exhausted = True
                return None
            self._pending = [(proposal, seed) for seed in self.seeds]
        proposal, seed = self._pending.pop(0)
        self._last_number += 1
        record = TrialRecord(self._last_number, dict(proposal.point), seed, dict(proposal.attributes), attempts=1)
        self.records.append(record)
        self._write(record)
        return record

    def report(self, record: TrialRecord, result: Mapping[str, Any]) -> None:
        """Records a validation. It replaces reports of the same or a later epoch, which a resumed trial repeats."""
        earlier = [(epoch, score) for epoch, score in record.reports if epoch < result["epoch"]]
        record.reports = [*earlier, (result["epoch"], result[SCORE])]
        record.run, record.costs = result["run"], {**record.costs, **result["costs"]}
        self._write(record)

    def end(self, record: TrialRecord, outcome: TrialOutcome) -> None:
        """Records the end of a trial. When the last trial of a point ends, the sampler gets the point's result."""
        for key, value in vars(outcome).items():
            if value is not None:
                setattr(record, key, value)
        self._write(record)
        trials_of_point = next(group for group in self.by_point().values() if record in group)
        if self._has_ended(trials_of_point):
            self.sampler.tell(record.point, self._means(trials_of_point))

    def _means(self, records: Sequence[TrialRecord]) -> list[float] | None:
        """The mean of each objective over a point's trials that did not fail; None when an objective has no value."""
        usable = [record for record in records if record.state != "failed"]
        means = []
        for objective in self.search.config.objectives:
            values = [value for record in usable if (value := record.value(objective)) is not None]
            if not values:
                return None
            means.append(sum(values) / len(values))
        return means

    def count(self, *states: TrialState) -> int:
        """The number of trials in these states."""
        return sum(record.state in states for record in self.records)

    def states_text(self) -> str:
        """The number of trials in each state, without states that no trial has."""
        return ", ".join(f"{self.count(state)} {state}" for state in (*ENDED, "running") if self.count(state))


def minutes(seconds: float) -> str:
    """A duration for log lines, in seconds below 90 s, else in minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
