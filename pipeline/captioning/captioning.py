"""Captions many images with one model or an ensemble. Each worker runs batched beam search over its share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from pipeline.scoring.split_result import Hypothesis

Hypotheses = dict[int, list[Hypothesis]]  # by image id, best first


@dataclass(frozen=True)
class CaptionSearch:
    """The settings of a search for captions.

    with_alignment: compute the alignment of each best caption, which takes one more decoder pass per batch.
    skip_unreadable: report images that cannot be read, instead of raising BadImage or OSError at the first.
    """

    settings: EvaluationSection
    vocabulary: Vocabulary
    with_alignment: bool = False
    skip_unreadable: bool = False


@dataclass(frozen=True)
class Shard:
    """One worker's share of the images: every `world_size`-th image, starting with number `rank`, on `device`."""

    rank: int
    world_size: int
    device: torch.device


def caption_images(
    captioner: Captioner, images: Images, vocabulary: Vocabulary, settings: EvaluationSection, context: Context
) -> dict[int, Hypothesis]:
    """The best caption of every image by image id, on every rank.

    This is a collective operation: every rank must call it, and captions its shard.
    """
    shard, was_training = Shard(context.world_rank, context.world_size, context.device), captioner.training
    hypotheses, _ = caption_split([captioner], [images], CaptionSearch(settings, vocabulary), shard=shard)
    captioner.train(was_training)
    best = {image: ranked[0] for image, ranked in hypotheses.items()}
    merged = {image: hypothesis for part in gather_objects(context, best) for image, hypothesis in part.items()}
    return {int(image): merged[int(image)] for image in images.image_ids}


def caption_split(
    models: Sequence[Captioner],
    inputs: Sequence[Images],
    search: CaptionSearch,
    *,
    shard: Shard,
    constraints: Mapping[int, ConstraintAutomaton] | None = None,
) -> tuple[Hypotheses, dict[int, str]]:
    """The `search.settings.num_results` best captions of each image of the shard, and {unreadable image: reason}.

    Several models form an ensemble. They are set to evaluation mode. `inputs` contains each model's inputs of the same
    images in the same order, and `constraints` the constraints by image id, for images that have any. When the GPU's
    memory runs out, the batch size is halved, down to one image. The function needs no process group.
    """
    caption = _BatchCaptioner(models, inputs, search, shard.device, constraints or {}).caption
    rows = np.arange(len(inputs[0]))[shard.rank :: shard.world_size]
    hypotheses: Hypotheses = {}
    unreadable: dict[int, str] = {}
    captioned_alone: set[int] = set()  # positions in `rows`
    start, size = 0, search.settings.batch_size
    for model in models:
        model.eval()
    while start < len(rows):
        batch = rows[start : start + (1 if start in captioned_alone else size)]
        try:
            hypotheses |= caption(batch)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if size == 1:
                raise
            size //= 2
            continue
        except (BadImage, OSError) as error:
            if not search.skip_unreadable:
                raise
            if len(batch) > 1:  # caption these images one by one, to find the unreadable one
                captioned_alone |= set(range(start, start + len(batch)))
                continue
            unreadable[int(inputs[0].image_ids[batch[0]])] = str(error)
        start += len(batch)
    return hypotheses, unreadable


@dataclass(frozen=True)
class _BatchCaptioner:
    """Captions one batch of images, given by their rows."""

    models: Sequence[Captioner]
    inputs: Sequence[Images]
    search: CaptionSearch
    device: torch.device
    constraints: Mapping[int, ConstraintAutomaton]

    @torch.no_grad()  # not inference mode, in which autocast converts each weight anew at every use
    def caption(self, rows: np.ndarray) -> Hypotheses:
        image_ids = [int(self.inputs[0].image_ids[row]) for row in rows]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.search.settings.precision == "bfloat16"):
            memories = [
                model.encode(images.load(rows).to(self.device))
                for model, images in zip(self.models, self.inputs, strict=True)
            ]
            captions, satisfied = self._search(memories, [self.constraints.get(image) for image in image_ids])
            alignment = self._alignment(memories, captions)
        log_probs = captions.log_probs.sum(-1)
        hypotheses: Hypotheses = {image: [] for image in image_ids}
        for row, image in enumerate(image_ids):
            ranked = zip(captions.tokens[row].tolist(), log_probs[row].tolist(), satisfied[row], strict=True)
            for rank, (tokens, log_prob, count) in enumerate(ranked):
                if count is None or count >= 0:  # a constrained search marks captions that it did not find with -1
                    caption = self.search.vocabulary.decode(tokens)
                    best_alignment = alignment[row] if rank == 0 else None
                    hypotheses[image].append(Hypothesis(caption, log_prob, best_alignment, count, tuple(tokens)))
        return hypotheses

    def _search(
        self, memories: Sequence[Memory], automata: Sequence[ConstraintAutomaton | None]
    ) -> tuple[Captions, list[list[int | None]]]:
        """The best captions, and the number of constraints that each satisfies.

        The number is None for an image without constraints, and -1 for a caption that the search did not find.
        """
        models, settings = [model.model for model in self.models], self.search.settings
        limits = {key: getattr(settings, key) for key in ("beam_size", "max_length", "num_results")}
        if not any(automata):
            return beam_search(models, memories, **limits), [[None] * settings.num_results for _ in automata]
        unconstrained = build_automaton([], len(self.search.vocabulary))
        constrained = constrained_beam_search(
            models, memories, [automaton or unconstrained for automaton in automata], **limits
        )
        return constrained, [
            [count if automaton is not None or count < 0 else None for count in counts]
            for counts, automaton in zip(constrained.num_satisfied.tolist(), automata, strict=True)
        ]

    def _alignment(self, memories: Sequence[Memory], captions: Captions) -> list[float | None]:
        """The alignment of each image's best caption. It is None for an ensemble and when it is not defined."""
        best = captions.tokens[:, 0]
        if not self.search.with_alignment or len(self.models) > 1:
            return [None] * len(best)
        values = alignment_scores(self.models[0].model, memories[0], best).tolist()
        return [None if math.isnan(value) else value for value in values]
