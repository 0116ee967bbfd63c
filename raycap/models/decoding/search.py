"""Greedy decoding, sampling and beam search with one model or an ensemble, and the rules that forbid words.

`models` and `memories` are one model and its memory, or equally long sequences of them. Several models are an ensemble,
which averages their probabilities; they share one vocabulary. Log-probabilities are float32 (float64 for a float64
model). Rules forbid words, and do not change the log-probabilities of allowed words.

Shapes: B images, K beams or samples per image, R = B*K rows, one for each caption, t tokens so far with SOS, T caption
tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Memory, check_positions
from raycap.models.config import PLAIN, Decoding, ModelSizes

CHECK_EVERY = 4  # steps between two checks on a GPU whether captions have ended, because each check waits for the GPU
COLUMN_WORDS = 20  # `best_words` arranges the vocabulary in columns of this many words

Models = CaptionModel | Sequence[CaptionModel]
Memories = Memory | Sequence[Memory]


@dataclass(frozen=True)
class ScoreRules:
    """The rules of `decoding` with word ids for one vocabulary, and the ranking of captions.

    unk: the id of UNK, or None if no word is UNK. open_endings: the ids of words that need another word after them.
    length_normalization: see `length_divisor`.
    """

    decoding: Decoding = PLAIN
    unk: int | None = None
    open_endings: tuple[int, ...] = ()
    length_normalization: bool | float = True

    def restriction(
        self, sizes: ModelSizes, max_length: int, device: torch.device
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns a function that applies the rules to captions of at most `max_length` tokens with SOS and EOS.

        The function takes log-probabilities (R, V) of the words after tokens (R, t), and returns them with -inf for
        forbidden words. If a row would have every word forbidden, EOS is allowed.
        """
        decoding = self.decoding

        def mask_of(words: Sequence[int]) -> Tensor:
            """Returns a mask (V,) that is True for the words."""
            mask = torch.zeros(sizes.vocabulary_size, dtype=torch.bool, device=device)
            # `mask[words] = True` would copy the list (with some versions of torch also True) to the GPU, and a CUDA
            # graph cannot capture this copy.
            for word in words:
                mask[word].fill_(True)
            return mask

        is_eos, is_open = mask_of([sizes.eos]), mask_of(self.open_endings if decoding.no_open_endings else ())
        is_unk = mask_of([self.unk]) if decoding.suppress_unk and self.unk is not None else None

        def restrict(log_probs: Tensor, tokens: Tensor) -> Tensor:
            length, ngram = tokens.shape[1], decoding.no_repeat_ngram
            masks = [] if is_unk is None else [is_unk[None]]
            if length + 1 < decoding.min_length:
                masks.append(is_eos[None])
            if ngram is not None and length >= ngram:
                masks.append(repeating_words(tokens, ngram, log_probs.shape[1]))
            if decoding.no_open_endings:
                masks.append(is_open[tokens[:, -1:]] & is_eos)
                if length + 1 == max_length:  # the next word is the last one
                    masks.append(is_open[None])
            if not masks:
                return log_probs
            forbidden = functools.reduce(torch.logical_or, masks)
            only_eos_is_left = forbidden.all(-1, keepdim=True) & is_eos
            return log_probs.masked_fill(forbidden & ~only_eos_is_left, -torch.inf)

        return restrict


def repeating_words(tokens: Tensor, order: int, vocabulary: int) -> Tensor:
    """Returns a mask (R, V) of the words that would repeat an n-gram of `order` tokens in tokens (R, t), t >= order."""
    windows = tokens.unfold(1, order, 1)  # (R, t - order + 1, order)
    last = tokens[:, tokens.shape[1] - order + 1 :]
    repeats = (windows[:, :, :-1] == last[:, None]).all(-1)
    words = windows[:, :, -1].where(repeats, vocabulary)  # other windows mark column V, which is cut off
    mask = torch.zeros(len(tokens), vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return mask.scatter(1, words, True)[:, :vocabulary]


def most_probable(log_probs: Tensor, count: int) -> Tensor:
    """Returns log_probs (R, V) with -inf for all but the `count` most probable words. Ties with the last remain."""
    limit = log_probs.topk(min(count, log_probs.shape[1]), -1).values[:, -1:]
    return log_probs.masked_fill(log_probs < limit, -torch.inf)


def nucleus(log_probs: Tensor, share: float) -> Tensor:
    """Returns log_probs (R, V) with -inf for all but the fewest words whose probabilities add up to `share`.

    Words that are as probable as the last of these words remain. The rows need not be normalized.
    """
    ordered = log_probs.double().softmax(-1).sort(-1, descending=True)
    before = ordered.values.cumsum(-1) - ordered.values  # the probability of all more probable words
    last = (before < share).sum(-1, keepdim=True) - 1
    limit = log_probs.gather(1, ordered.indices.gather(1, last))
    return log_probs.masked_fill(log_probs < limit, -torch.inf)


def length_divisor(lengths: Tensor, normalization: bool | float) -> Tensor:
    """Returns what to divide each caption's sum of log-probabilities by, to rank captions of different lengths.

    lengths: the numbers of tokens with SOS and EOS. normalization: True divides by the length, so that means are
    ranked. False divides by 1. A number is the exponent alpha of the length penalty ((5 + n) / 6) ** alpha, where n
    counts the tokens without SOS (Wu et al. 2016, arXiv 1609.08144, equation 14).
    """
    if isinstance(normalization, bool):
        return lengths if normalization else torch.ones_like(lengths)
    return ((lengths + 4) / 6) ** normalization


@dataclass
class Captions:
    """n captions for each of B images. The longest caption has T tokens."""

    tokens: Tensor  # (B, n, T) int64: SOS, words, EOS if the caption has ended, then PAD
    log_probs: Tensor  # (B, n, T) float32 of each token; 0 at SOS and after the end
    lengths: Tensor  # (B, n) int64, the number of tokens with SOS and EOS
    scores: Tensor  # (B, n) float32, the sum of log-probabilities over `length_divisor`, which ranks captions


class Decoder:
    """One or several models that decode the same tokens.

    images: the indices of the unfinished images. keeps_images: If it is True, finished images are never dropped.
    """

    def __init__(
        self, models: Models, memories: Memories, beams: int, max_length: int, *, keeps_images: bool = False
    ) -> None:
        self.models = [models] if isinstance(models, CaptionModel) else list(models)
        memories = [memories] if isinstance(memories, Memory) else list(memories)
        if max_length < 2:
            raise ValueError(f"max_length is {max_length}; it counts SOS and EOS and must be 2 or more")
        self.sizes = self.models[0].sizes
        for model in self.models:
            check_positions(max_length - 1, model.sizes.max_positions)
        self.beams, self.keeps_images = beams, keeps_images
        self.device = memories[0].states.device
        self.images = torch.arange(memories[0].batch_size, device=self.device)
        # without dropout, all beams of an image are equal in the first step, so that it runs once per image
        self.shares_first_step = not any(model.training for model in self.models)
        rows = 1 if self.shares_first_step else beams
        pairs = zip(self.models, memories, strict=True)
        self.caches = [model.init_cache(memory, rows) for model, memory in pairs]

    @property
    def check_every(self) -> int:
        """The number of steps between two checks which images have ended."""
        return CHECK_EVERY if self.device.type == "cuda" else 1

    def step(self, tokens: Tensor) -> Tensor:
        """Returns log-probabilities (R, V) of the next token: for an ensemble, logarithms of mean probabilities."""
        once_per_image = self.shares_first_step and self.caches[0].length == 0
        if once_per_image:
            tokens = tokens[:: self.beams]
        outputs = []
        for index, model in enumerate(self.models):
            logits, self.caches[index] = model.step(tokens, self.caches[index])
            outputs.append(logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)))
        log_probs = outputs[0]
        if len(outputs) > 1:
            log_probs = torch.logsumexp(torch.stack(outputs), 0).sub_(math.log(len(outputs)))
        if once_per_image:
            self.caches = [cache.expand_beams(self.beams) for cache in self.caches]
            log_probs = log_probs.repeat_interleave(self.beams, 0)
        return log_probs

    def select(self, index: Tensor) -> None:
        self.caches = [cache.select(index) for cache in self.caches]

    def drop_finished(self, finished: Tensor) -> Tensor | None:
        """Drops the images where `finished` (B,) is True, if they are at least half of all images.

        If fewer are finished, they stay, because dropping copies data. Further steps do not change their captions. Only
        every `check_every`-th step checks. Returns the indices of the remaining images, or None if none was dropped.
        """
        if self.keeps_images or self.caches[0].length % self.check_every:
            return None
        if 2 * int(finished.sum()) < len(self.images):
            return None
        remaining = (~finished).nonzero()[:, 0]
        self.images = self.images[remaining]
        if len(remaining):
            self.caches = [cache.keep_images(remaining) for cache in self.caches]
        return remaining


def caption_lengths(tokens: Tensor, eos: int) -> Tensor:
    """Returns the lengths (...) of captions (..., T): up to and with their first EOS, or T if there is no EOS."""
    before = (tokens == eos).cumsum(-1) == 0
    return (before.sum(-1) + 1).clamp_(max=tokens.shape[-1])


@torch.no_grad()
def greedy(models: Models, memories: Memories, *, max_length: int) -> Captions:
    """Decodes the most probable token at each step: captions (B, 1, T). `max_length` counts SOS and EOS."""
    decoder = Decoder(models, memories, 1, max_length)
    return _roll_out(decoder, max_length, lambda log_probs, rows, tokens: log_probs.argmax(-1))


@torch.no_grad()
def sample(
    models: Models,
    memories: Memories,
    *,
    num_samples: int,
    max_length: int,
    rules: ScoreRules = ScoreRules(),
    generator: torch.Generator | None = None,
    draws: Tensor | None = None,
) -> Captions:
    """Samples `num_samples` captions per image. Tokens are drawn from softmax(logits / temperature) within `rules`.

    `max_length` counts SOS and EOS. A caption that has not ended by then has no EOS. (The reference's sampler does not
    count SOS, so that its 20 is 21 here.) The result's `log_probs` are those of temperature 1 without rules. Each row
    takes one uniform number per step, from `generator` or from `draws` (B * num_samples, max_length), so that the same
    captions can be drawn again.
    """
    decoder, decoding = Decoder(models, memories, num_samples, max_length), rules.decoding
    restricted = rules.restriction(decoder.sizes, max_length, decoder.device)
    total = len(decoder.images) * num_samples
    draws = None if draws is None else draws.to(decoder.device)

    def draw(log_probs: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        log_probs = restricted(log_probs, tokens)
        if decoding.temperature != 1.0:
            log_probs = (log_probs / decoding.temperature).log_softmax(-1)
        if decoding.top_k is not None:
            log_probs = most_probable(log_probs, decoding.top_k)
        if decoding.top_p is not None:
            log_probs = nucleus(log_probs, decoding.top_p)
        if draws is not None:
            uniform = draws[:, tokens.shape[1]]
        else:
            # all rows draw a number, also finished ones, so that a row's numbers do not depend on when others end
            device = log_probs.device if generator is None else generator.device
            uniform = torch.rand(total, dtype=torch.float64, generator=generator, device=device).to(log_probs.device)
        return draw_by_inversion(log_probs.exp(), uniform[rows])

    return _roll_out(decoder, max_length, draw)


def image_draws(seeds: Sequence[int], num_samples: int, max_length: int) -> Tensor:
    """Draws uniform numbers (B * num_samples, max_length) for `sample`. An image's numbers depend only on its seed."""
    shape = (num_samples, max_length)
    generators = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.cat([torch.rand(shape, dtype=torch.float64, generator=generator) for generator in generators])


def draw_by_inversion(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Returns the index (R,) at which the cumulative sum of probabilities (R, V) exceeds a uniform number in [0, 1).

    uniform: one number per row, (R,), where torch.multinomial would draw V. To sum few numbers, which is done in
    float64, the function first finds a block of words and then the word in this block.
    """
    count = probabilities.shape[-1]
    width = math.isqrt(count)
    whole = count // width * width
    sums = probabilities[:, :whole].unflatten(1, (-1, width)).sum(-1)
    if whole < count:
        sums = torch.cat((sums, probabilities[:, whole:].sum(-1, keepdim=True)), 1)
    block, place = _locate(sums, uniform[:, None])
    words = block * width + torch.arange(width, device=block.device)
    inside = probabilities.gather(1, words.clamp(max=count - 1)).masked_fill(words >= count, 0.0)
    # clamped, because NaN from a diverged model may give an index beyond the last word in the last block
    return (block * width + _locate(inside, place)[0])[:, 0].clamp_(max=count - 1)


def _locate(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Divides [0, 1) in proportion to weights (R, n), and finds the interval of a uniform number (R, 1).

    Returns the interval's index (R, 1), and the number's place in the interval (R, 1), in [0, 1).
    """
    upper = weights.cumsum(-1, dtype=torch.float64)
    target = uniform * upper[:, -1:]
    # right=True finds the first cumulative weight above the target, so that a weight of 0 is never chosen
    position = torch.searchsorted(upper, target, right=True)
    position.clamp_(max=weights.shape[-1] - 1)  # avoids an index error for NaN from a diverged model
    weight = weights.gather(1, position).double()
    within = (target - (upper.gather(1, position) - weight)) / weight
    return position, within.clamp_(0.0, 1.0 - 2.0**-52)  # below 1, because it is used as a uniform number


def _roll_out(decoder: Decoder, max_length: int, choose: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Captions:
    """Decodes each row on its own, without beams.

    choose: returns the next tokens (R,) of the unfinished rows from their log-probabilities (R, V), their indices (R,)
    and their tokens so far (R, t).
    """
    sizes, beams = decoder.sizes, decoder.beams
    total = len(decoder.images) * beams
    rows = torch.arange(total, device=decoder.device)
    tokens = torch.full((total, max_length), sizes.pad, device=decoder.device)
    tokens[:, 0] = sizes.sos
    ended = torch.zeros(total, dtype=torch.bool, device=decoder.device)
    chosen_log_probs = torch.empty(0)
    for position in range(1, max_length):
        step_log_probs = decoder.step(tokens[rows, position - 1])  # (R, V)
        if position == 1:
            chosen_log_probs = step_log_probs.new_zeros(total, max_length)
        chosen = choose(step_log_probs, rows, tokens[rows, :position])
        log_prob = step_log_probs.gather(1, chosen[:, None])[:, 0]
        tokens[rows, position] = chosen.masked_fill_(ended, sizes.pad)
        chosen_log_probs[rows, position] = log_prob.masked_fill_(ended, 0.0)
        ended |= chosen == sizes.eos
        remaining = decoder.drop_finished(ended.view(-1, beams).all(1))
        if remaining is not None:
            rows, ended = rows.view(-1, beams)[remaining].flatten(), ended.view(-1, beams)[remaining].flatten()
            if not len(rows):
                break
    lengths = caption_lengths(tokens, sizes.eos).view(-1, beams)
    longest = int(lengths.max())
    scores = (chosen_log_probs.sum(-1).view(-1, beams) / lengths).float()
    tokens, log_probs = (x[:, :longest].reshape(-1, beams, longest) for x in (tokens, chosen_log_probs))
    return Captions(tokens, log_probs.float(), lengths, scores)


def best_words(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` greatest log-probabilities of each row (R, V), greatest first, and their words.

    Both are (R, count). The vocabulary is arranged in columns of `COLUMN_WORDS` words, and only the columns with the
    greatest maxima are searched. On a CPU, torch.topk over all words would take twice as long, and could choose other
    words among equally probable ones.
    """
    num_words = log_probs.shape[-1]
    num_columns = num_words // COLUMN_WORDS
    if num_columns < count:
        return log_probs.topk(count, -1)
    whole = num_columns * COLUMN_WORDS  # the number of words in columns; the rest always remain candidates
    maxima = log_probs[:, :whole].unflatten(1, (COLUMN_WORDS, num_columns)).amax(1)
    columns = maxima.topk(count, -1).indices
    starts = torch.arange(0, whole, num_columns, device=columns.device)
    candidates = (columns[:, :, None] + starts).flatten(1)
    if whole < num_words:
        rest = torch.arange(whole, num_words, device=columns.device)
        candidates = torch.cat((candidates, rest.expand(len(candidates), -1)), 1)
    best, index = log_probs.gather(1, candidates).topk(count, -1)
    return best, candidates.gather(1, index)


@torch.no_grad()
def beam_search(
    models: Models,
    memories: Memories,
    *,
    beam_size: int,
    max_length: int,
    num_results: int = 1,
    rules: ScoreRules = ScoreRules(),
) -> Captions:
    """Returns the `num_results` best captions per image, best first, by the search of ExpansionNet v2's reference.

    Each beam offers its `beam_size` best words, and the `beam_size` best sums of log-probabilities are kept. An ended
    beam keeps its sum and remains a candidate. The search stops when every beam has ended, or at `max_length` tokens
    with SOS and EOS. Captions are ranked by their sum divided by `length_divisor`, by default the number of tokens. If
    fewer captions were found than asked for, the remaining results have the score -inf.
    """
    decoder = Decoder(models, memories, beam_size, max_length)
    results = search(decoder, start_beams(decoder, max_length, rules.decoding), max_length, rules)
    captions, _ = results.ranked(num_results, rules.length_normalization)
    return captions


BeamsType = TypeVar("BeamsType", bound="Beams")


def search(decoder: Decoder, beams: BeamsType, max_length: int, rules: ScoreRules = ScoreRules()) -> BeamsType:
    """Extends the beams of every image until they are finished. Finished images leave the batch."""
    results = beams
    restricted = rules.restriction(decoder.sizes, max_length, decoder.device)
    num_beams = decoder.beams
    for position in range(1, max_length):
        log_probs = decoder.step(beams.tokens[:, :, position - 1].flatten())
        if position == 1:
            beams.log_probs = log_probs.new_zeros(beams.tokens.shape)
            beams.scores = log_probs.new_full(beams.ended.shape, -torch.inf)
            beams.scores[:, :: beams.group_size] = 0.0  # only a group's first beam, because all are equal
            results = beams.pick(decoder.images)
        log_probs = restricted(log_probs, beams.tokens[:, :, :position].flatten(0, 1))
        parent = beams.extend(log_probs, position)
        first_rows = torch.arange(0, parent.numel(), num_beams, device=parent.device)
        decoder.select((first_rows[:, None] + parent).flatten())
        images, finished = decoder.images, beams.finished()
        remaining = decoder.drop_finished(finished)
        if remaining is not None:
            results.write(images[finished], beams.pick(finished.nonzero()[:, 0]))
            beams = beams.pick(remaining)
            if not len(remaining):
                break
    results.write(decoder.images, beams)
    return results


@dataclass
class Beams:
    """Captions in progress: tokens and log_probs (B, K, max_length), scores (sums of log_probs) and ended (B, K)."""

    sizes: ModelSizes
    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    ended: Tensor

    @classmethod
    def start(cls, decoder: Decoder, max_length: int) -> Beams:
        """Returns beams of SOS only. `search` allocates log_probs and scores when their dtype is known."""
        shape = (len(decoder.images), decoder.beams)
        tokens = torch.full((*shape, max_length), decoder.sizes.pad, device=decoder.device)
        tokens[:, :, 0] = decoder.sizes.sos
        ended = torch.zeros(shape, dtype=torch.bool, device=decoder.device)
        return cls(decoder.sizes, tokens, log_probs=torch.empty(0), scores=torch.empty(0), ended=ended)

    @property
    def group_size(self) -> int:
        """The number of beams that compete with each other."""
        return self.ended.shape[1]

    def extend(self, log_probs: Tensor, position: int) -> Tensor:
        """Replaces each image's beams by their K best continuations, from log_probs (B*K, V).

        Returns the parents (B, K): the number of the former beam that each beam continues.
        """
        parent, word, log_prob, self.scores = self.continuations(log_probs)
        self.append(parent, word, log_prob, position)
        return parent

    def continuations(self, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Finds the K best continuations of each image's beams, from log_probs (B*K, V).

        Returns their parents, words, log-probabilities and sums, each (B, K).
        """
        num_beams = self.ended.shape[1]
        per_beam = min(num_beams, self.sizes.vocabulary_size)
        best, words = (part.view(-1, num_beams, per_beam) for part in best_words(log_probs, per_beam))
        best = best.masked_fill(self.ended[:, :, None], -torch.inf)
        best[:, :, 0].masked_fill_(self.ended, 0.0)  # an ended beam is one candidate, whose sum does not change
        words = words.masked_fill(self.ended[:, :, None], self.sizes.pad).flatten(1)
        sums, chosen = (self.scores[:, :, None] + best).flatten(1).topk(num_beams, -1)
        return chosen // per_beam, words.gather(1, chosen), best.flatten(1).gather(1, chosen), sums

    def append(self, parent: Tensor, word: Tensor, log_prob: Tensor, position: int) -> None:
        """Replaces each beam by the beam `parent` with `word` at `position`. parent, word and log_prob are (B, K)."""
        index = parent[:, :, None].expand_as(self.tokens)
        self.tokens = self.tokens.gather(1, index)
        self.tokens[:, :, position] = word
        self.log_probs = self.log_probs.gather(1, index)
        self.log_probs[:, :, position] = log_prob
        self.ended = self.ended.gather(1, parent) | (word == self.sizes.eos)

    def finished(self) -> Tensor:
        """Returns (B,), True for images without a beam that can be extended."""
        return self.ended.all(1)

    def pick(self: BeamsType, images: Tensor) -> BeamsType:
        """Returns a copy of the beams of the images with the indices `images` (int64)."""
        return replace(self, **{name: getattr(self, name)[images] for name in BEAM_TENSORS})

    def write(self, images: Tensor, beams: Beams) -> None:
        """Overwrites the beams of the images with the indices `images` (int64) by `beams`, in the same order."""
        for name in BEAM_TENSORS:
            getattr(self, name)[images] = getattr(beams, name)

    def ranked(
        self, num_results: int, length_normalization: bool | float, excluded: Tensor | None = None
    ) -> tuple[Captions, Tensor]:
        """Returns the `num_results` best captions per image, and their beams. excluded: beams to leave out (B, K)."""
        lengths = caption_lengths(self.tokens, self.sizes.eos)
        scores = self.scores / length_divisor(lengths, length_normalization)
        if excluded is not None:
            scores = scores.masked_fill(excluded, -torch.inf)
        best_scores, order = scores.topk(num_results, -1)
        best_lengths = lengths.gather(1, order)
        longest = int(best_lengths.max())
        index = order[:, :, None].expand(-1, -1, longest)
        tokens, log_probs = (x[:, :, :longest].gather(1, index) for x in (self.tokens, self.log_probs))
        return Captions(tokens, log_probs.float(), best_lengths, best_scores.float()), order


BEAM_TENSORS = ("tokens", "log_probs", "scores", "ended")


@dataclass
class GroupedBeams(Beams):
    """Groups of equally many beams, which prefer different words (`Decoding`). Scores do not include the diversity."""

    num_groups: int
    diversity: float  # taken from a word's log-probability for each beam of an earlier group that has chosen the word

    @property
    def group_size(self) -> int:
        return self.ended.shape[1] // self.num_groups

    def extend(self, log_probs: Tensor, position: int) -> Tensor:
        by_beam = log_probs.unflatten(0, (-1, self.ended.shape[1]))  # (B, K, V)
        times_chosen = torch.zeros_like(by_beam[:, 0])  # (B, V): how many beams of earlier groups chose a word
        groups = [
            self._extend_group(slice(first, first + self.group_size), by_beam, times_chosen)
            for first in range(0, self.ended.shape[1], self.group_size)
        ]
        parents, words, word_log_probs, self.scores = (torch.cat(parts, 1) for parts in zip(*groups, strict=True))
        self.append(parents, words, word_log_probs, position)
        return parents

    def _extend_group(self, of_group: slice, by_beam: Tensor, times_chosen: Tensor) -> tuple[Tensor, ...]:
        """Does what `continuations` does for the beams `of_group`, and adds their words to `times_chosen`."""
        group = Beams(self.sizes, *(getattr(self, name)[:, of_group] for name in BEAM_TENSORS))
        log_probs = by_beam[:, of_group]
        lowered = log_probs - self.diversity * times_chosen[:, None]
        parent, word, _, _ = group.continuations(lowered.flatten(0, 1))  # parents are counted within the group
        has_ended = group.ended.gather(1, parent)
        log_prob = log_probs.flatten(1).gather(1, parent * by_beam.shape[-1] + word).masked_fill(has_ended, 0.0)
        times_chosen.scatter_add_(1, word, (~has_ended).to(times_chosen.dtype))
        return parent + of_group.start, word, log_prob, group.scores.gather(1, parent) + log_prob


def start_beams(decoder: Decoder, max_length: int, decoding: Decoding) -> Beams:
    """Returns beams of SOS only, in as many equal groups as `decoding` says."""
    beams = Beams.start(decoder, max_length)
    if decoding.beam_groups == 1:
        return beams
    return GroupedBeams(**vars(beams), num_groups=decoding.beam_groups, diversity=decoding.diversity)


def by_score(captions: Captions, length_normalization: bool | float) -> Captions:
    """Sorts the captions of each image, best first, by their sum of log-probabilities over `length_divisor`."""
    scores = captions.log_probs.sum(-1) / length_divisor(captions.lengths, length_normalization)
    best_scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
    index = order[:, :, None].expand_as(captions.tokens)
    tokens, log_probs = (each.gather(1, index) for each in (captions.tokens, captions.log_probs))
    return Captions(tokens, log_probs, captions.lengths.gather(1, order), best_scores)
