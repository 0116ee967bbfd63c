"""Pickles of other projects that would take long or much memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.evaluation.captioning import upstream
from raycap.pipeline.evaluation.captioning.upstream import read_expansionnet_vocabulary, read_meshed_vocabulary

COUNTER = b"ccollections\nCounter\n"


def copies_of_a_counter(entries: int, copies: int) -> bytes:
    """A list of Counters, each made from the same dictionary."""
    words = [f"word {index}".encode() for index in range(entries)]
    items = b"".join(b"\x8c" + bytes([len(word)]) + word + b"K\x01" for word in words)
    return b"\x80\x04]" + b"}(" + items + b"uq\x00" + b"0(" + (COUNTER + b"h\x00\x85R") * copies + b"e."


def nested_lists(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (copies_of_a_counter(100, 1001), "more than 1000 objects of other types"),
        (nested_lists(6_000), "more than 10000 operations"),
        (nested_lists(4_000), "is no ExpansionNet v2 vocabulary|expected 'itos' and 'stoi'|no vocabulary object"),
        (b"\x80\x04" + b")" + b"\x85" * 2000 + b".", "more than 1000 objects of other types"),
        (b"\x80\x04}(" + b"\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"K\x01u.", "more than 60 bits"),
        (b"\x80\x04]p" + b"9" * 4_000 + b"\n.", "more than 60 bits"),
        (b"\x80\x04]r\xff\xff\xff\x00.", "asks for place 16777215 in a memo"),
        (b"\x80\x04c" + b"\x1b" * 5_000 + b"\nx\n.", "it names"),
    ],
)
def test_pickles_that_would_take_long_or_much_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.setattr(upstream, "MAX_OPERATIONS", 10_000)
    path = tmp_path / "v.pickle"
    path.write_bytes(content)
    for read in (read_expansionnet_vocabulary, read_meshed_vocabulary):
        with pytest.raises(ValueError, match=words) as refused:
            read(path)
        assert len(str(refused.value)) < 1000 and str(refused.value).isprintable()
