"""Reads the images of a data set with tasks on a Ray cluster, for `raycap check`, `raycap retrain` and `raycap run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.cluster.start import cluster_address, start_ray
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.content_keys import HashedFiles, numbered
from raycap.pipeline.data.images import hash_batch, measure_batch
from raycap.pipeline.features.interruptions import one_sentence, repeat_interrupted_tasks
from raycap.pipeline.runs.check import Reader, Threads
from raycap.pipeline.storage.s3 import StorageOptions

IMAGES_PER_TASK = 500


def image_reader(config: RunConfig, address: str | None) -> Reader:
    """What reads the images of a check: tasks on the cluster at `address` or RAY_ADDRESS; without one, threads."""
    return ImageTasks(config, address) if cluster_address(address) else Threads()


@dataclass(frozen=True)
class ImageTasks:
    """Reads images on a cluster (`pipeline.runs.check.Reader`)."""

    config: RunConfig
    address: str | None

    def hash_files(self, uris: pa.Array, options: StorageOptions) -> Iterator[HashedFiles]:
        settings = {"options": options, "cache_bytes": self.config.features.cache_bytes}
        return map(HashedFiles.of_batch, self._mapped(numbered(uris), hash_batch, settings))

    def measure(self, table: pa.Table, config: RunConfig) -> Iterator[dict[str, np.ndarray]]:
        settings = {"max_pixels": config.data.max_pixels, "options": config.storage.options}
        return self._mapped(table, measure_batch, settings)

    def _mapped(
        self, table: pa.Table, function: Callable[..., dict[str, Any]], settings: dict[str, Any]
    ) -> Iterator[dict[str, np.ndarray]]:
        """What a function makes of a table, with IMAGES_PER_TASK rows for each task."""
        import ray.data
        from ray.data import DataContext

        start_ray(self.config, self.address, "images")
        repeat_interrupted_tasks()
        DataContext.get_current().execution_no_progress_timeout_s = -1  # the watch ends a stall
        with StallWatch("reading images", self.config.workers) as progressed:
            starts = range(0, len(table), IMAGES_PER_TASK)
            source = ray.data.from_blocks([table.slice(at, IMAGES_PER_TASK).combine_chunks() for at in starts])
            mapped = source.map_batches(function, fn_kwargs=settings, batch_size=None, num_cpus=1)
            with one_sentence("reading images"):
                for batch in mapped.iter_batches(batch_size=None):
                    progressed()
                    yield batch
