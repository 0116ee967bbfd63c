"""Samplers, which choose the next point of a search: in order, at random, or with Optuna.

Optuna only proposes points (`study.ask`) and receives their results (`study.tell`); it runs no trial. When a killed
search resumes, the earlier results are added to a new study, with the attributes that Optuna's samplers store per trial
(for NSGA-II the generation). `importance` estimates how much each dimension matters.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.search.space import Dimension, Space

MAX_REPEATED_DRAWS = 50  # After Optuna has proposed this many tried points in a row, an untried one is drawn at random.
MIN_POINTS_FOR_IMPORTANCE = 4
MAX_LISTED_POINTS = 1_000_000  # larger spaces are sampled without a list of their points


@dataclass(frozen=True)
class Proposal:
    """A point, and the attributes with which a sampler restores it after a kill."""

    point: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)


class Sampler(Protocol):
    """Proposes points and learns from their results."""

    def ask(self) -> Proposal | None:
        """A point that was not tried before; None when all points were."""
        ...

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        """Gives the sampler the result of a point: one value per objective, or None for a failed point."""
        ...

    def restore(self, proposal: Proposal, values: Sequence[float] | None, ended: bool = True) -> None:
        """Adds a point that an earlier process has started. `values` is None if it failed or has not ended."""
        ...


def point_key(point: Mapping[str, Any]) -> str:
    """A string that is the same for equal points."""
    return repr(sorted(point.items()))


def make_sampler(
    space: Space, algorithm: str, directions: Sequence[str], seed: int, population: int | None, budget: int | None
) -> Sampler:
    """`directions` has max or min for each objective; `budget` is the number of points, None without a limit."""
    if algorithm in ("tpe", "nsga2"):
        if population is None:
            population = max(4, min(50, (budget or 80) // 4))
        return OptunaSampler(space, algorithm, directions, seed, population)
    return ListSampler(space, seed, shuffled=algorithm in ("random", "pbt"), repeat=algorithm == "pbt")


class ListSampler:
    """Proposes the points of a space in order or shuffled; the points of a very large space are drawn at random.

    The same seed gives the same points. With `repeat` a point may be proposed twice, because members of a population
    may start at the same point.
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
        for _ in range(100_000):  # gives up when every draw was tried before
            generator = random.Random(f"{self.seed} {self.num_drawn}")
            self.num_drawn += 1
            point = self.space.draw(generator)
            if self.repeat or point_key(point) not in self.tried:
                self.tried.add(point_key(point))
                return Proposal(point)
        return None

    def tell(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        """Ignores the result, which does not influence the next points."""

    def restore(self, proposal: Proposal, values: Sequence[float] | None, ended: bool = True) -> None:
        self.tried.add(point_key(proposal.point))
        if self.repeat:
            self.num_drawn += 1


class OptunaSampler:
    """Proposes points with TPE or NSGA-II; the choices of a dimension are categorical values, named by their labels."""

    def __init__(self, space: Space, algorithm: str, directions: Sequence[str], seed: int, population: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna, self.space, self.seed = optuna, space, seed
        self.algorithm, self.population = algorithm, population
        Direction = optuna.study.StudyDirection
        self.directions = [Direction.MAXIMIZE if name == "max" else Direction.MINIMIZE for name in directions]
        self.distributions = {dimension.key: _distribution(dimension) for dimension in space.dimensions}
        self.study = optuna.create_study(directions=self.directions)
        self.running: dict[str, int] = {}  # Optuna's number of the trial, by point
        self.results: dict[str, list[float] | None] = {}
        self.has_seeded_sampler = False

    def ask(self) -> Proposal | None:
        self._create_seeded_sampler()
        for _ in range(MAX_REPEATED_DRAWS):
            trial = self.study.ask(self.distributions)
            point = {key: trial.params[key] for key in self.distributions}
            if not self._is_tried(point):
                return self._propose(trial, point)
            # Optuna gets the result of the earlier trial of the same point
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
        key, TrialState = point_key(proposal.point), self.optuna.trial.TrialState
        state = TrialState.RUNNING
        if ended:
            state = TrialState.FAIL if values is None else TrialState.COMPLETE
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
        """Marks the point of an Optuna trial as running; returns it with the attributes that JSON can store."""
        self.running[point_key(point)] = trial.number
        attributes = self.study.trials[trial.number].system_attrs
        return Proposal(
            point, {key: value for key, value in attributes.items() if isinstance(value, str | int | float)}
        )

    def _finish(self, number: int, values: Sequence[float] | None) -> None:
        """Ends an Optuna trial, as failed if it has no values."""
        if values is None:
            self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(number, list(values))

    def _create_seeded_sampler(self) -> None:
        """Creates Optuna's sampler before the first draw.

        Its seed includes the number of restored trials, so that a resumed search does not repeat its first draws.
        """
        if self.has_seeded_sampler:
            return
        self.has_seeded_sampler = True
        seed = (self.seed * 1_000_003 + len(self.study.trials)) % 2**31
        samplers = self.optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns that multivariate and constant_liar are experimental
            if self.algorithm == "nsga2":
                self.study.sampler = samplers.NSGAIISampler(population_size=self.population, seed=seed)
            else:
                # constant_liar gives running points a bad score, so that concurrent trials get different points
                self.study.sampler = samplers.TPESampler(
                    seed=seed, multivariate=True, constant_liar=True, n_startup_trials=max(4, self.population)
                )

    def _draw_untried(self) -> dict[str, Any] | None:
        """A random untried point; None when there is none, or when 1,000 draws from a large space found none."""
        generator = random.Random(f"{self.seed} {len(self.study.trials)}")
        if self.space.size <= MAX_LISTED_POINTS:
            points = [point for point in self.space.points() if not self._is_tried(point)]
            return generator.choice(points) if points else None
        draws = (self.space.draw(generator) for _ in range(1000))
        return next((point for point in draws if not self._is_tried(point)), None)


def _distribution(dimension: Dimension) -> Any:
    """Optuna's description of a dimension."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not dimension.is_range:
        return CategoricalDistribution(dimension.labels)
    if dimension.integer:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def importance(space: Space, points: Sequence[Mapping[str, Any]], values: Iterable[float]) -> dict[str, float]:
    """The share of the values' variance that each dimension explains, by Optuna's fANOVA.

    The method: Hutter, Hoos, Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance (2014). The
    result is empty for fewer than four points or two dimensions, and when the points or the values do not vary.
    """
    values = list(values)
    varied = [dimension for dimension in space.dimensions if len({point[dimension.key] for point in points}) > 1]
    if len(points) < MIN_POINTS_FOR_IMPORTANCE or len(space.dimensions) < 2 or not varied or len(set(values)) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    distributions = {dimension.key: _distribution(dimension) for dimension in varied}
    for point, value in zip(points, values, strict=True):
        params = {key: point[key] for key in distributions}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {dimension.key: float(shares.get(dimension.key, 0.0)) for dimension in space.dimensions}
