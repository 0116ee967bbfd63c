"""Features of a few images in memory, and their captions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raycap.models.base import Features
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.evaluation.captioning.search import caption_batches
from raycap.pipeline.evaluation.results import RankedCaption
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.runtime.context import LocalContext


def half(rank: int) -> LocalContext:
    """One of two workers."""
    context = LocalContext()
    context.world_rank, context.world_size = rank, 2
    return context


class FewImages(Images):
    """Features in memory, in place of a store."""

    def __init__(self, features: torch.Tensor) -> None:
        self.store = self.positions = self.transform = None
        self.features, self.image_ids = features, np.arange(len(features)) + 1
        self.unreadable: set[int] = set()  # rows
        self.error: Exception = BadImage("row 3 is damaged")

    def load(self, rows: np.ndarray) -> Features:
        if self.unreadable.intersection(rows.tolist()):
            raise self.error
        return Features(self.features[rows])


def caption_split(*arguments: Any) -> tuple[dict[int, list[RankedCaption]], dict[int, str]]:
    """The captions and unreadable images of all batches."""
    hypotheses: dict[int, list[RankedCaption]] = {}
    unreadable: dict[int, str] = {}
    for captions, reasons in caption_batches(*arguments):
        hypotheses |= captions
        unreadable |= reasons
    return hypotheses, unreadable
