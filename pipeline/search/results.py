"""What a search has found: points with means over seeds, the Pareto front, tables, and configurations to run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from pipeline.config.load import dump_config, parse_config
from pipeline.config.run import RunConfig
from pipeline.reports.text_table import format_table
from pipeline.search.space import short, show_value
from pipeline.search.spec import COSTS, SCORE, Search
from pipeline.search.trials import OVER, Book, TrialRecord, minutes
from pipeline.storage.atomic import atomic_path, write_text

UNITS = {"macs": 1e6, "macs_executed": 1e6, "macs_beam_search": 1e6, "parameters": 1e3}
HEADS = {
    "macs": "MMACs",
    "macs_executed": "MMACs executed",
    "macs_beam_search": "MMACs beam search",
    "parameters": "k parameters",
    "latency_ms": "ms an image",
    "seconds": "s training",
}


@dataclass(frozen=True)
class PointResult:
    """A point over its seeds. `state` is finished when a seed is; means and spread are of the finished seeds, or of
    the stopped ones when none finished."""

    label: str
    point: dict[str, Any]
    records: list[TrialRecord]
    seeds: int  # how many were asked for

    @property
    def state(self) -> str:
        states = [record.state for record in self.records]
        return next((state for state in ("finished", "stopped", "running") if state in states), "failed")

    @property
    def counted(self) -> list[TrialRecord]:
        return [record for record in self.records if record.state == self.state]

    def values(self, name: str) -> list[float]:
        """An objective's, metric's or cost's values over the counted seeds."""
        return [value for record in self.counted if (value := record.value(name)) is not None]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def spread(self, name: str) -> float | None:
        """Sample standard deviation over the seeds; None with fewer than two."""
        values = self.values(name)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def epoch(self) -> float:
        return max((record.epoch for record in self.counted), default=0.0)


def point_results(book: Book) -> list[PointResult]:
    """Best first by the main objective: finished points, then stopped ones (who came further first), then failed."""
    search = book.search
    seeds = 1 if search.config.algorithm == "pbt" else len(search.config.seeds)
    results = [
        PointResult(search.space.describe(records[-1].point), records[-1].point, records, seeds)
        for records in book.by_point().values()
    ]
    order = {"finished": 0, "stopped": 1, "running": 2, "failed": 3}
    main = search.config.main_objective
    sign = -1 if search.config.objectives[main] == "max" else 1

    def rank(result: PointResult) -> tuple[float, ...]:
        mean = result.mean(main)
        reached = -result.epoch if result.state != "finished" else 0.0
        return (order[result.state], reached, sign * mean if mean is not None else float("inf"))

    return sorted(results, key=rank)


def front(results: Sequence[PointResult], objectives: Mapping[str, str]) -> list[PointResult]:
    """The finished points that no other finished point beats: at least as good in every objective, better in one."""
    rated = []
    for result in results:
        means = [result.mean(name) for name in objectives]
        if result.state == "finished" and all(mean is not None for mean in means):
            signs = [1 if direction == "max" else -1 for direction in objectives.values()]
            rated.append((result, [sign * mean for sign, mean in zip(signs, means, strict=True) if mean is not None]))
    return [
        result
        for result, mine in rated
        if not any(_beats(theirs, mine) for other, theirs in rated if other is not result)
    ]


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True)) and any(a > b for a, b in zip(one, other, strict=True))


def shown_columns(search: Search) -> list[str]:
    """Objectives, metrics and the cost in multiply-accumulates, in the order that tables have them."""
    return list(dict.fromkeys([SCORE, *search.config.metrics, *search.config.objectives, search.cost, "parameters"]))


def head(name: str) -> str:
    return HEADS.get(name, name)


def cell(name: str, value: float | None, spread: float | None = None) -> str:
    """A value as tables show it, costs in the units of `head`."""
    if value is None:
        return ""
    scaled = value / UNITS.get(name, 1)
    digits = 4 if name not in COSTS else 1 if name in ("seconds", "latency_ms") or scaled < 1000 else 0
    text = f"{scaled:,.{digits}f}"
    return f"{text} ± {spread / UNITS.get(name, 1):.{digits}f}" if spread is not None and name not in COSTS else text


def leaderboard(
    search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and rows: state, epochs, seeds, then mean and spread of what is shown."""
    names = shown_columns(search)
    rows = []
    for result in results:
        state = f"{result.state} *" if any(each is result for each in on_front) else result.state
        done = f"{0 if result.state == 'failed' else len(result.counted)}/{result.seeds}"
        cells = [cell(name, result.mean(name), result.spread(name)) for name in names]
        rows.append((result.label, [state, f"{result.epoch:g}", done, *cells]))
    return ["state", "epochs", "seeds", *map(head, names)], rows


def leaderboard_text(search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> str:
    columns, rows = leaderboard(search, results, on_front)
    return (
        format_table(columns, rows)
        + "\n* on the Pareto front of "
        + ", ".join(f"{head(name)} ({direction})" for name, direction in search.config.objectives.items())
    )


def live_table(book: Book) -> str:
    """All trials that did not end yet, and a line of how many did."""
    rows = []
    for record in book.records:
        if record.state not in OVER:
            score = "" if record.score is None else f"{record.score:.4f}"
            rows.append(
                (f"trial {record.number}  {book.search.space.describe(record.point)}", [f"{record.epoch:g}", score])
            )
    counts = book.states()
    asked = book.asked if book.asked is not None else len(book.records)
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    best = next((r for r in point_results(book) if r.state == "finished"), None)
    line = f"of {asked} trials: {told}" + (f"; best {SCORE} {best.mean(SCORE):.4f}, {best.label}" if best else "")
    return (format_table(["epoch", SCORE], rows) + "\n" if rows else "") + line


def trial_line(search: Search, record: TrialRecord, asked: int | None) -> str:
    """One line of what became of a trial."""
    name = f"trial {record.number}" + (f"/{asked}" if asked is not None else "")
    label = search.space.describe(record.point) + (f", seed {record.seed}" if len(search.config.seeds) > 1 else "")
    if record.state == "failed":
        return f"{name}  failed after {minutes(record.seconds)}: {record.reason}  ({label})"
    score = "no validation" if record.score is None else f"{SCORE} {record.score:.4f}"
    if record.state == "running":
        return f"{name}  epoch {record.epoch:g}: {score}  ({label})"
    costs = f"{cell(search.cost, record.costs.get(search.cost))} {head(search.cost)}"
    extra = f", {record.reason}" if record.reason else ""
    told = f"{score}, {costs}, {minutes(record.seconds)}{extra}"
    return f"{name}  {record.state} at epoch {record.epoch:g}: {told}  ({label})"


def write_tables(folder: Path, book: Book, on_front: Sequence[PointResult]) -> None:
    """trials.parquet and trials.csv: a row a trial, a column a key of the space, a score or a cost."""
    best = {record.number for result in on_front for record in result.records}
    rows = []
    all_changes = [book.search.changes(record.point) for record in book.records]
    numbers = {key for key in book.search.space.keys if all(_is_number(changes.get(key, 0)) for changes in all_changes)}
    for record, changes in zip(book.records, all_changes, strict=True):
        rows.append(
            {
                "trial": record.number,
                "state": record.state,
                **{
                    key: None if key not in changes else changes[key] if key in numbers else show_value(changes[key])
                    for key in book.search.space.keys
                },
                "seed": record.seed,
                "epochs": record.epoch,
                SCORE: record.score,
                **{name: record.scores.get(name) for name in book.search.config.metrics if name != SCORE},
                **{f"scored {name}": record.scores.get(name) for name in book.search.config.metrics if name == SCORE},
                **{name: record.costs.get(name) for name in COSTS},
                "search_seconds": record.seconds,
                "attempts": record.attempts,
                "on_front": record.number in best,
                "run": record.run.rsplit("/", 1)[-1],
                "reason": record.reason,
            }
        )
    table = pa.Table.from_pylist(rows)
    with atomic_path(folder / "trials.parquet") as path:
        pyarrow.parquet.write_table(table, path)
    with atomic_path(folder / "trials.csv") as path:
        pyarrow.csv.write_csv(table, path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_configurations(
    folder: Path, book: Book, results: Sequence[PointResult], on_front: Sequence[PointResult]
) -> list[Path]:
    """best.yaml, and front-1.yaml and on from the best of the main objective downwards; returns their paths."""
    search = book.search
    finished = [result for result in results if result.state == "finished"]
    for old in folder.glob("front-*.yaml"):
        old.unlink()
    if not finished:
        (folder / "best.yaml").unlink(missing_ok=True)
        return []
    ranked = [result for result in results if any(each is result for each in on_front)]
    wanted = [("best", finished[0]), *((f"front-{number}", result) for number, result in enumerate(ranked, 1))]
    paths = []
    for name, result in wanted:
        path = folder / f"{name}.yaml"
        write_text(path, _configuration(search, result, path, name))
        paths.append(path)
    return paths


def _configuration(search: Search, result: PointResult, path: Path, name: str) -> str:
    config = ready_config(search, result.point, name)
    told = ", ".join(f"{head(n)} {cell(n, result.mean(n), result.spread(n))}" for n in search.config.objectives)
    keys = ", ".join(f"{short(key)} {show_value(value)}" for key, value in search.changes(result.point).items())
    header = [
        f"# {keys}: the base configuration of the search {search.config.name} at this point.",
        f"# In the search: {told}, after {result.epoch:g} epochs of {', '.join(search.stages)}, "
        f"seeds: {len(result.counted)}.",
        f"#   raycap run {path}",
    ]
    return "\n".join(header) + "\n" + dump_config(config)


def ready_config(search: Search, point: dict[str, Any], name: str) -> RunConfig:
    """The base configuration at a point."""
    return parse_config(search.run_values(point, name))
