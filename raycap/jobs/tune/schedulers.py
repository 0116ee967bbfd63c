"""Early stopping (ASHA) and population based training. After a kill, both resume from the reports in the log."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.search.trials import ENDED, TrialRecord
from raycap.pipeline.storage.path import StoragePath, storage_path


@dataclass
class Turn:
    """A trial that has a process. Each turn of a population's member is another trial of Ray Tune."""

    record: TrialRecord
    take_over: TakeOver | None = None  # the member's order, until its first report
    run: str = ""  # the folder of the trial's run, as soon as the process has reported it

    @property
    def point(self) -> Values:
        """The point that the process trains."""
        return self.record.point if self.take_over is None else self.take_over.point


class NotPickled:
    """A base class for objects that are pickled as an empty object.

    Ray Tune pickles its searcher, scheduler and callbacks in order to restore a search. Ours resumes from its log
    instead, and what these objects refer to may hold the tracker's password.
    """

    def __reduce__(self) -> Any:
        return (object, ())


def make_scheduler(
    search: Search,
    records: Sequence[TrialRecord],
    turns: Mapping[str, Turn],
    population: Population | None = None,
) -> Any:
    """Ray Tune's scheduler for a search: the population's, ASHA, or first in, first out.

    turns: the trials that have a process, by Ray Tune's trial id. The caller changes this mapping as trials start.
    """
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

    if population is not None:
        return _population_scheduler(population, turns)
    settings = search.config.scheduler
    if settings is None:
        return FIFOScheduler()

    class NumberedASHA(ASHAScheduler):
        """Identifies trials by their number in the log, so that a resumed trial does not count as a second one."""

        def on_trial_add(self, tune_controller: object, trial: object) -> None:
            """Does nothing, because a trial has no number before it has a process."""

        def on_trial_remove(self, tune_controller: object, trial: object) -> None:
            """Does nothing, because a trial that never had a process was not added."""

        def on_trial_result(self, tune_controller: object, trial: Any, result: Values) -> str:
            if trial.trial_id not in turns:  # its process ends, because no trial was left for it
                return TrialScheduler.CONTINUE
            return self.report(turns[trial.trial_id].record.number, result)

        def on_trial_complete(self, tune_controller: object, trial: Any, result: Values) -> None:
            if trial.trial_id in turns:
                self.complete(turns[trial.trial_id].record.number, result)

        def report(self, number: int, result: Values, controller: Any = None) -> str:
            super().on_trial_add(controller, _named(number))  # adding a trial again changes nothing
            return super().on_trial_result(controller, _named(number), result)

        def complete(self, number: int, result: Values, controller: Any = None) -> None:
            super().on_trial_complete(controller, _named(number), result)

    scheduler: Any = NumberedASHA(
        time_attr="epoch",
        metric=SCORE,
        mode="max",
        max_t=search.total_epochs(),  # type: ignore[arg-type]  # a float is fine
        grace_period=settings.grace_epochs,  # type: ignore[arg-type]
        reduction_factor=settings.reduction,
    )
    # ASHA gets all earlier reports again, so that a resumed search decides as if it had not been interrupted
    for record in records:
        for epoch, score in record.reports:
            scheduler.report(record.number, {"epoch": epoch, SCORE: score})
        if record.state == "finished" and record.reports:
            scheduler.complete(record.number, {"epoch": record.epoch, SCORE: record.score})
    return scheduler


def _named(number: int) -> Any:
    """An object whose id is a trial's number in the log. ASHA uses nothing but the id of a trial."""
    return SimpleNamespace(trial_id=str(number))


@dataclass(frozen=True)
class TakeOver:
    """An order to a member: continue from a copy of another member's state, at a changed point."""

    donor: int  # the number of the member whose state was copied
    epoch: float  # the epoch of the copy
    point: Values
    handover: str  # the folder with the copy


@dataclass
class _Member:
    """The progress of one member."""

    point: Values
    epoch: float  # the epoch of the last report that was compared
    score: float | None
    ended: bool
    handover: str | None = None  # the folder with a copy of its state at that report
    order: TakeOver | None = None  # the instruction for the member's next turn
    reading: str | None = None  # the folder with a copy that the resumed member may still read


class Population:
    """Asynchronous population based training (Jaderberg et al., 2017), whose members are the trials of a search.

    Every `pbt.every_epochs` epochs a reporting member is compared with the last reports of the others. If it is among
    the worst `pbt.quantile`, it takes over the weights and the changed point of a random member of the best. If there
    are more members than free slots, they take turns at the same intervals.
    """

    def __init__(self, search: Search, records: Sequence[TrialRecord], handovers: StoragePath) -> None:
        self.search, self.handovers = search, handovers
        self.copies: dict[int, set[str]] = {record.number: set() for record in records}  # of each member's state
        self.members = {
            record.number: _Member(record.point, record.epoch, record.score, record.state in ENDED)
            for record in records
        }
        self.waiting = [number for number, member in self.members.items() if not member.ended]
        self._generator = random.Random(search.config.seed)

    def next(self) -> tuple[int, TakeOver | None] | None:
        """Starts the turn of the waiting member with the fewest epochs.

        Returns the member's number and its order, if it has one; None when no member waits.
        """
        if not self.waiting:
            return None
        number = min(self.waiting, key=lambda waiting: self.members[waiting].epoch)
        self.waiting.remove(number)
        member = self.members[number]
        order, member.order = member.order, None
        if order is not None:
            member.reading = order.handover
        return number, order

    def pause(self, number: int) -> None:
        """Marks a member as waiting for its next turn."""
        self.waiting.append(number)

    def end(self, number: int) -> None:
        """Marks a member as ended, so that it has no further turn and other members do not copy it."""
        self.members[number].ended, self.members[number].reading = True, None

    def report(self, number: int, point: Values, epoch: float, score: float, handover: str) -> bool:
        """Compares a member's report. True if the member must stop, because it has an order or another member waits."""
        member = self.members[number]
        member.point, member.reading = point, None
        self.copies[number].add(handover)
        is_compared = epoch - member.epoch >= self.search.config.pbt.every_epochs
        if is_compared:
            member.epoch, member.score, member.handover = epoch, score, handover
            donors = self._donors(number)
            if donors:
                self._give_order(member, self._generator.choice(donors))
        self._remove_unused(number)
        return is_compared and (member.order is not None or bool(self.waiting))

    def _donors(self, number: int) -> list[int]:
        """The members to copy from: the best ones, or none if the member is not worse than all of them."""
        scores = {
            other: member.score
            for other, member in self.members.items()
            if not member.ended and member.score is not None and not math.isnan(member.score)
        }
        ranked = sorted(scores, key=lambda other: scores[other])
        # at most half, so that no member is both among the worst and among the best
        size = min(math.ceil(len(ranked) * self.search.config.pbt.quantile), len(ranked) // 2)
        worst, best = ranked[:size], ranked[len(ranked) - size :]
        if number not in worst or scores[number] >= min(scores[other] for other in best):
            return []
        return [other for other in best if self.members[other].handover is not None]

    def _give_order(self, member: _Member, donor: int) -> None:
        """Orders a member to continue from a donor's state at a changed point."""
        source = self.members[donor]
        assert source.handover is not None
        point = {
            dimension.key: dimension.neighbor(source.point[dimension.key], self._generator)
            for dimension in self.search.space.dimensions
        }
        member.order = TakeOver(donor, source.epoch, point, source.handover)
        member.epoch = source.epoch

    def _remove_unused(self, number: int) -> None:
        """Deletes the copies of a member's state that no member will read."""
        members = self.members.values()
        used = {path for member in members for path in (member.handover, member.reading)}
        used |= {member.order.handover for member in members if member.order is not None}
        for path in self.copies[number] - used:
            storage_path(path, self.handovers.options).delete_folder()
            self.copies[number].remove(path)


def _population_scheduler(population: Population, turns: Mapping[str, Turn]) -> Any:
    """Ray Tune's scheduler that stops the members that the population wants to stop."""
    from ray.tune.schedulers import FIFOScheduler, TrialScheduler

    class PopulationScheduler(NotPickled, FIFOScheduler):
        def on_trial_result(self, tune_controller: object, trial: Any, result: Values) -> str:
            if "handover" not in result:  # the outcome, which ends a member's training
                return TrialScheduler.CONTINUE
            turn = turns[trial.trial_id]
            stop = population.report(turn.record.number, turn.point, result["epoch"], result[SCORE], result["handover"])
            return TrialScheduler.STOP if stop else TrialScheduler.CONTINUE

    return PopulationScheduler()
