"""Captions images with exported graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from raycap_onnx.description import CaptionerError, Values, Words, check_digest, read_json
from raycap_onnx.images import ImageSource, Transform, load_image
from raycap_onnx.search import MAX_BEAMS, MAX_TOKENS, Search, beam_search

FORMAT = 1  # of captioner.json
MAX_BYTES = 2**20  # of captioner.json
FILES = ("encoder.onnx", "decoder.onnx", "vocabulary.json")
WEIGHTS = ("encoder.onnx.data", "decoder.onnx.data")
BATCH_SIZE = 16  # images


@dataclass(frozen=True)
class Caption:
    """The best caption of an image."""

    text: str
    log_prob: float  # natural logarithm, summed over the tokens
    tokens: tuple[int, ...]  # ids with SOS and, where the caption ended, EOS


class Captioner:
    """Captions images with the graphs in a folder that `raycap export` wrote. Raises CaptionerError for another folder.

    threads: of onnxruntime; None for its choice. providers: onnxruntime's names of what computes, in the order in which
    they are tried, such as CUDAExecutionProvider.
    """

    def __init__(
        self, folder: str | Path, *, threads: int | None = None, providers: Sequence[str] = ("CPUExecutionProvider",)
    ) -> None:
        folder = Path(folder)
        read = read_json(folder / "captioner.json", MAX_BYTES)
        if read.get("format", int) != FORMAT or read.get("graphs", str) != "onnx":
            raise CaptionerError(f"{read.name}: expected format {FORMAT} with graphs onnx; export the model again")
        self.name, self.max_positions = read.get("name", str), read.number("max_positions", 2, MAX_TOKENS)
        self.search = Search.parse(Values(read.values.get("search"), f"{read.name}: search"), self.max_positions)
        image = read.values.get("image")
        self.transform = None if image is None else Transform.parse(Values(image, f"{read.name}: image"))
        self.max_regions: int | None = None
        if self.transform is None:
            self.max_regions = read.get("features", dict).get("max_regions")
        digests = Values(read.values.get("files"), f"{read.name}: files")
        for file in (*FILES, *(file for file in WEIGHTS if (folder / file).exists())):
            check_digest(folder / file, digests.get(file, str))
        self.words = Words.read(folder / "vocabulary.json", Values(read.values.get("tokens"), f"{read.name}: tokens"))
        self.open_endings = np.array(read.ids("open_endings", len(self.words.texts)), np.int64)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = threads or 0
        try:
            self._encoder, self._decoder = (
                onnxruntime.InferenceSession(str(folder / f"{graph}.onnx"), options, providers=list(providers))
                for graph in ("encoder", "decoder")
            )
        except Exception as error:  # onnxruntime raises types of its own
            raise CaptionerError(
                f"{folder}: the graphs cannot be opened: {' '.join(str(error).split())[:200]}"
            ) from error
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

        images: see `load_image`. beam_size (1 for greedy search) and max_length replace the recorded ones. batch_size:
        images at a time. Raises CaptionerError for an image that cannot be used, and for a number out of range.
        """
        if self.transform is None:
            raise CaptionerError(f"{self.name} captions the features of regions, not images; use caption_features")
        if batch_size < 1:
            raise CaptionerError(f"batch_size is {batch_size}; it must be 1 or more")
        if isinstance(images, str | bytes | Path | np.ndarray) or not isinstance(images, Iterable):
            raise CaptionerError(f"images has the type {type(images).__name__}; give a list of images, also for one")
        search, captions, rest = self._changed_search(beam_size, max_length), list[Caption](), iter(images)
        while batch := [self.transform(load_image(each)) for each in islice(rest, batch_size)]:
            captions += self._captions({"image": np.stack(batch)}, search)
        return captions

    def caption_features(
        self,
        features: np.ndarray,
        lengths: np.ndarray | None = None,
        boxes: np.ndarray | None = None,
        *,
        beam_size: int | None = None,
        max_length: int | None = None,
    ) -> list[Caption]:
        """The best caption of each image, for a model of region features.

        features: (B, N, C). lengths: the numbers (B,) of valid regions; None for N. boxes: corners x0 y0 x1 y1 of the
        regions (B, N, 4), for models that arrange regions by them. Other arguments and errors as in `caption`.
        """
        if self.transform is not None:
            raise CaptionerError(f"{self.name} captions images, not features; use caption")
        if self.max_regions is not None and features.shape[1] > self.max_regions:
            raise CaptionerError(f"an image has {features.shape[1]} regions; {self.name} takes {self.max_regions}")
        if lengths is None:
            lengths = np.full(len(features), features.shape[1])
        given = {"features": features, "lengths": lengths, "boxes": boxes}
        names = [each.name for each in self._encoder.get_inputs()]
        if missing := [name for name in names if given.get(name) is None]:
            raise CaptionerError(f"{self.name} needs the {missing[0]} of the regions; give them")
        kinds = {"lengths": np.int64}
        inputs = {name: np.asarray(given[name], kinds.get(name, np.float32)) for name in names}
        return self._captions(inputs, self._changed_search(beam_size, max_length))

    def _changed_search(self, beam_size: int | None, max_length: int | None) -> Search:
        """The recorded search with other values. Raises CaptionerError for values that the model does not take."""
        changes: dict[str, Any] = {}
        for key, value, least, most in (
            ("beam_size", beam_size, 1, MAX_BEAMS),
            ("max_length", max_length, self.search.min_length, self.max_positions),
        ):
            if value is not None and not least <= value <= most:
                raise CaptionerError(f"{key} is {value}; it must be {least} to {most}")
            changes |= {} if value is None else {key: value}
        return replace(self.search, **changes)

    def _captions(self, inputs: dict[str, np.ndarray], search: Search) -> list[Caption]:
        """The best captions of a batch with the encoder's inputs."""
        memory = dict(zip(self._memory_names, self._encoder.run(None, inputs), strict=True))
        beams = beam_search(self._step, memory, search, self.words, self.open_endings)
        captions = []
        for tokens, log_prob in beams.best(search, self.words):
            text = self.words.decode(tokens)
            if search.collapse_repeats:
                text = " ".join(word for word, _ in groupby(text.split()))
            captions.append(Caption(text, log_prob, tuple(tokens)))
        return captions

    def _step(
        self, tokens: np.ndarray, rows: np.ndarray, memory: dict[str, np.ndarray], cache: dict[str, Any] | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """See `raycap_onnx.search.Step`. The cache remains with onnxruntime, which saves copies."""
        if cache is None:
            cache = {name: _value(_no_tokens(each, len(tokens))) for name, each in self._cache.items()}
        given = {"tokens": tokens, "parents": rows} | memory
        values = {name: _value(each) for name, each in given.items()} | cache
        log_probs, *new = self._decoder.run_with_ort_values(None, values)
        return log_probs.numpy(), dict(zip(self._cache, new, strict=True))


def _value(array: np.ndarray) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _no_tokens(cache: Any, images: int) -> np.ndarray:
    """The content of an input of the cache before the first step, in which sizes that grow have names."""
    kinds = {"tensor(float16)": np.float16, "tensor(int64)": np.int64}
    sizes = (0 if isinstance(size, str) else size for size in cache.shape[1:])
    return np.zeros((images, *sizes), kinds.get(cache.type, np.float32))
