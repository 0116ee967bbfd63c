"""Beam search in numpy, with raycap's ranking and rules.

Shapes: B images, K beams per image, T caption tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycap_onnx.description import CaptionerError, Words, is_number, require_flags, require_number

MAX_BEAMS, MAX_TOKENS = 1000, 10_000

# A step of the decoder. Arguments: the newest tokens (B, K) of the beams, the rows (B, K) of the cache that the beams
# continue, the encoder's result, and the cache, which is None before the first step. Result: the log-probabilities
# (B, K, V) of the words after the tokens, and the new cache.
Step = Callable[[np.ndarray, np.ndarray, dict[str, Any], Any], tuple[np.ndarray, Any]]


@dataclass(frozen=True)
class Search:
    """The search and its rules. The sections `evaluation` and `evaluation.decoding` of raycap describe the values.

    ranking: "mean" or "sum" of the log-probabilities, or the exponent of the length penalty. max_length, min_length:
    tokens of a caption, with SOS and EOS. max_positions: the largest max_length that the model takes. Raises
    CaptionerError for values out of range, and for searches that this package lacks: sampling and groups of beams.
    """

    beam_size: int
    max_length: int
    max_positions: int
    ranking: str | float
    collapse_repeats: bool
    suppress_unk: bool
    min_length: int
    no_repeat_ngram: int | None
    no_open_endings: bool
    sampling: bool
    beam_groups: int

    def __post_init__(self) -> None:
        if self.sampling or self.beam_groups != 1:
            raise CaptionerError("the search draws captions or has groups of beams, which need raycap itself")
        require_flags(self, "collapse_repeats", "suppress_unk", "no_open_endings")
        require_number(self.beam_size, "beam_size", 1, MAX_BEAMS)
        require_number(self.max_positions, "max_positions", 2, MAX_TOKENS)
        require_number(self.min_length, "min_length", 2, self.max_positions)
        require_number(self.max_length, "max_length", self.min_length, self.max_positions)
        if self.no_repeat_ngram is not None:
            require_number(self.no_repeat_ngram, "no_repeat_ngram", 1, MAX_TOKENS)
        if self.ranking not in ("mean", "sum") and not is_number(self.ranking):
            raise CaptionerError(f"ranking is {self.ranking!r:.80}; it must be mean, sum or a number")

    def divisor(self, lengths: np.ndarray) -> np.ndarray:
        """The numbers by which the log-probabilities of captions with the given lengths are divided for the ranking."""
        if self.ranking == "mean":
            return lengths.astype(np.float32)
        if self.ranking == "sum":
            return np.ones(lengths.shape, np.float32)
        return ((lengths.astype(np.float32) + 4) / 6) ** np.float32(self.ranking)


def beam_search(
    step: Step, memory: dict[str, np.ndarray], search: Search, words: Words
) -> list[tuple[list[int], float]]:
    """The tokens of the best caption of each image, with SOS and EOS, and the sum of their log-probabilities.

    As soon as at least half of the images in the batch are finished, they are removed from the batch.
    """
    num_images, num_beams = len(next(iter(memory.values()))), search.beam_size
    tokens = np.full((num_images, num_beams, search.max_length), words.pad, np.int64)
    tokens[:, :, 0] = words.sos
    log_probs, ended = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape[:2], bool)
    scores = np.full(ended.shape, -np.inf, np.float32)
    scores[:, 0] = 0.0  # All beams of an image are equal at first, so only the first beam is continued.
    images, cache = np.arange(num_images), None  # images: the numbers of those in the batch
    new, rows = tokens[:, :1, 0], images[:, None]  # one beam per image in the first step
    for position in range(1, search.max_length):
        word_log_probs, cache = step(new, rows, memory, cache)
        num_rows = word_log_probs.shape[1]  # computed beams per image: 1 in the first step, then K
        of_beams = np.repeat(word_log_probs, num_beams // num_rows, 1)  # (B, K, V)
        allowed = _restricted(of_beams, tokens[images, :, :position], search, words)
        parent, new, new_log_probs, scores[images] = _continued(allowed, scores[images], ended[images], words.pad)
        for history, last in ((tokens, new), (log_probs, new_log_probs)):
            history[images] = np.take_along_axis(history[images], parent[:, :, None], 1)
            history[images, :, position] = last
        ended[images] = np.take_along_axis(ended[images], parent, 1) | (new == words.eos)
        # The cache has the rows of the first image, then those of the second, and so on.
        rows = np.arange(len(images))[:, None] * num_rows + np.minimum(parent, num_rows - 1)
        remains = ~ended[images].all(1)
        if not remains.any():
            break
        if 2 * remains.sum() <= len(images):
            images, rows, new = images[remains], rows[remains], new[remains]
            memory = {name: each[remains] for name, each in memory.items()}
    before_eos = (np.cumsum(tokens == words.eos, -1) == 0).sum(-1)
    lengths = np.minimum(before_eos + 1, search.max_length)
    best = np.arange(num_images), (scores / search.divisor(lengths)).argmax(-1)
    captions = zip(tokens[best].tolist(), lengths[best].tolist(), log_probs[best].sum(-1).tolist(), strict=True)
    return [(caption[:length], log_prob) for caption, length, log_prob in captions]


def _continued(
    log_probs: np.ndarray, scores: np.ndarray, ended: np.ndarray, pad: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The K best continuations of each image's beams.

    log_probs: (B, K, V) of the words after each beam. scores, ended: of the beams (B, K). Returns four arrays (B, K):
    the number of the beam that is continued, the new word, the word's log-probability, and the new score.
    """
    num_images, num_beams, num_words = log_probs.shape
    num_offered = min(num_beams, num_words)  # the best words after each beam; more are never chosen
    unsorted = np.argpartition(log_probs, num_words - num_offered, -1)[:, :, num_words - num_offered :]
    order = np.argsort(-np.take_along_axis(log_probs, unsorted, -1), -1, kind="stable")
    word = np.take_along_axis(unsorted, order, -1)  # (B, K, num_offered), the most probable first
    value = np.take_along_axis(log_probs, word, -1)
    value[ended], word[ended] = -np.inf, pad
    value[ended, 0] = 0.0  # an ended beam has one continuation, PAD, which keeps its score
    # Each image's continuations of all beams, (B, K * num_offered)
    words, values, sums = (each.reshape(num_images, -1) for each in (word, value, scores[:, :, None] + value))
    chosen = np.argsort(-sums, -1, kind="stable")[:, :num_beams]
    new, new_log_probs, new_scores = (np.take_along_axis(each, chosen, -1) for each in (words, values, sums))
    return chosen // num_offered, new, new_log_probs, new_scores


def _restricted(log_probs: np.ndarray, tokens: np.ndarray, search: Search, words: Words) -> np.ndarray:
    """Sets the log-probabilities (B, K, V) of forbidden words after `tokens` (B, K, t) to -inf.

    If every word is forbidden, EOS is allowed.
    """
    length = tokens.shape[-1]
    forbidden = np.zeros(log_probs.shape, bool)
    forbidden[:, :, words.unk] = search.suppress_unk
    forbidden[:, :, words.eos] = length + 1 < search.min_length
    order = search.no_repeat_ngram
    if order is not None and length >= order:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, order, -1)  # (B, K, t - order + 1, order)
        repeats = (windows[..., :-1] == tokens[:, :, None, length - order + 1 :]).all(-1)
        image, beam, window = np.nonzero(repeats)
        forbidden[image, beam, windows[image, beam, window, -1]] = True
    if search.no_open_endings:
        forbidden[:, :, words.eos] |= np.isin(tokens[:, :, -1], words.open_endings)
        if length + 1 == search.max_length:  # the last word must not need another
            forbidden[:, :, words.open_endings] = True
    forbidden[:, :, words.eos] &= ~forbidden.all(-1)
    return np.where(forbidden, np.float32(-np.inf), log_probs)
