"""Captions for many images with a trained captioner or several: batched beam search, sharded over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from models.base import Memory
from models.captioner import Captioner
from models.decoding import beam_search
from pipeline.batches import Images
from pipeline.config import EvaluationSection
from pipeline.context import Context, gather_objects
from pipeline.images import BadImage
from pipeline.text import Vocabulary


class Hypothesis(NamedTuple):
    """A caption and the sum of its tokens' log-probabilities, EOS with them."""

    caption: str
    log_prob: float


def caption_images(
    captioner: Captioner, images: Images, vocabulary: Vocabulary, settings: EvaluationSection, context: Context
) -> dict[int, str]:
    """The best caption of every image by its id, on every rank. Each rank computes its share (a collective)."""
    rank, count = context.world_rank, context.world_size
    mine = caption_share([captioner], [images], vocabulary, settings, rank, count, context.device)
    best = {image: found[0].caption for image, found in mine.items()}
    merged = {image: caption for share in gather_objects(context, best) for image, caption in share.items()}
    return {int(image): merged[int(image)] for image in images.image_ids}


def caption_share(
    captioners: Sequence[Captioner],
    images: Sequence[Images],
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    rank: int,
    world_size: int,
    device: torch.device,
    bad: dict[int, str] | None = None,
) -> dict[int, list[Hypothesis]]:
    """The `settings.num_results` best captions of every `world_size`-th image from `rank` on; needs no process group.

    Several captioners are an ensemble; `images` gives each its own inputs of the same images, in one order. The batch
    is halved, down to one image, when memory runs out. An image that cannot be read raises, or goes into `bad` with the
    reason where that is given.
    """
    rows = np.arange(len(images[0]))[rank::world_size]
    training = [captioner.training for captioner in captioners]
    for captioner in captioners:
        captioner.eval()
    mine: dict[int, list[Hypothesis]] = {}
    alone: set[int] = set()
    start, size = 0, settings.batch_size
    try:
        while start < len(rows):
            part = rows[start : start + (1 if start in alone else size)]
            try:
                mine.update(_caption(captioners, images, part, vocabulary, settings, device))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if size == 1:
                    raise
                size //= 2
                continue
            except (BadImage, OSError) as error:
                if bad is None:
                    raise
                if len(part) > 1:  # one by one, to find out which
                    alone |= set(range(start, start + len(part)))
                    continue
                bad[int(images[0].image_ids[part[0]])] = str(error)
            start += len(part)
    finally:
        for captioner, before in zip(captioners, training, strict=True):
            captioner.train(before)
    return mine


@torch.inference_mode()
def _caption(
    captioners: Sequence[Captioner],
    images: Sequence[Images],
    rows: np.ndarray,
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    device: torch.device,
) -> dict[int, list[Hypothesis]]:
    memories = [_encoded(captioner, own, rows, device) for captioner, own in zip(captioners, images, strict=True)]
    found = beam_search(
        [captioner.model for captioner in captioners],
        memories,
        beam_size=settings.beam_size,
        max_length=settings.max_length,
        num_results=settings.num_results,
    )
    sums = found.log_probs.sum(-1).tolist()
    return {
        int(images[0].image_ids[row]): [
            Hypothesis(vocabulary.decode(ids), value) for ids, value in zip(tokens, values, strict=True)
        ]
        for row, tokens, values in zip(rows, found.tokens.tolist(), sums, strict=True)
    }


def _encoded(captioner: Captioner, images: Images, rows: np.ndarray, device: torch.device) -> Memory:
    lengths, boxes = (None if part is None else part.to(device) for part in images.regions(rows))
    return captioner.encode(images.load(rows).to(device), lengths, boxes)
