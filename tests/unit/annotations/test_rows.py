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
from raycap.pipeline.data.formats.source import IMAGES, Rows, Source
from raycap.pipeline.data.formats.table import table_entries
from raycap.pipeline.data.image_locations import has_remote_image, is_remote_image
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import storage_path
from tests.support.plain_data import plain_table


def test_rows_are_those_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captions are added to the newest rows and to rows that are no longer Python objects."""
    monkeypatch.setattr(module, "BUFFERED_ROWS", 4)
    rng = np.random.default_rng(0)
    for size in (0, 1, 4, 8, 9, 100):
        for share in (0.0, 0.3, 1.0):
            rows, lists = Rows(), list[tuple[int, str, str, list[str], list[str]]]()
            for number in range(size):
                captions = [f"{number} {index}" for index in range(rng.integers(0, 3))]
                lists.append((number, f"split{number % 3}", f"/{number}.png", list(captions), [f"t{number}"]))
                rows.add(number, f"split{number % 3}", f"/{number}.png", captions, "here", [f"t{number}"])
                assert len(rows) == number + 1
                while rng.random() < share / 2:
                    row, more = int(rng.integers(0, number + 1)), [f"more {rng.integers(100)}"] * int(rng.integers(3))
                    lists[row][3].extend(more)
                    rows.add_captions(row, list(more))
            columns = zip(*lists, strict=True) if lists else [[]] * 5
            expected = pa.table([list(column) for column in columns], schema=IMAGES)
            table = rows.table(with_tokens=True)
            table.validate(full=True)
            assert table.equals(expected)
            assert rows.table(with_tokens=False).column_names == IMAGES.names[:-1]


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


def test_many_files_of_a_folder_are_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of images and texts, in any order, of which some are not ASCII and some have several texts."""
    monkeypatch.setattr("raycap.pipeline.data.formats.text_files._FILES_PER_SLICE", 5)
    rng, texts = np.random.default_rng(0), dict[str, str]()
    stems = [
        f"{folder}{number}{mark}" for folder in ("", "b/", "é/") for number in range(20) for mark in "-\U0001f600\ue000"
    ]
    for stem in rng.permutation(stems).tolist():
        (tmp_path / stem).parent.mkdir(exist_ok=True)
        (tmp_path / f"{stem}.png").touch()
        for ending in rng.choice([".TXT", ".txt"], int(rng.integers(0, 3)), replace=False):
            (tmp_path / f"{stem}{ending}").write_text(f"text of {stem}{ending}")
            texts[stem] = max(texts.get(stem, ""), f"text of {stem}{ending}")
    dataset, problems = read_annotations(DataSection(root=str(tmp_path), annotations="."), tmp_path)
    assert not problems and dataset.column("uri") == [str(tmp_path / f"{stem}.png") for stem in sorted(stems)]
    assert dataset.column("captions") == [[texts[stem]] if stem in texts else [] for stem in sorted(stems)]
