"""Files of token ids: what is read is what was written, and a damaged file is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raycap.pipeline.data.vocabulary import DTYPES, TokenFiles, write_tokens
from raycap.pipeline.errors import DamagedError
from tests.support.damage import cut, empty, replace_by_garbage

Ids = list[list[list[int]]]


def random_ids(rng: random.Random, num_images: int) -> Ids:
    """Up to 3 captions of up to 4 ids per image; some have none."""
    return [
        [[rng.randrange(2**31) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(4))]
        for _ in range(num_images)
    ]


def read_ids(files: TokenFiles) -> Ids:
    captions = [files.ids[start:end].tolist() for start, end in zip(files.offsets, files.offsets[1:], strict=False)]
    return [captions[start:end] for start, end in zip(files.first, files.first[1:], strict=False)]


def test_files_have_what_was_written(tmp_path: Path) -> None:
    rng = random.Random(0)
    for num_images in (0, 1, 100):
        for ids in (random_ids(rng, num_images), [[] for _ in range(num_images)], [[[]]] * num_images):
            write_tokens(tmp_path, iter(ids))
            files = TokenFiles.open(tmp_path)
            assert read_ids(files) == ids and files.num_images == num_images
            assert {name: str(getattr(files, name).dtype) for name in DTYPES} == DTYPES
            assert all(isinstance(getattr(files, name), np.memmap) for name in DTYPES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.npy" for name in DTYPES)


@pytest.mark.parametrize("name", [f"{name}.npy" for name in DTYPES])
@pytest.mark.parametrize("damage", [cut, empty, replace_by_garbage, Path.unlink])
def test_a_damaged_file_is_refused_and_can_be_written_again(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    ids = random_ids(random.Random(1), 50)
    write_tokens(tmp_path, ids)
    damage(tmp_path / name)
    with pytest.raises(DamagedError, match=rf"{tmp_path}/\S+( is damaged: | is missing)"):
        TokenFiles.open(tmp_path)
    write_tokens(tmp_path, ids)
    assert read_ids(TokenFiles.open(tmp_path)) == ids
