"""`raycap import`: turns an upstream checkpoint into a model bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from safetensors import SafetensorError

from raycap.jobs.options import Set
from raycap.models.config import BackboneConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig
from raycap.pipeline.config.load import apply_override, parse_given, read_file
from raycap.pipeline.config.variables import expand_variables
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import save_bundle
from raycap.pipeline.evaluation.captioning.upstream import read_expansionnet_vocabulary, read_meshed_vocabulary
from raycap.pipeline.evaluation.comparison.protocol import Protocol, model_protocol
from raycap.pipeline.evaluation.comparison.published import shared_protocol

if TYPE_CHECKING:
    from torch import Tensor

    from raycap.models.base import CaptionModel
    from raycap.models.captioner import Captioner
    from raycap.models.convert.upstream import Inferred
    from raycap.models.encoders.backbone import Backbone
    from raycap.pipeline.data.vocabulary import Vocabulary


class ImportRequest(NamedTuple):
    """The files to import, and the checked settings of the sections `model` and `backbone` that the user gave."""

    checkpoint: Path
    tokens: Path
    settings: dict[str, dict[str, Any]]
    backbone_file: Path | None
    backbone_overrides: Sequence[str]


# The imported model, its vocabulary, and two texts for the user: the model's sizes, and the features that it takes.
Imported = tuple["Captioner", "Vocabulary", str, str]


def import_checkpoint(
    source: Annotated[
        Literal["expansionnet_v2", "meshed_memory"],
        typer.Option("--from", metavar="FORMAT", help="expansionnet_v2 or meshed_memory."),
    ],
    checkpoint: Annotated[Path, typer.Option(help="The upstream checkpoint. It is read as tensors; no code runs.")],
    tokens: Annotated[Path, typer.Option(help="Its vocabulary pickle. Only plain values are read.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="The bundle's folder.")],
    config: Annotated[Path | None, typer.Option(help="YAML with settings that the checkpoint lacks.")] = None,
    overrides: Set = None,
    backbone: Annotated[Path | None, typer.Option(help="A Swin checkpoint, for a captioner without one.")] = None,
    objective: Annotated[
        Literal["cross_entropy", "scst"] | None,
        typer.Option(help="What trained it last, for the comparison with printed scores."),
    ] = None,
) -> None:
    """Turn an upstream checkpoint into a model bundle.

    Example: raycap import --from expansionnet_v2 --checkpoint rf_model.pth --tokens demo_coco_tokens.pickle --out model
    """
    input_files = {"--checkpoint": checkpoint, "--tokens": tokens, "--config": config, "--backbone": backbone}
    for option, path in input_files.items():
        if path is not None and not path.is_file():
            raise UserError(f"{option} {path} does not exist or is not a file")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} exists and is not empty; choose another folder or remove it")
    title, read_checkpoint, config_type = FORMATS[source]
    settings = _read_settings(config, overrides or (), config_type)
    backbone_overrides = [override for override in overrides or () if override.startswith("backbone.")]
    print(f"Importing {checkpoint} ({title}) with the vocabulary {tokens} into {out}", flush=True)
    try:
        request = ImportRequest(checkpoint, tokens, settings, backbone, backbone_overrides)
        captioner, vocabulary, sizes, features = read_checkpoint(request)
        protocol = _protocol(source, captioner, objective)
        _save(out, captioner, vocabulary, protocol, {"imported_from": checkpoint.name, "format": source})
    except ValueError as error:
        raise UserError(str(error)) from error
    model = captioner.model
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters without the backbone, "
        f"{len(vocabulary):,} words, {model.sizes.max_positions} positions, {model.config.num_heads} heads, {sizes}"
    )
    print(features)
    print(f"The bundle: {out}")


def _read_settings(
    config: Path | None, overrides: Sequence[str], model: type[ModelConfig]
) -> dict[str, dict[str, Any]]:
    """The settings that the user gave, by section. model: the class of the system's configuration.

    Only the types of the settings are checked, because the checkpoint decides whether they fit together. Raises
    UserError that names the key.
    """
    section_types = {"model": model, "backbone": BackboneConfig}
    file_values = {} if config is None else read_file(config)
    settings: dict[str, Any] = {section: file_values.get(section) or {} for section in section_types}
    for override in overrides:
        section, dot, _ = override.partition("=")[0].partition(".")
        if not dot or section not in section_types:
            raise UserError(f"--set {override!r} is not of the form model.key=value or backbone.key=value")
        apply_override(settings, override)
    settings = expand_variables(settings)
    return {name: parse_given(section_type, settings[name], name) for name, section_type in section_types.items()}


def _import_expansionnet(request: ImportRequest) -> Imported:
    """Reads an ExpansionNet v2 checkpoint. The backbone is its Swin, or that of --backbone, or none."""
    from raycap.models.captioner import Captioner
    from raycap.models.convert import upstream as convert
    from raycap.models.convert.tensor_files import read_tensors

    vocabulary, tensors = read_expansionnet_vocabulary(request.tokens), read_tensors(request.checkpoint)
    # the checkpoint of a whole system contains its backbone, a Swin, under names with a prefix
    swin_names = [name for name in tensors if name.startswith(convert.SWIN_PREFIX)]
    swin = {name.removeprefix(convert.SWIN_PREFIX): tensors.pop(name) for name in swin_names}
    if swin and request.backbone_file is not None:
        raise UserError(f"{request.checkpoint} contains a Swin ({len(swin)} tensors); leave --backbone out")
    inferred = convert.infer_expansionnet(tensors)
    config = convert.complete_config(inferred, request.settings["model"])
    model = _build(request, config, inferred, vocabulary, convert.convert_expansionnet(tensors, config))
    sizes = f"G = {list(config.static_expansion or ())}, N_E = {config.dynamic_expansion}"
    if request.backbone_file is not None:
        swin = read_tensors(request.backbone_file)
    if swin:
        backbone = _build_backbone(swin, request.settings["backbone"], inferred.feature_width)
        features = f"Backbone: {backbone.config.name} at {backbone.config.image_size} px, {backbone.num_tokens} tokens"
        return Captioner(model, backbone), vocabulary, sizes, features
    if request.backbone_overrides:
        raise UserError(
            f"--set {request.backbone_overrides[0]}: {request.checkpoint} holds no Swin; add --backbone FILE or "
            "leave it out"
        )
    features = (
        f"No backbone: the bundle captions stored features of width {inferred.feature_width}; raycap caption needs "
        "images, so import again with --backbone FILE for it"
    )
    return Captioner(model), vocabulary, sizes, features


def _import_meshed_memory(request: ImportRequest) -> Imported:
    """Reads a checkpoint of the Meshed-Memory Transformer, which has no backbone."""
    from raycap.models.captioner import Captioner
    from raycap.models.convert import upstream as convert
    from raycap.models.convert.tensor_files import read_tensors

    if request.backbone_file is not None or request.backbone_overrides:
        raise UserError(
            "the Meshed-Memory Transformer works on region features; leave --backbone out, and its settings"
        )
    vocabulary, tensors = read_meshed_vocabulary(request.tokens), read_tensors(request.checkpoint)
    inferred = convert.infer_meshed_memory(tensors)
    config = convert.complete_meshed_config(inferred, request.settings["model"])
    model = _build(request, config, inferred, vocabulary, convert.convert_meshed_memory(tensors, config))
    features = f"No backbone: the bundle captions stored region features of width {inferred.feature_width}"
    return Captioner(model), vocabulary, f"{config.num_memory_slots} memory slots", features


def _build(
    request: ImportRequest, config: ModelConfig, inferred: Inferred, vocabulary: Vocabulary, tensors: dict[str, Tensor]
) -> CaptionModel:
    """Builds the model and loads `tensors`, which have raycap's names. Raises ValueError if they do not fit."""
    from raycap.models.base import load_strictly
    from raycap.models.convert.upstream import imported_sizes
    from raycap.models.registry import build_model

    vocabulary_sizes = {"count": len(vocabulary), "sos": vocabulary.sos, "eos": vocabulary.eos, "pad": vocabulary.pad}
    model = build_model(config, imported_sizes(inferred, vocabulary_sizes))
    load_strictly(model, tensors, str(request.checkpoint))
    return model


def _build_backbone(swin: dict[str, Tensor], settings: dict[str, Any], feature_width: int) -> Backbone:
    """Builds the backbone and loads a Swin's tensors. UserError if the model takes features of another width."""
    from raycap.models.convert.upstream import backbone_config, infer_swin
    from raycap.models.encoders.backbone import Backbone, load_tensors

    backbone = Backbone(backbone_config(infer_swin(swin), settings))
    if backbone.width != feature_width:
        raise UserError(
            f"the backbone gives features of width {backbone.width}, the captioner takes {feature_width}; "
            "they do not belong together"
        )
    load_tensors(backbone, swin)
    return backbone


def _save(out: Path, captioner: Captioner, vocabulary: Vocabulary, protocol: Protocol, info: dict[str, Any]) -> None:
    """Writes the bundle. info: entries about its origin for the bundle's configuration."""
    try:
        save_bundle(out, captioner, vocabulary, name=out.name, protocol=protocol, info=info)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out} cannot be written: {error}; choose another folder or make room") from error


def _protocol(source: str, captioner: Captioner, objective: Literal["cross_entropy", "scst"] | None) -> Protocol:
    """The original's protocol: the search by which its authors evaluate, and for SCST whether EOS was rewarded.

    source: a key of FORMATS. A model with fewer positions than the original's captions has tokens gets that limit.
    """
    printed, model = shared_protocol(source), captioner.model
    ours = model_protocol(model.config, regions=printed.features == "regions")
    return replace(
        printed,
        system=ours.system,
        attend_padding=ours.attend_padding,
        objective=objective,
        eos_in_reward=printed.eos_in_reward if objective == "scst" else None,
        max_length=min(printed.max_length or model.sizes.max_positions, model.sizes.max_positions),
    )


# By format: the project's name, the function that reads its files, and the class of its model's configuration.
FORMATS: dict[str, tuple[str, Callable[[ImportRequest], Imported], type[ModelConfig]]] = {
    "expansionnet_v2": ("ExpansionNet v2", _import_expansionnet, ExpansionNetConfig),
    "meshed_memory": ("Meshed-Memory Transformer", _import_meshed_memory, MeshedMemoryConfig),
}
