"""The part "reward" of `raycap bench scale`: the index of CIDEr-D, built from generated captions in a new process."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jobs.bench.measuring import in_new_process, timed
from pipeline.rewards.cider_index import MEMORY, build_index
from pipeline.runtime.cpu import prepare_processor

CAPTIONS = (100_000, 600_000, 3_000_000)
PER_IMAGE = 5
WORDS = 10_000  # of the vocabulary; their frequencies follow Zipf's law
_IMAGES = 4096  # generated at a time


class ScaleRow(NamedTuple):
    """One measurement: the seconds, the peak of the process's memory without that before, and the file's bytes."""

    part: str
    captions: int
    seconds: float
    peak_mb: float
    bytes: int


def reward_rows(captions: tuple[int, ...] = CAPTIONS, *, memory: int = MEMORY) -> list[ScaleRow]:
    """The index over each of these numbers of captions. memory: of `build_index`.

    One core, a new process each. The seconds include the generation of the captions, about 1 s per 100,000.
    """
    return [in_new_process(_build, count, memory) for count in captions]


def generated_captions(images: int) -> Iterator[list[list[int]]]:
    """The captions of each image: PER_IMAGE of 8 to 12 random words."""
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(1 / np.arange(1, WORDS + 1))
    for begin in range(0, images, _IMAGES):
        lengths = rng.integers(8, 13, min(_IMAGES, images - begin) * PER_IMAGE)
        words = np.searchsorted(cumulative, rng.random(int(lengths.sum())) * cumulative[-1]).tolist()
        ends = np.cumsum(lengths).tolist()
        captions = [words[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
        yield from (captions[first : first + PER_IMAGE] for first in range(0, len(captions), PER_IMAGE))


def _build(captions: int, memory: int) -> ScaleRow:
    """The row of one number of captions."""
    prepare_processor(1)
    before = _peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.safetensors"
        images = generated_captions(captions // PER_IMAGE)
        _, seconds = timed(lambda: build_index(images, memory=memory, path=path))
        return ScaleRow("reward", captions, seconds, (_peak_bytes() - before) / 1e6, path.stat().st_size)


def _peak_bytes() -> int:
    """The largest resident memory of this process until now, mapped pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
