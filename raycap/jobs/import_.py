"""`raycap import`: turns an upstream checkpoint into a model bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raycap.jobs.named_files import check_output_folder
from raycap.jobs.options import Set
from raycap.models.config import Values
from raycap.pipeline.config.load import apply_override
from raycap.pipeline.config.variables import expand_variables
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import save_bundle
from raycap.pipeline.evaluation.comparison.protocol import Protocol, model_protocol
from raycap.pipeline.evaluation.comparison.published import shared_protocol

if TYPE_CHECKING:
    from raycap.models.captioner import Captioner


def import_checkpoint(
    source: Annotated[
        Literal["expansionnet_v2", "meshed_memory"],
        typer.Option("--from", metavar="FORMAT", help="expansionnet_v2 or meshed_memory."),
    ],
    checkpoint: Annotated[Path, typer.Option(help="The upstream checkpoint. It is read as tensors; no code runs.")],
    tokens: Annotated[Path, typer.Option(help="Its vocabulary pickle. Only plain values are read.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="The bundle's folder.")],
    overrides: Set = None,
    backbone: Annotated[Path | None, typer.Option(help="A Swin checkpoint, for a captioner without one.")] = None,
    objective: Annotated[
        Literal["cross_entropy", "scst"] | None,
        typer.Option(help="What trained it last, for the comparison with published scores."),
    ] = None,
) -> None:
    """Turn an upstream checkpoint into a model bundle.

    Example: raycap import --from expansionnet_v2 --checkpoint rf_model.pth --tokens demo_coco_tokens.pickle --out model
    """
    input_files = {"--checkpoint": checkpoint, "--tokens": tokens, "--backbone": backbone}
    for option, path in input_files.items():
        if path is not None and not path.is_file():
            raise UserError(f"{option} {path} does not exist or is not a file")
    check_output_folder("--out", out, must_be_empty=True)
    from raycap.pipeline.evaluation.captioning import upstream

    title, read_checkpoint = upstream.FORMATS[source]
    settings = _read_settings(overrides or ())
    print(f"Importing {checkpoint} ({title}) with the vocabulary {tokens} into {out}", flush=True)
    try:
        request = upstream.ImportRequest(checkpoint, tokens, settings, backbone)
        captioner, vocabulary, sizes, features = read_checkpoint(request)
        protocol = _protocol(source, captioner, objective)
    except ValueError as error:
        raise UserError(str(error)) from error
    info = {"imported_from": checkpoint.name, "format": source}
    try:
        save_bundle(out, captioner, vocabulary, name=out.name, protocol=protocol, info=info)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error}; choose another folder or make room") from error
    model = captioner.model
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters without the backbone, "
        f"{len(vocabulary):,} words, {model.sizes.max_positions} positions, {model.config.num_heads} heads, {sizes}"
    )
    print(features)
    print(f"The bundle: {out}")


def _read_settings(overrides: Sequence[str]) -> dict[str, Values]:
    """The values of --set for the sections model and backbone, not checked yet. Raises UserError for other sections."""
    settings: Values = {"model": {}, "backbone": {}}
    for override in overrides:
        section, dot, _ = override.partition("=")[0].partition(".")
        if not dot or section not in settings:
            raise UserError(f"--set {override!r} is not of the form model.key=value or backbone.key=value")
        apply_override(settings, override)
    expanded: dict[str, Values] = expand_variables(settings)
    return expanded


def _protocol(source: str, captioner: Captioner, objective: Literal["cross_entropy", "scst"] | None) -> Protocol:
    """The protocol of the original: its authors' search, and for SCST whether EOS counts in the reward.

    source: a key of FORMATS. If the model has fewer positions than the original's maximum length, the number of
    positions is the maximum length.
    """
    published, model = shared_protocol(source), captioner.model
    ours = model_protocol(model.config, regions=published.features == "regions")
    return replace(
        published,
        system=ours.system,
        attend_padding=ours.attend_padding,
        objective=objective,
        eos_in_reward=published.eos_in_reward if objective == "scst" else None,
        max_length=min(published.max_length or model.sizes.max_positions, model.sizes.max_positions),
    )
