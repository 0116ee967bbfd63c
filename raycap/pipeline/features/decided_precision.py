"""The precision that `auto` means: decided once by a measurement, and kept in the storage."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import ConflictError
from raycap.pipeline.storage.untrusted.documents import parse_json

if TYPE_CHECKING:
    from raycap.pipeline.runtime.processor import PrecisionTimes

logger = logging.getLogger(__name__)

PRECISIONS = ("float32", "bfloat16")
MAX_BYTES = 4096  # of a record


def decided_precision(
    work: Mapping[str, Any], folder: StoragePath, measure: Callable[[], PrecisionTimes], *, label: str, measured: str
) -> str:
    """float32 or bfloat16: the storage's decision for this kind of work, which the first caller makes by `measure`.

    work: plain values that tell different kinds of work apart. folder: where the storage keeps its decisions. label:
    the name of the work in the log. measured: what `measure` computes, in words. If two callers measure at the same
    time, the first to write decides.
    """
    record = _record(work, folder)
    decision, tag = _recorded(record)
    if decision is None:
        times = measure()
        content = {"precision": times.fastest, **asdict(times), "nonce": secrets.token_hex(8)}
        try:
            record.write_if(json.dumps(content, indent=1).encode(), tag)
            decision = times.fastest
        except ConflictError:  # another process was faster
            decision = _recorded(record)[0] or times.fastest
        logger.info(f"{label:<9} in {decision} from now on: {times}, measured with {measured}")
    return decision


def recorded_precision(work: Mapping[str, Any], folder: StoragePath) -> str | None:
    """What `decided_precision` has decided for this kind of work; None before its first decision."""
    return _recorded(_record(work, folder))[0]


def _record(work: Mapping[str, Any], folder: StoragePath) -> StoragePath:
    """The file of a decision."""
    return folder / f"{hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:20]}.json"


def _recorded(record: StoragePath) -> tuple[str | None, str | None]:
    """The storage's decision, and the tag of the record; None without one. A damaged record has no decision."""
    try:
        data, tag = record.read_tagged()
    except FileNotFoundError:
        return None, None
    with suppress(ValueError):
        content = parse_json(data[:MAX_BYTES], str(record))
        if isinstance(content, dict) and content.get("precision") in PRECISIONS:
            return str(content["precision"]), tag
    logger.warning(f"damaged   {record} is no record of a precision; it is made again")
    return None, tag
