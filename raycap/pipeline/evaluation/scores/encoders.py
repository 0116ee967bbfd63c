"""Vectors of images and texts, from a CLIP for CLIPScore and PAC-S, and from a BERT or RoBERTa for BERTScore.

The packages open_clip and transformers (the extra `metrics`) compute the vectors with files that the configuration
names. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from raycap.models.convert.tensor_files import read_tensors
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.sections import EncoderSection, TextEncoderSection
from raycap.pipeline.data.images import BadImage, decode_image, read_image_file
from raycap.pipeline.errors import UnavailableError
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.runtime.processor import computes_on_cpus
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.storage.weights import weights_file_digest

BATCH = 64  # images or texts
MAX_TOKENS = 512  # of a text for BERTScore, as in the package bert-score
OPENAI_CONSTANTS = ("input_resolution", "context_length", "vocab_size")  # not weights, but in OpenAI's weight files
Ids = tuple[int, ...]  # the token ids of a text, with a mark at its start and at its end


def _package(name: str) -> Any:
    """Imports a package of the extra `metrics`. Raises UnavailableError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"the package {name} is not installed; install raycap[metrics]") from error


def _device() -> str:
    return "cuda" if torch.cuda.is_available() and not computes_on_cpus() else "cpu"


class ClipEncoder:
    """Computes unit vectors of images and texts with a CLIP of open_clip, whose files are read at the first use.

    uris: {image id: URI}. Methods raise UnavailableError if the files are not those of a CLIP, or an image cannot be
    read.
    """

    def __init__(
        self, section: EncoderSection, uris: Mapping[object, str], max_pixels: int, options: StorageOptions
    ) -> None:
        self._architecture, self._weights = section.model, Path(section.weights).expanduser()
        self._uris, self._max_pixels, self._options = uris, max_pixels, options

    @property
    def name(self) -> str:
        """The architecture and the first digits of the weights' digest, for the signature of scores."""
        return f"{self._architecture}-{weights_file_digest(self._weights)[:10]}"

    @cached_property
    def _model(self) -> Any:
        open_clip, name = _package("open_clip"), self._architecture
        sizes = open_clip.get_model_config(name) if name in open_clip.list_models() else None
        # other text towers are refused, because the package would download their tokenizers
        if sizes is None or "custom_text" in sizes or any(key.startswith("hf_") for key in sizes["text_cfg"]):
            raise UnavailableError(f"{shown(name)} is none of open_clip's models with the text tower of CLIP")
        try:
            model, tensors = open_clip.CLIP(**sizes), read_tensors(self._weights)
            model.load_state_dict({key: tensors[key] for key in tensors.keys() - OPENAI_CONSTANTS})
        except (ValueError, TypeError, RuntimeError) as error:
            raise UnavailableError(f"{self._weights} are no weights of {name}: {one_line(error)}") from error
        return model.to(_device()).eval()

    @cached_property
    def _transform(self) -> ImageTransform:
        """CLIP's transform: resizes the shorter side to the model's size (bicubic), and crops the central square."""
        open_clip, (size, _) = _package("open_clip"), self._model.visual.image_size
        return ImageTransform(
            size, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD, "bicubic", size, keep_aspect=True
        )

    def images(self, image_ids: Sequence[object]) -> np.ndarray:
        """The unit vectors (N, D) of images, float64."""
        if unknown := [image for image in image_ids if image not in self._uris]:
            raise UnavailableError(f"the file of image {shown(unknown[0])} is not known; give `raycap score` --images")

        def encode(ids: Sequence[object]) -> Tensor:
            pixels = torch.stack([torch.tensor(self._pixels(self._uris[image])) for image in ids])
            return self._model.encode_image(self._transform.normalize(pixels.to(_device())), normalize=True)

        return _encoded(encode, image_ids)

    def _pixels(self, uri: str) -> np.ndarray:
        try:
            data = read_image_file(StoragePath(uri, self._options))
            return self._transform.resize(decode_image(data, self._max_pixels))
        except (BadImage, OSError) as error:
            raise UnavailableError(f"the image {shown(uri)} cannot be read: {error}") from error

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """The unit vectors (N, D) of texts, float64. A text is cut off at the model's number of positions."""
        tokenize = _package("open_clip").SimpleTokenizer(context_length=self._model.context_length)
        return _encoded(lambda part: self._model.encode_text(tokenize(part).to(_device()), normalize=True), texts)


def _encoded(encode: Callable[[Sequence[Any]], Tensor], items: Sequence[object]) -> np.ndarray:
    """The vectors (N, D) of all items, float64. `encode` gets batches of BATCH items."""
    with torch.inference_mode():
        parts = [encode(items[start : start + BATCH]).cpu() for start in range(0, len(items), BATCH)]
    return torch.cat(parts).double().numpy()


class BertEncoder:
    """Computes vectors of texts' tokens with a BERT or RoBERTa of transformers, whose files are read at the first use.

    Methods and properties raise UnavailableError if the files are not those of such a model.
    """

    def __init__(self, section: TextEncoderSection) -> None:
        self._section = section
        self._folder = Path(section.folder).expanduser()

    @property
    def name(self) -> str:
        """The first digits of the files' digests, and the layer, for the signature of scores."""
        digests = [weights_file_digest(Path(file))[:10] for file in self._section.model_files().values()]
        return "-".join([*digests, f"L{self._section.layer}"])

    @cached_property
    def _model(self) -> Any:
        """The model without the layers above the configured one, so that its last hidden states are that layer's."""
        transformers = _package("transformers")
        try:
            config = transformers.AutoConfig.from_pretrained(self._folder, local_files_only=True)
            if config.model_type not in ("bert", "roberta"):
                raise ValueError(f"its model_type is {config.model_type}, neither bert nor roberta")
            if self._section.layer > config.num_hidden_layers:
                raise ValueError(
                    f"it has {config.num_hidden_layers} layers; set evaluation.inputs.bert.layer to one of them"
                )
            architecture = transformers.BertModel if config.model_type == "bert" else transformers.RobertaModel
            config.num_hidden_layers = self._section.layer
            model, report = architecture.from_pretrained(
                self._folder,
                config=config,
                add_pooling_layer=False,
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
            )
            if report["missing_keys"]:
                raise ValueError(f"model.safetensors lacks {min(report['missing_keys'])}")
        except Exception as error:  # the package raises errors of many types for damaged files
            raise UnavailableError(f"{self._folder} cannot be used: {one_line(error)}") from error
        return model.to(_device()).eval()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path, config = self._folder / "tokenizer.json", self._model.config
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exceptions
            raise UnavailableError(f"{path} cannot be used: {one_line(error)}") from error
        if tokenizer.get_vocab_size() > config.vocab_size:
            raise UnavailableError(f"{path} has more pieces than the model in its folder")
        first_position = config.pad_token_id + 1 if config.model_type == "roberta" else 0
        tokenizer.no_padding()
        tokenizer.enable_truncation(min(config.max_position_embeddings - first_position, MAX_TOKENS))
        return tokenizer

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text's tokens and two marks, cut off at the model's number of positions.

        As in the package bert-score, white space around a text is removed, and RoBERTa gets a space before the text.
        """
        tokenizer, is_roberta = self._tokenizer, self._model.config.model_type == "roberta"
        stripped = [f" {text.strip()}" if is_roberta and text.strip() else text.strip() for text in texts]
        return [tuple(encoding.ids) for encoding in tokenizer.encode_batch(stripped)]

    def vectors(self, texts: Sequence[Ids]) -> list[np.ndarray]:
        """The unit vectors (T, W) of each text's tokens, float32."""
        by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = dict[int, np.ndarray]()  # {index of a text: its vectors}
        for start in range(0, len(by_length), BATCH):
            batch = by_length[start : start + BATCH]
            lengths = torch.tensor([len(texts[index]) for index in batch])
            ids = pad_sequence([torch.tensor(texts[index]) for index in batch], batch_first=True)
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            with torch.inference_mode():
                states = self._model(ids.to(_device()), attention_mask=mask.to(_device())).last_hidden_state
            padded = F.normalize(states, dim=-1).cpu().numpy()
            for index, rows in zip(batch, padded, strict=True):
                vectors[index] = rows[: len(texts[index])]
        if not all(np.isfinite(rows).all() for rows in vectors.values()):
            raise UnavailableError(f"the weights in {self._folder} give vectors that are not finite")
        return [vectors[index] for index in range(len(texts))]
