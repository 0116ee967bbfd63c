"""Embeddings of a data set's images and captions, by a CLIP model whose files the configuration names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycap.models.convert.tensor_files import read_tensors
from raycap.models.encoders.dual_encoder import DualEncoder
from raycap.pipeline.config.sections import EncoderSection
from raycap.pipeline.data.caption_files import read_content
from raycap.pipeline.data.images import BadImage, decode_image, read_image_file
from raycap.pipeline.data.language.subwords import ClipTokenizer
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.metrics import UnavailableError
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.runtime.processor import computes_on_cpus
from raycap.pipeline.storage.path import StorageOptions, StoragePath
from raycap.pipeline.storage.weights import weights_file_digest

IMAGES_PER_BATCH, TEXTS_PER_BATCH = 32, 256


class FileEncoder:
    """An encoder of images and texts (`evaluation.scores.grounding.Encoder`). Its files are read at the first use.

    uris: of images, by id. Methods raise UnavailableError for files that are no CLIP's and for unreadable images.
    """

    def __init__(
        self, section: EncoderSection, uris: Mapping[Any, str], max_pixels: int, options: StorageOptions
    ) -> None:
        self._section, self._uris, self._max_pixels, self._options = section, uris, max_pixels, options

    @property
    def name(self) -> str:
        """The first digits of the digests of weights and merges, and the activation."""
        files = (self._section.weights, self._section.merges)
        digests = [weights_file_digest(Path(file).expanduser())[:10] for file in files]
        return "-".join([*digests, self._section.activation])

    @cached_property
    def _model(self) -> DualEncoder:
        device = "cuda" if torch.cuda.is_available() and not computes_on_cpus() else "cpu"
        path = Path(self._section.weights).expanduser()
        try:
            return DualEncoder(read_tensors(path), self._section.activation, device)
        except ValueError as error:
            raise UnavailableError(f"{path} cannot be used: {one_line(error)}") from error

    @cached_property
    def _tokenizer(self) -> ClipTokenizer:
        path = Path(self._section.merges).expanduser()
        try:
            return ClipTokenizer(read_content(path).decode().splitlines(), self._model.num_pieces)
        except (UserError, ValueError) as error:
            raise UnavailableError(f"{path} is no file of CLIP's merges: {one_line(error)}") from error

    def images(self, image_ids: Sequence[Any]) -> np.ndarray:
        """The unit vectors (N, D) of images."""
        if unknown := [image for image in image_ids if image not in self._uris]:
            raise UnavailableError(f"the file of image {shown(unknown[0])} is not known; give `raycap score` --images")
        model, transform = self._model, self._model.transform
        return _stacked(
            model.encode_images(transform.normalize(torch.stack(pixels).to(model.device)))
            for pixels in _batches((torch.tensor(self._pixels(image)) for image in image_ids), IMAGES_PER_BATCH)
        )

    def _pixels(self, image: Any) -> np.ndarray:
        uri = self._uris[image]
        try:
            data = read_image_file(StoragePath(uri, self._options))
            return self._model.transform.resize(decode_image(data, self._max_pixels))
        except (BadImage, OSError) as error:
            raise UnavailableError(f"the image {shown(uri)} cannot be read: {error}") from error

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """The unit vectors (N, D) of texts, of which the model's first positions are read."""
        model, tokenizer = self._model, self._tokenizer
        rows = (torch.tensor(tokenizer.ids(text, model.num_positions)) for text in texts)
        return _stacked(
            model.encode_texts(_shortened(torch.stack(batch)).to(model.device))
            for batch in _batches(rows, TEXTS_PER_BATCH)
        )


def _shortened(tokens: Tensor) -> Tensor:
    """Token ids (N, T) without the columns after the ends of all texts, which are the largest ids."""
    return tokens[:, : int(tokens.argmax(1).max()) + 1]


def _batches(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    for tensor in tensors:
        batch.append(tensor)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _stacked(parts: Iterable[Tensor]) -> np.ndarray:
    """The rows of all parts as float64."""
    return torch.cat([part.cpu() for part in parts]).double().numpy()
