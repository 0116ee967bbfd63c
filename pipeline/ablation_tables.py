"""A search's points beside the ablations of the Meshed-Memory Transformer and of Ada-ClustFormer."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.ablation import difference_cell, mean_score, number_cell
from pipeline.published_ablations import NOTE, TABLES, PrintedRow, PrintedTable
from pipeline.search import SCORE, Search
from pipeline.search_results import PointResult, cell, head

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
