"""Content keys: which bytes lie behind every image's path, found without reading files that are known already.

The manifest of a storage keeps path, size and modification time beside each key; a file whose three are unchanged is
not read again. Cost: one stat an image, and one read of each new or changed one.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset import Dataset

MANIFEST = pa.schema([("uri", pa.string()), ("size", pa.int64()), ("mtime_ns", pa.int64()), ("key", pa.string())])
MAX_BYTES = 256 * 2**20  # no photograph is larger; guards the memory of whoever reads it


def take_snapshot(dataset: Dataset, manifest: Path) -> tuple[Dataset, dict[str, str]]:
    """The data set with every readable image's content key, and {path: reason} for those that cannot be read.

    `manifest` (Parquet) is read if it is there, and rewritten in one piece when something in it changed.
    """
    known: dict[str, tuple[int, int, str]] = {}
    if manifest.is_file():
        columns = pq.read_table(manifest, schema=MANIFEST).to_pydict()
        known = {
            uri: (size, mtime, key)
            for uri, size, mtime, key in zip(*(columns[name] for name in MANIFEST.names), strict=True)
        }
    uris = dataset.column("uri")
    troubles: dict[str, str] = {}
    fresh: dict[str, tuple[int, int, str]] = {}

    def look(uri: str) -> None:
        try:
            status = os.stat(uri)  # noqa: PTH116 (a Path an image costs more than the stat)
            before = known.get(uri)
            if before and before[:2] == (status.st_size, status.st_mtime_ns):
                fresh[uri] = before
            elif status.st_size > MAX_BYTES:
                troubles[uri] = f"larger than {MAX_BYTES} bytes"
            else:
                key = hashlib.sha256(Path(uri).read_bytes()).hexdigest()
                fresh[uri] = (status.st_size, status.st_mtime_ns, key)
        except OSError as error:
            troubles[uri] = error.strerror or str(error)

    with ThreadPoolExecutor(max_workers=8) as pool:  # reading and hashing release the interpreter's lock
        for _ in pool.map(look, uris, chunksize=64):
            pass
    if any(known.get(uri) != row for uri, row in fresh.items()):
        _write(manifest, known | fresh)
    keys = pa.array([fresh[uri][2] if uri in fresh else None for uri in uris], pa.string())
    table = dataset.table.set_column(dataset.table.schema.get_field_index("key"), "key", keys)
    return Dataset(table), troubles


def _write(manifest: Path, rows: dict[str, tuple[int, int, str]]) -> None:
    manifest.parent.mkdir(parents=True, exist_ok=True)
    sizes, mtimes, keys = zip(*rows.values(), strict=True)
    table = pa.table({"uri": list(rows), "size": sizes, "mtime_ns": mtimes, "key": keys}, schema=MANIFEST)
    temporary = manifest.with_name(f".{manifest.name}.{os.getpid()}.tmp")
    pq.write_table(table, temporary)
    temporary.replace(manifest)
