"""Starts a run from a model bundle (`init_from`): the run takes over vocabulary, number of positions and weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

from raycap.models.base import CaptionModel
from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, fetched, load_bundle
from raycap.pipeline.storage.path import storage_path

MAY_DIFFER = {"dropout", "expansion_dropout", "max_positions"}  # these model keys do not have to equal the bundle's


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
        if bundled.subwords is not None:  # its pieces are enough for every caption
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
