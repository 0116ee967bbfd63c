"""Every kind of file that later commands read is in the table of `raycap doctor --storage`."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.jobs.doctor.damage import find_damaged_files
from raycap.pipeline.storage.path import storage_path

ENTRY = json.dumps({"stage": "xe", "kind": "train", "step": 1, "time": 1.0}).encode()


def table() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1, 2]}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "whole", "damaged"),
    [
        ("backbones/a.safetensors", b"weights", b"weighty"),
        ("searches/s-1/trials.parquet", table(), table()[:-9]),
        ("retrain/demo/snapshots/t000002.parquet", table(), table()[:-9]),
        ("retrain/demo/held-out/t000002.parquet", table(), table()[:-9]),
        ("distilled/0123456789abcdef0123/0a1b.parquet", table(), table()[:-9]),
        ("runs/x-1/log/journal/00001.jsonl", ENTRY + b"\n" + ENTRY[:9], ENTRY.replace(b"step", b"stop") + b"\n"),
        ("runs/x-1/log/metrics.jsonl", ENTRY + b"\n", ENTRY[:9] + b"\n" + ENTRY + b"\n"),
    ],
)
def test_a_damaged_file_is_found(tmp_path: Path, name: str, whole: bytes, damaged: bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(whole)
    if path.suffix == ".safetensors":
        path.with_name(f"{path.name}.sha256").write_text(hashlib.sha256(whole).hexdigest())
    assert list(find_damaged_files(storage_path(tmp_path))) == []
    path.write_bytes(damaged)
    ((found, remedy),) = find_damaged_files(storage_path(tmp_path))
    assert str(path) in found and remedy
