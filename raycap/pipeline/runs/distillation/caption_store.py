"""The stored captions of a teacher: Parquet files of some hundred images, called chunks.

    distilled/<digest>/<chunk>.parquet   key, captions: those of the beam, the best first

The digest is that of the teacher with its search. For region features, whose content keys are image ids, it also covers
the file and how it is read. A chunk's name is a hash of the content keys of its images, so that a repeated
task writes the same file again, and no lock is needed. A chunk is written whole; a damaged one is removed when missing
images are looked for, and its captions are computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.features.regions import describe_regions
from raycap.pipeline.features.store import feature_key, shard_name
from raycap.pipeline.runs.distillation.teacher import Teacher
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import from_bytes, read_cache, write_table

# a caption that the teacher did not finish, or that contains UNK, is null
CHUNK = pa.schema([("key", pa.string()), ("captions", pa.list_(pa.string()))])
MAX_CAPTION = 10_000  # characters; a bundle may come from a stranger
NUM_READS = 8  # chunks read at the same time


@dataclass(frozen=True)
class CaptionStore:
    """The captions of one teacher. It can be pickled, so that the tasks of a cluster write their chunks."""

    folder: StoragePath
    images_per_chunk: int = 512  # of the chunks that tasks write

    def chunks(self) -> list[str]:
        """The names of the chunks, in a fixed order."""
        return sorted(name for name in self.folder.list() if name.endswith(".parquet"))

    def stored(self, keys: Sequence[str]) -> set[str]:
        """Which of these images have captions in the chunk of exactly these images; none if there is no such chunk."""
        return set(read_cache(self._path(keys), CHUNK)["key"].to_pylist())

    def write(self, keys: Sequence[str], captions: Mapping[str, Sequence[str | None]]) -> None:
        """Writes the chunk of these images. Those without an entry in `captions` could not be read.

        Without any entry there is no chunk, so that a later command tries these images again.
        """
        rows = {key: captions[key] for key in keys if key in captions}
        if rows:
            short = [[text if len(text or "") <= MAX_CAPTION else None for text in texts] for texts in rows.values()]
            write_table(self._path(keys), pa.table([list(rows), short], schema=CHUNK))

    def lacks(self, keys: pa.ChunkedArray) -> np.ndarray:
        """For each image, whether the store lacks its captions: bools (len(keys),). Removes damaged chunks.

        Reads all chunks whole, because damage may be in the captions, too. Needs memory for the stored keys.
        """
        with ThreadPoolExecutor(NUM_READS) as pool:
            parts = pool.map(lambda name: read_cache(self.folder / name, CHUNK)["key"].combine_chunks(), self.chunks())
            stored = pa.chunked_array(list(parts), pa.string())
        return ~pc.is_in(keys, value_set=stored).to_numpy(zero_copy_only=False)

    def divide(self, images: Dataset, is_stored: np.ndarray, is_wanted: np.ndarray) -> ImageChunks:
        """Divides the wanted images into the chunks in which they are captioned. is_stored, is_wanted: (len(images),).

        Blocks of `images_per_chunk` images, stored or not, decide: the wanted images of a block of which nothing is
        stored are a chunk. After a kill these are the same chunks as before, although unreadable images of finished
        blocks are wanted again. All others, such as new images between old ones, fill chunks of their own.
        """
        size = self.images_per_chunk
        blocks = np.arange(len(images)) // size
        is_rest = is_wanted & np.isin(blocks, blocks[is_stored])
        whole, rest = np.flatnonzero(is_wanted & ~is_rest), np.flatnonzero(is_rest)
        starts = np.flatnonzero(np.diff(blocks[whole], prepend=-1)).tolist()
        starts += range(len(whole), len(whole) + len(rest), size)
        return ImageChunks(Dataset(images.table.take(pa.array(np.concatenate((whole, rest))))), tuple(starts))

    def read(self) -> Iterator[pa.Table]:
        """The tables of all chunks, one at a time. Raises DamagedError for a damaged one."""
        for name in self.chunks():
            yield from_bytes((self.folder / name).read_bytes(), CHUNK, name)

    def _path(self, keys: Sequence[str]) -> StoragePath:
        return self.folder / f"{shard_name(keys)}.parquet"


@dataclass(frozen=True)
class ImageChunks:
    """Images, and the row at which each chunk of them begins."""

    images: Dataset
    starts: tuple[int, ...]

    def of_worker(self, rank: int, num_workers: int) -> list[slice]:
        """The rows of every `num_workers`-th chunk."""
        ends = (*self.starts[1:], len(self.images))
        return [slice(*bounds) for bounds in list(zip(self.starts, ends, strict=True))[rank::num_workers]]


def caption_store(config: RunConfig, teacher: Teacher) -> CaptionStore:
    """The store of a teacher in the storage of a run. Reads the ends of the file of region features, if it has one."""
    digest = teacher.digest
    if not config.has_backbone:
        digest = hashlib.sha256(f"{digest} {feature_key(describe_regions(config))}".encode()).hexdigest()
    return CaptionStore(config.storage_place / f"distilled/{digest[:20]}")


def images_to_caption(config: RunConfig, dataset: Dataset) -> Dataset:
    """The training images of a data set with content keys, each content once, without their captions."""
    table = dataset.split(*config.data.train_splits).readable().table.select(["image_id", "uri", "key"])
    keys = pc.unique(table["key"])
    return Dataset(table if len(keys) == len(table) else table.take(pc.index_in(keys, value_set=table["key"])))
