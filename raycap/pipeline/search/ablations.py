"""Compares a search's points with the ablation tables of the three papers, row by row.

Absolute scores depend on the data and the training length, so each table also shows differences to its baseline row.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Sequence
from dataclasses import asdict

from raycap.models.captioner import TABLE_6_IMAGES
from raycap.pipeline.evaluation.comparison.published import PublishedTable, published_tables
from raycap.pipeline.evaluation.reports.tables import Rows, Table
from raycap.pipeline.search.results import PointResult, SearchResults, format_cell, heading
from raycap.pipeline.search.spec import SCORE

COSTS_SHOWN = ("macs_executed", "parameters")
EXPANSION = "encoder_dynamic_expansion"  # a key that only some models have
NOTE = (
    "Ours: means over seeds of the split {split}. The paper's: {protocol}. +/- is the difference to the row {baseline}."
)
TABLE_VI_NOTE = " TMACs are 1e12 multiply-accumulates of 5,000 images with captions of 12.5 tokens, as in Table VI."


def comparisons(results: SearchResults, metrics: Container[str] | None = None) -> list[Table]:
    """The tables of the paper that the search's `compare` names, with the paper's numbers beside ours.

    If the paper has several tables, those with fewer than two rows among our points are left out, because one row has
    nothing to be compared with. metrics: the metrics that get columns, if both sides have them; None: all.
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
