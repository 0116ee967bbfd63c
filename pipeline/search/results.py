"""The results of a search: means over seeds, the Pareto front, tables, and configurations for `raycap run`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from pipeline.config.load import dump_config, parse_config
from pipeline.reports.text_table import format_table
from pipeline.search.space import short, show_value
from pipeline.search.spec import COSTS, SCORE, Search
from pipeline.search.trials import ENDED, TrialLog, TrialRecord, minutes
from pipeline.storage.atomic import atomic_path, write_text

Rows = list[tuple[str, list[str]]]  # the rows of a table, each as (label, cells)
STATES = ("finished", "stopped", "running", "failed")  # of a trial or point, the best first


@dataclass(frozen=True)
class PointResult:
    """A point with its trials, one per seed. Means and spreads use only the trials in the point's state."""

    label: str
    point: dict[str, Any]
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
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def spread(self, name: str) -> float | None:
        """The sample standard deviation over the counted trials; None for fewer than two."""
        values = self.values(name)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def epoch(self) -> float:
        """The last epoch that a counted trial reported."""
        return max(record.epoch for record in self.counted)


def point_results(log: TrialLog) -> list[PointResult]:
    """The points with their trials, in the order of STATES.

    Finished points are ordered by the main objective. Other points in the same state are ordered by their number of
    epochs, the largest first, then by the main objective.
    """
    search = log.search
    results = [
        PointResult(search.space.describe(records[-1].point), records[-1].point, records, len(log.seeds))
        for records in log.by_point().values()
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


def heading(name: str) -> str:
    """The heading of a score or cost in tables and plots; for a cost it includes the unit."""
    return COSTS[name].heading if name in COSTS else name


def unit(name: str) -> float:
    """The number by which tables and plots divide the score or cost `name`; 1 for scores."""
    return COSTS[name].unit if name in COSTS else 1


def format_cell(name: str, value: float | None, spread: float | None = None) -> str:
    """The text of a table's cell for the score or cost `name`; empty for None.

    A cost is divided by its unit. A score with a spread is written as `value ± spread`.
    """
    if value is None:
        return ""
    if name in COSTS:
        scaled = value / unit(name)
        digits = 1 if name in ("seconds", "latency_ms") or scaled < 1000 else 0
        return f"{scaled:,.{digits}f}"
    return f"{value:,.4f}" if spread is None else f"{value:,.4f} ± {spread:.4f}"


def leaderboard(
    search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> tuple[list[str], Rows]:
    """The headings and rows of the leaderboard: state, epochs, seeds, and means with spreads of scores and costs."""
    config = search.config
    names = list(dict.fromkeys([SCORE, *config.metrics, *config.objectives, search.cost, "parameters"]))
    rows = []
    for result in results:
        state = f"{result.state} *" if result in on_front else result.state
        seeds = f"{0 if result.state == 'failed' else len(result.counted)}/{result.num_seeds}"
        cells = [format_cell(name, result.mean(name), result.spread(name)) for name in names]
        rows.append((result.label, [state, f"{result.epoch:g}", seeds, *cells]))
    return ["state", "epochs", "seeds", *map(heading, names)], rows


def leaderboard_text(search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> str:
    """The leaderboard for the terminal."""
    columns, rows = leaderboard(search, results, on_front)
    return f"{format_table(columns, rows)}\n* on the Pareto front of {objectives_text(search)}"


def objectives_text(search: Search) -> str:
    """The objectives with their directions."""
    return ", ".join(f"{heading(name)} ({direction})" for name, direction in search.config.objectives.items())


def live_table(log: TrialLog, num_waiting: int = 0) -> str:
    """A table of the running trials, and one line with the number of trials in each state.

    num_waiting: the number of trials that wait for nodes.
    """
    rows = []
    for record in log.records:
        if record.state not in ENDED:
            label = f"trial {record.number}  {log.search.space.describe(record.point)}"
            rows.append((label, [f"{record.epoch:g}", format_cell(SCORE, record.score)]))
    line = f"of {len(log.records) if log.num_trials is None else log.num_trials} trials: {log.states_text()}"
    if num_waiting:
        line += f"; {num_waiting} wait for nodes"
    best = next((result for result in point_results(log) if result.state == "finished"), None)
    if best is not None:
        line += f"; best {SCORE} {best.mean(SCORE):.4f}, {best.label}"
    return (format_table(["epoch", SCORE], rows) + "\n" if rows else "") + line


def trial_name(search: Search, record: TrialRecord, num_trials: int | None) -> tuple[str, str]:
    """The name of a trial, which contains its number, and a label with its point and seed.

    num_trials: the number of trials of the search; None if only budget.hours ends it.
    """
    name = f"trial {record.number}" + (f"/{num_trials}" if num_trials is not None else "")
    seed = f", seed {record.seed}" if len(search.config.seeds) > 1 else ""
    return name, search.space.describe(record.point) + seed


def trial_line(search: Search, record: TrialRecord, num_trials: int | None) -> str:
    """The progress or result of a trial in one line."""
    name, label = trial_name(search, record, num_trials)
    if record.state == "failed":
        return f"{name}  failed after {minutes(record.seconds)}: {record.reason}  ({label})"
    score = "no validation" if record.score is None else f"{SCORE} {record.score:.4f}"
    if record.state == "running":
        return f"{name}  epoch {record.epoch:g}: {score}  ({label})"
    costs = f"{format_cell(search.cost, record.costs.get(search.cost))} {heading(search.cost)}"
    reason = f", {record.reason}" if record.reason else ""
    result = f"{score}, {costs}, {minutes(record.seconds)}{reason}"
    return f"{name}  {record.state} at epoch {record.epoch:g}: {result}  ({label})"


def write_tables(log: TrialLog, on_front: Sequence[PointResult]) -> None:
    """Writes trials.parquet and trials.csv: a row per trial, a column per key of the space, score and cost."""
    config, keys = log.search.config, log.search.space.keys
    numbers_on_front = {record.number for result in on_front for record in result.records}
    all_changes = [log.search.space.changes(record.point) for record in log.records]
    numeric = {key for key in keys if all(type(changes.get(key, 0)) in (int, float) for changes in all_changes)}
    rows = []  # keys with other than numeric values have their labels as text, because an Arrow column has one type
    for record, changes in zip(log.records, all_changes, strict=True):
        values = {key: value if key in numeric else show_value(value) for key, value in changes.items()}
        rows.append(
            {
                "trial": record.number,
                "state": record.state,
                **{key: values.get(key) for key in keys},
                "seed": record.seed,
                "epochs": record.epoch,
                SCORE: record.score,
                **{name: record.scores.get(name) for name in config.metrics if name != SCORE},
                # SCORE is the best of all validations; this is the score of the last stage's captions
                **({f"scored {SCORE}": record.scores.get(SCORE)} if SCORE in config.metrics else {}),
                **{name: record.costs.get(name) for name in COSTS},
                "search_seconds": record.seconds,
                "attempts": record.attempts,
                "on_front": record.number in numbers_on_front,
                "run": Path(record.run).name,
                "reason": record.reason,
            }
        )
    table = pa.Table.from_pylist(rows)
    folder = log.folder.path
    with atomic_path(folder / "trials.parquet") as path:
        pyarrow.parquet.write_table(table, path)
    with atomic_path(folder / "trials.csv") as path:
        pyarrow.csv.write_csv(table, path)


def write_configurations(log: TrialLog, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> list[Path]:
    """Writes best.yaml and front-1.yaml, front-2.yaml, ... (best main objective first); returns their paths."""
    folder = log.folder.path
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
        write_text(paths[-1], _configuration(log.search, result, paths[-1]))
    return paths


def _configuration(search: Search, result: PointResult, path: Path) -> str:
    """The text of a configuration file, headed by a comment with the point and its results."""
    config = parse_config(search.run_values(result.point, path.stem))
    means = ", ".join(
        f"{heading(name)} {format_cell(name, result.mean(name), result.spread(name))}"
        for name in search.config.objectives
    )
    keys = ", ".join(f"{short(key)} {show_value(value)}" for key, value in search.space.changes(result.point).items())
    return (
        f"# {keys}: the base configuration of the search {search.config.name} at this point.\n"
        f"# In the search: {means}, after {result.epoch:g} epochs of {', '.join(search.stages)}, "
        f"seeds: {len(result.counted)}.\n#   raycap run {path}\n{dump_config(config)}"
    )
