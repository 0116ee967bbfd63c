"""Scores that papers print for these systems, and whether our scores can be compared with them.

`published.yaml` holds the numbers and their protocol.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ABLATION_COLUMNS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
OBJECTIVES = {"cross_entropy": "cross entropy", "scst": "SCST"}
NOTE = (
    "Means of the validation captions beside the paper's (Karpathy test after SCST, beam 5); +/- is the difference to "
    "the row {baseline}."
)


@dataclass(frozen=True)
class Evaluated:
    """What was evaluated, as far as it decides with which printed scores ours can be compared.

    system: `model.name`. features: "grid" or "regions". objective: of the last stage whose weights were kept; None if
    it is not recorded. num_models: of the ensemble, or 1. The others are keys of the section `evaluation`.
    """

    system: str
    features: str
    objective: str | None
    num_models: int
    beam_size: int
    max_length: int
    ranking: str
    collapse_repeats: bool
    constrained: bool


@dataclass(frozen=True)
class PrintedRow:
    """A row of a paper's table: its name, its scores, and its values of the section `model`."""

    name: str
    scores: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinalRow:
    """A row of a paper's table of results, with the protocol by which its scores were computed.

    split: the name of the split beside whose scores the row is shown. data: the key of the images in `data_sets`.
    num_models: 0 for an ensemble of a size that is not stated. None in other fields: neither paper nor code states it.
    """

    name: str
    table: str
    scores: dict[str, float]
    split: str = "test"
    data: str = "karpathy-test"
    objective: str = "scst"
    num_models: int = 1
    beam_size: int = 5
    features: str | None = None
    max_length: int | None = None
    ranking: str | None = None
    collapse_repeats: bool | None = None
    constrained: bool = False

    @property
    def protocol(self) -> str:
        """The protocol in words."""
        parts = [f"Table {self.table}", OBJECTIVES[self.objective], _models(self.num_models), f"beam {self.beam_size}"]
        return ", ".join(parts)


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


def published_rows(ours: Evaluated, split: str, uris: Sequence[str]) -> list[tuple[FinalRow, str]]:
    """The printed rows of a system for a split of this name, each with why our score cannot be compared, or ""."""
    rows = [FinalRow(**row) for row in _published()["rows"].get(ours.system, ())]
    return [(row, _differences(row, ours, uris)) for row in rows if row.split == split]


def _differences(row: FinalRow, ours: Evaluated, uris: Sequence[str]) -> str:
    """The differences between the protocols of a printed row and ours, as one text; "" if there are none.

    Precision and tokenizer are not compared, nor the models that a run started from.
    """
    pairs: list[tuple[str, str]] = []
    images = _published()["data_sets"][row.data]
    count = sum(re.fullmatch(images["files"], uri.rsplit("/", 1)[-1]) is not None for uri in uris)
    if count < len(uris):
        pairs.append((f"{images['count']:,} images of {images['name']}", f"{count:,} of {len(uris):,} are of it"))
    elif len(uris) != images["count"]:
        pairs.append((f"{images['count']:,} images of {images['name']}", f"{len(uris):,}"))
    if row.objective != ours.objective:
        objective = "not recorded" if ours.objective is None else OBJECTIVES[ours.objective]
        pairs.append((OBJECTIVES[row.objective], objective))
    if row.features not in (None, ours.features):
        pairs.append((f"{row.features} features", ours.features))
    if row.num_models != ours.num_models and (row.num_models or ours.num_models == 1):
        pairs.append((_models(row.num_models), _models(ours.num_models)))
    if row.beam_size != ours.beam_size:
        pairs.append((f"beam {row.beam_size}", f"beam {ours.beam_size}"))
    if row.max_length not in (None, ours.max_length):
        pairs.append((f"at most {row.max_length} tokens", f"at most {ours.max_length}"))
    if row.ranking not in (None, ours.ranking):
        pairs.append((f"ranked by the {row.ranking} of log-probabilities", f"by the {ours.ranking}"))
    if row.collapse_repeats not in (None, ours.collapse_repeats):
        words = ("kept", "collapsed")
        pairs.append((f"repeated words {words[row.collapse_repeats]}", words[ours.collapse_repeats]))
    if row.constrained != ours.constrained:
        words = ("no constraints", "constraints")
        pairs.append((words[row.constrained], words[ours.constrained]))
    return "not comparable: " + "; ".join(f"printed: {theirs}, ours: {our}" for theirs, our in pairs) if pairs else ""


def _models(count: int) -> str:
    return {0: "an ensemble", 1: "one model"}.get(count, f"an ensemble of {count}")
