"""Optuna's samplers and its importance of keys. No other module imports Optuna."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycap.pipeline.search.records import TrialRecord
from raycap.pipeline.search.results import heading
from raycap.pipeline.search.space import Dimension, point_key
from raycap.pipeline.search.spec import SCORE, Search

MIN_TRIALS = 4  # for an importance
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


def importances(search: Search, records: Sequence[TrialRecord]) -> tuple[dict[str, float], str]:
    """{dimension: share of the main objective's variance} by Optuna's fANOVA, and a note on the trials that it is from.

    If some trials were stopped early, the CIDEr-D of all trials after the last epoch that all of them reached is used
    instead of the main objective, because scores after different epochs are not comparable. The shares are empty for
    fewer than four trials or two dimensions, and when the points or the values do not vary.

    The method: Hutter, Hoos, Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance (2014).
    """
    main, dimensions = search.config.main_objective, search.space.dimensions
    usable = [record for record in records if record.state in ("finished", "stopped") and record.reports]
    usable.sort(key=lambda record: (point_key(record.point), record.seed))  # fANOVA's forest depends on the order
    values = [record.value(main) for record in usable]
    source = f"of {heading(search, main)} over {len(usable)} trials"
    if any(record.state == "stopped" for record in usable):
        scores = [dict(record.reports) for record in usable]
        epoch = max(set.intersection(*map(set, scores)), default=-1.0)  # without a common epoch no trial has a value
        values = [score.get(epoch) for score in scores]
        source = f"of {heading(search, SCORE)} after epoch {epoch:g}, the last that all {len(usable)} trials reached"
    rated = [(record.point, value) for record, value in zip(usable, values, strict=True) if value is not None]
    varied = [key for key in dimensions if len({point[key] for point, _ in rated}) > 1]
    has_different_values = len({value for _, value in rated}) > 1
    if len(rated) < MIN_TRIALS or len(dimensions) < 2 or not varied or not has_different_values:
        return {}, f"Needs at least {MIN_TRIALS} trials with different scores and two keys."
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    distributions = {key: distribution(dimensions[key]) for key in varied}
    for point, value in rated:
        params = {key: point[key] for key in varied}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    found = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    note = f"Share that each key explains of the variance {source} (fANOVA); unreliable for few trials."
    return {key: float(found.get(key, 0.0)) for key in dimensions}, note
