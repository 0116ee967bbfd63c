"""`NameIndex` against a dict."""

from __future__ import annotations

import numpy as np
import pytest

from raycap.pipeline.storage import tables as module
from raycap.pipeline.storage.tables import NameIndex


@pytest.mark.parametrize("limit", [0, 2**20])
def test_it_gives_what_a_dict_gives(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("raycap.pipeline.storage.tables.SPILL_BYTES", limit)
    monkeypatch.setattr(module, "FIRST_SLOTS", 4)
    monkeypatch.setattr(module, "_REHASHED", 16)
    index, expected = NameIndex(), dict[str, int]()
    for number, value in enumerate(np.random.default_rng(0).integers(0, 1500, 4000).tolist()):
        name = f"{value}\udcff.png"
        assert (name in index) == (name in expected)
        assert index.setdefault(name, number) == expected.setdefault(name, number)
        assert len(index) == len(expected)


def test_names_with_half_of_an_equal_hash_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Digest:
        def __init__(self, data: bytes, digest_size: int) -> None:
            self.data = data

        def digest(self) -> bytes:
            return b"\xff" * 8 + self.data.rjust(8, b"\0")

    monkeypatch.setattr(module, "blake2b", Digest)
    index = NameIndex()
    for _ in range(2):
        assert [index.setdefault(name, number) for number, name in enumerate("abcdef")] == list(range(6))
