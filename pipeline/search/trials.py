"""The book of a search: which trial runs next and what became of each, one file a trial, so that a kill loses nothing.

    searches/<name>-<hash>/  plan.json  what every trial needs to know
                             trials/<number>.json  a trial, from its start on; rewritten when something happens to it

A trial is one point with one seed. Trials that a killed search left behind run first when it goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.search.samplers import Proposal, Proposals, name_of
from pipeline.search.spec import COSTS, SCORE, Search, SearchConfig
from pipeline.storage.atomic import read_json, write_json

State = Literal["running", "finished", "stopped", "failed"]
OVER: tuple[State, ...] = ("finished", "stopped", "failed")


@dataclass
class TrialRecord:
    """A trial as the search knows it. `reports` are (epoch, best validation CIDEr-D so far)."""

    number: int
    point: dict[str, Any]
    seed: int
    attributes: dict[str, Any] = field(default_factory=dict)
    state: State = "running"
    reason: str = ""
    run: str = ""  # the folder of its run
    reports: list[tuple[float, float]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of training, over all attempts
    attempts: int = 0
    took_over: list[tuple[float, int]] = field(default_factory=list)  # (epoch, the member whose weights it took)

    @property
    def score(self) -> float | None:
        return self.reports[-1][1] if self.reports else None

    @property
    def epoch(self) -> float:
        return self.reports[-1][0] if self.reports else 0.0

    def value(self, objective: str) -> float | None:
        """An objective's value, None where the trial has none."""
        if objective == SCORE:
            return self.score
        return (self.costs if objective in COSTS else self.scores).get(objective)


@dataclass(frozen=True)
class SearchFolder:
    """The folder of one search; trials open it by its path alone."""

    path: Path

    @property
    def plan(self) -> dict[str, Any]:
        """What `write_plan` wrote."""
        values: dict[str, Any] = read_json(self.path / "plan.json")
        return values

    def write_plan(
        self, search: Search, weights: Path | None, start: Path | None, store: str | None, bad: list[str]
    ) -> None:
        """`weights` is the backbone's file as runs keep it, `start` the same in timm's names; None without one."""
        write_json(
            self.path / "plan.json",
            {
                "search": search.config.model_dump(mode="json", exclude={"set"}),  # it is in the base already
                # without the tracker, whose address may hold a password
                "base": {key: value for key, value in search.values.items() if key != "tracking"},
                "weights": None if weights is None else str(weights),
                "start": None if start is None else str(start),
                "store": store,
                "excluded": bad,
            },
        )

    def search(self) -> Search:
        plan = self.plan
        return Search(SearchConfig.model_validate(plan["search"]), plan["base"])

    def records(self) -> list[TrialRecord]:
        """All trials in the order of their numbers."""
        found = [TrialRecord(**read_json(path)) for path in sorted((self.path / "trials").glob("[0-9]*.json"))]
        for record in found:
            record.reports = [(epoch, score) for epoch, score in record.reports]
            record.took_over = [(epoch, donor) for epoch, donor in record.took_over]
        return found

    def write(self, record: TrialRecord) -> None:
        write_json(self.path / "trials" / f"{record.number:05}.json", dataclasses.asdict(record))

    def reopen_failed(self) -> int:
        """Failed trials are left in the middle again, with what they had; returns how many there were."""
        failed = [record for record in self.records() if record.state == "failed"]
        for record in failed:
            self.write(dataclasses.replace(record, state="running", reason=""))
        return len(failed)


class Book:
    """What the driver of a search asks: the next trial, and notes what happens."""

    def __init__(self, folder: SearchFolder, search: Search, proposals: Proposals) -> None:
        self.folder, self.search, self.proposals = folder, search, proposals
        self.records = folder.records()
        self.asked = search.num_trials()
        self.left_behind = [record for record in self.records if record.state not in OVER]
        self.exhausted = False
        self._seeds: list[tuple[Proposal, int]] = []  # seeds of the newest point that did not begin yet
        self._recall()

    def _recall(self) -> None:
        """Tells the sampler what was tried before, point by point in the order of their beginning."""
        for records in self.by_point().values():
            first = records[0]
            proposal = Proposal(first.point, first.attributes)
            missing = [seed for seed in self.search.config.seeds if seed not in [r.seed for r in records]]
            self._seeds += [(proposal, seed) for seed in missing if self.search.config.algorithm != "pbt"]
            over = not missing and all(record.state in OVER for record in records)
            self.proposals.known(proposal, self._values(records) if over else None, over)

    def by_point(self) -> dict[str, list[TrialRecord]]:
        """Trials of the same point, which differ in their seeds; members of a population are each a point."""
        grouped: dict[str, list[TrialRecord]] = {}
        for record in self.records:
            alone = f"{record.number} " if self.search.config.algorithm == "pbt" else ""
            grouped.setdefault(alone + name_of(record.point), []).append(record)
        return grouped

    @property
    def remaining(self) -> float:
        """Trials that were asked for and did not begin; infinite when only time ends the search."""
        return float("inf") if self.asked is None else max(0, self.asked - len(self.records))

    def next(self) -> TrialRecord | None:
        """The next trial, noted as begun; None when there is none."""
        if self.left_behind:
            record = self.left_behind.pop(0)
            record.attempts += 1
            self.folder.write(record)
            return record
        if self.remaining <= 0 or self.exhausted:
            return None
        if not self._seeds:
            proposal = self.proposals.next()
            if proposal is None:
                self.exhausted = True
                return None
            seeds = self.search.config.seeds
            if self.search.config.algorithm == "pbt":  # members differ by what they were drawn
                seeds = seeds[:1]
            self._seeds = [(proposal, seed) for seed in seeds]
        proposal, seed = self._seeds.pop(0)
        number = 1 + max((record.number for record in self.records), default=0)
        record = TrialRecord(number, dict(proposal.point), seed, dict(proposal.attributes), attempts=1)
        self.records.append(record)
        self.folder.write(record)
        return record

    def reported(self, record: TrialRecord, result: Mapping[str, Any]) -> None:
        """A validation of a trial that goes on."""
        record.reports = [*((e, s) for e, s in record.reports if e < result["epoch"]), (result["epoch"], result[SCORE])]
        record.run, record.costs = result["run"], {**record.costs, **result["costs"]}
        self.folder.write(record)

    def over(self, record: TrialRecord, outcome: Mapping[str, Any]) -> None:
        """The end of a trial: finished, stopped or failed. With a point's last seed the sampler is told."""
        for key, value in outcome.items():
            setattr(record, key, value)
        self.folder.write(record)
        mine = next(records for records in self.by_point().values() if any(each is record for each in records))
        seeds = 1 if self.search.config.algorithm == "pbt" else len(self.search.config.seeds)
        if len(mine) == seeds and all(each.state in OVER for each in mine):
            self.proposals.tell(record.point, self._values(mine))

    def _values(self, records: Sequence[TrialRecord]) -> list[float] | None:
        """Means over the seeds that did not fail, one an objective; a stopped trial counts with what it had."""
        found = []
        for objective in self.search.config.objectives:
            values = [
                v for record in records if record.state != "failed" and (v := record.value(objective)) is not None
            ]
            if not values:
                return None
            found.append(sum(values) / len(values))
        return found

    def states(self) -> dict[str, int]:
        counts = dict.fromkeys(("finished", "stopped", "failed", "running"), 0)
        for record in self.records:
            counts[record.state] += 1
        return counts


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
