"""The stored captions of a teacher: Parquet files of some hundred images, called chunks.

    distilled/<digest of the teacher>/<chunk>.parquet   key, captions: those of the beam, the best first

The teacher's digest contains its search. A chunk's name is a hash of the content keys of its images, so that a repeated
task writes the same file again, and no lock is needed. A chunk is written whole; a damaged one is removed when missing
images are looked for, and its captions are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.distillation.teacher import Teacher
from pipeline.features.store import shard_name
from pipeline.storage.path import StoragePath
from pipeline.storage.tables import read_cache, read_table, write_table

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

    def has(self, keys: Sequence[str]) -> bool:
        """Whether there is a chunk of exactly these images, so that a repeated task need not compute it again."""
        return self._path(keys).exists()

    def write(self, keys: Sequence[str], captions: Mapping[str, Sequence[str | None]]) -> None:
        """Writes the chunk of these images. Those without an entry in `captions` could not be read.

        Without any entry there is no chunk, so that a later command tries these images again.
        """
        rows = {key: captions[key] for key in keys if key in captions}
        if rows:
            short = [[text if len(text or "") <= MAX_CAPTION else None for text in texts] for texts in rows.values()]
            write_table(self._path(keys), pa.table([list(rows), short], schema=CHUNK))

    def lacks(self, keys: pa.ChunkedArray) -> np.ndarray:
        """For each image, whether the store lacks its captions: bools (len(keys),). Removes damaged chunks."""
        missing = np.ones(len(keys), bool)
        with ThreadPoolExecutor(NUM_READS) as pool:
            for stored in pool.map(lambda name: read_cache(self.folder / name, CHUNK)["key"], self.chunks()):
                missing &= ~pc.is_in(keys, value_set=stored).to_numpy(zero_copy_only=False)
        return missing

    def read(self) -> Iterator[pa.Table]:
        """The tables of all chunks, one at a time. Raises DamagedError for a damaged one."""
        for name in self.chunks():
            yield read_table(self.folder / name, CHUNK)

    def _path(self, keys: Sequence[str]) -> StoragePath:
        return self.folder / f"{shard_name(keys)}.parquet"


def caption_store(config: RunConfig, teacher: Teacher) -> CaptionStore:
    """The store of a teacher in the storage of a run."""
    return CaptionStore(config.storage_place / f"distilled/{teacher.digest[:20]}")


def images_to_caption(config: RunConfig, dataset: Dataset) -> Dataset:
    """The training images of a data set with content keys, each content once, without their captions."""
    table = dataset.split(*config.data.train_splits).readable().table.select(["image_id", "uri", "key"])
    keys = pc.unique(table["key"])
    return Dataset(table if len(keys) == len(table) else table.take(pc.index_in(keys, value_set=table["key"])))
