"""The results of a search: means over seeds, the Pareto front, tables, and configurations for `raycap run`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raycap.models.config import Values
from raycap.pipeline.config.load import dump_config, parse_config
from raycap.pipeline.evaluation.comparison.protocol import Protocol, in_language, searched
from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.search.records import TrialRecord, by_point
from raycap.pipeline.search.space import short, show_value
from raycap.pipeline.search.spec import COSTS, SCORE, Search
from raycap.pipeline.storage.atomic import atomic_path, write_text

Rows = list[tuple[str, list[str]]]  # the rows of a table, each as (label, cells)
SPREAD_TEXT = "one standard deviation over the seeds (n - 1); within spread: the difference is not larger than it"
STATES = ("finished", "stopped", "running", "failed")  # of a trial or point, the best first


@dataclass(frozen=True)
class PointResult:
    """A point with its trials, one per seed. Means and spreads use only the trials in the point's state."""

    label: str
    point: Values
    records: list[TrialRecord]
    num_seeds: int  # the number of seeds that the search runs per point

    @property
    def state(self) -> str:
        """The best state that one of the trials has."""
        return min((record.state for record in self.records), key=STATES.index)

    @property
    def counted(self) -> list[TrialRecord]:
        """The trials that means and spreads use."""
        return [record for record in self.records if record.state == self.state]

    def values(self, name: str) -> list[float]:
        """The values of an objective, metric or cost in the counted trials."""
        return [value for record in self.counted if (value := record.value(name)) is not None]

    def mean(self, name: str) -> float | None:
        """The mean over the counted trials; None when none of them has a value."""
        return mean_of(self.values(name))

    def spread(self, name: str) -> float | None:
        """The sample standard deviation over the counted trials; None for fewer than two."""
        return spread_of(self.values(name))

    @property
    def seeds_text(self) -> str:
        """The number of seeds that means use, and of those that the search runs: `2/3`."""
        return f"{0 if self.state == 'failed' else len(self.counted)}/{self.num_seeds}"

    @property
    def epoch(self) -> float:
        """The last epoch that a counted trial reported."""
        return max(record.epoch for record in self.counted)


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    return statistics.fmean(values) if values else None


def spread_of(values: Sequence[float]) -> float | None:
    """The sample standard deviation, with n - 1 in its denominator; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def difference_note(ours: Sequence[float], others: Sequence[float]) -> str:
    """How far two means differ: `equal`, `within spread` if one standard deviation is not smaller, else ""."""
    if not ours or not others:
        return ""
    difference = abs(statistics.fmean(ours) - statistics.fmean(others))
    spreads = [spread for values in (ours, others) if (spread := spread_of(values)) is not None]
    return "equal" if not difference else "within spread" if spreads and difference <= max(spreads) else ""


def point_results(search: Search, records: Sequence[TrialRecord]) -> list[PointResult]:
    """The points with their trials, in the order of STATES.

    Finished points are ordered by the mean of the main objective, whose scores are those of the validation. Other
    points in the same state are ordered by their number of epochs, the largest first, then by the main objective.
    """
    num_seeds = len(search.config.seeds)
    results = [
        PointResult(search.space.describe(trials[0].point), trials[0].point, trials, num_seeds)
        for trials in by_point(search, records)
    ]
    main = search.config.main_objective
    sign = -1 if search.config.objectives[main] == "max" else 1

    def rank(result: PointResult) -> tuple[float, ...]:
        mean = result.mean(main)
        epochs = 0.0 if result.state == "finished" else result.epoch  # scores of finished points are comparable
        return STATES.index(result.state), -epochs, math.inf if mean is None else sign * mean

    return sorted(results, key=rank)


def front(results: Sequence[PointResult], objectives: Mapping[str, str]) -> list[PointResult]:
    """The Pareto front: the finished points that no other finished point dominates."""
    rated = []
    for result in results:
        means = {name: mean for name in objectives if (mean := result.mean(name)) is not None}
        if result.state == "finished" and means.keys() == objectives.keys():
            rated.append((result, [mean if objectives[name] == "max" else -mean for name, mean in means.items()]))
    return [result for result, values in rated if not any(_dominates(other, values) for _, other in rated)]


def _dominates(one: list[float], other: list[float]) -> bool:
    """Whether `one` is at least as good as `other` in every objective and better in one; larger values are better."""
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def heading(search: Search, name: str) -> str:
    """The heading of a score or cost in tables and plots.

    It includes a cost's unit, and the split of a score, unless the search reports validation scores only.
    """
    if name in COSTS:
        return COSTS[name].heading
    is_validation = name in (SCORE, *search.config.metrics)
    return f"{search.base.data.val_split} {name}" if is_validation and not search.reports_validation else name


def selection_note(search: Search) -> str:
    """The split on which the search chooses, the split that it reports, and how."""
    val, split = search.base.data.val_split, search.score_split
    chosen = "each trial's weights, the order of points, the Pareto front and best.yaml"
    if search.reports_validation:
        return f"Chosen and reported on {val}: {chosen}. The best of many scores is too high; score_split avoids it."
    evaluation = search.trial_config(search.space.first(), search.config.seeds[0]).evaluation
    how = searched(in_language(Protocol(), search.base.data.language), evaluation).signature
    if any(key.startswith("evaluation") for key in search.space.keys):
        how = "each point's evaluation"
    return (
        f"Chosen on {val}, with CIDEr-D over the vocabulary's tokens: {chosen}. "
        f"Reported on {split}: the chosen weights caption it once, with {how}."
    )


def unit(name: str) -> float:
    """The number by which tables and plots divide the score or cost `name`; 1 for scores."""
    return COSTS[name].unit if name in COSTS else 1


def format_cell(name: str, value: float | None, spread: float | None = None) -> str:
    """The text of a table's cell for the score or cost `name`; empty for None.

    A cost is divided by its unit. A value with a spread is written as `value ± spread`; costs that the architecture
    determines have a spread of 0, which is left out.
    """
    if value is None:
        return ""
    digits = 4
    if name in COSTS:
        value, spread = value / unit(name), spread and spread / unit(name)
        digits = 1 if name in ("seconds", "latency_ms") or value < 1000 else 0
    has_spread = spread is not None and (spread or name not in COSTS)
    return f"{value:,.{digits}f} ± {spread:,.{digits}f}" if has_spread else f"{value:,.{digits}f}"


def leaderboard(
    search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> tuple[list[str], Rows]:
    """The headings and rows of the leaderboard: state, epochs, seeds, and means with spreads of scores and costs.

    With several seeds a column marks the finished points whose reported score differs from the best point's by no more
    than a spread.
    """
    names = columns_of(search)
    main = search.config.main_objective
    name_of_difference = main if main in COSTS else search.reported(main)
    has_seeds = any(result.num_seeds > 1 for result in results)
    rows = []
    for result in results:
        state = f"{result.state} *" if result in on_front else result.state
        cells = [format_cell(name, result.mean(name), result.spread(name)) for name in names]
        if has_seeds:
            best, is_finished = results[0], result.state == "finished"
            note = difference_note(result.values(name_of_difference), best.values(name_of_difference))
            cells.insert(0, "" if not is_finished else "best" if result is best else note)
        rows.append((result.label, [state, f"{result.epoch:g}", result.seeds_text, *cells]))
    columns = ["state", "epochs", "seeds", *(["to the best"] if has_seeds else [])]
    return columns + [heading(search, name) for name in names], rows


def columns_of(search: Search) -> list[str]:
    """The scores and costs of the leaderboard, each once: chosen by, reported, objectives, cost and parameters."""
    config = search.config
    reported = [search.reported(name) for name in (SCORE, *config.metrics)]
    return list(dict.fromkeys([SCORE, *reported, *config.objectives, search.cost, "parameters"]))


def leaderboard_text(search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> str:
    """The leaderboard for the terminal."""
    columns, rows = leaderboard(search, results, on_front)
    notes = f"* on the Pareto front of {objectives_text(search)}\n{selection_note(search)}"
    if "to the best" in columns:
        notes += f"\n± is {SPREAD_TEXT}."
    return f"{format_table(columns, rows)}\n{notes}"


def objectives_text(search: Search) -> str:
    """The objectives with their directions."""
    return ", ".join(f"{heading(search, name)} ({direction})" for name, direction in search.config.objectives.items())


def trial_name(search: Search, record: TrialRecord) -> str:
    """A trial's point and seed, which are the same in a later experiment, and the id of a population's member."""
    seed = f", seed {record.seed}" if len(search.config.seeds) > 1 else ""
    member = f", {record.trial_id}" if search.is_population else ""
    return f"{search.space.describe(record.point)}{seed}{member}"


def trial_line(search: Search, record: TrialRecord) -> str:
    """The progress or result of a trial in one line."""
    name, label = f"trial {record.trial_id}", f"({trial_name(search, record)})"
    if record.state == "failed":
        return f"{name}  failed: {record.reason}  {label}"
    if record.score is None:
        return f"{name}  starts  {label}"
    score = f"{heading(search, SCORE)} {record.score:.4f}"
    if record.state == "running":
        return f"{name}  epoch {record.epoch:g}: {score}  {label}"
    if not search.reports_validation and (reported := record.value(search.reported(SCORE))) is not None:
        score += f", {search.reported(SCORE)} {reported:.4f}"
    costs = f"{format_cell(search.cost, record.costs.get(search.cost))} {heading(search, search.cost)}"
    reason = f", {record.reason}" if record.reason else ""
    return f"{name}  {record.state} at epoch {record.epoch:g}: {score}, {costs}{reason}  {label}"


def write_tables(folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> None:
    """Writes trials.parquet and trials.csv: a row per trial, a column per key of the space, score and cost.

    Each row also has the rank of its point, the number of seeds that the point's means use, and the mean and the
    standard deviation of each score over them.
    """
    keys, records = search.space.keys, [record for result in results for record in result.records]
    scores = [name for name in dict.fromkeys([*columns_of(search), *search.config.metrics]) if name not in COSTS]
    columns_by_trial: dict[str, Values] = {}
    for rank, result in enumerate(results, 1):
        columns: Values = {"rank": rank, "seeds": 0 if result.state == "failed" else len(result.counted)}
        for name in scores:
            columns[f"{heading(search, name)} mean"] = result.mean(name)
            columns[f"{heading(search, name)} std"] = result.spread(name)
        columns_by_trial |= {record.trial_id: columns for record in result.records}
    ids_on_front = {record.trial_id for result in on_front for record in result.records}
    all_changes = [search.space.changes(record.point) for record in records]
    numeric = {key for key in keys if all(type(changes.get(key, 0)) in (int, float) for changes in all_changes)}
    rows = []  # keys with other than numeric values have their labels as text, because an Arrow column has one type
    for record, changes in zip(records, all_changes, strict=True):
        values = {key: value if key in numeric else show_value(value) for key, value in changes.items()}
        rows.append(
            {
                "trial": record.trial_id,
                "state": record.state,
                **{key: values.get(key) for key in keys},
                "seed": record.seed,
                "epochs": record.epoch,
                **{heading(search, name): record.value(name) for name in scores},
                # the validation score above is computed during training; this is the score of the same captions' text
                **({f"scored {SCORE}": record.scores.get(SCORE)} if SCORE in search.config.metrics else {}),
                **{name: record.costs.get(name) for name in COSTS},
                **columns_by_trial[record.trial_id],
                "on_front": record.trial_id in ids_on_front,
                "run": Path(record.run).name,
                "reason": record.reason,
            }
        )
    table = pa.Table.from_pylist(rows)
    with atomic_path(folder / "trials.parquet") as path:
        pyarrow.parquet.write_table(table, path)
    with atomic_path(folder / "trials.csv") as path:
        pyarrow.csv.write_csv(table, path)


def write_configurations(
    folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> list[Path]:
    """Writes best.yaml and front-1.yaml, front-2.yaml, ... (best main objective first); returns their paths."""
    for outdated in folder.glob("front-*.yaml"):
        outdated.unlink()
    finished = [result for result in results if result.state == "finished"]
    if not finished:
        (folder / "best.yaml").unlink(missing_ok=True)
        return []
    ranked_front = [result for result in results if result in on_front]
    names = ["best", *(f"front-{number}" for number in range(1, len(ranked_front) + 1))]
    paths = []
    for name, result in zip(names, [finished[0], *ranked_front], strict=True):
        paths.append(folder / f"{name}.yaml")
        write_text(paths[-1], _configuration(search, result, paths[-1]))
    return paths


def _configuration(search: Search, result: PointResult, path: Path) -> str:
    """The text of a configuration file, headed by a comment with the point and its results."""
    config = parse_config(search.run_values(result.point, path.stem))
    means = ", ".join(
        f"{heading(search, name)} {format_cell(name, result.mean(name), result.spread(name))}"
        for name in dict.fromkeys([*search.config.objectives, search.reported(SCORE)])
    )
    keys = ", ".join(f"{short(key)} {show_value(value)}" for key, value in search.space.changes(result.point).items())
    return (
        f"# {keys}: the base configuration of the search {search.config.name} at this point.\n"
        f"# In the search: {means}, after {result.epoch:g} epochs of {', '.join(search.stages)}, "
        f"seeds: {result.seeds_text}.\n# {selection_note(search)}\n#   raycap run {path}\n{dump_config(config)}"
    )
