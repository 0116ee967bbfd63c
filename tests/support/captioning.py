"""Captions in the process of the test, in place of tasks on Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from raycap.jobs.cluster_captions import Captioned, SplitTask
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.evaluation.captioning.bundle import ModelSource
from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_batches
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.store.store import open_store
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.path import StoragePath


class Captioning:
    """Captions in this process. `num_calls`: how often. `fails_at`: the number of the call that fails."""

    num_calls, fails_at = 0, 0

    def __call__(
        self,
        models: Sequence[ModelSource],
        splits: Mapping[str, SplitTask],
        config: RunConfig,
        *,
        store: StoragePath | None = None,
        with_alignment: bool = True,
    ) -> dict[str, Captioned]:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise KeyboardInterrupt
        ((name, (images, constraints)),) = splits.items()
        (bundle,) = (model.load() for model in models)
        features = None if bundle.transform or store is None else open_store(store, config.features)
        inputs = Images(images, features, bundle.transform, max_pixels=10**6, threads=1, options=config.storage.options)
        search = CaptionSearch(config.evaluation, bundle.vocabulary, with_alignment, True)
        hypotheses_of, reasons, begin = {}, {}, time.monotonic()
        context = LocalContext(torch.device("cpu"))
        for hypotheses, unreadable in caption_batches([bundle.captioner], [inputs], search, context, constraints):
            hypotheses_of |= hypotheses
            reasons |= unreadable
        return {name: Captioned(hypotheses_of, reasons, time.monotonic() - begin)}
