"""Vectors of a data set's images and captions, by models whose files the configuration names.

CLIP gives a vector for each image and caption, BERT or RoBERTa one for each token of a caption, for BERTScore.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raycap.models.convert.tensor_files import read_header, read_tensors
from raycap.models.encoders.dual_encoder import DualEncoder
from raycap.models.encoders.text_encoder import TextEncoder, TextEncoderSizes
from raycap.pipeline.config.sections import EncoderSection, TextEncoderSection
from raycap.pipeline.data.caption_files import read_content
from raycap.pipeline.data.image_locations import read_image_file
from raycap.pipeline.data.images import BadImage, decode_image
from raycap.pipeline.data.language.bert_tokenizer import BertTokenizer
from raycap.pipeline.data.language.subwords import ClipTokenizer
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.grounding import Ids
from raycap.pipeline.evaluation.scores.metrics import UnavailableError
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.runtime.processor import computes_on_cpus
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.storage.untrusted.documents import parse_json, read_regular_file
from raycap.pipeline.storage.weights import weights_file_digest

IMAGES_PER_BATCH, TEXTS_PER_BATCH = 32, 256
TOKENS_PER_BATCH = 4096  # with padding
MAX_JSON_BYTES = 32 * 2**20  # bert-base-multilingual-cased has 2 MB
MAX_TABLE_BYTES = 2**16  # the package's tables of baselines have 2 kB


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
        path = Path(self._section.weights).expanduser()
        try:
            return DualEncoder(read_tensors(path), self._section.activation, _device())
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


def _device() -> str:
    return "cuda" if torch.cuda.is_available() and not computes_on_cpus() else "cpu"


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


class FileTextEncoder:
    """An encoder of tokens (`pipeline.evaluation.scores.grounding.TokenEncoder`). Its files are read at the first use.

    Methods and properties raise UnavailableError for files that are no BERT's or RoBERTa's.
    """

    def __init__(self, section: TextEncoderSection) -> None:
        self._section, self.uses_idf = section, section.idf
        self._weights, self._config, self._tokens = (Path(path) for path in section.model_files().values())

    @property
    def name(self) -> str:
        """The first digits of the digests of weights, config.json and tokenizer.json, the layer, and the options."""
        digests = [weights_file_digest(path)[:10] for path in (self._weights, self._config, self._tokens)]
        parts = [*digests, f"L{self._layer}", "idf" if self.uses_idf else "no-idf"]
        if self._section.baseline is not None:
            parts.append(f"rescaled-{weights_file_digest(Path(self._section.baseline).expanduser())[:10]}")
        return "-".join(parts)

    @cached_property
    def _sizes(self) -> TextEncoderSizes:
        try:
            return TextEncoderSizes.read(_json(self._config))
        except (UserError, ValueError) as error:
            raise UnavailableError(f"{self._config} cannot be used: {one_line(error)}") from error

    @property
    def _layer(self) -> int:
        layer = self._section.layer
        if layer is None and (layer := self._sizes.published_layer) is None:
            raise UnavailableError(
                f"{self._config.parent} is none of the models with a published layer; set evaluation.inputs.bert.layer "
                f"to a number up to {self._sizes.num_layers}"
            )
        return layer

    @cached_property
    def _model(self) -> TextEncoder:
        path, sizes, layer = self._weights, self._sizes, self._layer
        try:
            if path.suffix == ".safetensors":
                sizes.named(read_header(path))  # before the weights take memory
            return TextEncoder(read_tensors(path), sizes, layer, _device())
        except ValueError as error:
            raise UnavailableError(f"{path} cannot be used: {one_line(error)}") from error

    @cached_property
    def _tokenizer(self) -> BertTokenizer:
        sizes = self._sizes
        try:
            return BertTokenizer(_json(self._tokens), sizes.architecture, sizes.num_pieces)
        except (UserError, ValueError) as error:
            raise UnavailableError(f"{self._tokens} cannot be used: {one_line(error)}") from error

    @cached_property
    def baseline(self) -> np.ndarray | None:
        """The precision, recall and F1 of unrelated texts (3,), for the layer; None without a file of them."""
        if self._section.baseline is None:
            return None
        path, layer = Path(self._section.baseline).expanduser(), self._layer
        try:
            rows = list(csv.reader(read_regular_file(path, MAX_TABLE_BYTES).decode().splitlines()))
            if rows[0] != ["LAYER", "P", "R", "F"]:
                raise ValueError("its first line is not LAYER,P,R,F")
            values = next([float(value) for value in row[1:]] for row in rows if row[:1] == [str(layer)])
            if len(values) != 3 or not all(-1 <= value <= 0.9999 for value in values):
                raise ValueError(f"its line of layer {layer} has no three numbers from -1 to 0.9999")
        except StopIteration as error:
            raise UnavailableError(f"{path} cannot be used: it has no line of layer {layer}") from error
        except (OSError, ValueError, IndexError, csv.Error) as error:
            raise UnavailableError(f"{path} is no table of baselines: {one_line(error)}") from error
        return np.array(values)

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text's tokens between two marks, as many as the model has positions."""
        tokenizer, length = self._tokenizer, self._sizes.max_tokens
        return [tokenizer.ids(text, length) for text in texts]

    def vectors(self, texts: Sequence[Ids]) -> list[np.ndarray]:
        """The unit vectors (T, W) of each text's tokens, float32."""
        model, order = self._model, sorted(range(len(texts)), key=lambda number: len(texts[number]))
        vectors = dict[int, np.ndarray]()
        for batch in _token_batches(order, [len(ids) for ids in texts]):
            lengths = torch.tensor([len(texts[number]) for number in batch])
            ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
            for row, number in zip(ids, batch, strict=True):
                row[: len(texts[number])] = torch.tensor(texts[number])
            states = F.normalize(model.encode(ids.to(model.device), lengths.to(model.device)), dim=-1).cpu().numpy()
            for number, rows in zip(batch, states, strict=True):
                vectors[number] = rows[: len(texts[number])]
                if not np.isfinite(vectors[number]).all():
                    raise UnavailableError(f"the weights of {self._weights} give vectors that are not finite")
        return [vectors[number] for number in range(len(texts))]


def _json(path: Path) -> object:
    """The value of a JSON file. Raises UserError."""
    try:
        return parse_json(read_regular_file(path, MAX_JSON_BYTES), "it")
    except OSError as error:
        raise UserError(str(error)) from error


def _token_batches(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divides texts, in order of their lengths, into batches of at most TOKENS_PER_BATCH tokens with padding."""
    batch = list[int]()
    for number in order:
        if batch and (len(batch) + 1) * lengths[number] > TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
