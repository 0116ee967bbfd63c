"""The rows that readers add: kept in Arrow arrays, a part at a time."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.formats import source as module
from raycap.pipeline.data.formats.source import Source
from raycap.pipeline.data.formats.table import table_entries
from raycap.pipeline.data.images import has_remote_image, is_remote_image
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import storage_path
from tests.support.plain_data import plain_table


def test_tables_are_those_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in several spellings, rows in any order, splits that are missing, and sometimes ones that contradict."""
    monkeypatch.setattr(module, "BUFFERED_ROWS", 5)
    rng, outcomes = np.random.default_rng(0), set[str]()
    for _ in range(60):
        lines = []
        for row in range(int(rng.integers(1, 60))):
            image, form = int(rng.integers(0, 30)), str(rng.choice(["{}.png", "./{}.png", "a/{}.png", "a//{}.png"]))
            entry: dict[str, Any] = {"image": form.format(image), "caption": f"caption {row}"}
            if rng.random() < 0.3:
                entry["caption"] = [f"caption {row}", "another"]
            if rng.random() < 0.5:
                entry["split"] = ["train", "val", 3, "3", ""][image % 5]
                if rng.random() < 0.02:
                    entry["split"] = ["other", True][int(rng.integers(2))]
            if rng.random() < 0.02:
                entry["id"] = 7
            lines.append(json.dumps(entry))
        (tmp_path / "t.jsonl").write_text("\n".join(lines))
        config = DataSection(
            root=str(tmp_path),
            annotations="t.jsonl",
        )
        source = Source(storage_path(tmp_path / "t.jsonl"), storage_path(tmp_path), "t.jsonl", ".")
        try:
            expected: Any = plain_table(source, table_entries(source))
            ids = Counter(row["image_id"] for row in expected)
            if max(ids.values()) > 1:
                expected = f"repeats the image id {ids.most_common(1)[0][0]}"
        except UserError as error:
            expected = str(error)
        if isinstance(expected, str):
            with pytest.raises(UserError, match=re.escape(expected)):
                read_annotations(config, tmp_path)
            outcomes.add(expected.split(": ")[-1][:9])
        else:
            assert read_annotations(config, tmp_path)[0].table.to_pylist() == expected
            outcomes.add("equal")
    assert {"equal", "the image"} <= outcomes and len(outcomes) > 2


def test_images_on_s3_are_found_in_a_column() -> None:
    local = ["/a/s3://b.png", "tar:1+2+9:/a/b.tarx/s3://c.png", "parquet:1+2+3+2:/a/s3:"]
    remote = ["s3://a/b.png", "tar:1+2+9:s3://a/b/x.png", "parquet:1+2+3+6:s3://a/x"]
    assert not any(map(is_remote_image, local)) and all(map(is_remote_image, remote))
    assert not has_remote_image(pa.chunked_array([local, []], pa.string()))
    assert not has_remote_image(pa.chunked_array([], pa.string()))
    for uri in remote:
        assert has_remote_image(pa.chunked_array([local, [uri]], pa.string()))
