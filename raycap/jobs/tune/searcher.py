"""What Ray Tune's searchers cannot do for a search over captioners, on top of its `OptunaSearch`.

- Several seeds per point with several objectives: `ray.tune.search.Repeater` averages a single metric.
- No point twice: Optuna's samplers repeat points of a small space, and two trials would train the same run.
- A larger budget: `Tuner.restore` cannot raise the number of trials. A new experiment first proposes the earlier
  points, whose runs are finished, so that the sampler gets their results within seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from raycap.models.config import Values
from raycap.pipeline.search.samplers import distribution, make_sampler
from raycap.pipeline.search.space import point_key
from raycap.pipeline.search.spec import Search

SEED = "seed"  # the key of a trial's seed in the configuration that Ray Tune passes to it
MAX_REPEATED_DRAWS = 20  # after this many known points in a row, an untried one is taken in the order of the space


@dataclass
class _Point:
    """A proposed point: the id by which Optuna knows it, and the objectives' values of each seed that has ended."""

    draw_id: str  # "" for a point that Optuna has not proposed
    values: list[Sequence[float] | None] = field(default_factory=list)  # None for a failed trial


class PointSearcher(OptunaSearch):
    """Proposes each of Optuna's points once per seed, and gives Optuna the means over the seeds.

    Ray Tune saves and restores all attributes with those of `OptunaSearch`.
    """

    def __init__(self, search: Search, earlier: Sequence[Values] = ()) -> None:
        """earlier: the points of this search's earlier experiments, which are proposed first."""
        super().__init__(
            {key: distribution(dimension) for key, dimension in search.space.dimensions.items()},
            metric=list(search.config.objectives),
            mode=list(search.config.objectives.values()),
            points_to_evaluate=list(earlier),
            sampler=make_sampler(search),
        )
        self.objectives, self.seeds, self.space = list(search.config.objectives), search.config.seeds, search.space
        self.points: dict[str, _Point] = {}  # by `point_key`
        self.owners: dict[str, str] = {}  # the key of each trial's point, by the trial's id
        self.waiting: list[tuple[Values, int]] = []  # points and seeds that the next trials get
        self.num_draws = 0

    def suggest(self, trial_id: str) -> Any:
        """The configuration of the next trial, or FINISHED if every point of the space was proposed."""
        if not self.waiting:
            point = self._new_point()
            if point is None:
                return Searcher.FINISHED
            self.waiting = [(point, seed) for seed in self.seeds]
        point, seed = self.waiting.pop(0)
        self.owners[trial_id] = point_key(point)
        return {**point, SEED: seed}

    def _new_point(self) -> Values | None:
        """A point that was not proposed before; None if there is none."""
        for _ in range(MAX_REPEATED_DRAWS):
            self.num_draws += 1
            draw_id = f"draw-{self.num_draws}"
            drawn = super().suggest(draw_id) or {}
            point = {key: dimension.rounded(drawn[key]) for key, dimension in self.space.dimensions.items()}
            known = self.points.get(point_key(point))
            if known is None:
                self.points[point_key(point)] = _Point(draw_id)
                return point
            self._tell(draw_id, known)  # Optuna gets the result of the earlier proposal
        untried = next((point for point in self.space.points() if point_key(point) not in self.points), None)
        if untried is not None:
            self.points[point_key(untried)] = _Point("")
        return untried

    def on_trial_result(self, trial_id: str, result: Values) -> None:
        """Ignores a validation. Only the end of a point's trials counts."""

    def on_trial_complete(self, trial_id: str, result: Values | None = None, error: bool = False) -> None:
        """Records a trial's result. When the last seed of a point has ended, Optuna gets the means.

        A trial without a number for each objective, such as one that the scheduler stopped before its end, counts as
        failed, because Optuna would wait for its result forever. A trial that a restored searcher has not proposed is
        ignored: a kill may come between the files in which Ray Tune stores its trials and its searcher.
        """
        if trial_id not in self.owners:
            return
        point = self.points[self.owners[trial_id]]
        values = [float((result or {}).get(name, math.nan)) for name in self.objectives]
        point.values.append(None if error or not all(map(math.isfinite, values)) else values)
        if len(point.values) == len(self.seeds) and point.draw_id:
            self._tell(point.draw_id, point)

    def _tell(self, draw_id: str, point: _Point) -> None:
        """Gives Optuna the means over the seeds that did not fail, or a failure if all of them did."""
        usable = [values for values in point.values if values is not None]
        means = [sum(column) / len(usable) for column in zip(*usable, strict=True)]
        result = dict(zip(self.objectives, means, strict=True)) if usable else None
        super().on_trial_complete(draw_id, result, error=result is None)
