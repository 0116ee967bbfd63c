"""Captions many images with one model or an ensemble. Each worker runs a batched search over its share.

Two measures of a best caption take one teacher-forced pass each. The alignment is the normalized fine-grained score of
Ada-ClustFormer's paper (section 4.1). A word and an image token agree if each is the nearest of the other, and the
alignment is the share of words that agree with an image token. The energy of a token is minus the log-sum-exp of its
logits (Liu et al. 2020, arXiv 2010.03759, eq. 4 with temperature 1). It is higher on images unlike those of the
training. Log-probabilities do not contain it, because softmax removes the common level of the logits.

Shapes: B images, N image tokens, T caption tokens with SOS, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Memory, evaluating, hooked, valid_tokens
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

Hypotheses = dict[int, list[RankedCaption]]  # by image id, best first


@dataclass(frozen=True)
class CaptionSearch:
    """The settings of a search for captions.

    with_values: compute the alignment and the signals of each best caption. This takes one decoder pass per batch, and
        another one over the first tokens. Ensembles have neither, and captions with constraints have no signals.
    skip_unreadable: report images that cannot be read. Without it, the first of them raises BadImage or OSError.
        Requests that the storage refuses or does not answer always raise, because the image is not at fault.
    """

    settings: EvaluationSection
    vocabulary: Vocabulary
    with_values: bool = True
    skip_unreadable: bool = False


def caption_images(
    captioner: Captioner,
    images: Images,
    vocabulary: Vocabulary,
    settings: EvaluationSection,
    context: Context,
    report: Callable[[float], object] = lambda _: None,
) -> dict[int, RankedCaption]:
    """The best caption of every image by image id, on every rank, without its signals.

    This is a collective operation: every rank must call it, and captions its shard. After each batch, `report` is
    called with the finished fraction of the shard.
    """
    was_training = captioner.training
    shard_size = len(_shard(images, context))
    best: dict[int, RankedCaption] = {}
    search = CaptionSearch(settings, vocabulary, with_values=False)
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
    """Yields the `search.settings.num_results` best captions by image id, and {unreadable image: reason}, by batch.

    Each rank captions its shard, every `world_size`-th image; no process group is needed. Several models form an
    ensemble; all are set to evaluation mode. `inputs` contains each model's inputs of the same images in the same
    order. `constraints` contains the constraints by image id, for images that have any. When the GPU's memory runs out,
    fewer images are captioned at a time, down to one. Each item still covers `images_at_a_time` images.
    """
    if search.settings.precision == "auto":
        raise ValueError("evaluation.precision is auto, which must be decided before the search")
    shard, batch_size = _shard(inputs[0], context), search.settings.images_at_a_time(context.device.type)
    size = batch_size  # images that are captioned at a time
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
        start = one_by_one_until = 0  # images before this position are captioned one at a time
        while start < len(rows):
            batch = rows[start : start + (1 if start < one_by_one_until else size)]
            try:
                hypotheses |= _caption_batch(models, inputs, search, context.device, constraints or {}, batch, graphs)
            except torch.OutOfMemoryError:
                if graphs is None and size == 1:
                    raise
                # without the graphs, which take memory of their own, the same batch may fit
                graphs, size = None, size if graphs is not None else size // 2
                torch.cuda.empty_cache()
                continue
            except (BadImage, OSError) as error:
                is_storage_at_fault = isinstance(error, StorageError) and not isinstance(error, ChangedError)
                if is_storage_at_fault or not search.skip_unreadable:
                    raise
                if len(batch) > 1:  # try these images one at a time, to find the unreadable one
                    one_by_one_until = start + len(batch)
                    continue
                unreadable[int(inputs[0].image_ids[batch[0]])] = without_secrets(str(error))
            start += len(batch)
        yield hypotheses, unreadable


def _shard(images: Images, context: Context) -> np.ndarray:
    """The rows of the images that belong to this rank."""
    return np.arange(len(images))[context.world_rank :: context.world_size]


@torch.no_grad()  # in inference mode, autocast would convert each weight again at every use
def _caption_batch(
    models: Sequence[Captioner],
    inputs: Sequence[Images],
    search: CaptionSearch,
    device: torch.device,
    constraints: Mapping[int, ConstraintAutomaton],
    rows: np.ndarray,
    graphs: GraphedSearch | None,
) -> Hypotheses:
    """The captions of the images in these rows. The other arguments are those of `caption_batches`."""
    image_ids = [int(inputs[0].image_ids[row]) for row in rows]
    alignment: list[float] = [math.nan] * len(rows)
    with torch.autocast(device.type, torch.bfloat16, enabled=search.settings.precision == "bfloat16"):
        pairs = zip(models, inputs, strict=True)
        memories = [model.encode(on_device(each.load(rows), device, transform=each.transform)) for model, each in pairs]
        automata = [constraints.get(image) for image in image_ids]
        captions, satisfied = _search(models, memories, search, image_ids, automata, graphs)
        signals: list[tuple[float, ...]] = [()] * len(rows)
        if search.with_values and len(models) == 1:
            alignment = alignment_scores(models[0].model, memories[0], captions.tokens[:, 0]).tolist()
            if not constraints:
                signals = best_signals(models[0].model, memories[0], captions)
    log_probs = captions.log_probs.sum(-1)
    hypotheses: Hypotheses = {image: [] for image in image_ids}
    for row, image in enumerate(image_ids):
        ranked = zip(captions.tokens[row].tolist(), log_probs[row].tolist(), satisfied[row], strict=True)
        for rank, (tokens, log_prob, count) in enumerate(ranked):
            if count is None or count >= 0:  # a constrained search marks captions that it did not find with -1
                best_alignment = None if rank or math.isnan(alignment[row]) else alignment[row]
                caption = search.vocabulary.decode(tokens)
                if search.settings.collapse_repeats:
                    caption = collapsed(caption)
                of_best = () if rank else signals[row]
                found = RankedCaption(caption, log_prob, (), tuple(tokens), best_alignment, count, of_best)
                hypotheses[image].append(found)
    return hypotheses


def best_signals(model: CaptionModel, memory: Memory, captions: Captions) -> list[tuple[float, ...]]:
    """The signals of each image's best caption, from which the confidence follows (`evaluation.confidence`)."""
    tokens, log_probs, lengths = (part[:, 0] for part in (captions.tokens, captions.log_probs, captions.lengths))
    energies = caption_energies(model, memory, tokens, lengths, NUM_FIRST)
    return caption_signals(*(part.cpu().numpy() for part in (log_probs, lengths, energies)))


def _search(
    models: Sequence[Captioner],
    memories: Sequence[Memory],
    search: CaptionSearch,
    image_ids: Sequence[int],
    automata: Sequence[ConstraintAutomaton | None],
    graphs: GraphedSearch | None,
) -> tuple[Captions, list[list[int | None]]]:
    """The best captions, and the number of constraints that each satisfies.

    The number is None for an image without constraints, and -1 for a caption that the search did not find.
    """
    decoders, settings = [model.model for model in models], search.settings
    if not any(automata):
        if graphs is None:
            captions = find_captions(decoders, memories, settings, search.vocabulary, image_ids)
        else:
            captions = graphs(memories)
        return captions, [[None] * settings.num_results for _ in automata]
    unconstrained = build_automaton([], len(search.vocabulary))
    all_automata = [automaton or unconstrained for automaton in automata]
    options = beam_options(settings, search.vocabulary)
    constrained = constrained_beam_search(decoders, memories, all_automata, **options)
    return constrained, [
        [count if automaton is not None or count < 0 else None for count in counts]
        for counts, automaton in zip(constrained.num_satisfied.tolist(), automata, strict=True)
    ]


def score_rules(settings: EvaluationSection, vocabulary: Vocabulary) -> ScoreRules:
    """The rules of a search with their words in a vocabulary."""
    ranking = settings.ranking
    open_endings = tuple(vocabulary.ids[word] for word in sorted(OPEN_ENDINGS & vocabulary.ids.keys()))
    normalization = ranking if isinstance(ranking, float) else ranking == "mean"
    return ScoreRules(settings.decoding, vocabulary.ids[UNK], open_endings, normalization)


def beam_options(settings: EvaluationSection, vocabulary: Vocabulary) -> Values:
    """The options of `beam_search`."""
    options = {key: getattr(settings, key) for key in ("beam_size", "max_length", "num_results")}
    return options | {"rules": score_rules(settings, vocabulary)}


def find_captions(
    models: Models, memories: Memories, settings: EvaluationSection, vocabulary: Vocabulary, images: Iterable[object]
) -> Captions:
    """The captions of each image, best first.

    images: a text or number for each image, on which its drawn captions depend besides `decoding.seed`; read only to
    draw captions.
    """
    if not settings.decoding.sampling:
        return beam_search(models, memories, **beam_options(settings, vocabulary))
    rules, count, length = score_rules(settings, vocabulary), settings.num_results, settings.max_length
    seeds = [_seed(settings.decoding.seed, image) for image in images]
    draws = image_draws(seeds, count, length)
    captions = sample(models, memories, num_samples=count, max_length=length, rules=rules, draws=draws)
    return by_score(captions, rules.length_normalization)


def _seed(seed: int, image: object) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {image}".encode()).digest()[:7])


def collapsed(caption: str) -> str:
    """The caption with one word in place of equal neighboring words."""
    return " ".join(word for word, _ in groupby(caption.split()))


def aligned_words(image: Tensor, words: Tensor, valid_mask: Tensor | None, counted: Tensor) -> Tensor:
    """Whether each word agrees, (B, T), from image tokens (B, N, D) and word states (B, T, D).

    `valid_mask` (B, N) is True at image tokens that are not padding, `counted` (B, T) at tokens that are words.
    """
    products = image @ words.mT  # (B, N, T)
    if valid_mask is not None:
        products = products.masked_fill(~valid_mask[:, :, None], -torch.inf)
    nearest_token = products.argmax(1)  # (B, T) the image token of each word
    index = nearest_token[:, :, None].expand(-1, -1, words.shape[1])
    counted_products = products.masked_fill(~counted[:, None], -torch.inf)
    nearest_word = counted_products.gather(1, index).argmax(2)  # (B, T) the word nearest to that image token
    return (nearest_word == torch.arange(words.shape[1], device=words.device)) & counted


@torch.no_grad()
def alignment_scores(model: CaptionModel, memory: Memory, tokens: Tensor) -> Tensor:
    """The scores (B,) float32 of one caption per image, tokens (B, T) with SOS; NaN for a caption without words.

    The paper divides by no stated number; here it is the number of words. The state of a word is the one after the
    word was read. A model with several encoder levels is measured on the last one. When a caption fills the positional
    table, its last word has no state and is left out. A random model scores above 0.
    """
    tokens = tokens[:, : model.sizes.max_positions]
    sizes = model.sizes
    states: list[Tensor] = []  # the input of the output layer, which is the last decoder states (B, T, D)
    with evaluating(model), hooked([cast(nn.Module, model.lm_head)], lambda _, inputs: states.append(inputs[0])):
        model.decode(memory, tokens)
    ended = (tokens == sizes.eos).cumsum(1) > 0  # True at EOS and after it
    counted = ~ended & (tokens != sizes.sos) & (tokens != sizes.pad)
    image = memory.states[:, -1] if memory.states.ndim == 4 else memory.states
    agree = aligned_words(image.float(), states[0].float(), valid_tokens(memory.lengths, image.shape[1]), counted)
    return agree.sum(1) / counted.sum(1)  # 0 / 0 is NaN


@torch.no_grad()
def caption_energies(model: CaptionModel, memory: Memory, tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The mean energy (B,) float32 of the first `count` tokens of each caption; float64 for a float64 model.

    tokens: one caption per image, (B, T) with SOS. lengths: (B,) with SOS and EOS, 2 or more. count: the number of
    tokens after SOS. If a caption has fewer, the mean is over all of them.
    """
    counts = (lengths - 1).clamp(max=count)
    with evaluating(model):
        logits = model.decode(memory, tokens[:, :-1][:, :count])
    energies = -logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
    counted = torch.arange(energies.shape[1], device=energies.device) < counts[:, None]
    return energies.masked_fill(~counted, 0.0).sum(1) / counts
