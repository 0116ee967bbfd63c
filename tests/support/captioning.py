"""Captions in the process of the test in place of tasks on Ray, and captions without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pyarrow as pa

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.evaluation.captioning import on_cluster
from raycap.pipeline.evaluation.captioning.on_cluster import SplitTask, TaskModel
from raycap.pipeline.evaluation.results import ImageCaption, RankedCaption


def caption_here(
    models: Sequence[TaskModel], splits: Mapping[str, SplitTask], config: RunConfig, *, with_signals: bool = True
) -> tuple[dict[str, dict[int, ImageCaption]], float]:
    """What `caption_on_cluster` gives, computed in this process by the task of a single worker."""
    workers = config.workers.model_copy(update={"num_workers": 1})
    found: dict[str, dict[int, ImageCaption]] = {name: {} for name in splits}
    begin = time.monotonic()
    for name, captions, _ in on_cluster._caption_shard(
        0, models, splits, config.model_copy(update={"workers": workers}), with_signals
    ):
        found[name] |= captions
    return found, time.monotonic() - begin


def captions_of(
    texts: Mapping[int, str | Sequence[str]], signals: Mapping[int, tuple[float, ...]] | None = None
) -> dict[int, ImageCaption]:
    """The captions of images in the form of an evaluation. texts: one text or several for each image id."""
    found = {}
    for image, given in texts.items():
        several = [given] if isinstance(given, str) else given
        of_best = {} if signals is None else {"signals": signals[image]}
        ranked = [RankedCaption(text, -1.0, **({} if rank else of_best)) for rank, text in enumerate(several)]
        found[image] = ImageCaption(tuple(ranked))
    return found


def images_of(references: Mapping[int, Sequence[str]], split: str = "test") -> Dataset:
    """Images without files, with these references."""
    keys = [f"{image:064d}" for image in references]
    columns = [list(references), [split] * len(keys), keys, list(references.values()), keys]
    return Dataset(pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA))
