"""Optuna's samplers and its importance of keys. No other module imports Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycap.pipeline.search.space import Dimension, Space
from raycap.pipeline.search.spec import Search

MIN_POINTS_FOR_IMPORTANCE = 4
ASSUMED_TRIALS = 80  # in a search that only budget.hours ends


def make_sampler(search: Search) -> Any:
    """Optuna's sampler of the search's algorithm."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    algorithm, seed = search.config.algorithm, search.config.seed
    num_points = min(search.space.size, (search.config.budget.trials or ASSUMED_TRIALS) // len(search.config.seeds))
    population = max(4, min(50, int(num_points) // 4))
    if algorithm == "random":
        return optuna.samplers.RandomSampler(seed)
    if algorithm == "nsga2":
        return optuna.samplers.NSGAIISampler(population_size=population, seed=seed)
    # constant_liar gives running points a bad score, so that concurrent trials get different points
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=population)


def distribution(dimension: Dimension) -> Any:
    """Optuna's description of a dimension. Choices are categorical values, named by their labels."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.values:
        return CategoricalDistribution(list(dimension.values))
    if dimension.is_integer:
        low, high, step = map(int, (dimension.low, dimension.high, dimension.step or 1))
        return IntDistribution(low, high, log=dimension.log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def importance(space: Space, points: Sequence[Mapping[str, object]], values: Sequence[float]) -> dict[str, float]:
    """{dimension: share of the values' variance that it explains} by Optuna's fANOVA; `values` has one per point.

    The method: Hutter, Hoos, Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance (2014). The
    result is empty for fewer than four points or two dimensions, and when the points or the values do not vary.
    """
    varied = [key for key in space.dimensions if len({point[key] for point in points}) > 1]
    if len(points) < MIN_POINTS_FOR_IMPORTANCE or len(space.dimensions) < 2 or not varied or len(set(values)) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    distributions = {key: distribution(space.dimensions[key]) for key in varied}
    for point, value in zip(points, values, strict=True):
        params = {key: point[key] for key in distributions}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {key: float(shares.get(key, 0.0)) for key in space.dimensions}
