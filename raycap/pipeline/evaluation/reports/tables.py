"""Plain-text tables for the terminal and logs, and the scores of models that differ only in the seed of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.evaluation.comparison.bootstrap import Spread
from raycap.pipeline.evaluation.scores.metrics import MetricScores

UNAVAILABLE = "unavailable"  # a cell that starts with this word explains why a value is missing
MAIN_OBJECT = "main object"  # the only column in percent, because its values are shares
Rows = list[tuple[str, list[str]]]


class Table(NamedTuple):
    """A table of a page. rows: (label, one cell per column). note: a line above the table."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def format_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The text of a table. rows: (label, one cell per column). Labels are aligned left, and cells right.

    A cell that starts with "unavailable" becomes "-". The lines after the table give each reason once.
    """
    reasons: list[str] = []
    table = [["", *columns]]
    for label, cells in rows:
        reasons += [f"{name} {cell}" for name, cell in zip(columns, cells, strict=True) if cell.startswith(UNAVAILABLE)]
        table.append([label, *("-" if cell.startswith(UNAVAILABLE) else cell for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([label.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for label, *cells in table
    ]
    return "\n".join([*lines, *dict.fromkeys(reasons)])


@dataclass(frozen=True)
class SeedScores:
    """The scores of several models that differ only in the seed of training.

    labels: a name for each model, such as "seed 0". splits: {split: one entry per model}. The entries are those of
    scores.json (`SplitScores.to_json`).
    """

    labels: tuple[str, ...]
    splits: Mapping[str, Sequence[Mapping[str, Any]]]

    @staticmethod
    def of(entries: Mapping[str, Mapping[str, Mapping[str, object]]]) -> SeedScores:
        """Collects the scores in {label: {split: entry}}. Splits without scores are left out."""
        models = list(entries.values())
        splits = {split: [model[split] for model in models] for split, entry in models[0].items() if "scores" in entry}
        return SeedScores(tuple(entries), splits)

    @property
    def columns(self) -> list[str]:
        """The metrics of all splits and models, each once."""
        entries = chain.from_iterable(self.splits.values())
        return list(dict.fromkeys(chain.from_iterable(map(_values, entries))))

    def values(self, split: str, column: str) -> list[float | None]:
        """The score of each model, with None for a model whose score is unavailable."""
        return [_values(entry).get(column) for entry in self.splits[split]]

    def spread(self, split: str, column: str) -> Spread | None:
        """The statistics of a score over the models, or None if one of the models lacks the score."""
        values = self.values(split, column)
        present = [value for value in values if value is not None]
        return Spread.of(present) if len(present) == len(values) else None

    def to_json(self) -> Values:
        """The scores as JSON: {split: {"images": number, "scores": {metric: statistics over the models, or null}}}."""
        content: Values = {}
        for split, entries in self.splits.items():
            spreads = {column: self.spread(split, column) for column in self.columns}
            scores = {column: None if spread is None else asdict(spread) for column, spread in spreads.items()}
            if scores.get(MAIN_OBJECT) is None:  # only some splits have this share
                scores.pop(MAIN_OBJECT, None)
            content[split] = {"images": entries[0]["images"], "scores": scores}
        return content

    def rows(self, split: str, columns: Sequence[str]) -> Rows:
        """The row of a split, as a list: mean and standard deviation of each column."""
        seeds = "1 seed" if len(self.labels) == 1 else f"{len(self.labels)} seeds"
        cells = []
        for column in columns:
            spread = self.spread(split, column)
            if spread is None:
                cells.append(self._missing(split, column))
            else:
                cells.append(spread.text(in_percent=column == MAIN_OBJECT))
        return [(f"{split}, {self.splits[split][0]['images']} images ({seeds})", cells)]

    def rows_of_models(self, split: str, columns: Sequence[str]) -> Rows:
        """The scores of a split in one row per model."""
        texts = [[_single(value, column) for value in self.values(split, column)] for column in columns]
        return [(f"  {label}", cells) for label, *cells in zip(self.labels, *texts, strict=True)]

    def _missing(self, split: str, column: str) -> str:
        """The text of a cell whose score at least one model lacks: the reason, or "" if the split has no such score."""
        values = self.values(split, column)
        if all(column not in _values(entry) for entry in self.splits[split]):
            return ""  # the column belongs to other splits only
        reasons = [entry["unavailable"].get(column) for entry in self.splits[split]]
        reason = next(filter(None, reasons), "not computed")
        return f"{UNAVAILABLE} for {values.count(None)} of {len(values)} models: {reason}"


def _single(value: float | None, column: str) -> str:
    """The text of one model's score, or "" if it is None."""
    return "" if value is None else Spread.of([value]).text(in_percent=column == MAIN_OBJECT)


def _values(entry: Mapping[str, Any]) -> dict[str, float | None]:
    """{column: score} from a split's entry in scores.json."""
    values = dict(entry["scores"])
    if entry.get("main_object") is not None:
        values[MAIN_OBJECT] = entry["main_object"]
    return values


def format_scores(scores: MetricScores) -> str:
    """The scores as text: one line per metric, then statistics of the captions, then the signature."""
    lines = [""]
    width = max(9, *map(len, scores.by_name))
    for name, score in scores.by_name.items():
        value = f"{score.value:.3f}" if score.value is not None else f"unavailable: {score.unavailable}"
        lines.append(f"  {name:<{width}} {value}")
    extras = scores.extras
    repeated = ", ".join(f"{share:.1%} {n}-grams" for n, share in extras["repeated_ngrams"].items())
    endings = "" if extras["broken_endings"] is None else f"broken endings {extras['broken_endings']:.1%}, "
    lines += [
        "",
        f"  {len(scores.image_ids)} captions, {extras['mean_length']:.1f} words on average, "
        f"{extras['distinct_words']} distinct words",
        f"  {endings}doubled words {extras['doubled_words']:.1%}, captions that repeat: {repeated}",
    ]
    if extras["empty"]:
        empty = round(extras["empty"] * len(scores.image_ids))
        lines.append(f"  {empty} of the captions have no words: they match nothing and score 0")
    return "\n".join([*lines, f"  {scores.signature}", ""])
