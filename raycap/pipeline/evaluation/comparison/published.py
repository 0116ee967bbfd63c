"""Scores that papers print for these systems, and whether our scores can be compared with them.

The numbers and their protocols are in the file `published.yaml`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from raycap.models.config import Values
from raycap.pipeline.evaluation.comparison.protocol import Protocol, differences

ABLATION_COLUMNS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")


@dataclass(frozen=True)
class PrintedRow:
    """A row of a paper's table. settings: its values for keys of the section `model`."""

    name: str
    scores: dict[str, float]
    settings: Values = field(default_factory=dict)


@dataclass(frozen=True)
class FinalRow:
    """A row of a paper's table of results, with the protocol by which its scores were computed.

    table: the number of the table. split: reports show the row next to our scores of this split. data: the key of the
    scored images in `data_sets` of published.yaml.
    """

    name: str
    table: str
    scores: dict[str, float]
    protocol: Protocol
    split: str = "test"
    data: str = "karpathy-test"


@dataclass(frozen=True)
class AblationRow:
    """A row of ExpansionNet v2's ablation. An expansion that is None is replaced by attention."""

    static_expansion: tuple[int, ...] | None
    dynamic_expansion: int | None
    scores: dict[str, float]
    macs: float  # multiply-accumulates of the captioner, without the backbone, for 5,000 images and captions

    @property
    def settings(self) -> Values:
        """The row's keys of the section `model`."""
        return {"static_expansion": self.static_expansion, "dynamic_expansion": self.dynamic_expansion}


@dataclass(frozen=True)
class PrintedTable:
    """A table of a paper. baseline: the index of the row from which reports show the differences."""

    title: str
    columns: Sequence[str]
    keys: Sequence[str]  # the keys of the section `model` in which rows differ. Each row sets all of these keys.
    rows: Sequence[PrintedRow]
    baseline: int = 0


@functools.cache
def _published() -> Values:
    """The content of published.yaml."""
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


@functools.cache
def ablation() -> tuple[AblationRow, ...]:
    """The ablation of ExpansionNet v2: the scores of its Table I, and the costs of its Table VI."""
    return tuple(
        AblationRow(groups and tuple(groups), vectors, dict(zip(ABLATION_COLUMNS, scores, strict=True)), macs)
        for groups, vectors, scores, macs in _published()["ablation"]
    )


@functools.cache
def printed_tables(compare: str | None) -> tuple[PrintedTable, ...]:
    """The tables for a value of a search's key `compare`. ExpansionNet v2 has none, because its table is `ablation`."""
    return tuple(_table(**table) for table in _published()["tables"].get(compare, ()))


def _table(rows: list[Any], **table: Any) -> PrintedTable:
    """Builds a table of published.yaml. rows: lists [name, values of the keys, scores]. table: the other fields."""
    printed = []
    for name, values, scores in rows:
        by_column = dict(zip(table["columns"], scores, strict=True))
        printed.append(PrintedRow(name, by_column, dict(zip(table["keys"], values, strict=True))))
    return PrintedTable(rows=printed, **table)


def published_rows(ours: Protocol, split: str, uris: Sequence[str]) -> list[tuple[FinalRow, str]]:
    """The published rows for our system and a split of this name, with the reasons why they cannot be compared.

    uris: of the images that we scored. A reason is "" if the row and our scores can be compared.
    """
    if ours.system is None:
        return []
    rows = [_final_row(ours.system, row) for row in _published()["rows"].get(ours.system, ())]
    return [(row, _reason(row, ours, uris)) for row in rows if row.split == split]


def shared_protocol(system: str) -> Protocol:
    """The protocol that the published rows of a system share. Raises KeyError for a system without rows."""
    return Protocol(system=system, **_published()["protocols"][system])


def _final_row(system: str, row: Values) -> FinalRow:
    """A row of published.yaml. Its protocol is the system's shared one, changed by the protocol keys of the row."""
    keys = {field.name for field in fields(Protocol)}
    protocol = replace(shared_protocol(system), **{key: value for key, value in row.items() if key in keys})
    if protocol.objective == "cross_entropy":
        protocol = replace(protocol, eos_in_reward=None)
    return FinalRow(**{key: value for key, value in row.items() if key not in keys}, protocol=protocol)


def _reason(row: FinalRow, ours: Protocol, uris: Sequence[str]) -> str:
    """All reasons why our scores cannot be compared with a published row, as one text, or "" if they can.

    The vocabulary's tokenizer and the models that a run started from are not considered.
    """
    pairs: list[tuple[str, str]] = []
    images = _published()["data_sets"][row.data]
    count = sum(re.fullmatch(images["files"], uri.rsplit("/", 1)[-1]) is not None for uri in uris)
    if count < len(uris):
        pairs.append((f"{images['count']:,} images of {images['name']}", f"{count:,} of {len(uris):,} are of it"))
    elif len(uris) != images["count"]:
        pairs.append((f"{images['count']:,} images of {images['name']}", f"{len(uris):,}"))
    pairs += differences(row.protocol, ours)
    if not pairs:
        return ""
    return "not comparable: " + "; ".join(f"published: {theirs}, ours: {our}" for theirs, our in pairs)
