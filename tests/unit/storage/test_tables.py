"""A Parquet file is removed only if it is damaged, and not if the machine cannot read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.tables import read_cache, write_table
from tests.support.damage import cut

SCHEMA = pa.schema([("key", pa.string())])


@pytest.mark.parametrize("error", [pa.ArrowMemoryError("malloc failed"), MemoryError(), pa.ArrowCancelled("stopped")])
def test_a_whole_file_survives_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = storage_path(tmp_path / "keys.parquet")
    write_table(path, pa.table({"key": ["a"]}, SCHEMA))

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(pq, "read_table", fail)
        with pytest.raises(type(error)):
            read_cache(path, SCHEMA)
    assert read_cache(path, SCHEMA).num_rows == 1
    cut(path.path)
    assert read_cache(path, SCHEMA).num_rows == 0 and not path.exists()
