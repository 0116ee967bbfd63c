"""`raycap soup`: joins models of one architecture by the weighted sum of their weights ("rewarded soups").

Ramé et al., "Rewarded soups: towards Pareto-optimal alignment by interpolating weights fine-tuned on diverse rewards"
(NeurIPS 2023, arXiv 2306.04488): theta = sum_i lambda_i theta_i with lambda_i >= 0 and sum_i lambda_i = 1.
The sum is good only for models that were fine-tuned from the same weights, which cannot be checked here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from raycap.jobs.named_files import OpenedBundle, check_output_place, open_bundle
from raycap.models.config import PLAIN, Values
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, bundle_protocol, save_bundle
from raycap.pipeline.evaluation.comparison.protocol import common_protocol
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.digests import file_digest
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import storage_path

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6  # by which the sum of the weights may differ from 1, because 1/3 has no exact decimals


def soup(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE", help="Model bundles of one recipe.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder of the new bundle.")],
    weights: Annotated[
        str | None, typer.Option(metavar="W,W...", help="One for each bundle, with the sum 1. The default is equal.")
    ] = None,
) -> int:
    """Join models by the weighted sum of their weights.

    The bundles must have one architecture, vocabulary and language, and should have been trained from the same weights,
    for example with different rewards.

    Example: raycap soup models/cider models/bleu --weights 0.3,0.7 -o models/soup
    """
    if len(bundles) < 2:
        raise UserError(f"{len(bundles)} bundle is given; a soup needs two or more")
    shares = [1 / len(bundles)] * len(bundles) if weights is None else _parse_weights(weights, len(bundles))
    place = storage_path(out)
    check_output_place("-o", place)
    if next(place.walk(), None) is not None:
        raise UserError(f"-o {place} is not empty; choose another folder or remove it")
    opened = [open_bundle("BUNDLE", bundle) for bundle in bundles]
    if place.is_remote:
        with TemporaryDirectory(prefix="raycap-") as scratch:
            _write(Path(scratch) / "bundle", opened, shares)
            Mirror(place, Path(scratch) / "bundle").push()
    else:
        _write(place.path, opened, shares)
    for member, share in zip(opened, shares, strict=True):
        logger.info(f"source    {share:g} of {member.location}")
    logger.info(f"bundle    {place}")
    return 0


def _parse_weights(text: str, count: int) -> list[float]:
    """The numbers of --weights. Raises UserError unless they are `count` numbers, at least 0, whose sum is 1."""
    try:
        weights = [*map(float, text.split(","))]
    except ValueError as error:
        raise UserError(f"--weights {shown(text)}: give numbers with commas between them, such as 0.3,0.7") from error
    if len(weights) != count:
        raise UserError(f"--weights {text}: {len(weights)} numbers for {count} bundles; give one for each")
    is_valid = min(weights) >= 0 and abs(math.fsum(weights) - 1) <= TOLERANCE
    if not is_valid:  # so that NaN is refused, too
        raise UserError(f"--weights {text}: the numbers must be at least 0 and have the sum 1")
    return weights


def _write(folder: Path, members: Sequence[OpenedBundle], weights: Sequence[float]) -> None:
    """Writes the joined bundle, and into its info the location, the weight and the digest of each member.

    The bundle has no rules of decoding if those of the members differ. Changes the weights of the first member in
    memory. Raises UserError for bundles that cannot be joined.
    """
    first, *others = members
    for other in others:
        if problem := _difference(first.bundle, other.bundle):
            raise UserError(
                f"{first.location} and {other.location} cannot be joined: {problem}; give models of one recipe"
            )
    protocols = [bundle_protocol(member.bundle.config) for member in members]
    if len({each.decoding for each in protocols}) > 1:
        protocols = [replace(each, decoding=PLAIN) for each in protocols]
    protocol = common_protocol(protocols)
    captioner = first.bundle.captioner
    captioner.load_state_dict(mixed_tensors([member.bundle.captioner.state_dict() for member in members], weights))
    info: Values = {}
    for number, (member, weight) in enumerate(zip(members, weights, strict=True), 1):
        digest = file_digest(member.folder / "model.safetensors")
        info |= {f"source {number}": str(member.location), f"weight {number}": weight, f"sha256 {number}": digest}
    name = first.bundle.config["name"]
    save_bundle(folder, captioner, first.bundle.vocabulary, name=name, protocol=protocol, info=info)


def mixed_tensors(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted sum of the tensors of each name, computed in float32.

    states: tensors by name, with equal names, shapes and dtypes. A tensor that is equal in all states is kept as it is,
    so that a backbone that no member has trained stays equal to the bit. Raises UserError if tensors of whole numbers
    differ.
    """
    import torch

    used = [(state, weight) for state, weight in zip(states, weights, strict=True) if weight > 0]
    found = {}
    for name, tensor in used[0][0].items():
        if all(torch.equal(tensor, state[name]) for state in states):
            found[name] = tensor
        elif not tensor.is_floating_point():
            raise UserError(f"the tensor {name} has whole numbers that differ; give models of one recipe")
        else:
            total = torch.zeros_like(tensor, dtype=torch.float32)
            for state, weight in used:
                total += weight * state[name].float()
            found[name] = total.to(tensor.dtype)
    return found


def _difference(ours: Bundle, theirs: Bundle) -> str | None:
    """Why two bundles cannot be joined: a difference of architecture, words or image transform. None if they can be."""
    for section in ("model", "sizes", "backbone"):
        our_values, their_values = ours.config.get(section) or {}, theirs.config.get(section) or {}
        for key in our_values | their_values:
            if our_values.get(key) != their_values.get(key):
                return f"{section}.{key} is {our_values.get(key)} and {their_values.get(key)}"
    if ours.vocabulary != theirs.vocabulary:
        return "the vocabularies or their tokenizers differ"
    return None if ours.transform == theirs.transform else "the image transforms differ"
