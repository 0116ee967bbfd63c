"""Damages files: flips bits, cuts them, empties them, or replaces them by garbage."""

from __future__ import annotations

import random
from pathlib import Path


def flip(path: Path, rng: random.Random) -> None:
    """Changes one bit at a random place of a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Keeps the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def flip_any(path: Path) -> None:
    """Changes one bit of a file. The place depends on the file's name only."""
    flip(path, random.Random(path.name))
