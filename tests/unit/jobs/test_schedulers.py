"""ASHA and population based training: their rules, and that both resume from the log after a kill."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycap.jobs.tune.schedulers import Population, Turn, make_scheduler
from raycap.pipeline.search.spec import Search
from raycap.pipeline.search.trials import TrialRecord
from raycap.pipeline.storage.path import storage_path
from tests.support.searches import LR, small_search


def ray_trial(number: int) -> Any:
    return SimpleNamespace(trial_id=f"id-{number}")


def cutoffs_of(asha: Any) -> str:
    """The cutoffs of all rungs as ASHA prints them."""
    return str(asha.debug_string().split("\n", 1)[1])


def test_asha_follows_its_rule(tmp_path: Path) -> None:
    """At each rung (1, 2, 4 epochs) a trial ends if it is below the median of those before it (reduction 2)."""
    scheduler_section = {"name": "asha", "grace_epochs": 1, "reduction": 2}
    search = small_search(tmp_path, trial={"epochs": 8}, scheduler=scheduler_section)
    generator = random.Random(0)
    records = [TrialRecord(number, {}, 0) for number in range(40)]
    turns = {f"id-{record.number}": Turn(record) for record in records}
    scheduler = make_scheduler(search, [], turns)
    qualities = [generator.random() for _ in records]
    for record in records:
        scheduler.on_trial_add(None, ray_trial(record.number))
    rungs: dict[int, list[float]] = {1: [], 2: [], 4: []}
    running, num_stopped = list(records), 0
    while running:
        record = generator.choice(running)  # asynchronous: trials report in any order
        epoch = len(record.reports) + 1
        score = qualities[record.number] + 0.1 * epoch
        expected = "CONTINUE"
        if epoch in rungs:
            if rungs[epoch] and score < np.percentile(rungs[epoch], 50):
                expected = "STOP"
            rungs[epoch].append(score)
        if epoch == 8:
            expected = "STOP"
        result = {"epoch": float(epoch), "CIDEr-D": score}
        assert scheduler.on_trial_result(None, ray_trial(record.number), result) == expected
        record.reports.append((float(epoch), score))
        if expected == "STOP":
            running.remove(record)
            num_stopped += epoch < 8
    assert 15 < num_stopped < 40

    resumed = make_scheduler(search, records, turns)  # after a kill
    assert cutoffs_of(resumed) == cutoffs_of(scheduler)
    cutoffs = cutoffs_of(resumed)
    resumed.on_trial_add(None, ray_trial(7))
    for epoch, score in records[7].reports:
        resumed.on_trial_result(None, ray_trial(7), {"epoch": epoch, "CIDEr-D": score})
    assert cutoffs_of(resumed) == cutoffs, "a resumed trial counts once"
    without = ray_trial(1000)  # its process got no trial
    resumed.on_trial_add(None, without)
    assert resumed.on_trial_result(None, without, {}) == "CONTINUE"
    resumed.on_trial_complete(None, without, {})


@pytest.fixture
def pbt_search(tmp_path: Path) -> Search:
    space = {LR: {"choices": [1e-4, 1e-3, 1e-2, 1e-1]}}
    pbt = {"every_epochs": 1, "quantile": 0.25}
    return small_search(tmp_path, space=space, algorithm="pbt", pbt=pbt, budget={"trials": 4})


def members(search: Search) -> list[TrialRecord]:
    return [TrialRecord(number, point, 0) for number, point in enumerate(search.space.points(), 1)]


class Driver:
    """Reports of members as their processes make them: each with a folder that holds a copy of the state."""

    def __init__(self, population: Population, points: dict[int, dict[str, Any]]) -> None:
        self.population, self.points, self.num_reports = population, points, 0

    def report(self, number: int, epoch: float, score: float) -> bool:
        self.num_reports += 1
        copy = self.population.handovers / str(number) / str(self.num_reports)
        copy.path.mkdir(parents=True)
        return self.population.report(number, self.points[number], epoch, score, str(copy))

    def copies(self, number: int) -> int:
        return len(list((self.population.handovers / str(number)).path.iterdir()))


def started(search: Search, folder: Path) -> Driver:
    records = members(search)
    population = Population(search, records, storage_path(folder / "handover"))
    while population.next():
        pass
    return Driver(population, {record.number: record.point for record in records})


def test_the_worst_member_continues_from_the_best(pbt_search: Search, tmp_path: Path) -> None:
    driver = started(pbt_search, tmp_path)
    population = driver.population
    assert not population.waiting
    assert not driver.report(2, 1.0, 0.5) and not driver.report(3, 1.0, 0.6) and not driver.report(1, 1.0, 0.9)
    assert driver.report(4, 1.0, 0.1), "it must stop"
    population.pause(4)
    number, order = population.next() or (0, None)
    assert number == 4 and order is not None and (order.donor, order.epoch) == (1, 1.0)
    assert order.point[LR] in pbt_search.space.dimensions[0].labels and Path(order.handover).is_dir()
    driver.points[4] = order.point
    assert not driver.report(1, 2.0, 1.0) and driver.copies(1) == 2, "the copy that member 4 reads is kept"
    assert not driver.report(4, 2.0, 0.95) and not driver.report(1, 3.0, 1.1)
    assert driver.copies(1) == 1, "a copy is deleted when it was read"
    assert not driver.report(1, 3.5, 1.2) and driver.copies(1) == 1, "nothing happens between the intervals"
