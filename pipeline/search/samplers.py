"""Which point a search tries next: one by one, at random, or by Optuna (its only home); and what mattered.

Optuna is asked and told; it runs nothing. What a search has tried before is told again after a kill, with the
attributes that its samplers keep with a trial (NSGA-II's generation).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.search.space import Dimension, Space

ATTEMPTS = 50  # draws that give points which were tried before, until a new one is drawn at random
IMPORTANCE_FEWEST = 4  # points below which no importance is told


@dataclass(frozen=True)
class Proposal:
    """A point, and what the sampler wants to have back with it after a kill."""

    point: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)


class Proposals(Protocol):
    def next(self) -> Proposal | None:
        """A point that was not tried; None when there is none."""
        ...

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        """What a proposed point came to, one value an objective; None when it failed."""
        ...

    def known(self, proposal: Proposal, values: Sequence[float] | None, over: bool = True) -> None:
        """A point of before this process began: with its values, failed (None), or not `over` yet."""
        ...


def name_of(point: Mapping[str, Any]) -> str:
    """Points are the same when their names are."""
    return repr(sorted(point.items()))


def make_proposals(
    space: Space, algorithm: str, directions: Sequence[str], seed: int, population: int | None, budget: int | None
) -> Proposals:
    """`directions` are max or min, one an objective; `budget` how many points are asked for, None without an end."""
    if algorithm in ("tpe", "nsga2"):
        if population is None:
            population = max(4, min(50, (budget or 80) // 4))
        return OptunaProposals(space, algorithm, directions, seed, population)
    return ListedProposals(space, seed, shuffled=algorithm in ("random", "pbt"), repeat=algorithm == "pbt")


class ListedProposals:
    """Every point of a finite space in its order or shuffled, or draws from an infinite one; a function of the seed.

    With `repeat` a point may come again (members of a population may begin alike).
    """

    def __init__(self, space: Space, seed: int, *, shuffled: bool, repeat: bool = False) -> None:
        self.space, self.seed, self.repeat = space, seed, repeat
        self.tried: set[str] = set()
        self.drawn = 0
        self.listed: list[dict[str, Any]] | None = None
        if space.size <= 1_000_000 and not repeat:
            self.listed = list(space.points())
            if shuffled:
                random.Random(seed).shuffle(self.listed)

    def next(self) -> Proposal | None:
        if self.listed is not None:
            for point in self.listed[self.drawn :]:
                self.drawn += 1
                if name_of(point) not in self.tried:
                    self.tried.add(name_of(point))
                    return Proposal(point)
            return None
        for _ in range(100_000):
            generator = random.Random(f"{self.seed} {self.drawn}")
            self.drawn += 1
            point = {dimension.key: dimension.draw(generator) for dimension in self.space.dimensions}
            if self.repeat or name_of(point) not in self.tried:
                self.tried.add(name_of(point))
                return Proposal(point)
        return None

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        pass

    def known(self, proposal: Proposal, values: Sequence[float] | None, over: bool = True) -> None:
        self.tried.add(name_of(proposal.point))
        if self.repeat:
            self.drawn += 1


class OptunaProposals:
    """TPE or NSGA-II over the dimensions; choices are categorical by their labels."""

    def __init__(self, space: Space, algorithm: str, directions: Sequence[str], seed: int, population: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna, self.space, self.seed = optuna, space, seed
        self.algorithm, self.population = algorithm, population
        kinds = optuna.study.StudyDirection
        self.directions = [kinds.MAXIMIZE if direction == "max" else kinds.MINIMIZE for direction in directions]
        self.distributions = {d.key: _distribution(d) for d in space.dimensions}
        self.study = optuna.create_study(directions=self.directions)
        self.pending: dict[str, Any] = {}
        self.over: dict[str, list[float] | None] = {}
        self.seeded = False

    def next(self) -> Proposal | None:
        self._seed()
        for _ in range(ATTEMPTS):
            trial = self.study.ask(self.distributions)
            point = self._point(trial.params)
            name = name_of(point)
            if name not in self.over and name not in self.pending:
                return self._take(trial, point)
            values = self.over.get(name)
            self._finish(trial.number, values)
        untried = self._untried()
        if untried is None:
            return None
        self.study.enqueue_trial(dict(untried))
        return self._take(self.study.ask(self.distributions), untried)

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        number = self.pending.pop(name_of(point))
        self.over[name_of(point)] = list(values) if values is not None else None
        self._finish(number, values)

    def known(self, proposal: Proposal, values: Sequence[float] | None, over: bool = True) -> None:
        name = name_of(proposal.point)
        states = self.optuna.trial.TrialState
        state = states.RUNNING if not over else states.FAIL if values is None else states.COMPLETE
        self.study.add_trial(
            self.optuna.trial.create_trial(
                state=state,
                params=dict(proposal.point),
                distributions=self.distributions,
                values=list(values) if values is not None and over else None,
                system_attrs=dict(proposal.attributes),
            )
        )
        if over:
            self.over[name] = list(values) if values is not None else None
        else:
            self.pending[name] = self.study.trials[-1].number

    def _take(self, trial: Any, point: dict[str, Any]) -> Proposal:
        self.pending[name_of(point)] = trial.number
        attributes = self.study.trials[trial.number].system_attrs
        return Proposal(point, {k: v for k, v in attributes.items() if isinstance(v, str | int | float)})

    def _finish(self, number: int, values: Sequence[float] | None) -> None:
        if values is None:
            self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(number, list(values))

    def _point(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {key: params[key] for key in self.distributions}

    def _seed(self) -> None:
        """A process that goes on draws other points than the one before it drew: the seed counts what is known."""
        if self.seeded:
            return
        self.seeded = True
        seed = (self.seed * 1_000_003 + len(self.study.trials)) % 2**31
        samplers = self.optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental features that are named below
            if self.algorithm == "nsga2":
                self.study.sampler = samplers.NSGAIISampler(population_size=self.population, seed=seed)
            else:
                # constant_liar: points that are being tried repel, so that several at a time differ
                self.study.sampler = samplers.TPESampler(
                    seed=seed, multivariate=True, constant_liar=True, n_startup_trials=max(4, self.population)
                )

    def _untried(self) -> dict[str, Any] | None:
        generator = random.Random(f"{self.seed} {len(self.study.trials)}")
        if self.space.size <= 1_000_000:
            points = [p for p in self.space.points() if (n := name_of(p)) not in self.over and n not in self.pending]
            return generator.choice(points) if points else None
        for _ in range(1000):
            point = {dimension.key: dimension.draw(generator) for dimension in self.space.dimensions}
            if name_of(point) not in self.over and name_of(point) not in self.pending:
                return point
        return None


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not dimension.is_range:
        return CategoricalDistribution(dimension.labels)
    if dimension.integer:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def importance(space: Space, points: Sequence[Mapping[str, Any]], values: Iterable[float]) -> dict[str, float]:
    """The share of the values' variance that each dimension explains by itself or with others (Optuna's fANOVA).

    Hutter, Hoos, Leyton-Brown: An Efficient Approach for Assessing Hyperparameter Importance (2014). Empty when
    there are fewer than four points, one dimension, or nothing that varies.
    """
    values = list(values)
    varied = [d for d in space.dimensions if len({point[d.key] for point in points}) > 1]
    if len(points) < IMPORTANCE_FEWEST or len(space.dimensions) < 2 or not varied or len(set(values)) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    distributions = {d.key: _distribution(d) for d in varied}
    for point, value in zip(points, values, strict=True):
        params = {key: point[key] for key in distributions}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    found = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {d.key: float(found.get(d.key, 0.0)) for d in space.dimensions}
