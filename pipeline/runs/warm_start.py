"""What a run takes over from a model bundle (`init_from`): its words, its positions and its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from models.backbone import Backbone
from models.base import CaptionModel
from pipeline.captioning.bundle import Bundle, fetched, load_bundle
from pipeline.config.run import RunConfig
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError
from pipeline.storage.path import storage_path

FREE = {"dropout", "expansion_dropout", "max_positions"}  # keys of a model that may change from run to run


@dataclass(frozen=True)
class WarmStart:
    """A loaded bundle, to begin a run from; optimizers and schedules begin anew."""

    uri: str
    bundle: Bundle

    @property
    def positions(self) -> int:
        return self.bundle.captioner.model.sizes.max_positions

    def vocabulary(self, found: Vocabulary) -> Vocabulary:
        """The bundle's words with their ids, and behind them those that only the data have. UserError: other tokens."""
        known = self.bundle.vocabulary
        if known.tokenizer != found.tokenizer:
            raise UserError(
                f"data.tokenizer is {found.tokenizer} and the words of init_from = {self.uri} were made by "
                f"{known.tokenizer}; set the same"
            )
        return Vocabulary((*known.words, *(word for word in found.words if word not in known.ids)), known.tokenizer)

    def fill(self, model: CaptionModel, backbone: Backbone | None) -> None:
        """Gives a run's fresh modules the bundle's weights; rows of new words and positions keep their initial values.

        Without a backbone (region features) the bundle's is left aside.

        Raises UserError where the two models are not of one shape.
        """
        theirs = self.bundle.captioner
        if backbone is not None and theirs.backbone is None:
            raise UserError(f"init_from = {self.uri}: this bundle has no backbone; give one that captions images")
        own, other = asdict(model.config), asdict(theirs.model.config)
        for key in ("name", *sorted(own.keys() - FREE)):
            if own[key] != other.get(key):
                raise UserError(
                    f"model.{key} is {own[key]} and that of init_from = {self.uri} is {other.get(key)}; set the same"
                )
        sizes = theirs.model.sizes
        if backbone is not None and theirs.backbone is not None:
            _fill(backbone, theirs.backbone, set(), f"init_from = {self.uri}: backbone")
        _fill(model, theirs.model, {sizes.vocabulary_size, sizes.max_positions}, f"init_from = {self.uri}: model")


def warm_start(config: RunConfig) -> WarmStart | None:
    """The start that `init_from` names; None without it. UserError where no bundle lies there."""
    if config.init_from is None:
        return None
    where = storage_path(config.init_from, config.storage.options)
    try:
        return WarmStart(where.uri, load_bundle(fetched(where)))
    except ValueError as error:
        raise UserError(f"init_from: {error}") from error


def without_download(config: RunConfig) -> RunConfig:
    """The configuration with a backbone whose weights come from the bundle, so that no others are looked for."""
    return config.model_copy(update={"backbone": replace(config.backbone, weights="none")})


@torch.no_grad()
def _fill(module: nn.Module, source: nn.Module, growing: set[int], what: str) -> None:
    """Copies tensor by tensor; a dimension of one of the `growing` sizes may be larger in `module`."""
    own, theirs = module.state_dict(), source.state_dict()
    if odd := sorted(own.keys() ^ theirs.keys()):
        raise UserError(f"{what} has other parts than the configuration asks for, first {odd[0]}; set the same")
    for name, tensor in theirs.items():
        target = own[name]
        fits = len(target.shape) == len(tensor.shape) and all(
            new == old or (old in growing and new > old) for new, old in zip(target.shape, tensor.shape, strict=True)
        )
        if not fits:
            raise UserError(
                f"{what}.{name} has shape {tuple(tensor.shape)} and the configuration asks for {tuple(target.shape)}; "
                "set the same sizes"
            )
        target[tuple(slice(size) for size in tensor.shape)] = tensor
