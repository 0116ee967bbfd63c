"""What Ray Tune's searchers cannot do for a search over captioners, on top of its `OptunaSearch`.

- Several seeds per point with several objectives: `ray.tune.search.Repeater` averages a single metric.
- No point twice: Optuna's samplers repeat points of a small space, and two trials would train the same run.
- A larger budget: `Tuner.restore` cannot raise the number of trials. A new experiment proposes the earlier points first,
  whose runs are finished, so that the sampler gets their results within seconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from raycap.models.config import Values
from raycap.pipeline.search.samplers import distribution, make_sampler
from raycap.pipeline.search.space import point_key
from raycap.pipeline.search.spec import Search

SEED = "seed"  # the key of a trial's seed in the configuration that Ray Tune passes to it
MAX_REPEATED_DRAWS = 50  # after this many known points in a row, an untried one is taken in the order of the space
MAX_LISTED_POINTS = 100_000  # larger spaces are not searched for an untried point


@dataclass
class _Point:
    """A proposed point: the id by which the sampler knows it, and the objectives' values of each ended seed."""

    sampler_id: str
    values: list[Sequence[float] | None] = field(default_factory=list)  # None for a failed trial


class PointSearcher(Searcher):
    """Proposes each point of a sampler once per seed, and gives the sampler the means over the seeds."""

    def __init__(self, search: Search, earlier: Sequence[Values] = ()) -> None:
        """earlier: the points of this search's earlier experiments, which are proposed first."""
        objectives = search.config.objectives
        super().__init__(metric=list(objectives), mode=list(objectives.values()))  # type: ignore[arg-type]
        self.objectives, self.seeds, self.space = list(objectives), search.config.seeds, search.space
        self.sampler = OptunaSearch(
            {dimension.key: distribution(dimension) for dimension in search.space.dimensions},
            metric=list(objectives),
            mode=list(objectives.values()),
            points_to_evaluate=list(earlier),
            sampler=make_sampler(search),
        )
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
        """A point that was not proposed before. None if there is none, or if a very large space seems used up."""
        for _ in range(MAX_REPEATED_DRAWS):
            sampler_id = f"draw-{self.num_draws}"
            self.num_draws += 1
            point: Values = self.sampler.suggest(sampler_id) or {}
            known = self.points.get(point_key(point))
            if known is None:
                self.points[point_key(point)] = _Point(sampler_id)
                return point
            self._tell(sampler_id, known)  # the sampler gets the result of the earlier proposal
        if self.space.size > MAX_LISTED_POINTS:
            return None
        for point in self.space.points():
            if point_key(point) not in self.points:
                self.points[point_key(point)] = _Point("")  # the sampler does not know it
                return point
        return None

    def on_trial_complete(self, trial_id: str, result: Values | None = None, error: bool = False) -> None:
        """Records a trial's result. When the last seed of a point has ended, the sampler gets the means."""
        point = self.points[self.owners[trial_id]]
        point.values.append(None if error or not result else [float(result[name]) for name in self.objectives])
        if len(point.values) == len(self.seeds) and point.sampler_id:
            self._tell(point.sampler_id, point)

    def _tell(self, sampler_id: str, point: _Point) -> None:
        """Gives the sampler the means over the seeds that did not fail, or a failure if all of them did."""
        usable = [values for values in point.values if values is not None]
        means = [sum(column) / len(usable) for column in zip(*usable, strict=True)]
        result = dict(zip(self.objectives, means, strict=True)) if usable else None
        self.sampler.on_trial_complete(sampler_id, result, error=result is None)

    def save(self, checkpoint_path: str) -> None:
        """Writes the state, as Ray Tune does for every searcher when it saves an experiment."""
        Path(checkpoint_path).write_bytes(pickle.dumps(self.__dict__))

    def restore(self, checkpoint_path: str) -> None:
        """Reads a state that `save` wrote."""
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))
