"""Captions many images with one model or an ensemble. Each worker captions its share of the images in batches.

The energy of a token is minus the log-sum-exp of its logits (Liu et al. 2020, arXiv 2010.03759, eq. 4 with temperature
1). The energy is higher on images unlike those of the training. Log-probabilities do not show it, because softmax
removes the common level of the logits.

Shapes: B images, T caption tokens with SOS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Memory, evaluating
from raycap.models.captioner import Captioner
from raycap.models.config import Values
from raycap.models.decoding.constraints import ConstraintAutomaton, build_automaton, constrained_beam_search
from raycap.models.decoding.graphed_search import GraphedSearch
from raycap.models.decoding.search import (
    Captions,
    Memories,
    Models,
    ScoreRules,
    beam_search,
    by_score,
    image_draws,
    sample,
)
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.data.vocabulary import UNK, Vocabulary
from raycap.pipeline.evaluation.confidence import NUM_FIRST, caption_signals
from raycap.pipeline.evaluation.results import RankedCaption
from raycap.pipeline.evaluation.scores.words import OPEN_ENDINGS
from raycap.pipeline.features.model_inputs import Images, on_device
from raycap.pipeline.runtime.context import Context, gather_objects
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.cache import ChangedError
from raycap.pipeline.storage.s3 import StorageError

Hypotheses = dict[int, list[RankedCaption]]  # {image id: captions, best first}
NOT_FOUND = -1  # in the place of a number of constraints, if a constrained search found fewer captions than asked


@dataclass(frozen=True)
class CaptionSearch:
    """The settings of a search for captions.

    with_signals: compute the signals of each best caption, which take a decoder pass over the first tokens. Ensembles
        and captions with constraints get no signals.
    skip_unreadable: report images that cannot be read. If it is False, the first such image raises BadImage or OSError.
        An error is always raised if the storage refuses or does not answer, because the image is not at fault.
    """

    settings: EvaluationSection
    vocabulary: Vocabulary
    with_signals: bool = True
    skip_unreadable: bool = False


def caption_images(
    captioner: Captioner,
    images: Images,
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    context: Context,
    report: Callable[[float], object] = lambda _: None,
) -> dict[int, RankedCaption]:
    """The best caption of every image, by image id, without signals. Every rank gets all captions.

    The function is collective: every rank must call it, and captions its shard. report: is called after each batch with
    the finished fraction of the shard.
    """
    was_training = captioner.training
    shard_size = len(_shard(images, context))
    best: dict[int, RankedCaption] = {}
    search = CaptionSearch(settings, vocabulary, with_signals=False)
    for hypotheses, _ in caption_batches([captioner], [images], search, context):
        best |= {image: ranked[0] for image, ranked in hypotheses.items()}
        report(len(best) / shard_size)
    captioner.train(was_training)
    merged = {image: hypothesis for part in gather_objects(context, best) for image, hypothesis in part.items()}
    return {int(image): merged[int(image)] for image in images.image_ids}


def caption_batches(
    models: Sequence[Captioner],
    inputs: Sequence[Images],
    search: CaptionSearch,
    context: Context,
    constraints: Mapping[int, ConstraintAutomaton] | None = None,
) -> Iterator[tuple[Hypotheses, dict[int, str]]]:
    """Yields for each batch its `search.settings.num_results` best captions by image id, and {unreadable id: reason}.

    Each rank captions its shard, every `world_size`-th image, without a process group. models: one model, or several as
    an ensemble. All models are set to evaluation mode. inputs: for each model, its inputs of the same images in the
    same order. constraints: {image id: automaton}, for images with constraints. If the GPU's memory runs out, fewer
    images are captioned at a time, down to one, but each yielded batch still has `images_at_a_time` images.
    """
    shard, batch_size = _shard(inputs[0], context), search.settings.images_at_a_time(context.device.type)
    num_at_a_time = batch_size  # fewer after the GPU's memory ran out
    graphs = None
    if search.settings.cuda_graph and context.device.type == "cuda" and not search.settings.decoding.sampling:
        options = beam_options(search.settings, search.vocabulary)
        graphs = GraphedSearch([model.model for model in models], **options)
    for model in models:
        model.eval()
    for first in range(0, len(shard), batch_size):
        rows = shard[first : first + batch_size]
        hypotheses: Hypotheses = {}
        unreadable: dict[int, str] = {}
        start = 0
        while start < len(rows):
            batch = rows[start : start + num_at_a_time]
            caption = partial(_caption_batch, models, inputs, search, context.device, constraints or {}, graphs)
            try:
                found, reasons = _caption_readable(caption, batch, inputs[0].image_ids, search.skip_unreadable)
            except torch.OutOfMemoryError:
                if graphs is not None:  # graphs take memory of their own
                    graphs = None
                elif num_at_a_time > 1:
                    num_at_a_time //= 2
                else:
                    raise
                torch.cuda.empty_cache()
                continue
            hypotheses |= found
            unreadable |= reasons
            start += len(batch)
        yield hypotheses, unreadable


def _caption_readable(
    caption: Callable[[np.ndarray], Hypotheses], rows: np.ndarray, image_ids: np.ndarray, skip_unreadable: bool
) -> tuple[Hypotheses, dict[int, str]]:
    """Calls `caption` for these rows. Returns the captions by image id, and {unreadable id: reason}.

    If an image cannot be read, the images are captioned again one by one, to find which one it is.
    """
    try:
        return caption(rows), {}
    except (BadImage, OSError) as error:
        is_storage_at_fault = isinstance(error, StorageError) and not isinstance(error, ChangedError)
        if is_storage_at_fault or not skip_unreadable:
            raise
        if len(rows) == 1:
            return {}, {int(image_ids[rows[0]]): without_secrets(str(error))}
    hypotheses: Hypotheses = {}
    unreadable: dict[int, str] = {}
    for position in range(len(rows)):
        found, reasons = _caption_readable(caption, rows[position : position + 1], image_ids, skip_unreadable)
        hypotheses |= found
        unreadable |= reasons
    return hypotheses, unreadable


def _shard(images: Images, context: Context) -> np.ndarray:
    """The rows of the images that belong to this rank."""
    return np.arange(len(images))[context.world_rank :: context.world_size]


@torch.no_grad()  # not inference mode, because autocast would then convert each weight again at every use
def _caption_batch(
    models: Sequence[Captioner],
    inputs: Sequence[Images],
    search: CaptionSearch,
    device: torch.device,
    constraints: Mapping[int, ConstraintAutomaton],
    graphs: GraphedSearch | None,
    rows: np.ndarray,
) -> Hypotheses:
    """The captions of the images in these rows, by image id. The other arguments are those of `caption_batches`."""
    image_ids = [int(inputs[0].image_ids[row]) for row in rows]
    signals: list[tuple[float, ...]] = [()] * len(rows)
    with torch.autocast(device.type, torch.bfloat16, enabled=search.settings.precision == "bfloat16"):
        pairs = zip(models, inputs, strict=True)
        memories = [model.encode(on_device(each.load(rows), device, transform=each.transform)) for model, each in pairs]
        automata = [constraints.get(image) for image in image_ids]
        captions, num_satisfied = _search(models, memories, search, image_ids, automata, graphs)
        if search.with_signals and len(models) == 1 and not constraints:
            signals = best_signals(models[0].model, memories[0], captions)
    log_probs = captions.log_probs.sum(-1)
    hypotheses: Hypotheses = {}
    for row, image in enumerate(image_ids):
        found = zip(captions.tokens[row].tolist(), log_probs[row].tolist(), num_satisfied[row], strict=True)
        ranked = []
        for tokens, log_prob, count in found:
            if count == NOT_FOUND:
                continue
            caption = search.vocabulary.decode(tokens)
            caption = collapsed(caption) if search.settings.collapse_repeats else caption
            ranked.append(RankedCaption(caption, log_prob, ids=tuple(tokens), num_satisfied=count))
        if ranked:
            ranked[0] = replace(ranked[0], signals=signals[row])
        hypotheses[image] = ranked
    return hypotheses


def best_signals(model: CaptionModel, memory: Memory, captions: Captions) -> list[tuple[float, ...]]:
    """The signals of each image's best caption, from which the confidence is computed (`evaluation.confidence`)."""
    log_probs, lengths = captions.log_probs[:, 0], captions.lengths[:, 0]
    energies = caption_energies(model, memory, captions.tokens[:, 0], lengths, NUM_FIRST)
    return caption_signals(log_probs.cpu().numpy(), lengths.cpu().numpy(), energies.cpu().numpy())


def _search(
    models: Sequence[Captioner],
    memories: Sequence[Memory],
    search: CaptionSearch,
    image_ids: Sequence[int],
    automata: Sequence[ConstraintAutomaton | None],
    graphs: GraphedSearch | None,
) -> tuple[Captions, list[list[int | None]]]:
    """Finds the best captions. Returns them, and for each caption the number of constraints that it satisfies.

    The number is None if the image has no constraints, and NOT_FOUND if the search did not find the caption.
    """
    decoders, settings = [model.model for model in models], search.settings
    num_satisfied: list[list[int | None]] = [[None] * settings.num_results for _ in automata]
    if any(automata):
        unconstrained = build_automaton([], len(search.vocabulary))
        all_automata = [automaton or unconstrained for automaton in automata]
        options = beam_options(settings, search.vocabulary)
        captions = constrained_beam_search(decoders, memories, all_automata, **options)
        for row, counts in enumerate(captions.num_satisfied.tolist()):
            is_constrained = automata[row] is not None
            num_satisfied[row] = [each if is_constrained or each == NOT_FOUND else None for each in counts]
        return captions, num_satisfied
    if graphs is not None:
        return graphs(memories), num_satisfied
    return find_captions(decoders, memories, settings, search.vocabulary, image_ids), num_satisfied


def score_rules(settings: EvaluationSection, vocabulary: Vocabulary) -> ScoreRules:
    """The rules of a search, with words as ids of a vocabulary."""
    open_endings = tuple(vocabulary.ids[word] for word in sorted(OPEN_ENDINGS & vocabulary.ids.keys()))
    # A number is the exponent of the length. True divides by the length, and False keeps the sum.
    normalization = settings.ranking if isinstance(settings.ranking, float) else settings.ranking == "mean"
    return ScoreRules(settings.decoding, vocabulary.ids[UNK], open_endings, normalization)


def beam_options(settings: EvaluationSection, vocabulary: Vocabulary) -> Values:
    """The keyword arguments of `beam_search` for these settings."""
    options = {key: getattr(settings, key) for key in ("beam_size", "max_length", "num_results")}
    return options | {"rules": score_rules(settings, vocabulary)}


def find_captions(
    models: Models, memories: Memories, settings: EvaluationSection, vocabulary: Vocabulary, images: Iterable[object]
) -> Captions:
    """The captions of each image, best first, from beam search or, with `decoding.sampling`, from random draws.

    images: a text or number for each image. Its draws depend on this value and on `decoding.seed`, and on no other
    image. Beam search does not read the values.
    """
    if not settings.decoding.sampling:
        return beam_search(models, memories, **beam_options(settings, vocabulary))
    rules, count, length = score_rules(settings, vocabulary), settings.num_results, settings.max_length
    digests = [hashlib.sha256(f"{settings.decoding.seed} {image}".encode()).digest() for image in images]
    draws = image_draws([int.from_bytes(digest[:7]) for digest in digests], count, length)
    captions = sample(models, memories, num_samples=count, max_length=length, rules=rules, draws=draws)
    return by_score(captions, rules.length_normalization)


def collapsed(caption: str) -> str:
    """The caption with equal neighboring words replaced by one word."""
    return " ".join(word for word, _ in groupby(caption.split()))


@torch.no_grad()
def caption_energies(model: CaptionModel, memory: Memory, tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The mean energy (B,) of the first `count` tokens of each caption after SOS, float32, or float64 for such a model.

    tokens: one caption per image, (B, T) with SOS. lengths: (B,), tokens with SOS and EOS, 2 or more. If a caption has
    fewer than `count` tokens, the mean is over all of them.
    """
    counts = (lengths - 1).clamp(max=count)  # (B,) without SOS
    with evaluating(model):
        logits = model.decode(memory, tokens[:, :-1][:, :count])
    energies = -logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)  # (B, T - 1 or `count`)
    is_counted = torch.arange(energies.shape[1], device=energies.device) < counts[:, None]
    return energies.masked_fill(~is_counted, 0.0).sum(1) / counts
