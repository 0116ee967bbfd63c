"""A search's points beside ExpansionNet v2's ablation: Table I's scores and Table VI's costs, row by row.

The differences to the baseline row (attention in encoder and decoder) are what can be compared: the paper's scores
are of COCO's validation images after eight epochs, a search's of whatever it ran on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.config import ExpansionNetConfig
from models.macs import TABLE_6_IMAGES
from pipeline.scoring.published import ABLATION, ABLATION_COLUMNS, NOTE, TABLES, AblationRow, PrintedRow, PrintedTable
from pipeline.search.results import PointResult, cell, head
from pipeline.search.space import show_value
from pipeline.search.spec import SCORE, Search


@dataclass(frozen=True)
class Pair:
    """A printed row and the search's point with the same G and N_E, if it has one."""

    printed: AblationRow
    result: PointResult | None

    @property
    def label(self) -> str:
        return printed_label(self.printed)

    def ours(self, name: str) -> float | None:
        return mean_score(self.result, name)


def mean_score(result: PointResult | None, name: str) -> float | None:
    """Mean of a score that is computed as the paper's was, from the captions; of a stopped point what it had."""
    if result is None:
        return None
    values = [record.scores[name] for record in result.counted if name in record.scores]
    if values:
        return sum(values) / len(values)
    return result.mean(SCORE) if name == SCORE else None


def printed_label(row: AblationRow) -> str:
    return f"G {show_value(row.static_expansion)}, N_E {show_value(row.dynamic_expansion)}"


def pairs(search: Search, results: Sequence[PointResult]) -> list[Pair]:
    """Every printed row in the paper's order."""
    found: dict[tuple[Any, Any], PointResult] = {}
    for result in results:
        model = search.trial_config(result.point, search.config.seeds[0]).model
        if not isinstance(model, ExpansionNetConfig):
            continue
        groups = model.static_expansion if model.name != "transformer" else None
        vectors = model.dynamic_expansion if model.name != "transformer" else None
        if model.encoder_dynamic_expansion is None:
            found.setdefault((groups, vectors), result)
    return [Pair(row, found.get((row.static_expansion, row.dynamic_expansion))) for row in ABLATION]


def score_table(
    search: Search, results: Sequence[PointResult], metrics: Sequence[str] = ABLATION_COLUMNS
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and rows: every metric as ours, ours against our baseline row, the paper's, and its difference."""
    rows = pairs(search, results)
    names = [name for name in metrics if any(pair.ours(name) is not None for pair in rows)] or [SCORE]
    columns = [f"{name}{kind}" for name in names for kind in ("", " +/-", " paper", " paper +/-")]
    table = []
    for pair in rows:
        cells = []
        for name in names:
            ours, printed = pair.ours(name), pair.printed.scores[name]
            cells += [number_cell(ours), difference_cell(ours, rows[0].ours(name))]
            cells += [number_cell(printed, 3), difference_cell(printed, rows[0].printed.scores[name], 3)]
        table.append((pair.label, cells))
    return columns, table


def cost_table(search: Search, results: Sequence[PointResult]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Table VI beside ours: 1e12 multiply-accumulates of 5,000 images in its accounting, and over the baseline's."""
    rows = pairs(search, results)
    columns = ["1e12 MACs", "of baseline", "paper (Table VI)", "of baseline", "executed", "k parameters"]

    def ours(pair: Pair, name: str) -> float | None:
        value = pair.result.mean(name) if pair.result is not None else None
        return None if value is None else value * TABLE_6_IMAGES / 1e12

    table = []
    for pair in rows:
        mine, first = ours(pair, "macs"), ours(rows[0], "macs")
        parameters = pair.result.mean("parameters") if pair.result is not None else None
        cells = [
            number_cell(mine, 4 if mine is not None and mine < 1 else 2),
            "" if mine is None or not first else f"{mine / first:.3f}",
            f"{pair.printed.macs / 1e12:.2f}",
            f"{pair.printed.macs / rows[0].printed.macs:.3f}",
            number_cell(ours(pair, "macs_executed"), 4 if mine is not None and mine < 1 else 2),
            "" if parameters is None else f"{parameters / 1000:,.0f}",
        ]
        table.append((pair.label, cells))
    return columns, table


def number_cell(value: float | None, digits: int = 4) -> str:
    """Empty where there is no value."""
    return "" if value is None else f"{value:.{digits}f}"


def difference_cell(value: float | None, baseline: float | None, digits: int = 4) -> str:
    """A value against a baseline's, with its sign."""
    return "" if value is None or baseline is None else f"{value - baseline:+.{digits}f}"


# A search's points beside the ablations of the Meshed-Memory Transformer and of Ada-ClustFormer.

COSTS_SHOWN = ("macs_executed", "parameters")
Table = tuple[str, str, list[str], list[tuple[str, list[str]]]]


def tables_beside(search: Search, results: Sequence[PointResult], metrics: Sequence[str]) -> list[Table]:
    """(title, note, columns, rows) of each of the paper's tables that has two rows or more in common with the search.

    Of each metric that both have: ours, ours against our baseline row, the paper's, and its difference; then our costs.
    """
    found = []
    for table in TABLES.get(search.config.compare or "", ()):
        points = [result_of(search, results, row, table) for row in table.rows]
        if sum(point is not None for point in points) > 1:
            note = NOTE.format(baseline=table.rows[table.baseline].name)
            found.append((f"{table.title} beside the paper's", note, *_laid_out(table, points, metrics)))
    return found


def result_of(
    search: Search, results: Sequence[PointResult], row: PrintedRow, table: PrintedTable
) -> PointResult | None:
    """The first point whose model has the row's settings, whatever else it has."""
    for result in results:
        model = search.trial_config(result.point, search.config.seeds[0]).model
        if all(getattr(model, key, None) == row.settings[key] for key in table.keys):
            return result
    return None


def _laid_out(
    table: PrintedTable, points: Sequence[PointResult | None], metrics: Sequence[str]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    wanted = [name for name in table.columns if name in metrics]
    names = [name for name in wanted if any(mean_score(point, name) is not None for point in points)] or [SCORE]
    columns = [f"{name}{kind}" for name in names for kind in ("", " +/-", " paper", " paper +/-")]
    first, printed_first = points[table.baseline], table.rows[table.baseline]
    rows = []
    for row, point in zip(table.rows, points, strict=True):
        cells = []
        for name in names:
            ours, printed = mean_score(point, name), row.scores[name]
            cells += [number_cell(ours), difference_cell(ours, mean_score(first, name))]
            cells += [number_cell(printed, 3), difference_cell(printed, printed_first.scores[name], 3)]
        cells += [cell(name, None if point is None else point.mean(name)) for name in COSTS_SHOWN]
        rows.append((row.name, cells))
    return [*columns, *map(head, COSTS_SHOWN)], rows
