"""The weights with which a run begins, and what decides their shapes: vocabulary, positions, width of the features.

They are drawn from the seed, or read from files, or taken over from a model bundle (`init_from`) with its vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from raycap.models.base import CaptionModel
from raycap.models.captioner import build_model
from raycap.models.config import ModelSizes
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.models.layers import fill_word_vectors
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import build_vocabulary
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.data.word_vectors import describe_missing, read_word_vectors
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, fetched, load_bundle
from raycap.pipeline.features.regions import feature_width
from raycap.pipeline.runs.prepare import check_constraints, max_positions
from raycap.pipeline.storage.path import storage_path

logger = logging.getLogger(__name__)

MAY_DIFFER = {"dropout", "expansion_dropout", "max_positions"}  # these model keys do not have to equal the bundle's


class Beginning(NamedTuple):
    """What a run begins with. num_tokens: of an image's features. parts: `model`, and `backbone` if it has one."""

    vocabulary: Vocabulary
    sizes: ModelSizes
    num_tokens: int
    parts: dict[str, nn.Module]


def begin(config: RunConfig, dataset: Dataset) -> Beginning:
    """Draws the weights of the backbone and then of the model from the seed. Raises UserError."""
    start = warm_start(config)
    vocabulary = build_vocabulary(dataset, config.data)
    if start is not None:
        vocabulary = start.extend_vocabulary(vocabulary)
    num_positions = max_positions(config, dataset, vocabulary)
    if start is not None:
        num_positions = max(num_positions, start.bundle.captioner.model.sizes.max_positions)
    backbone = None
    if config.has_backbone:
        backbone = initial_backbone(config, with_weights=start is None)  # the bundle contains the backbone's weights
        width, num_tokens = backbone.width, backbone.num_tokens
    else:
        width, num_tokens = feature_width(dataset, config), config.features.max_regions
        torch.manual_seed(config.seed)
    check_constraints(config, dataset, vocabulary)
    sizes = ModelSizes(width, len(vocabulary), num_positions, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    model = _initial_model(config, sizes, vocabulary)
    if start is not None:
        start.copy_weights(model, backbone)
    parts: dict[str, nn.Module] = {"model": model} | ({} if backbone is None else {"backbone": backbone})
    return Beginning(vocabulary, sizes, num_tokens, parts)


def initial_backbone(config: RunConfig, *, with_weights: bool = True) -> Backbone:
    """The backbone of a configuration, with its weights, or else with weights drawn from the seed.

    Raises UserError when it cannot be made, and JobFailedError when the pretrained weights cannot be downloaded.
    """
    torch.manual_seed(config.seed)
    try:
        image_transform(config.backbone)  # refuses a transform that cannot be computed
        return Backbone(config.backbone, with_weights=with_weights)
    except ConnectionError as error:
        raise JobFailedError(f"{error}; repeat the command later, or give backbone.weights a file") from error
    except Exception as error:  # timm and its libraries may raise any error
        reason = " ".join(str(error).split())
        raise UserError(f"backbone {config.backbone.name} cannot be made: {reason}") from error


def _initial_model(config: RunConfig, sizes: ModelSizes, vocabulary: Vocabulary) -> CaptionModel:
    """The model with weights drawn from torch's current random state and, if configured, with word vectors."""
    file, columns = config.model.word_vectors, config.model.word_vector_width
    if file is None or columns is None:
        return build_model(config.model, sizes)
    vectors, has_vector = read_word_vectors(Path(file).expanduser(), vocabulary.words, columns)
    logger.info(f"words     {file}: {describe_missing(vocabulary.words, has_vector)}")
    model = build_model(config.model, sizes)
    fill_word_vectors(model, torch.from_numpy(vectors), torch.from_numpy(has_vector))
    return model


@dataclass(frozen=True)
class WarmStart:
    """A loaded bundle whose weights a run starts from. The optimizer and the schedule start afresh."""

    uri: str
    bundle: Bundle

    def extend_vocabulary(self, vocabulary: Vocabulary) -> Vocabulary:
        """The bundle's words with their ids, followed by the words of `vocabulary` that the bundle lacks.

        Raises UserError when the two vocabularies were made by different tokenizers.
        """
        bundled = self.bundle.vocabulary
        if bundled.tokenizer != vocabulary.tokenizer:
            raise UserError(
                f"data.tokenizer is {vocabulary.tokenizer} and the words of init_from = {self.uri} were made by "
                f"{bundled.tokenizer}; set the same"
            )
        if bundled.subwords is not None:  # byte-level pieces can spell any caption
            return bundled
        new_words = [word for word in vocabulary.words if word not in bundled.ids]
        return Vocabulary((*bundled.words, *new_words), bundled.tokenizer)

    def copy_weights(self, model: CaptionModel, backbone: Backbone | None) -> None:
        """Copies the bundle's weights into a run's new modules. Rows of new words and positions keep their values.

        For a run without a backbone (region features), the bundle's backbone is ignored.

        Raises UserError when the two models differ in configuration or in shapes.
        """
        captioner, label = self.bundle.captioner, f"init_from = {self.uri}"
        if backbone is not None and captioner.backbone is None:
            raise UserError(f"{label}: this bundle has no backbone; give one that captions images")
        config, bundled = asdict(model.config), asdict(captioner.model.config)
        for key in ("name", *sorted(config.keys() - MAY_DIFFER)):  # the name first, because it decides the other keys
            if config[key] != bundled.get(key):
                raise UserError(f"model.{key} is {config[key]} and that of {label} is {bundled.get(key)}; set the same")
        if backbone is not None and captioner.backbone is not None:
            _copy_tensors(captioner.backbone, backbone, growing=set(), label=f"{label}: backbone")
        sizes = captioner.model.sizes
        growing = {sizes.vocabulary_size, sizes.max_positions}
        _copy_tensors(captioner.model, model, growing=growing, label=f"{label}: model")


def warm_start(config: RunConfig) -> WarmStart | None:
    """The bundle that `init_from` names; None without `init_from`. UserError when it is not a bundle."""
    if config.init_from is None:
        return None
    location = storage_path(config.init_from, config.storage.options)
    try:
        return WarmStart(location.uri, load_bundle(fetched(location)))
    except ValueError as error:
        raise UserError(f"init_from: {error}") from error


@torch.no_grad()
def _copy_tensors(source: nn.Module, target: nn.Module, *, growing: set[int], label: str) -> None:
    """Copies every tensor. A dimension whose size in `source` is one of `growing` may be larger in `target`.

    label: the source's name in error messages.
    """
    from_tensors, to_tensors = source.state_dict(), target.state_dict()
    if unmatched := sorted(from_tensors.keys() ^ to_tensors.keys()):
        raise UserError(f"{label} has other parts than the configuration asks for, first {unmatched[0]}; set the same")
    for name, tensor in from_tensors.items():
        copy = to_tensors[name]
        fits = len(copy.shape) == len(tensor.shape) and all(
            new == old or (old in growing and new > old) for new, old in zip(copy.shape, tensor.shape, strict=True)
        )
        if not fits:
            raise UserError(
                f"{label}.{name} has shape {tuple(tensor.shape)} and the configuration asks for {tuple(copy.shape)}; "
                "set the same sizes"
            )
        copy[tuple(slice(size) for size in tensor.shape)] = tensor  # fills the first places of every dimension
