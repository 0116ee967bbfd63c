"""The captions that a run takes from the store of its teacher, as a file in the run's folder.

A run learns from its own file, so that what other runs store, or a storage loses, changes no resumed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.vocabulary import SPECIALS, Vocabulary
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.distillation.caption_store import CHUNK, CaptionStore
from raycap.pipeline.storage.atomic import atomic_path
from raycap.pipeline.storage.digests import file_digest

ROWS_AT_A_TIME = 4096  # of images whose captions are Python objects
NOT_FINISHED, NO_WORD = "not finished or with UNK", "without a word"
UNKNOWN, TOO_LONG = "with words that the model lacks", "longer than the model's positions"


@dataclass(frozen=True)
class Distilled:
    """The record of a run's teacher and its captions in run.json.

    model: the bundle's location. digest: of what decides its captions. images: training images with a caption of the
    teacher. captions: (image, caption) pairs of these images. dropped: captions that are not learned, by reason.
    missing: training images that the teacher could not read.
    """

    model: str
    name: str
    digest: str
    search: str
    captions_per_image: int
    images: int
    captions: int
    dropped: dict[str, int]
    missing: int
    sha256: str  # of the file of captions

    def __str__(self) -> str:
        """The record in words."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return (
            f"{self.name} ({self.search}): {self.captions} captions of {self.images} images"
            + (f"; dropped: {dropped}" if dropped else "")
            + (f"; {self.missing} images without any" if self.missing else "")
        )


@dataclass(frozen=True)
class Taker:
    """What a run takes from a store: of each image the best `captions_per_image`, without those that it cannot learn.

    A caption is dropped if the teacher did not finish it, if it contains UNK or has no word, or if it has a word
    outside of the vocabulary or more tokens than the model's positions, with SOS and EOS. No other one takes its place.
    """

    vocabulary: Vocabulary
    max_positions: int
    captions_per_image: int

    def problem(self, caption: str | None) -> str | None:
        """Why a caption cannot be learned; None if it can."""
        if caption is None:
            return NOT_FINISHED
        tokens = self.vocabulary.tokenize(caption)
        if not tokens:
            return NO_WORD
        if any(token in SPECIALS or token not in self.vocabulary.ids for token in tokens):
            return UNKNOWN
        return TOO_LONG if len(tokens) + 2 > self.max_positions else None

    def take(self, store: CaptionStore, keys: pa.ChunkedArray, path: Path) -> tuple[Mapping[str, int], str]:
        """Writes the captions of the images with these keys to a file, an Arrow table of CHUNK.

        Needs memory for the captions of one chunk, and looks up all keys in each chunk: 0.05 s per chunk for a million
        images. Returns the dropped captions by reason, and the file's SHA-256.
        """
        dropped: Counter[str] = Counter()
        with atomic_path(path) as temporary, pa.ipc.new_file(temporary, CHUNK) as writer:
            for part in _of_images(store.read(), keys):
                taken = []
                for captions in part["captions"].to_pylist():
                    problems = [(caption, self.problem(caption)) for caption in captions[: self.captions_per_image]]
                    dropped.update(problem for _, problem in problems if problem)
                    taken.append([caption for caption, problem in problems if problem is None])
                writer.write_table(part.set_column(1, CHUNK.field(1), pa.array(taken, CHUNK.field(1).type)))
        return dict(sorted(dropped.items())), file_digest(path)


def _of_images(chunks: Iterator[pa.Table], keys: pa.ChunkedArray) -> Iterator[pa.Table]:
    """The rows of these images, each once: two commands may have captioned the same image at the same time."""
    is_left = np.ones(len(keys), bool)
    for chunk in chunks:
        rows = pc.index_in(keys, value_set=chunk["key"])
        is_here = is_left & rows.is_valid().to_numpy(zero_copy_only=False)
        is_left &= ~is_here
        if is_here.any():
            yield chunk.take(rows.filter(pa.array(is_here))).combine_chunks()


def read_taken(path: Path) -> pa.Table:
    """The table of CHUNK in the file of a run, memory-mapped. Raises DamagedError."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().cast(CHUNK)
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowKeyError, ValueError) as error:
        raise DamagedError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return table


def count_taken(table: pa.Table, images: Dataset) -> tuple[int, int]:
    """How many of the images have a caption in a table of CHUNK, and how many captions these are."""
    lengths = pc.list_value_length(table["captions"])
    counts = lengths.take(pc.index_in(images.table["key"], value_set=table["key"]).drop_null())
    return pc.sum(pc.greater(counts, 0)).as_py() or 0, pc.sum(counts).as_py() or 0


def captions_of(images: Dataset, table: pa.Table) -> Iterator[list[str]]:
    """The captions of each image in a table of CHUNK with each key once, one image at a time; [] for others.

    Needs memory for a hash table of the keys, and for the captions of some thousand images.
    """
    rows = pc.index_in(images.table["key"], value_set=table["key"])
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        for captions in table["captions"].take(rows.slice(start, ROWS_AT_A_TIME)).to_pylist():
            yield captions or []
