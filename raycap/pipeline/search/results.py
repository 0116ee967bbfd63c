"""The results of a search: means over seeds, the Pareto front, tables, and configurations for `raycap run`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raycap.models.config import Values
from raycap.pipeline.config.load import dump_config, parse_config
from raycap.pipeline.evaluation.comparison.bootstrap import Spread
from raycap.pipeline.evaluation.comparison.protocol import Protocol, in_language, searched
from raycap.pipeline.evaluation.reports.tables import Rows, format_table
from raycap.pipeline.search.records import TrialRecord, by_point
from raycap.pipeline.search.space import show_value
from raycap.pipeline.search.spec import COSTS, SCORE, Search
from raycap.pipeline.storage.atomic import atomic_path, write_text

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

    @property
    def seeds_text(self) -> str:
        """The number of counted trials, and of seeds that the search runs: `2/3`."""
        return f"{len(self.counted)}/{self.num_seeds}"

    @property
    def epoch(self) -> float:
        """The last epoch that a counted trial reported."""
        return max(record.epoch for record in self.counted)

    def values(self, name: str) -> list[float]:
        """The values of an objective, metric or cost in the counted trials."""
        return [value for record in self.counted if (value := record.value(name)) is not None]

    def spread(self, name: str) -> Spread | None:
        """The mean and standard deviation over the counted trials; None if none of them has a value."""
        values = self.values(name)
        return Spread.of(values) if values else None

    def mean(self, name: str) -> float | None:
        """The mean over the counted trials; None if none of them has a value."""
        spread = self.spread(name)
        return None if spread is None else spread.mean


def difference_note(ours: Sequence[float], others: Sequence[float]) -> str:
    """How far two means differ: `equal`, `within spread` if one standard deviation is not smaller, else ""."""
    if not ours or not others:
        return ""
    one, other = Spread.of(ours), Spread.of(others)
    difference = abs(one.mean - other.mean)
    within = "within spread" if difference <= max(one.std or 0, other.std or 0) else ""
    return within if difference else "equal"


def point_results(search: Search, records: Sequence[TrialRecord]) -> list[PointResult]:
    """The points with their trials, in the order of STATES.

    Finished points are ordered by the mean of the main objective, whose scores are those of the validation. Other
    points in the same state are ordered by their number of epochs, the largest first, then by the main objective.
    """
    main, num_seeds = search.config.main_objective, len(search.config.seeds)
    sign = -1 if search.config.objectives[main] == "max" else 1
    results = [
        PointResult(search.space.describe(trials[0].point), trials[0].point, trials, num_seeds)
        for trials in by_point(search, records)
    ]

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


def public_settings(search: Search) -> Values:
    """The settings that are not None, without those that may hold passwords or local paths."""
    private = {"set", "storage", "base", "backbone"}
    return search.config.model_dump(mode="json", exclude=private, exclude_none=True)


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


def format_cell(name: str, values: Sequence[float]) -> str:
    """The text of a table's cell: the mean of a score or cost, and `± spread` for several seeds; empty without values.

    A cost is divided by its unit. Costs that the architecture determines have a spread of 0, which is left out.
    """
    if not values:
        return ""
    spread, unit = Spread.of(values), COSTS[name].unit if name in COSTS else 1
    digits = 4 if name not in COSTS else 1 if spread.mean < 1000 * unit else 0
    text = f"{spread.mean / unit:,.{digits}f}"
    if spread.std is None or (name in COSTS and spread.std == 0):
        return text
    return f"{text} ± {spread.std / unit:,.{digits}f}"


def leaderboard(
    search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> tuple[list[str], Rows]:
    """The headings and rows of the leaderboard: state, epochs, seeds, and means with spreads of scores and costs.

    With several seeds a column marks the finished points whose reported score differs from the best point's by no more
    than a spread.
    """
    names, main, has_seeds = columns_of(search), search.config.main_objective, len(search.config.seeds) > 1
    compared, rows = main if main in COSTS else search.reported(main), Rows()
    for result in results:
        cells = [f"{result.state} *" if result in on_front else result.state, f"{result.epoch:g}", result.seeds_text]
        if has_seeds:
            note = difference_note(result.values(compared), results[0].values(compared))
            cells.append("" if result.state != "finished" else "best" if result is results[0] else note)
        rows.append((result.label, cells + [format_cell(name, result.values(name)) for name in names]))
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
    if search.cost in record.costs:
        score += f", {format_cell(search.cost, [record.costs[search.cost]])} {heading(search, search.cost)}"
    reason = f", {record.reason}" if record.reason else ""
    return f"{name}  {record.state} at epoch {record.epoch:g}: {score}{reason}  {label}"


def write_tables(folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> None:
    """Writes trials.parquet and trials.csv: a row per trial, a column per key of the space, score and cost.

    Each row also has the rank of its point, the number of seeds that the point's means use, and the mean and standard
    deviation of each score.
    """
    scores = [name for name in dict.fromkeys([*columns_of(search), *search.config.metrics]) if name not in COSTS]
    keys, changes = search.space.keys, [search.space.changes(result.point) for result in results]
    numeric = {key for key in keys if all(type(values.get(key, 0)) in (int, float) for values in changes)}
    rows = []
    for rank, (result, values) in enumerate(zip(results, changes, strict=True), 1):
        # an Arrow column has one type, so that keys with other values than numbers have labels
        cells = {key: value if key in numeric else show_value(value) for key, value in values.items()}
        means: Values = {}
        for name in scores:
            spread = result.spread(name)
            means[f"{heading(search, name)} mean"] = spread and spread.mean
            means[f"{heading(search, name)} std"] = spread and spread.std
        for record in result.records:
            row: Values = {"trial": record.trial_id, "state": record.state, **dict.fromkeys(keys), **cells}
            row |= {"seed": record.seed, "epochs": record.epoch}
            row |= {heading(search, name): record.value(name) for name in scores}
            if SCORE in search.config.metrics:  # of the captions' text; training scores the vocabulary's tokens
                row[f"scored {SCORE}"] = record.scores.get(SCORE)
            row |= {name: record.costs.get(name) for name in COSTS}
            row |= {"rank": rank, "seeds": len(result.counted), **means, "on_front": result in on_front}
            rows.append(row | {"run": Path(record.run).name, "reason": record.reason})
    table = pa.Table.from_pylist(rows)
    with atomic_path(folder / "trials.parquet") as path:
        pyarrow.parquet.write_table(table, path)
    with atomic_path(folder / "trials.csv") as path:
        pyarrow.csv.write_csv(table, path)


def write_configurations(
    folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> list[Path]:
    """Writes best.yaml and front-1.yaml, front-2.yaml, ... (best main objective first); returns their paths.

    on_front: as `front` returns it. Files of an earlier front are removed.
    """
    for outdated in [*folder.glob("front-*.yaml"), folder / "best.yaml"]:
        outdated.unlink(missing_ok=True)
    paths = []
    best = [result for result in results if result.state == "finished"][:1]
    for number, result in enumerate([*best, *on_front]):
        paths.append(folder / (f"front-{number}.yaml" if number else "best.yaml"))
        write_text(paths[-1], _configuration(search, result, paths[-1]))
    return paths


def result_files(folder: Path) -> list[Path]:
    """The files with results in the folder of a search."""
    names = ("search.html", "pareto.png", "trials.csv", "trials.parquet", "best.yaml")
    return [path for name in names if (path := folder / name).is_file()] + sorted(folder.glob("front-*.yaml"))


def _configuration(search: Search, result: PointResult, path: Path) -> str:
    """The text of a configuration file, headed by a comment with the point and its results."""
    config = parse_config(search.run_values(result.point, path.stem))
    means = ", ".join(
        f"{heading(search, name)} {format_cell(name, result.values(name))}"
        for name in dict.fromkeys([*search.config.objectives, search.reported(SCORE)])
    )
    return (
        f"# {result.label}: the base configuration of the search {search.config.name} at this point.\n"
        f"# In the search: {means}, after {result.epoch:g} epochs of {', '.join(search.stages)}, "
        f"seeds: {result.seeds_text}.\n# {selection_note(search)}\n#   raycap run {path}\n{dump_config(config)}"
    )
