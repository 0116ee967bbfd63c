"""Samplers, which choose the next point of a search: in order, at random, or with Optuna.

Each sampler has three methods. `ask` proposes a point that was not tried before, or None when all points were. `tell`
takes the result of a point: one value per objective, or None for a failed point. `restore` adds a point that an earlier
process has started; its values are None if it failed or has not ended.

Optuna runs no trial. When a killed search resumes, the earlier results are added to a new study, with the attributes
that Optuna's samplers store per trial (for NSGA-II the generation).
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.search.space import Dimension, Space
from raycap.pipeline.search.spec import Search

MAX_REPEATED_DRAWS = 50  # After Optuna has proposed this many tried points in a row, an untried one is drawn at random.
MIN_POINTS_FOR_IMPORTANCE = 4
MAX_LISTED_POINTS = 1_000_000  # larger spaces are sampled without a list of their points


@dataclass(frozen=True)
class Proposal:
    """A point, and the attributes that a sampler needs to restore it when a killed search resumes."""

    point: Values
    attributes: Values = field(default_factory=dict)


def point_key(point: Mapping[str, object]) -> str:
    """A string that is the same for equal points."""
    return repr(sorted(point.items()))


class ListSampler:
    """Proposes the points of a space in order or shuffled; the points of a very large space are drawn at random.

    The same seed gives the same points. Members of a population may start at the same point, so their points are drawn
    at random and may repeat.
    """

    def __init__(self, search: Search) -> None:
        self.space, self.seed = search.space, search.config.seed
        self.may_repeat = search.config.algorithm == "pbt"
        self.tried: set[str] = set()  # the keys of the points that were proposed
        self.num_drawn = 0
        self.draws = self._draw()
        if self.space.size <= MAX_LISTED_POINTS and not self.may_repeat:
            points = list(self.space.points())
            if search.config.algorithm == "random":
                random.Random(self.seed).shuffle(points)
            self.draws = iter(points)

    def _draw(self) -> Iterator[Values]:
        """Random points. Each depends only on the seed and its number, so that a resumed search draws the next ones."""
        while True:
            generator = random.Random(f"{self.seed} {self.num_drawn}")
            self.num_drawn += 1
            yield self.space.draw(generator)

    def ask(self) -> Proposal | None:
        for point in itertools.islice(self.draws, MAX_LISTED_POINTS):  # gives up when every draw was tried before
            if self.may_repeat or point_key(point) not in self.tried:
                self.tried.add(point_key(point))
                return Proposal(point)
        return None

    def tell(self, point: Mapping[str, object], values: list[float] | None) -> None:
        """Ignores the result, which does not influence the next points."""

    def restore(self, proposal: Proposal, values: list[float] | None, *, ended: bool) -> None:
        self.tried.add(point_key(proposal.point))
        if self.may_repeat:  # otherwise the same points are drawn again and skipped, because they are in `tried`
            self.num_drawn += 1


class OptunaSampler:
    """Proposes points with TPE or NSGA-II; the choices of a dimension are categorical values, named by their labels."""

    def __init__(self, search: Search) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna, self.space, self.config = optuna, search.space, search.config
        num_trials, num_seeds = search.num_trials(), len(search.config.seeds)
        # 80 points are assumed if only budget.hours limits their number
        num_points = 80 if num_trials is None else max(1, num_trials // num_seeds)
        self.population = search.config.population or max(4, min(50, num_points // 4))
        self.distributions = {dimension.key: _distribution(dimension) for dimension in self.space.dimensions}
        self.study = optuna.create_study(
            directions=["maximize" if best == "max" else "minimize" for best in search.config.objectives.values()]
        )
        self.running: dict[str, int] = {}  # Optuna's number of the trial, by point
        self.results: dict[str, list[float] | None] = {}  # of ended points; None for a failed one

    @cached_property
    def seeded_sampler(self) -> Any:
        """Optuna's sampler. It must be created with the first proposal, when all earlier trials have been restored.

        Its seed includes their number, so that a resumed search does not repeat its first draws.
        """
        # the large prime keeps the sums of neighboring seeds apart; Optuna accepts 32 bits
        seed = (self.config.seed * 1_000_003 + len(self.study.trials)) % 2**31
        if self.config.algorithm == "nsga2":
            return self.optuna.samplers.NSGAIISampler(population_size=self.population, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns that multivariate and constant_liar are experimental
            # constant_liar gives running points a bad score, so that concurrent trials get different points
            return self.optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=max(4, self.population)
            )

    def ask(self) -> Proposal | None:
        self.study.sampler = self.seeded_sampler
        for _ in range(MAX_REPEATED_DRAWS):
            trial = self.study.ask(self.distributions)
            point = {key: trial.params[key] for key in self.distributions}
            if not self._is_tried(point):
                return self._propose(trial, point)
            # Optuna gets the result of the earlier trial of the same point, or a failure if that trial still runs
            self._finish(trial.number, self.results.get(point_key(point)))
        untried = self._draw_untried()
        if untried is None:
            return None
        self.study.enqueue_trial(untried)
        return self._propose(self.study.ask(self.distributions), untried)

    def tell(self, point: Mapping[str, object], values: list[float] | None) -> None:
        self.results[point_key(point)] = values
        self._finish(self.running.pop(point_key(point)), values)

    def restore(self, proposal: Proposal, values: list[float] | None, *, ended: bool) -> None:
        states = self.optuna.trial.TrialState
        ended_state = states.FAIL if values is None else states.COMPLETE
        trial = self.optuna.trial.create_trial(
            state=ended_state if ended else states.RUNNING,
            params=proposal.point,
            distributions=self.distributions,
            values=values,
            system_attrs=proposal.attributes,
        )
        self.study.add_trial(trial)
        if ended:
            self.results[point_key(proposal.point)] = values
        else:
            self.running[point_key(proposal.point)] = self.study.trials[-1].number

    def _is_tried(self, point: Mapping[str, object]) -> bool:
        """Whether a trial of the point runs or has ended."""
        return point_key(point) in self.results or point_key(point) in self.running

    def _propose(self, trial: Any, point: Values) -> Proposal:
        """Marks the point of an Optuna trial as running; returns it with the attributes that JSON can store."""
        self.running[point_key(point)] = trial.number
        attributes = self.study.trials[trial.number].system_attrs
        storable = {key: value for key, value in attributes.items() if isinstance(value, str | int | float)}
        return Proposal(point, storable)

    def _finish(self, number: int, values: list[float] | None) -> None:
        """Ends the Optuna trial with this number. It counts as failed if `values` is None."""
        self.study.tell(number, values, state=self.optuna.trial.TrialState.FAIL if values is None else None)

    def _draw_untried(self) -> Values | None:
        """A random untried point; None when there is none, or when 1,000 draws from a large space found none."""
        generator = random.Random(f"{self.config.seed} {len(self.study.trials)}")
        if self.space.size <= MAX_LISTED_POINTS:
            points = [point for point in self.space.points() if not self._is_tried(point)]
            return generator.choice(points) if points else None
        draws = (self.space.draw(generator) for _ in range(1000))
        return next((point for point in draws if not self._is_tried(point)), None)


Sampler = ListSampler | OptunaSampler


def make_sampler(search: Search) -> Sampler:
    """The sampler of a search's algorithm."""
    return OptunaSampler(search) if search.config.algorithm in ("tpe", "nsga2") else ListSampler(search)


def _distribution(dimension: Dimension) -> Any:
    """Optuna's description of a dimension."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not dimension.is_range:
        return CategoricalDistribution(dimension.labels)
    if dimension.integer:
        ends = int(dimension.low), int(dimension.high)
        return IntDistribution(*ends, log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def importance(space: Space, points: Sequence[Mapping[str, object]], values: Sequence[float]) -> dict[str, float]:
    """{dimension: share of the values' variance that it explains} by Optuna's fANOVA; `values` has one per point.

    The method: Hutter, Hoos, Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance (2014). The
    result is empty for fewer than four points or two dimensions, and when the points or the values do not vary.
    """
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
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {dimension.key: float(shares.get(dimension.key, 0.0)) for dimension in space.dimensions}
