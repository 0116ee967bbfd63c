"""Captions images with exported graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from raycap_onnx.description import CaptionerError, Words, one_line, read_json, require_number
from raycap_onnx.images import ImageSource, Transform, load_image
from raycap_onnx.search import Search, beam_search

FORMAT = 2  # the version of captioner.json's format
MAX_BYTES, MAX_VOCABULARY_BYTES = 2**20, 2**26  # limits for captioner.json and vocabulary.json
FILES = ("encoder.onnx", "decoder.onnx", "vocabulary.json")
WEIGHTS = ("encoder.onnx.data", "decoder.onnx.data")
BATCH_SIZE, MAX_BATCH = 16, 100_000  # images per batch, and its limit
KINDS = {"tensor(float16)": np.float16, "tensor(int64)": np.int64}  # all other types of a cache are float32


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
        if isinstance(images, str | bytes | Path | np.ndarray):
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
        """Computes one step of the decoder. `raycap_onnx.search.Step` describes the arguments and the result."""
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
            cache[name] = np.zeros((rows, *sizes), KINDS.get(each.type, np.float32))
        return cache
