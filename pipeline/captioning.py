"""Captions for many images with a trained captioner: batched beam search, sharded over workers."""

from __future__ import annotations

import numpy as np
import torch

from models.captioner import Captioner
from models.decoding import beam_search
from pipeline.batches import Images
from pipeline.config import EvaluationSection
from pipeline.context import Context, gather_objects
from pipeline.text import Vocabulary


def caption_images(
    captioner: Captioner, images: Images, vocabulary: Vocabulary, settings: EvaluationSection, context: Context
) -> dict[int, str]:
    """The best caption of every image by its id, on every rank. Each rank computes its share (a collective)."""
    mine = caption_share(
        captioner, images, vocabulary, settings, context.world_rank, context.world_size, context.device
    )
    return in_order(images, gather_objects(context, mine))


def caption_share(
    captioner: Captioner,
    images: Images,
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    rank: int,
    world_size: int,
    device: torch.device,
) -> dict[int, str]:
    """Captions of every `world_size`-th image from `rank` on; needs no process group.

    The batch is halved, down to one image, when memory runs out.
    """
    rows = np.arange(len(images))[rank::world_size]
    training = captioner.training
    captioner.eval()
    mine: dict[int, str] = {}
    start, size = 0, settings.batch_size
    try:
        while start < len(rows):
            part = rows[start : start + size]
            try:
                mine.update(_caption(captioner, images, part, vocabulary, settings, device))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if size == 1:
                    raise
                size //= 2
                continue
            start += len(part)
    finally:
        captioner.train(training)
    return mine


def in_order(images: Images, shares: list[dict[int, str]]) -> dict[int, str]:
    """The shares of all ranks as one mapping in the order of the images."""
    merged = {image: caption for share in shares for image, caption in share.items()}
    return {int(image): merged[int(image)] for image in images.image_ids}


@torch.inference_mode()
def _caption(
    captioner: Captioner,
    images: Images,
    rows: np.ndarray,
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    device: torch.device,
) -> dict[int, str]:
    memory = captioner.encode(images.load(rows).to(device))
    captions = beam_search(captioner.model, memory, beam_size=settings.beam_size, max_length=settings.max_length)
    ids = captions.tokens[:, 0].tolist()
    return {int(images.image_ids[row]): vocabulary.decode(tokens) for row, tokens in zip(rows, ids, strict=True)}
