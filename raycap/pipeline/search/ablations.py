"""Compares a search's points with the ablation tables of the three papers, row by row.

Absolute scores depend on the data and the training length, so each table also shows differences to its baseline row.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Sequence
from dataclasses import dataclass

from raycap.models.captioner import TABLE_6_IMAGES
from raycap.models.config import ModelConfig, Values
from raycap.pipeline.evaluation.comparison.published import PublishedRow, PublishedTable, published_tables
from raycap.pipeline.evaluation.reports.tables import Table
from raycap.pipeline.search.results import SPREAD_TEXT, PointResult, difference_note, format_cell, heading
from raycap.pipeline.search.spec import SCORE, Search

COSTS_SHOWN = ("macs_executed", "parameters")
NOTE = (
    "Ours: means over seeds of the split {split}. The paper's: {protocol}. +/- is the difference to the row "
    f"{{baseline}}; ± is {SPREAD_TEXT}."
)
TABLE_VI_NOTE = "1e12 multiply-accumulates of 5,000 images with a caption of 12.5 tokens each, counted as in the paper."


@dataclass(frozen=True)
class Match:
    """A row of a paper's table and the search's first point with the same settings, or None."""

    row: PublishedRow
    result: PointResult | None

    def values(self, name: str) -> list[float]:
        """Our values of a score or cost, one per seed.

        The scores are those of the captions' text. A stopped point has only its last validation CIDEr-D.
        """
        if self.result is None:
            return []
        scores = [record.scores[name] for record in self.result.counted if name in record.scores]
        return scores or self.result.values(name)

    @property
    def macs(self) -> float | None:
        """Our multiply-accumulates for 5,000 images, which do not depend on the seed."""
        values = self.values("macs")
        return values[0] * TABLE_6_IMAGES if values else None


def comparisons(search: Search, results: Sequence[PointResult], metrics: Container[str] | None = None) -> list[Table]:
    """The tables of the paper that the search's `compare` names, with the paper's numbers beside ours.

    If the paper has several tables, those with fewer than two rows among our points are left out, because one row has
    nothing to be compared with. metrics: the metrics that get columns, if both sides have them; None: all.
    """
    tables = []
    published = published_tables(search.config.compare)
    for table in published:
        matches = _matches(search, results, table)
        if len(published) > 1 and sum(match.result is not None for match in matches) < 2:
            continue
        tables.append(_score_table(search, table, matches, metrics))
        if table.rows[0].macs is not None:
            tables.append(_macs_table(matches))
    return tables


def _matches(search: Search, results: Sequence[PointResult], table: PublishedTable) -> list[Match]:
    """Matches each row of a table with the first point that has the row's settings."""
    models = [search.trial_config(result.point, search.config.seeds[0]).model for result in results]
    points = [(_settings(model, table.keys), result) for model, result in zip(models, results, strict=True)]
    return [
        Match(row, next((result for settings, result in points if settings == row.settings), None))
        for row in table.rows
    ]


def _settings(model: ModelConfig, keys: Sequence[str]) -> Values:
    """The model's values of these keys, to be compared with the settings of a table's row.

    The papers' baseline Transformer ignores its expansion settings, so they count as None. Returns {}, which equals
    no row's settings, for a model that no table has: one without these keys, or one with a dynamic expansion in
    its encoder.
    """
    if getattr(model, "encoder_dynamic_expansion", None) is not None or not all(hasattr(model, key) for key in keys):
        return {}
    ignored = ("static_expansion", "dynamic_expansion") if model.name == "transformer" else ()
    return {key: None if key in ignored else getattr(model, key) for key in keys}


def _score_table(
    search: Search, table: PublishedTable, matches: Sequence[Match], metrics: Container[str] | None
) -> Table:
    """A table of scores: our number of seeds, four columns per metric, and our costs.

    The four columns: our score, its difference to our baseline, the paper's score, its difference to the paper's
    baseline.
    """
    baseline = matches[table.baseline]
    names = [
        name
        for name in table.columns
        if (metrics is None or name in metrics) and any(match.values(search.reported(name)) for match in matches)
    ] or [SCORE]
    rows = []
    for match in matches:
        cells = ["" if match.result is None else match.result.seeds_text]
        for name in names:
            reported, published = search.reported(name), match.row.scores[name]
            ours, others = match.values(reported), baseline.values(reported)
            cells += [format_cell(reported, ours), _difference(ours, others)]
            cells += [f"{published:.3f}", f"{published - baseline.row.scores[name]:+.3f}"]
        rows.append((match.row.name, cells + [format_cell(name, match.values(name)) for name in COSTS_SHOWN]))
    columns = [f"{name}{kind}" for name in names for kind in ("", " +/-", " paper", " paper +/-")]
    columns = ["seeds", *columns, *(heading(search, name) for name in COSTS_SHOWN)]
    note = NOTE.format(split=search.score_split, protocol=table.protocol, baseline=baseline.row.name)
    return Table(f"{table.title} next to the paper's", note, columns, rows)


def _difference(ours: Sequence[float], baseline: Sequence[float]) -> str:
    """The signed difference between two means, with the note of `difference_note`; empty if a side has no values."""
    if not ours or not baseline:
        return ""
    difference = statistics.fmean(ours) - statistics.fmean(baseline)
    return f"{difference:+.4f} {difference_note(ours, baseline)}".strip()


def _macs_table(matches: Sequence[Match]) -> Table:
    """ExpansionNet v2's Table VI: our models' multiply-accumulates, counted as the paper does, and the paper's.

    Each number has its ratio to that of the first row, the baseline.
    """

    def cells(macs: float | None, baseline: float | None) -> list[str]:
        if macs is None:
            return ["", ""]
        return [f"{macs / 1e12:.4g}", f"{macs / baseline:.3f}" if baseline else ""]

    first = matches[0]
    rows = [
        (match.row.name, cells(match.macs, first.macs) + cells(match.row.macs, first.row.macs)) for match in matches
    ]
    columns = ["1e12 MACs", "of baseline", "paper", "of baseline"]
    return Table("Table VI next to the paper's", TABLE_VI_NOTE, columns, rows)
