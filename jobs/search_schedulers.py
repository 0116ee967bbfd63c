"""What ends trials early or changes them on the way: ASHA and populations (PBT), of Ray Tune."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from pipeline.search import SCORE, Search
from pipeline.search_book import TrialRecord


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


def _population(search: Search) -> Any:
    from ray.tune.schedulers import PopulationBasedTraining

    settings, generator = search.config.pbt, random.Random(search.config.seed)

    def changed(config: dict[str, Any]) -> dict[str, Any]:
        member = config["member"]
        point = {d.key: d.neighbor(member["point"][d.key], generator) for d in search.space.dimensions}
        return config | {"member": member | {"point": point}}

    return PopulationBasedTraining(
        time_attr="epoch",
        metric=SCORE,
        mode="max",
        perturbation_interval=settings.every_epochs,
        quantile_fraction=settings.quantile,
        custom_explore_fn=changed,
        log_config=False,
        require_attrs=False,
    )
