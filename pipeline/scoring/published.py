"""Scores that papers print for these systems, and whether our scores can be compared with them.

`published.yaml` holds the numbers and their protocol.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

COCO_TEST = 5_000  # images of Karpathy's test split
ABLATION_COLUMNS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
NOTE = (
    "Means of the validation captions beside the paper's (Karpathy test after SCST, beam 5); +/- is the difference to "
    "the row {baseline}."
)


@dataclass(frozen=True)
class PrintedRow:
    """A row of a paper's table: its name, its scores, its values of the section `model`, and how it was decoded."""

    name: str
    scores: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    beam_size: int = 5
    protocol: str = "beam 5"


@dataclass(frozen=True)
class AblationRow:
    """A row of ExpansionNet v2's ablation; attention replaces an expansion that is None."""

    static_expansion: tuple[int, ...] | None
    dynamic_expansion: int | None
    scores: dict[str, float]
    macs: float  # multiply-accumulates of the captioner, without the backbone, for 5,000 images and captions

    @property
    def settings(self) -> dict[str, Any]:
        """The row's keys of the section `model`."""
        return {"static_expansion": self.static_expansion, "dynamic_expansion": self.dynamic_expansion}


@dataclass(frozen=True)
class PrintedTable:
    """A table of a paper. Reports show differences from the row with the index `baseline`."""

    title: str
    columns: Sequence[str]
    keys: Sequence[str]  # the keys of the section `model` in which the rows differ; each row sets all of them
    rows: Sequence[PrintedRow]
    baseline: int = 0


@functools.cache
def _published() -> dict[str, Any]:
    """The content of published.yaml."""
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


@functools.cache
def ablation() -> tuple[AblationRow, ...]:
    """Table I of ExpansionNet v2 with the costs of Table VI."""
    return tuple(
        AblationRow(groups and tuple(groups), vectors, dict(zip(ABLATION_COLUMNS, scores, strict=True)), macs)
        for groups, vectors, scores, macs in _published()["ablation"]
    )


@functools.cache
def printed_tables(compare: str | None) -> tuple[PrintedTable, ...]:
    """The tables for a value of a search's key `compare`; none for ExpansionNet v2, whose table is `ablation`."""
    return tuple(_table(**table) for table in _published()["tables"].get(compare, ()))


def _table(rows: list[Any], **table: Any) -> PrintedTable:
    """A table of published.yaml, whose rows are lists [name, values of the keys, scores]."""
    printed = [
        PrintedRow(
            name, dict(zip(table["columns"], scores, strict=True)), dict(zip(table["keys"], values, strict=True))
        )
        for name, values, scores in rows
    ]
    return PrintedTable(rows=printed, **table)


def published_rows(model: str, split: str, uris: Sequence[str], beam_size: int) -> list[tuple[PrintedRow, str]]:
    """The printed rows of a system on a split, each with the reason why our score cannot be compared, or ""."""
    rows = [PrintedRow(**row) for row in _published()["rows"].get(model, ())]
    return [(row, _difference(row, uris, beam_size)) for row in rows if row.split == split]


def _difference(row: PrintedRow, uris: Sequence[str], beam_size: int) -> str:
    """Why our score for these images cannot be compared with a printed row: other images or another beam; else ""."""
    if row.split == "test":
        coco = sum(uri.rsplit("/", 1)[-1].startswith("COCO_val2014_") for uri in uris)
        if coco < len(uris) or len(uris) != COCO_TEST:
            ours = f"{coco} of ours are COCO's" if coco < len(uris) else f"ours has {len(uris):,}"
            return f"not comparable: printed for the {COCO_TEST:,} images of Karpathy's COCO test split, {ours}"
    if row.beam_size != beam_size:
        return f"not comparable: printed for beam {row.beam_size}, ours is {beam_size}"
    return ""
