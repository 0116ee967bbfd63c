"""The results of a search: means over seeds, the Pareto front, tables, and configurations for `raycap run`."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from raycap.models.captioner import TABLE_6_IMAGES
from raycap.models.config import Values
from raycap.pipeline.config.load import dump_config, parse_config
from raycap.pipeline.evaluation.comparison.bootstrap import Spread
from raycap.pipeline.evaluation.comparison.protocol import Protocol, in_language, searched
from raycap.pipeline.evaluation.comparison.published import PublishedTable, published_tables
from raycap.pipeline.evaluation.reports.tables import Rows, Table
from raycap.pipeline.search.records import TrialRecord, TrialState, by_point
from raycap.pipeline.search.space import show_value
from raycap.pipeline.search.spec import COSTS, SCORE, Search
from raycap.pipeline.storage.atomic import atomic_path, write_text

STATES: tuple[TrialState, ...] = ("finished", "stopped", "running", "failed")  # of a trial or point, the best first
FILES = ("search.html", "pareto.png", "trials.csv", "best.yaml")
COSTS_SHOWN = ("macs_executed", "parameters")  # next to a paper's table
EXPANSION = "encoder_dynamic_expansion"  # a key that only some models have
NOTE = (
    "Ours: means over seeds of the split {split}. The paper's: {protocol}. +/- is the difference to the row {baseline}."
)
TABLE_VI_NOTE = " TMACs are 1e12 multiply-accumulates of 5,000 images with captions of 12.5 tokens, as in Table VI."


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

    def mean(self, name: str) -> float | None:
        """The mean over the counted trials; None if none of them has a value."""
        values = self.values(name)
        return Spread.of(values).mean if values else None


@dataclass(frozen=True)
class SearchResults:
    """The trials of a search by point. points: the best first. front: the points on the Pareto front, also in order."""

    search: Search
    points: list[PointResult]
    front: list[PointResult]

    @staticmethod
    def of(search: Search, records: Sequence[TrialRecord]) -> SearchResults:
        """Orders the points by STATES, and finished points by the mean of the main objective on the validation split.

        Other points in the same state are ordered by their number of epochs, the largest first, then by the objective.
        """
        main, num_seeds = search.config.main_objective, len(search.config.seeds)
        sign = -1 if search.config.objectives[main] == "max" else 1

        def rank(result: PointResult) -> tuple[float, ...]:
            mean = result.mean(main)
            epochs = 0.0 if result.state == "finished" else result.epoch  # scores of finished points are comparable
            return STATES.index(result.state), -epochs, math.inf if mean is None else sign * mean

        trials = by_point(search, records)
        points = [PointResult(search.space.describe(each[0].point), each[0].point, each, num_seeds) for each in trials]
        points.sort(key=rank)
        return SearchResults(search, points, pareto_front(points, search.config.objectives))

    @property
    def records(self) -> list[TrialRecord]:
        """All trials, those of the best point first."""
        return [record for point in self.points for record in point.records]

    def leaderboard(self) -> Table:
        """The state, epochs and seeds of each point, and means with spreads of its scores and costs."""
        names, rows = columns_of(self.search), Rows()
        for point in self.points:
            state = f"{point.state} *" if point in self.front else point.state
            cells = [state, f"{point.epoch:g}", point.seeds_text]
            rows.append((point.label, cells + [format_cell(name, point.values(name)) for name in names]))
        objectives = self.search.config.objectives.items()
        shown = ", ".join(f"{heading(self.search, name)} ({direction})" for name, direction in objectives)
        note = f"* on the Pareto front of {shown}\n{selection_note(self.search)}"
        if len(self.search.config.seeds) > 1:
            note += "\n± is one standard deviation over the seeds (n - 1)."
        columns = ["state", "epochs", "seeds", *(heading(self.search, name) for name in names)]
        return Table("Leaderboard", note, columns, rows)


def pareto_front(points: Sequence[PointResult], objectives: Mapping[str, str]) -> list[PointResult]:
    """The finished points that no other finished point dominates.

    A point dominates another one if it is at least as good in every objective and better in one.
    """
    rated = []
    for point in points:
        means = {name: mean for name in objectives if (mean := point.mean(name)) is not None}
        if point.state == "finished" and means.keys() == objectives.keys():
            rated.append((point, [mean if objectives[name] == "max" else -mean for name, mean in means.items()]))

    def is_dominated(values: list[float]) -> bool:
        return any(other != values and all(a >= b for a, b in zip(other, values, strict=True)) for _, other in rated)

    return [point for point, values in rated if not is_dominated(values)]


def columns_of(search: Search) -> list[str]:
    """The scores and costs of the leaderboard, each once: chosen by, reported, objectives, cost and parameters."""
    config = search.config
    reported = [search.reported(name) for name in (SCORE, *config.metrics)]
    return list(dict.fromkeys([SCORE, *reported, *config.objectives, search.cost, "parameters"]))


def heading(search: Search, name: str) -> str:
    """The heading of a score or cost in tables and plots.

    It includes a cost's unit, and the split of a score, unless the search reports validation scores only.
    """
    if name in COSTS:
        return COSTS[name].heading
    is_validation = name in (SCORE, *search.config.metrics)
    return f"{search.base.data.val_split} {name}" if is_validation and not search.reports_validation else name


def format_cell(name: str, values: Sequence[float]) -> str:
    """The text of a table's cell: the mean of a score or cost, and `± spread` for several seeds; empty without values.

    A cost is divided by its unit. Costs that the architecture determines are equal for all seeds and have no spread.
    """
    if not values:
        return ""
    if name not in COSTS:
        return Spread.of(values).text(digits=4)
    shown = [value / COSTS[name].unit for value in values]
    return Spread.of(shown if len(set(shown)) > 1 else shown[:1]).text(digits=1)


def public_settings(search: Search) -> Values:
    """The settings that are not None, without those that may hold passwords or local paths."""
    private = {"set", "storage", "base"}
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
    reported = record.value(search.reported(SCORE))
    if not search.reports_validation and reported is not None:
        score += f", {search.reported(SCORE)} {reported:.4f}"
    if search.cost in record.costs:
        score += f", {format_cell(search.cost, [record.costs[search.cost]])} {heading(search, search.cost)}"
    reason = f", {record.reason}" if record.reason else ""
    return f"{name}  {record.state} at epoch {record.epoch:g}: {score}{reason}  {label}"


def write_trials(path: Path, results: SearchResults) -> None:
    """Writes a CSV file with a row per trial and a column per key of the space, score and cost.

    rank: the place of the trial's point in the leaderboard.
    """
    search, rows = results.search, list[Values]()
    scores = [name for name in dict.fromkeys([*columns_of(search), *search.config.metrics]) if name not in COSTS]
    for rank, point in enumerate(results.points, 1):
        changes = search.space.changes(point.point)
        for record in point.records:
            row: Values = {"trial": record.trial_id, "rank": rank, "on_front": point in results.front}
            row |= {"state": record.state, "reason": record.reason, "run": Path(record.run).name}
            row |= {key: show_value(changes[key]) if key in changes else None for key in search.space.keys}
            row |= {"seed": record.seed, "epochs": record.epoch}
            row |= {heading(search, name): record.value(name) for name in scores}
            rows.append(row | {name: record.costs.get(name) for name in COSTS})
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def write_configurations(folder: Path, results: SearchResults) -> None:
    """Writes best.yaml and front-1.yaml, front-2.yaml, ..., the best main objective first. Removes older ones."""
    points = {f"front-{number}.yaml": point for number, point in enumerate(results.front, 1)}
    if results.points and results.points[0].state == "finished":
        points["best.yaml"] = results.points[0]
    for name, point in points.items():
        write_text(folder / name, _configuration(results.search, point, folder / name))
    for path in [*folder.glob("front-*.yaml"), folder / "best.yaml"]:
        if path.name not in points:
            path.unlink(missing_ok=True)


def result_files(folder: Path) -> list[Path]:
    """The files with results in the folder of a search."""
    return [path for name in FILES if (path := folder / name).is_file()] + sorted(folder.glob("front-*.yaml"))


def _configuration(search: Search, result: PointResult, path: Path) -> str:
    """The text of a configuration file, headed by a comment with the point and its results."""
    config = parse_config(search.run_values(result.point, path.stem))
    names = dict.fromkeys([*search.config.objectives, search.reported(SCORE)])
    means = ", ".join(f"{heading(search, name)} {format_cell(name, result.values(name))}" for name in names)
    return (
        f"# {result.label}: the base configuration of the search {search.config.name} at this point.\n"
        f"# In the search: {means}, after {result.epoch:g} epochs of {', '.join(search.stages)}, "
        f"seeds: {result.seeds_text}.\n# {selection_note(search)}\n#   raycap run {path}\n{dump_config(config)}"
    )


def comparisons(results: SearchResults, metrics: Container[str] | None = None) -> list[Table]:
    """The tables of the paper that the search's `compare` names, with the paper's numbers beside ours.

    If the paper has several tables, those with fewer than two rows among our points are left out, because one row has
    nothing to be compared with. Absolute scores depend on the data and the training length, so each table also shows
    differences to its baseline row. metrics: the metrics that get columns, if both sides have them; None: all.
    """
    search, published, tables = results.search, published_tables(results.search.config.compare), []
    models = [asdict(search.trial_config(point.point, search.config.seeds[0]).model) for point in results.points]
    fixed = {"name": search.config.compare, EXPANSION: None}  # of each row
    points_of = [(point, {EXPANSION: None} | model) for point, model in zip(results.points, models, strict=True)]
    for table in published:
        settings = [row.settings | fixed for row in table.rows]
        points = [next((point for point, model in points_of if row.items() <= model.items()), None) for row in settings]
        if len(published) == 1 or len(points) - points.count(None) >= 2:
            tables.append(_compared(results, table, points, metrics))
    return tables


def _values(point: PointResult | None, name: str) -> list[float]:
    """Our values of a score or cost, one per seed. The scores are those of the captions' text.

    A stopped point has only its last validation CIDEr-D.
    """
    if point is None:
        return []
    scores = [record.scores[name] for record in point.counted if name in record.scores]
    return scores or point.values(name)


def _compared(
    results: SearchResults,
    table: PublishedTable,
    points: Sequence[PointResult | None],
    metrics: Container[str] | None,
) -> Table:
    """A published table with our points beside its rows.

    The columns: our number of seeds; of each metric our score, its difference to our baseline, the paper's score, and
    its difference to the paper's baseline; our costs; the multiply-accumulates of Table VI, if the paper has them.
    """
    search, baseline, rows = results.search, table.baseline, Rows()
    names = [
        name
        for name in table.columns
        if (metrics is None or name in metrics) and any(_values(point, search.reported(name)) for point in points)
    ] or [SCORE]
    for row, point in zip(table.rows, points, strict=True):
        cells = [point.seeds_text if point else ""]
        for name in names:
            reported, theirs = search.reported(name), row.scores[name]
            ours, base = _values(point, reported), _values(points[baseline], reported)
            difference = f"{statistics.fmean(ours) - statistics.fmean(base):+.4f}" if ours and base else ""
            cells += [format_cell(reported, ours), difference]
            cells += [f"{theirs:.3f}", f"{theirs - table.rows[baseline].scores[name]:+.3f}"]
        cells += [format_cell(name, _values(point, name)) for name in COSTS_SHOWN]
        if row.macs is not None:
            cells += [f"{macs * TABLE_6_IMAGES / 1e12:.4g}" for macs in _values(point, "macs")[:1]] or [""]
            cells.append(f"{row.macs / 1e12:.4g}")
        rows.append((row.name, cells))
    columns = [f"{name}{kind}" for name in names for kind in ("", " +/-", " paper", " paper +/-")]
    columns = ["seeds", *columns, *(heading(search, name) for name in COSTS_SHOWN)]
    note = NOTE.format(split=search.score_split, protocol=table.protocol, baseline=table.rows[baseline].name)
    if table.rows[0].macs is not None:
        columns, note = [*columns, "TMACs", "TMACs paper"], note + TABLE_VI_NOTE
    return Table(f"{table.title} next to the paper's", note, columns, rows)
