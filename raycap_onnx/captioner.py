"""Captions images with exported graphs, by a beam search in numpy with raycap's ranking and rules.

Shapes: B images, K beams per image, T caption tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from raycap_onnx.description import CaptionerError, Words, is_number, one_line, read_json, require_flags, require_number
from raycap_onnx.images import ImageSource, Transform, load_image

FORMAT = 2  # the version of captioner.json's format
MAX_BYTES, MAX_VOCABULARY_BYTES = 2**20, 2**26  # limits for captioner.json and vocabulary.json
FILES = ("encoder.onnx", "decoder.onnx", "vocabulary.json")
WEIGHTS = ("encoder.onnx.data", "decoder.onnx.data")
BATCH_SIZE, MAX_BATCH = 16, 100_000  # images per batch, and its limit
MAX_BEAMS, MAX_TOKENS = 100, 10_000

# A step of the decoder. Arguments: the newest tokens (B, K) of the beams, the rows (B, K) of the cache that the beams
# continue, the encoder's result, and the cache, which is None before the first step. Result: the log-probabilities
# (B, K, V) of the words after the tokens, and the new cache.
Step = Callable[[np.ndarray, np.ndarray, dict[str, Any], Any], tuple[np.ndarray, Any]]


@dataclass(frozen=True)
class Caption:
    """The best caption of an image."""

    text: str
    log_prob: float  # natural logarithm, summed over the tokens
    tokens: tuple[int, ...]  # ids with SOS and, where the caption ended, EOS


class Captioner:
    """Captions images with the graphs in a folder that `raycap export` wrote. Raises CaptionerError for another folder.

    threads: of onnxruntime. If it is None, onnxruntime chooses the number. providers: onnxruntime's names of devices,
    such as CUDAExecutionProvider, which are tried in this order.
    """

    def __init__(
        self, folder: str | Path, *, threads: int | None = None, providers: Sequence[str] = ("CPUExecutionProvider",)
    ) -> None:
        folder = Path(folder)
        name = folder / "captioner.json"
        content, vocabulary = read_json(name, MAX_BYTES), read_json(folder / "vocabulary.json", MAX_VOCABULARY_BYTES)
        try:
            if content["format"] != FORMAT:
                raise CaptionerError(f"format is {content['format']!r:.80}, not {FORMAT}; export the model again")
            self.name, digests = str(content["name"]), dict(content["files"])
            self.search, self.words = Search(**content["search"]), Words(**content["tokens"], **vocabulary)
            self.transform = Transform(**content["image"])
        except CaptionerError as error:
            raise CaptionerError(f"{name}: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
            raise CaptionerError(f"{name} describes no captioner ({problem}); export the model again") from error
        weights = [file for file in WEIGHTS if (folder / file).exists()]
        for file in (*FILES, *weights):
            if not (folder / file).is_file():
                raise CaptionerError(f"{folder / file} is missing or no file; export the model again")
            with (folder / file).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != digests.get(file):
                raise CaptionerError(f"{folder / file} is damaged: {name} has another SHA-256; export the model again")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # only errors are logged
        options.intra_op_num_threads = threads or 0
        try:
            self._encoder, self._decoder = (
                onnxruntime.InferenceSession(str(folder / f"{graph}.onnx"), options, providers=list(providers))
                for graph in ("encoder", "decoder")
            )
        except Exception as error:  # any type, because onnxruntime raises types of its own
            raise CaptionerError(f"{folder}: the graphs cannot be opened: {one_line(error)}") from error
        self._memory_names = [each.name for each in self._encoder.get_outputs()]
        self._cache = {each.name: each for each in self._decoder.get_inputs() if each.name.startswith("cache_")}

    def caption(
        self,
        images: Iterable[ImageSource],
        *,
        beam_size: int | None = None,
        max_length: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> list[Caption]:
        """The best caption of each image.

        images: sources that `load_image` accepts. beam_size, max_length: replace the numbers in the folder. A beam of 1
        is greedy search. batch_size: number of images that are captioned at a time. Raises CaptionerError for an image
        that cannot be used, and for a number out of range.
        """
        require_number(batch_size, "batch_size", 1, MAX_BATCH)
        if isinstance(images, str | bytes | Path):
            raise CaptionerError(f"images has the type {type(images).__name__}; give a list of images, also for one")
        given = {"beam_size": beam_size, "max_length": max_length}
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        search = replace(self.search, **changes)
        captions, rest = list[Caption](), iter(images)
        # Only resized pixels are kept, because photographs of a whole batch may take much memory.
        while pixels := [self.transform(load_image(image)) for image in islice(rest, batch_size)]:
            captions += self._captions(np.stack(pixels), search)
        return captions

    def _captions(self, pixels: np.ndarray, search: Search) -> list[Caption]:
        """The best caption of each image of a batch (B, 3, H, W)."""
        memory = dict(zip(self._memory_names, self._encoder.run(None, {"image": pixels}), strict=True))
        captions = []
        for tokens, log_prob in beam_search(self._step, memory, search, self.words):
            text = self.words.decode(tokens)
            if search.collapse_repeats:
                text = " ".join(word for word, _ in groupby(text.split()))
            captions.append(Caption(text, log_prob, tuple(tokens)))
        return captions

    def _step(
        self, tokens: np.ndarray, rows: np.ndarray, memory: dict[str, np.ndarray], cache: dict[str, Any] | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Computes one step of the decoder. `Step` describes the arguments and the result."""
        if cache is None:
            cache = self._empty_cache(len(tokens))
        log_probs, *new = self._decoder.run(None, {"tokens": tokens, "parents": rows} | memory | cache)
        return log_probs, dict(zip(self._cache, new, strict=True))

    def _empty_cache(self, rows: int) -> dict[str, Any]:
        """The cache of `rows` captions before the first step."""
        cache = {}
        for name, each in self._cache.items():
            # In `shape`, a size that grows has a name in place of a number. Such a size is 0 at first.
            sizes = (0 if isinstance(size, str) else size for size in each.shape[1:])
            cache[name] = np.zeros((rows, *sizes), np.int64 if each.type == "tensor(int64)" else np.float32)
        return cache


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
