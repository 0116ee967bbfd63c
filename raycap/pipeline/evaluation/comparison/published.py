"""Scores that papers print for these systems, and whether our scores can be compared with them.

The numbers and their protocols are in the file `published.yaml`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from raycap.models.config import Values
from raycap.pipeline.evaluation.comparison.protocol import Protocol, differences

OTHER_IMAGES = " are of it"  # at the end of the first reason of a row if we scored images of another data set


@dataclass(frozen=True)
class PublishedRow:
    """A row of a paper's ablation.

    settings: its values for keys of the section `model`. macs: the multiply-accumulates of the captioner, without the
    backbone, for 5,000 images and captions; None if the paper does not state them.
    """

    name: str
    scores: dict[str, float]
    settings: Values
    macs: float | None = None


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
class PublishedTable:
    """The table of a paper's ablation. baseline: the index of the row from which reports show the differences."""

    title: str
    columns: Sequence[str]  # the metrics
    keys: Sequence[str]  # the keys of the section `model` in which rows differ. Each row sets all of these keys.
    rows: Sequence[PublishedRow]
    baseline: int = 0
    protocol: str = "Karpathy test after SCST, beam 5"


@functools.cache
def _published() -> Values:
    """The content of published.yaml."""
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


@functools.cache
def published_tables(compare: str | None) -> tuple[PublishedTable, ...]:
    """The tables for a value of a search's key `compare`."""
    return tuple(_table(**table) for table in _published()["tables"].get(compare, ()))


def _table(rows: list[Any], **table: Any) -> PublishedTable:
    """Builds a table of published.yaml.

    rows: lists [name, values of the keys, scores], with multiply-accumulates as a fourth item if the paper states them.
    table: the other fields.
    """
    published = []
    for name, values, scores, *macs in rows:
        settings = [tuple(value) if isinstance(value, list) else value for value in values]
        by_key, by_metric = zip(table["keys"], settings, strict=True), zip(table["columns"], scores, strict=True)
        published.append(PublishedRow(name, dict(by_metric), dict(by_key), *macs))
    return PublishedTable(rows=published, **table)


def published_rows(ours: Protocol, split: str, uris: Sequence[str]) -> list[tuple[FinalRow, str]]:
    """The published rows for our system and a split of this name, with the reasons why they cannot be compared.

    uris: of the images that we scored. A reason is "" if the row and our scores can be compared.
    """
    if ours.system is None:
        return []
    rows = [_final_row(ours.system, row) for row in _published()["rows"].get(ours.system, ())]
    return [(row, _reason(row, ours, uris)) for row in rows if row.split == split]


def folded(published: Sequence[tuple[FinalRow, str]]) -> list[tuple[FinalRow, str]]:
    """The result of `published_rows` with one row, without scores, in place of those of other data sets than ours."""
    of_other_images = [each for each in published if each[1].partition(";")[0].endswith(OTHER_IMAGES)]
    if len(of_other_images) < 2:
        return list(published)
    row, reason = of_other_images[0]
    joined = replace(row, name=f"{len(of_other_images)} rows of papers", scores={})
    return [*(each for each in published if each not in of_other_images), (joined, reason.partition(";")[0])]


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
        pairs.append((f"{images['count']:,} images of {images['name']}", f"{count:,} of {len(uris):,}{OTHER_IMAGES}"))
    elif len(uris) != images["count"]:
        pairs.append((f"{images['count']:,} images of {images['name']}", f"{len(uris):,}"))
    pairs += differences(row.protocol, ours)
    if not pairs:
        return ""
    return "not comparable: " + "; ".join(f"published: {theirs}, ours: {our}" for theirs, our in pairs)
