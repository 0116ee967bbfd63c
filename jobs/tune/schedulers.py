"""What ends trials early or changes them on the way: ASHA and populations (PBT), of Ray Tune."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.search.spec import SCORE, Search
from pipeline.search.trials import TrialRecord


def make_scheduler(search: Search, records: list[TrialRecord]) -> Any:
    """The search's ASHA, which remembers the reports of trials that ran before, or first in, first out."""
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    if search.config.algorithm == "pbt":
        return _population(search)
    settings = search.config.scheduler
    if settings is None:
        return FIFOScheduler()
    scheduler = ASHAScheduler(
        time_attr="epoch",
        metric=SCORE,
        mode="max",
        max_t=search.total_epochs(),  # type: ignore[arg-type]  # any number will do
        grace_period=settings.grace_epochs,  # type: ignore[arg-type]
        reduction_factor=settings.reduction,
    )
    for record in records:
        for epoch, score in record.reports:
            scheduler._brackets[0].on_result(SimpleNamespace(trial_id=f"trial {record.number}"), epoch, score)  # type: ignore[arg-type]
    return scheduler


def take_over(scheduler: Any, before: str, trial_id: str) -> None:
    """A trial that goes on stands in ASHA's rungs as itself, not as a second one beside what it was."""
    for bracket in getattr(scheduler, "_brackets", ()):
        for _, recorded in bracket._rungs:
            if before in recorded:
                recorded[trial_id] = recorded.pop(before)


def drop_checkpoints(scheduler: Any, trials: Sequence[Any]) -> None:
    """Removes what a population's members handed over and none will go on from.

    A number to keep, as Ray has it, does not do: while one member waits for its turn, the one whose weights it takes
    may report any number of times. A member's newest two stay, of which Ray may not know yet. O(members) a report.
    """
    states = getattr(scheduler, "_trial_state", None)
    if states is None:
        return  # no population
    taken = [trial.checkpoint for trial in trials] + [state.last_checkpoint for state in states.values()]
    if any(checkpoint is not None and not hasattr(checkpoint, "path") for checkpoint in taken):
        return  # Ray is still saving one
    wanted = {str(checkpoint.path) for checkpoint in taken if checkpoint is not None}
    for trial in trials:
        for path in sorted(Path(trial.path).glob("checkpoint_*"), key=_age)[:-2]:
            if str(path) not in wanted:
                shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _population(search: Search) -> Any:
    from ray.tune.schedulers import PopulationBasedTraining

    settings, generator = search.config.pbt, random.Random(search.config.seed)

    class Population(PopulationBasedTraining):
        def _quantiles(self) -> tuple[list[Any], list[Any]]:
            """The worst and the best; who is as good as all of the best is not among the worst.

            Members of equal scores would take each other's place again and again.
            """
            worst, best = super()._quantiles()
            scores: dict[Any, Any] = {trial: state.last_score for trial, state in self._trial_state.items()}
            return [t for t in worst if scores[t] < min(scores[b] for b in best)], best

    def changed(config: dict[str, Any]) -> dict[str, Any]:
        member = config["member"]
        point = {d.key: d.neighbor(member["point"][d.key], generator) for d in search.space.dimensions}
        return config | {"member": member | {"point": point}}

    return Population(
        time_attr="epoch",
        metric=SCORE,
        mode="max",
        perturbation_interval=settings.every_epochs,
        quantile_fraction=settings.quantile,
        custom_explore_fn=changed,
        log_config=False,
        require_attrs=False,
    )
