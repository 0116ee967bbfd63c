"""Compares a search's points with the ablation tables of the three papers, row by row.

Absolute scores depend on the data and the training length, so each table also shows differences to its baseline row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raycap.models.captioner import TABLE_6_IMAGES
from raycap.models.config import ModelConfig, Values
from raycap.pipeline.evaluation.comparison.published import (
    ABLATION_COLUMNS,
    AblationRow,
    PrintedRow,
    ablation,
    printed_tables,
)
from raycap.pipeline.search.results import (
    SPREAD_TEXT,
    PointResult,
    Rows,
    difference_note,
    format_cell,
    heading,
    mean_of,
    spread_of,
)
from raycap.pipeline.search.space import show_value
from raycap.pipeline.search.spec import SCORE, Search

COSTS_SHOWN = ("macs_executed", "parameters")  # the costs in the tables of the other two papers
NOTE = (
    "Ours: means over seeds of the split {split}. The paper's: {protocol}. +/- is the difference to the row "
    f"{{baseline}}; ± is {SPREAD_TEXT}."
)
TABLE_I_PROTOCOL = "first cross-entropy stage, Karpathy validation, beam 3"
PROTOCOL = "Karpathy test after SCST, beam 5"  # of the tables of the other two papers
TABLE_VI_NOTE = (
    "1e12 multiply-accumulates of 5,000 images with a caption of 12.5 tokens each, as the paper counts them and as "
    "executed here."
)


class ComparisonTable(NamedTuple):
    """A table of a paper with the search's results; each row is (label, cells)."""

    title: str
    note: str
    columns: list[str]
    rows: Rows


@dataclass(frozen=True)
class Match:
    """A row of a paper's table and the search's first point with the same settings.

    printed: the paper's scores by metric. result: None if no point has these settings.
    """

    label: str
    printed: dict[str, float]
    result: PointResult | None

    def scores(self, name: str) -> list[float]:
        """The score `name` of the captions of our seeds; a stopped point has only its last validation CIDEr-D."""
        if self.result is None:
            return []
        values = [record.scores[name] for record in self.result.counted if name in record.scores]
        return values or self.result.values(name)

    def mean(self, name: str) -> float | None:
        """The mean over our seeds of an objective or cost."""
        return None if self.result is None else self.result.mean(name)


def comparisons(
    search: Search, results: Sequence[PointResult], metrics: Sequence[str] = ABLATION_COLUMNS
) -> list[ComparisonTable]:
    """The tables of the paper that the search's `compare` names; columns only for `metrics` that both sides have."""
    if search.config.compare == "expansionnet_v2":
        matches = expansionnet_matches(search, results)
        scores = _score_columns(search, matches, matches[0], [name for name in ABLATION_COLUMNS if name in metrics])
        note = NOTE.format(split=search.score_split, protocol=TABLE_I_PROTOCOL, baseline=matches[0].label)
        return [
            ComparisonTable("Table I next to the paper's", note, *scores),
            ComparisonTable("Table VI next to the paper's", TABLE_VI_NOTE, *_multiply_accumulate_columns(matches)),
        ]
    tables = []
    for table in printed_tables(search.config.compare):
        matches = _matches(search, results, table.rows, [row.name for row in table.rows])
        if sum(match.result is not None for match in matches) > 1:  # one row has nothing to be compared with
            baseline = table.rows[table.baseline].name
            note = NOTE.format(split=search.score_split, protocol=PROTOCOL, baseline=baseline)
            names = [name for name in table.columns if name in metrics]
            columns, rows = _score_columns(search, matches, matches[table.baseline], names)
            for (_, cells), match in zip(rows, matches, strict=True):
                cells += [format_cell(name, match.mean(name)) for name in COSTS_SHOWN]
            columns += [heading(search, name) for name in COSTS_SHOWN]
            tables.append(ComparisonTable(f"{table.title} next to the paper's", note, columns, rows))
    return tables


def printed_label(row: AblationRow) -> str:
    """A row of Table I as the paper names it: by its expansion groups G and its dynamic expansion N_E."""
    return f"G {show_value(row.static_expansion)}, N_E {show_value(row.dynamic_expansion)}"


def expansionnet_matches(search: Search, results: Sequence[PointResult]) -> list[Match]:
    """The rows of ExpansionNet v2's Table I, matched by G and N_E."""
    return _matches(search, results, ablation(), [printed_label(row) for row in ablation()])


def _matches(
    search: Search, results: Sequence[PointResult], rows: Sequence[PrintedRow | AblationRow], labels: Sequence[str]
) -> list[Match]:
    """Matches each row of a table with the first point that has the row's settings; `labels` name the rows."""
    models = [search.trial_config(result.point, search.config.seeds[0]).model for result in results]
    keys = rows[0].settings.keys()
    points = [(_settings(model, keys), result) for model, result in zip(models, results, strict=True)]
    return [
        Match(label, row.scores, next((result for settings, result in points if settings == row.settings), None))
        for row, label in zip(rows, labels, strict=True)
    ]


def _settings(model: ModelConfig, keys: Iterable[str]) -> Values:
    """The model's values of these keys, to be compared with the settings of a table's row.

    The papers' baseline Transformer ignores its expansion settings, so they count as None. Returns {}, which equals
    no row's settings, for a model that no table has: one without these keys, or one with a dynamic expansion in
    its encoder.
    """
    if getattr(model, "encoder_dynamic_expansion", None) is not None or not all(hasattr(model, key) for key in keys):
        return {}
    ignored = ("static_expansion", "dynamic_expansion") if model.name == "transformer" else ()
    return {key: None if key in ignored else getattr(model, key) for key in keys}


def _score_columns(
    search: Search, matches: Sequence[Match], baseline: Match, names: Sequence[str]
) -> tuple[list[str], Rows]:
    """The headings and rows of a table with our number of seeds and four columns per metric.

    The columns: our score, its difference to our baseline, the paper's score, its difference to the paper's baseline.
    """
    names = [name for name in names if any(match.scores(search.reported(name)) for match in matches)] or [SCORE]
    rows = []
    for match in matches:
        cells = ["" if match.result is None else match.result.seeds_text]
        for name in names:
            key, printed = search.reported(name), match.printed[name]
            ours, others = match.scores(key), baseline.scores(key)
            note = "" if match is baseline else difference_note(ours, others)
            difference = difference_cell(mean_of(ours), mean_of(others))
            cells += [format_cell(key, mean_of(ours), spread_of(ours)), f"{difference} {note}".strip()]
            cells += [number_cell(printed, digits=3), difference_cell(printed, baseline.printed[name], digits=3)]
        rows.append((match.label, cells))
    return ["seeds", *(f"{name}{kind}" for name in names for kind in ("", " +/-", " paper", " paper +/-"))], rows


def _multiply_accumulate_columns(matches: Sequence[Match]) -> tuple[list[str], Rows]:
    """The headings and rows of a table with multiply-accumulates for 5,000 images, in units of 1e12, and parameters.

    The first two columns have our models' number, counted as the paper does, and its ratio to the baseline's; the next
    two have the paper's. The table's first row is the baseline.
    """
    scale = TABLE_6_IMAGES / 1e12
    baseline = matches[0].mean("macs")
    rows = []
    for match, row in zip(matches, ablation(), strict=True):
        macs, executed, parameters = (match.mean(name) for name in ("macs", "macs_executed", "parameters"))
        digits = 4 if macs is not None and macs * scale < 1 else 2
        cells = [
            number_cell(None if macs is None else macs * scale, digits),
            "" if macs is None or not baseline else f"{macs / baseline:.3f}",
            f"{row.macs / 1e12:.2f}",
            f"{row.macs / ablation()[0].macs:.3f}",
            number_cell(None if executed is None else executed * scale, digits),
            "" if parameters is None else f"{parameters / 1000:,.0f}",
        ]
        rows.append((match.label, cells))
    return ["1e12 MACs", "of baseline", "paper (Table VI)", "of baseline", "executed", "k parameters"], rows


def number_cell(value: float | None, digits: int = 4) -> str:
    """The value with `digits` decimals; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def difference_cell(value: float | None, baseline: float | None, digits: int = 4) -> str:
    """The signed difference between a value and the baseline's; empty if one of them is None."""
    return "" if value is None or baseline is None else f"{value - baseline:+.{digits}f}"
