"""Captions for many images with a trained captioner or several: batched beam search, sharded over workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from models.alignment import alignment_scores
from models.base import Memory
from models.captioner import Captioner
from models.constraints import ConstraintAutomaton, build_automaton, constrained_beam_search
from models.decoding import Captions, beam_search
from pipeline.config.sections import EvaluationSection
from pipeline.data.images import BadImage
from pipeline.data.vocabulary import Vocabulary
from pipeline.features.model_inputs import Images
from pipeline.runtime.context import Context, gather_objects


class Hypothesis(NamedTuple):
    """A caption and the sum of its tokens' log-probabilities, EOS with them.

    alignment: of an image's best caption by a single model, how far words and image tokens agree (`models.alignment`).
    num_satisfied: how many of its image's constraints it holds; None without constraints.
    """

    caption: str
    log_prob: float
    alignment: float | None = None
    num_satisfied: int | None = None


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
    machines: Mapping[int, ConstraintAutomaton] | None = None,
    align: bool = False,
) -> dict[int, list[Hypothesis]]:
    """The `settings.num_results` best captions of every `world_size`-th image from `rank` on; needs no process group.

    Several captioners are an ensemble; `images` gives each its own inputs of the same images, in one order. The batch
    is halved, down to one image, when memory runs out. An image that cannot be read raises, or goes into `bad` with the
    reason where that is given. `machines` are the constraints of the images that have any, by image id. align:
    compute each best caption's alignment, by one more pass.
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
                mine.update(_caption(captioners, images, part, vocabulary, settings, device, machines or {}, align))
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


@torch.no_grad()  # in inference mode autocast would convert every weight anew at every use
def _caption(
    captioners: Sequence[Captioner],
    images: Sequence[Images],
    rows: np.ndarray,
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    device: torch.device,
    machines: Mapping[int, ConstraintAutomaton],
    align: bool,
) -> dict[int, list[Hypothesis]]:
    ids = [int(images[0].image_ids[row]) for row in rows]
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
        memories = [_encoded(captioner, own, rows, device) for captioner, own in zip(captioners, images, strict=True)]
        found, held = _search(captioners, memories, [machines.get(image) for image in ids], vocabulary, settings)
        alignment: list[float | None] = [None] * len(ids)
        if align and len(captioners) == 1:
            values = alignment_scores(captioners[0].model, memories[0], found.tokens[:, 0]).tolist()
            alignment = [None if math.isnan(value) else value for value in values]
    sums = found.log_probs.sum(-1).tolist()
    return {
        image: [
            Hypothesis(vocabulary.decode(tokens), value, alignment[number] if not place else None, own)
            for place, (tokens, value, own) in enumerate(zip(*columns, strict=True))
            if own is None or own >= 0
        ]
        for number, (image, columns) in enumerate(
            zip(ids, zip(found.tokens.tolist(), sums, held, strict=True), strict=True)
        )
    }


def _encoded(captioner: Captioner, images: Images, rows: np.ndarray, device: torch.device) -> Memory:
    return captioner.encode(images.load(rows).to(device))


def _search(
    captioners: Sequence[Captioner],
    memories: Sequence[Memory],
    machines: Sequence[ConstraintAutomaton | None],
    vocabulary: Vocabulary,
    settings: EvaluationSection,
) -> tuple[Captions, list[list[int | None]]]:
    """The best captions, and how many constraints each holds: None for those of an image without any."""
    models = [captioner.model for captioner in captioners]
    beam, longest, best = settings.beam_size, settings.max_length, settings.num_results
    if not any(machines):
        found = beam_search(models, memories, beam_size=beam, max_length=longest, num_results=best)
        return found, [[None] * best for _ in machines]
    none = build_automaton([], len(vocabulary))
    own_machines = [own or none for own in machines]
    constrained = constrained_beam_search(
        models, memories, own_machines, beam_size=beam, max_length=longest, num_results=best
    )
    held = constrained.num_satisfied.tolist()
    return constrained, [
        [own if machine is not None or own < 0 else None for own in row]
        for row, machine in zip(held, machines, strict=True)
    ]
