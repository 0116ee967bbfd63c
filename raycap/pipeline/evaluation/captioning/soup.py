"""Models of one architecture joined to one model: the weighted sum of their weights ("rewarded soups").

Ramé et al., "Rewarded soups: towards Pareto-optimal alignment by interpolating weights fine-tuned on diverse rewards"
(NeurIPS 2023, arXiv 2306.04488): theta = sum_i lambda_i theta_i with lambda_i >= 0 and sum_i lambda_i = 1.
The sum is good only for models that were fine-tuned from the same weights, which nothing here can check.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycap.models.config import PLAIN
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, ModelSource, bundle_protocol, save_bundle
from raycap.pipeline.evaluation.comparison.protocol import common_protocol

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6  # by which the sum of the weights may differ from 1, because 1/3 has no exact decimals


@dataclass(frozen=True)
class Soup:
    """A model source that loads its members and joins them. Ray's workers need no file of the result.

    without_backbone: for features that all members' equal backbones have computed.
    """

    members: Sequence[ModelSource]
    weights: Sequence[float]
    without_backbone: bool = False

    def load(self) -> Bundle:
        """The joined model, on the CPU. Raises UserError for members that cannot be joined."""
        from raycap.models.captioner import Captioner

        bundle = mixed([member.load() for member in self.members], self.weights)
        if self.without_backbone:
            return replace(bundle, captioner=Captioner(bundle.captioner.model), transform=None)
        return bundle


def mixed(bundles: Sequence[Bundle], weights: Sequence[float], names: Sequence[str] = ()) -> Bundle:
    """The bundle with the weighted sum of the bundles' weights, and the protocol that all of them share.

    Bundles that record different rules of decoding, as those of older and newer versions do, give one without rules.
    weights: one for each bundle. names: of the bundles in errors. Raises UserError for weights or bundles that do not
    fit together.
    """
    names = names or [f"bundle {number}" for number in range(1, len(bundles) + 1)]
    check_weights(weights, len(bundles))
    require_alike(bundles, names)
    protocols = [bundle_protocol(bundle.config) for bundle in bundles]
    if len({each.decoding for each in protocols}) > 1:
        protocols = [replace(each, decoding=PLAIN) for each in protocols]
    protocol = common_protocol(protocols)
    captioner = copy.deepcopy(bundles[0].captioner)
    captioner.load_state_dict(mixed_tensors([bundle.captioner.state_dict() for bundle in bundles], weights))
    config = bundles[0].config | {"protocol": asdict(protocol)}
    return replace(bundles[0], captioner=captioner, config=config, confidences=())


def require_alike(bundles: Sequence[Bundle], names: Sequence[str]) -> None:
    """Raises UserError unless all bundles have one architecture, one vocabulary and one image transform."""
    for name, bundle in zip(names[1:], bundles[1:], strict=True):
        if problem := _difference(bundles[0], bundle):
            raise UserError(f"{names[0]} and {name} cannot be joined: {problem}; give models of one recipe")


def check_weights(weights: Sequence[float], count: int) -> None:
    """Raises UserError unless there are `count` weights, at least 0, whose sum is 1."""
    text = ", ".join(f"{weight:g}" for weight in weights)
    if len(weights) != count:
        raise UserError(f"the weights {text} are {len(weights)}, and there are {count} bundles; give one for each")
    if not all(weight >= 0 for weight in weights) or not abs(math.fsum(weights) - 1) <= TOLERANCE:
        raise UserError(f"the weights {text} must be at least 0 and have the sum 1")


def mixed_tensors(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted sum of tensors by name, computed in float32.

    The states have equal names, shapes and dtypes. A tensor that is equal in all of them is kept as it is, so that
    a backbone that no member has trained remains bit for bit. So are the tensors of a member with the weight 1. Raises
    UserError for tensors of whole numbers that differ.
    """
    import torch

    used = [(state, weight) for state, weight in zip(states, weights, strict=True) if weight > 0]
    found = {}
    for name, tensor in used[0][0].items():
        if all(torch.equal(tensor, state[name]) for state in states):
            found[name] = tensor
        elif not tensor.is_floating_point():
            raise UserError(f"the tensor {name} has whole numbers that differ; give models of one recipe")
        elif len(used) == 1:
            found[name] = tensor
        else:
            total = torch.zeros_like(tensor, dtype=torch.float32)
            for state, weight in used:
                total += weight * state[name].float()
            found[name] = total.to(tensor.dtype)
    return found


def have_one_backbone(bundles: Sequence[Bundle]) -> bool:
    """Whether all bundles have backbones with equal weights, so that one extraction of features serves all."""
    import torch

    backbones = [bundle.captioner.backbone for bundle in bundles]
    states = [{} if backbone is None else backbone.state_dict() for backbone in backbones]
    return all(backbones) and all(torch.equal(states[0][name], state[name]) for state in states for name in states[0])


def save_soup(folder: Path, bundle: Bundle, sources: Sequence[tuple[str, float, str]]) -> None:
    """Writes the bundle of joined models.

    sources: of each member the location, the weight, and the SHA-256 of model.safetensors, for the bundle's info.
    """
    info: dict[str, Any] = {}
    for number, (location, weight, digest) in enumerate(sources, 1):
        info |= {f"source {number}": location, f"weight {number}": weight, f"sha256 {number}": digest}
    protocol = bundle_protocol(bundle.config)
    name = bundle.config["name"]
    save_bundle(folder, bundle.captioner, bundle.vocabulary, name=name, protocol=protocol, info=info)


def _difference(ours: Bundle, theirs: Bundle) -> str | None:
    """Why two bundles have no common architecture and no common words; None if they have both."""
    for section, mine, other in zip(("model", "backbone", "sizes"), _settings(ours), _settings(theirs), strict=True):
        if (mine is None) != (other is None):
            return "one has a backbone and the other has none"
        for key in {**(mine or {}), **(other or {})}:
            values = [(settings or {}).get(key) for settings in (mine, other)]
            if values[0] != values[1]:
                return f"{section}.{key} is {values[0]} and {values[1]}"
    if ours.vocabulary.tokenizer != theirs.vocabulary.tokenizer:
        return f"the tokenizer is {ours.vocabulary.tokenizer} and {theirs.vocabulary.tokenizer}"
    if ours.vocabulary != theirs.vocabulary:
        return "the vocabularies differ"
    if ours.transform != theirs.transform:
        return "the image transforms differ"
    return None


def _settings(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """The settings of the model and the backbone, and the sizes."""
    captioner = bundle.captioner
    backbone = None if captioner.backbone is None else captioner.backbone.config.feature_settings()
    return asdict(captioner.model.config), backbone, asdict(captioner.model.sizes)
