"""Beam search in numpy, with raycap's ranking and rules.

Shapes: B images, K beams per image, T caption tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycap_onnx.description import CaptionerError, Values, Words, is_number

MAX_BEAMS, MAX_TOKENS = 1000, 10_000

# Log-probabilities (B, K, V) after one more token (B, K) per beam, and the new cache; from the tokens, the rows (B, K)
# of the cache that the beams continue, the images' memory, and the cache, which is None at first.
Step = Callable[[np.ndarray, np.ndarray, dict[str, Any], Any], tuple[np.ndarray, Any]]


@dataclass(frozen=True)
class Search:
    """The search and its rules, as `evaluation` and `evaluation.decoding` of raycap's configurations describe them.

    ranking: "mean" or "sum" of the log-probabilities, or the exponent of the length penalty. max_length and min_length
    count SOS and EOS.
    """

    beam_size: int
    max_length: int
    ranking: str | float
    collapse_repeats: bool
    suppress_unk: bool
    min_length: int
    no_repeat_ngram: int | None
    no_open_endings: bool

    @classmethod
    def parse(cls, read: Values, max_positions: int) -> Search:
        """The search in captioner.json. Raises CaptionerError for values that no search has."""
        if read.get("sampling", bool) or read.number("beam_groups", 1, MAX_BEAMS) > 1:
            raise CaptionerError(
                f"{read.name} asks for drawn captions or groups of beams, which raycap_onnx does not have; export a "
                "model whose search has neither"
            )
        ranking: Any = read.values.get("ranking")
        if ranking not in ("mean", "sum") and not is_number(ranking):
            raise CaptionerError(f"{read.name}: ranking is {ranking!r:.80}; expected mean, sum or a number")
        max_length = read.number("max_length", 2, max_positions)
        repeats = read.values.get("no_repeat_ngram")
        return cls(
            beam_size=read.number("beam_size", 1, MAX_BEAMS),
            max_length=max_length,
            ranking=ranking,
            collapse_repeats=read.get("collapse_repeats", bool),
            suppress_unk=read.get("suppress_unk", bool),
            min_length=read.number("min_length", 2, max_length),
            no_repeat_ngram=None if repeats is None else read.number("no_repeat_ngram", 1, MAX_TOKENS),
            no_open_endings=read.get("no_open_endings", bool),
        )

    def divisor(self, lengths: np.ndarray) -> np.ndarray:
        """By what the sums of log-probabilities of captions with these lengths are divided to rank them."""
        if self.ranking == "mean":
            return lengths.astype(np.float32)
        if self.ranking == "sum":
            return np.ones(lengths.shape, np.float32)
        return ((lengths.astype(np.float32) + 4) / 6) ** np.float32(self.ranking)


class Beams:
    """The beams of B images in progress: tokens and log_probs (B, K, T), their sums `scores`, and `ended` (B, K)."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.log_probs = tokens, np.zeros(tokens.shape, np.float32)
        self.scores = np.full(tokens.shape[:2], -np.inf, np.float32)
        self.scores[:, 0] = 0.0  # all beams are equal: only the first one is extended
        self.ended = np.zeros(tokens.shape[:2], bool)

    def extend(self, log_probs: np.ndarray, position: int, words: Words) -> np.ndarray:
        """Keeps the K best continuations, from log_probs (B, K, V). Returns the beams (B, K) that they continue."""
        num_images, num_beams, num_words = log_probs.shape
        offered = min(num_beams, num_words)
        word = np.argpartition(log_probs, num_words - offered, -1)[:, :, num_words - offered :]
        best = np.take_along_axis(log_probs, word, -1)
        order = np.argsort(-best, -1, kind="stable")
        word, best = (np.take_along_axis(each, order, -1) for each in (word, best))
        best[self.ended], word[self.ended] = -np.inf, words.pad
        best[self.ended, 0] = 0.0  # an ended beam is one candidate and keeps its score
        sums = (self.scores[:, :, None] + best).reshape(num_images, -1)
        chosen = np.argsort(-sums, -1, kind="stable")[:, :num_beams]
        parent = chosen // offered
        self.scores = np.take_along_axis(sums, chosen, -1)
        self.tokens, self.log_probs = (
            np.take_along_axis(each, parent[:, :, None], 1) for each in (self.tokens, self.log_probs)
        )
        self.tokens[:, :, position] = np.take_along_axis(word.reshape(num_images, -1), chosen, -1)
        self.log_probs[:, :, position] = np.take_along_axis(best.reshape(num_images, -1), chosen, -1)
        self.ended = np.take_along_axis(self.ended, parent, 1) | (self.tokens[:, :, position] == words.eos)
        return parent

    def pick(self, images: np.ndarray) -> Beams:
        """A copy of the beams of the images with these indices."""
        picked = copy.copy(self)
        for name, each in vars(self).items():
            setattr(picked, name, each[images])
        return picked

    def write(self, images: np.ndarray, beams: Beams) -> None:
        """Overwrites the beams of the images with these indices."""
        for name, each in vars(self).items():
            each[images] = getattr(beams, name)

    def best(self, search: Search, words: Words) -> list[tuple[list[int], float]]:
        """The tokens of the best caption of each image, with SOS and EOS, and the sum of its log-probabilities."""
        before = np.cumsum(self.tokens == words.eos, -1) == 0
        lengths = np.minimum(before.sum(-1) + 1, self.tokens.shape[-1])
        beam = (self.scores / search.divisor(lengths)).argmax(-1)
        image = np.arange(len(beam))
        sums = self.log_probs[image, beam].sum(-1).tolist()
        rows = zip(self.tokens[image, beam].tolist(), lengths[image, beam].tolist(), strict=True)
        return [(tokens[:length], log_prob) for (tokens, length), log_prob in zip(rows, sums, strict=True)]


def beam_search(
    step: Step, memory: dict[str, np.ndarray], search: Search, words: Words, open_endings: np.ndarray
) -> Beams:
    """The beams of all images after the search. Finished images leave the batch when they are at least half of it.

    open_endings: the ids of words that need another word after them.
    """
    num_beams, num_images = search.beam_size, len(next(iter(memory.values())))
    tokens = np.full((num_images, num_beams, search.max_length), words.pad, np.int64)
    tokens[:, :, 0] = words.sos
    beams, images, cache = Beams(tokens), np.arange(num_images), None
    results = beams.pick(images)
    new, rows = tokens[:, :1, 0], images[:, None]  # all beams start alike: in the first step an image has one
    for position in range(1, search.max_length):
        log_probs, cache = step(new, rows, memory, cache)
        num_rows = log_probs.shape[1]  # per image
        log_probs = np.repeat(log_probs, num_beams // num_rows, 1)
        log_probs = _restricted(log_probs, beams.tokens[:, :, :position], search, words, open_endings)
        parent = beams.extend(log_probs, position, words)
        rows = np.arange(len(images))[:, None] * num_rows + np.minimum(parent, num_rows - 1)
        finished = np.asarray(beams.ended.all(1))
        if 2 * finished.sum() >= len(images):
            results.write(images[finished], beams.pick(finished))
            images, beams, rows = images[~finished], beams.pick(~finished), rows[~finished]
            if not len(images):
                return results
            memory = {name: each[~finished] for name, each in memory.items()}
        new = beams.tokens[:, :, position]
    results.write(images, beams)
    return results


def _restricted(
    log_probs: np.ndarray, tokens: np.ndarray, search: Search, words: Words, open_endings: np.ndarray
) -> np.ndarray:
    """The log-probabilities (B, K, V) of the words after `tokens` (B, K, t), with -inf for forbidden words.

    EOS is allowed where every word would be forbidden.
    """
    length = tokens.shape[-1]
    forbidden = np.zeros(log_probs.shape, bool)
    if search.suppress_unk:
        forbidden[:, :, words.unk] = True
    if length + 1 < search.min_length:
        forbidden[:, :, words.eos] = True
    order = search.no_repeat_ngram
    if order is not None and length >= order:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, order, -1)  # (B, K, t - order + 1, order)
        repeats = (windows[..., :-1] == tokens[:, :, None, length - order + 1 :]).all(-1)
        image, beam, window = np.nonzero(repeats)
        forbidden[image, beam, windows[image, beam, window, -1]] = True
    if search.no_open_endings:
        forbidden[:, :, words.eos] |= np.isin(tokens[:, :, -1], open_endings)
        if length + 1 == search.max_length:  # the next word is the last one
            forbidden[:, :, open_endings] = True
    forbidden[:, :, words.eos] &= ~forbidden.all(-1)
    return np.where(forbidden, np.float32(-np.inf), log_probs)
