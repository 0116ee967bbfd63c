"""Samplers choose the next point of a search: listed, random, or by Optuna. Also the importance of each dimension.

Optuna is used through ask and tell and runs nothing. After a kill, the earlier results are added to a new study,
together with the attributes that Optuna's samplers store per trial (the generation of NSGA-II).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.search.space import Dimension, Space

MAX_REPEATED_DRAWS = 50  # of points tried before, until an untried one is drawn at random
MIN_POINTS_FOR_IMPORTANCE = 4
MAX_LISTED_POINTS = 1_000_000


@dataclass(frozen=True)
class Proposal:
    """A point, and the attributes that the sampler needs to restore it after a kill."""

    point: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)


class Sampler(Protocol):
    def ask(self) -> Proposal | None:
        """An untried point; None when there is none."""
        ...

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        """The result of a proposed point, one value per objective; None for a failed one."""
        ...

    def restore(self, proposal: Proposal, values: Sequence[float] | None, ended: bool = True) -> None:
        """Adds a point of an earlier process: with its values, failed (None), or still running (not `ended`)."""
        ...


def point_key(point: Mapping[str, Any]) -> str:
    """Equal for equal points."""
    return repr(sorted(point.items()))


def make_sampler(
    space: Space, algorithm: str, directions: Sequence[str], seed: int, population: int | None, budget: int | None
) -> Sampler:
    """`directions` are max or min, one per objective; `budget` is the number of points, None without a limit."""
    if algorithm in ("tpe", "nsga2"):
        if population is None:
            population = max(4, min(50, (budget or 80) // 4))
        return OptunaSampler(space, algorithm, directions, seed, population)
    return ListSampler(space, seed, shuffled=algorithm in ("random", "pbt"), repeat=algorithm == "pbt")


class ListSampler:
    """All points of a finite space, in order or shuffled, or draws from an infinite one; deterministic by seed.

    With `repeat` a point may occur again: members of a population may start alike.
    """

    def __init__(self, space: Space, seed: int, *, shuffled: bool, repeat: bool = False) -> None:
        self.space, self.seed, self.repeat = space, seed, repeat
        self.tried: set[str] = set()
        self.num_drawn = 0
        self.points: list[dict[str, Any]] | None = None
        if space.size <= MAX_LISTED_POINTS and not repeat:
            self.points = list(space.points())
            if shuffled:
                random.Random(seed).shuffle(self.points)

    def ask(self) -> Proposal | None:
        if self.points is not None:
            for point in self.points[self.num_drawn :]:
                self.num_drawn += 1
                if point_key(point) not in self.tried:
                    self.tried.add(point_key(point))
                    return Proposal(point)
            return None
        for _ in range(100_000):
            generator = random.Random(f"{self.seed} {self.num_drawn}")
            self.num_drawn += 1
            point = self.space.draw(generator)
            if self.repeat or point_key(point) not in self.tried:
                self.tried.add(point_key(point))
                return Proposal(point)
        return None

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        pass

    def restore(self, proposal: Proposal, values: Sequence[float] | None, ended: bool = True) -> None:
        self.tried.add(point_key(proposal.point))
        if self.repeat:
            self.num_drawn += 1


class OptunaSampler:
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
        self.running: dict[str, int] = {}  # Optuna's trial number by point
        self.results: dict[str, list[float] | None] = {}
        self.seeded = False

    def ask(self) -> Proposal | None:
        self._seed()
        for _ in range(MAX_REPEATED_DRAWS):
            trial = self.study.ask(self.distributions)
            point = {key: trial.params[key] for key in self.distributions}
            if not self._is_tried(point):
                return self._propose(trial, point)
            self._finish(trial.number, self.results.get(point_key(point)))
        untried = self._draw_untried()
        if untried is None:
            return None
        self.study.enqueue_trial(dict(untried))
        return self._propose(self.study.ask(self.distributions), untried)

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        number = self.running.pop(point_key(point))
        self.results[point_key(point)] = list(values) if values is not None else None
        self._finish(number, values)

    def restore(self, proposal: Proposal, values: Sequence[float] | None, ended: bool = True) -> None:
        key, states = point_key(proposal.point), self.optuna.trial.TrialState
        state = states.RUNNING if not ended else states.FAIL if values is None else states.COMPLETE
        self.study.add_trial(
            self.optuna.trial.create_trial(
                state=state,
                params=dict(proposal.point),
                distributions=self.distributions,
                values=list(values) if values is not None and ended else None,
                system_attrs=dict(proposal.attributes),
            )
        )
        if ended:
            self.results[key] = list(values) if values is not None else None
        else:
            self.running[key] = self.study.trials[-1].number

    def _is_tried(self, point: Mapping[str, Any]) -> bool:
        return point_key(point) in self.results or point_key(point) in self.running

    def _propose(self, trial: Any, point: dict[str, Any]) -> Proposal:
        self.running[point_key(point)] = trial.number
        attributes = self.study.trials[trial.number].system_attrs
        return Proposal(point, {k: v for k, v in attributes.items() if isinstance(v, str | int | float)})

    def _finish(self, number: int, values: Sequence[float] | None) -> None:
        if values is None:
            self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(number, list(values))

    def _seed(self) -> None:
        """Creates Optuna's sampler. The number of restored trials enters the seed, so a resumed search draws anew."""
        if self.seeded:
            return
        self.seeded = True
        seed = (self.seed * 1_000_003 + len(self.study.trials)) % 2**31
        samplers = self.optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate and constant_liar are experimental
            if self.algorithm == "nsga2":
                self.study.sampler = samplers.NSGAIISampler(population_size=self.population, seed=seed)
            else:
                # constant_liar: running points repel, so that concurrent trials differ
                self.study.sampler = samplers.TPESampler(
                    seed=seed, multivariate=True, constant_liar=True, n_startup_trials=max(4, self.population)
                )

    def _draw_untried(self) -> dict[str, Any] | None:
        generator = random.Random(f"{self.seed} {len(self.study.trials)}")
        if self.space.size <= MAX_LISTED_POINTS:
            points = [point for point in self.space.points() if not self._is_tried(point)]
            return generator.choice(points) if points else None
        draws = (self.space.draw(generator) for _ in range(1000))
        return next((point for point in draws if not self._is_tried(point)), None)


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not dimension.is_range:
        return CategoricalDistribution(dimension.labels)
    if dimension.integer:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def importance(space: Space, points: Sequence[Mapping[str, Any]], values: Iterable[float]) -> dict[str, float]:
    """The share of the values' variance that each dimension explains, alone or with others (Optuna's fANOVA).

    Hutter, Hoos, Leyton-Brown: An Efficient Approach for Assessing Hyperparameter Importance (2014). Empty for fewer
    than four points or two dimensions, and when the points or the values do not vary.
    """
    values = list(values)
    varied = [d for d in space.dimensions if len({point[d.key] for point in points}) > 1]
    if len(points) < MIN_POINTS_FOR_IMPORTANCE or len(space.dimensions) < 2 or not varied or len(set(values)) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    distributions = {d.key: _distribution(d) for d in varied}
    for point, value in zip(points, values, strict=True):
        params = {key: point[key] for key in distributions}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {d.key: float(shares.get(d.key, 0.0)) for d in space.dimensions}
