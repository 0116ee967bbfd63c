"""The keys that the names of files suggest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from raycap.pipeline.data.formats.source import find_files
from raycap.pipeline.data.survey import find_candidates, read_names
from raycap.pipeline.storage.path import StoragePath, storage_path

TABLE, PARTS = b"image,caption\n", ["part1/metadata.csv", "part2/metadata.csv"]


def write(folder: Path, names: list[str]) -> StoragePath:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(TABLE)
    return storage_path(folder)


@pytest.mark.parametrize("seed", range(15))
def test_the_keys_name_exactly_the_files_of_a_candidate(tmp_path: Path, seed: int) -> None:
    """The patterns are compared with what the readers find by them."""
    draw = random.Random(seed)
    words = ["train", "val", "part", "part1", "a", "[b]", "{c,d}", "12", "x*"]
    names = {
        "/".join("-".join(draw.choices(words, k=draw.randint(1, 2))) for _ in range(draw.randint(1, 2))) + ".csv"
        for _ in range(draw.randint(1, 8))
    }
    root = write(tmp_path, sorted(names))
    for candidate in find_candidates(sorted(names)):
        _, keys = read_names(root, candidate, sorted(names))
        found = [name for each in keys.get("sources", [keys]) for name in find_files(root, each["annotations"])]
        assert sorted(found) == sorted(candidate.files)
