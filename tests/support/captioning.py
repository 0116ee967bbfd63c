"""Captions in the process of the test in place of tasks on Ray, and captions without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pyarrow as pa
import torch

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.evaluation.captioning.on_cluster import Captioned, SplitTask, TaskModel
from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_batches
from raycap.pipeline.evaluation.results import ImageCaption, RankedCaption
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runtime.context import LocalContext


class Captioning:
    """Captions in this process. `num_calls`: how often. `fails_at`: the number of the call that fails."""

    num_calls, fails_at = 0, 0

    def __call__(
        self,
        models: Sequence[TaskModel],
        splits: Mapping[str, SplitTask],
        config: RunConfig,
        *,
        with_values: bool = True,
    ) -> Captioned:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise KeyboardInterrupt
        (model,), ((name, (images, constraints)),) = models, splits.items()
        bundle, store = model.load(), None if model.store is None else open_store(model.store, config.features)
        source = bundle.transform if store is None else store
        assert source is not None
        inputs = Images(images, source, max_pixels=10**6, threads=1, options=config.storage.options)
        search = CaptionSearch(config.evaluation, bundle.vocabulary, with_values, skip_unreadable=True)
        found, begin = {}, time.monotonic()
        context = LocalContext(torch.device("cpu"))
        for hypotheses, unreadable in caption_batches([bundle.captioner], [inputs], search, context, constraints):
            found |= {image: ImageCaption(tuple(ranked)) for image, ranked in hypotheses.items()}
            found |= {image: ImageCaption(error=reason) for image, reason in unreadable.items()}
        return Captioned({name: found}, time.monotonic() - begin)


def captions_of(
    texts: Mapping[int, str | Sequence[str]], signals: Mapping[int, tuple[float, ...]] | None = None
) -> dict[int, ImageCaption]:
    """The captions of images by id, one text or several for each, as an evaluation has them."""
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
