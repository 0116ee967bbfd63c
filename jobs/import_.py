"""`raycap import`: an upstream checkpoint into a model bundle."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer
import yaml
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from jobs.options import Set
from models.config import BackboneConfig, ExpansionNetConfig, MeshedMemoryConfig
from pipeline.errors import UserError

if TYPE_CHECKING:
    from models.captioner import Captioner
    from pipeline.data.vocabulary import Vocabulary

SECTIONS = ("model", "backbone")


class Order(NamedTuple):
    """What is to be imported: files, where to, the checked settings of each section, the overrides for a backbone."""

    checkpoint: Path
    tokens: Path
    out: Path
    given: dict[str, dict[str, Any]]
    backbone_file: Path | None
    for_backbone: Sequence[str]


def import_checkpoint(
    source: str,
    *,
    checkpoint: Path,
    tokens: Path,
    out: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    backbone: Path | None = None,
) -> None:
    """Writes the bundle `out` from an upstream checkpoint, its vocabulary and, where it has none, a backbone file.

    config: a YAML file whose sections `model` and `backbone` say what the checkpoint does not hold (other sections are
    left alone); overrides: `model.num_heads=8`. Files are read as tensors and plain values only; nothing in them runs.
    Raises UserError in one sentence for what does not fit; nothing is written then.
    """
    if source not in FORMATS:
        raise UserError(f"--from {source!r} is unknown; known: {', '.join(sorted(FORMATS))}")
    for path, what in (
        (checkpoint, "--checkpoint"),
        (tokens, "--tokens"),
        (config, "--config"),
        (backbone, "--backbone"),
    ):
        if path is not None and not path.is_file():
            raise UserError(f"{what} {path} does not exist or is no file")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder's name")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} exists and is not empty; choose another folder or remove it")
    given = read_settings(config, overrides, FORMATS[source].config)
    for_backbone = [override for override in overrides if override.startswith("backbone.")]
    try:
        FORMATS[source].importer(Order(checkpoint, tokens, out, given, backbone, for_backbone))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def read_settings(config: Path | None, overrides: Sequence[str], model: type) -> dict[str, dict[str, Any]]:
    """The settings of both sections that the user gave, checked; `model` is the system's configuration.

    Raises UserError naming the key.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if config is not None:
        try:
            data = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{config} is not valid YAML: {' '.join(str(error).split())}") from error
        for name in SECTIONS:
            section = data.get(name) if isinstance(data, dict) else None
            if section is not None and not isinstance(section, dict):
                raise UserError(f"{config}: {name} must hold keys, found {type(section).__name__}")
            given[name] |= section or {}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot or section not in SECTIONS:
            raise UserError(f"--set {override!r} is not of the form model.key=value or backbone.key=value")
        try:
            given[section][name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--set {override!r}: {text!r} is not a YAML value") from error
    kinds = {"model": model, "backbone": BackboneConfig}
    return {name: _checked(name, kind, given[name]) for name, kind in kinds.items()}


def _checked(section: str, kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Only the given values, of the right types; UserError otherwise."""
    known = sorted(field.name for field in fields(kind))
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"unknown key {section}.{name}: {hint}known here: {', '.join(known)}")
    hints, checked = get_type_hints(kind), {}
    for name, value in values.items():  # one by one: whether they fit together is known once the checkpoint is read
        try:
            checked[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join([section, name, *(str(part) for part in first["loc"])])
            raise UserError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from error
    return checked


def _import_expansionnet(order: Order) -> None:
    from models import convert
    from models.backbone import Backbone, load_swin, read_tensors
    from models.base import load_strictly
    from models.captioner import Captioner
    from models.registry import build_model
    from pipeline.captioning.upstream import read_expansionnet_vocabulary

    checkpoint, tokens, out, given, backbone_file, for_backbone = order
    print(f"Importing {checkpoint} (ExpansionNet v2) with the vocabulary {tokens} into {out}", flush=True)
    vocabulary = read_expansionnet_vocabulary(tokens)
    tensors = read_tensors(checkpoint)
    swin = {
        name.removeprefix(convert.SWIN_PREFIX): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(convert.SWIN_PREFIX)
    }
    if swin and backbone_file is not None:
        raise UserError(f"{checkpoint} brings its own Swin ({len(swin)} tensors); leave --backbone out")
    inferred = convert.infer_expansionnet(tensors)
    config = convert.complete_config(inferred, given["model"])
    words = {"count": len(vocabulary), "sos": vocabulary.sos, "eos": vocabulary.eos, "pad": vocabulary.pad}
    model = build_model(config, convert.imported_sizes(inferred, words))
    load_strictly(model, convert.convert_expansionnet(tensors, config), str(checkpoint))
    backbone = None
    if backbone_file is not None:
        swin = read_tensors(backbone_file)
    if swin:
        settings = convert.backbone_config(convert.infer_swin(swin), given["backbone"])
        backbone = Backbone(settings)
        if backbone.width != inferred.feature_width:
            raise UserError(
                f"the backbone gives features of width {backbone.width}, the captioner takes {inferred.feature_width}; "
                f"they do not belong together"
            )
        load_swin(backbone, swin)
    elif for_backbone:
        raise UserError(f"--set {for_backbone[0]}: {checkpoint} holds no Swin; add --backbone FILE or leave it out")
    info = {"imported_from": checkpoint.name, "format": "expansionnet_v2"}
    _save(out, Captioner(model, backbone), vocabulary, name=out.name, info=info)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{count:,} parameters without the backbone, {len(vocabulary):,} words, {inferred.max_positions} positions, "
        f"G = {list(config.static_expansion or ())}, N_E = {config.dynamic_expansion}, {config.num_heads} heads"
    )
    if backbone is None:
        print(
            "No backbone: the bundle captions stored features of width "
            f"{inferred.feature_width}; raycap caption needs images, so import again with --backbone FILE for it"
        )
    else:
        print(f"Backbone: {backbone.config.name} at {backbone.config.image_size} px, {backbone.num_tokens} tokens")
    print(f"The bundle: {out}")


def _import_meshed_memory(order: Order) -> None:
    from models import convert_meshed as convert
    from models.backbone import read_tensors
    from models.base import load_strictly
    from models.captioner import Captioner
    from models.convert import imported_sizes
    from models.registry import build_model
    from pipeline.captioning.upstream import read_meshed_vocabulary

    checkpoint, tokens, out, given, backbone_file, for_backbone = order
    if backbone_file is not None or for_backbone:
        raise UserError(
            "the Meshed-Memory Transformer works on region features; leave --backbone out, and what is set for it"
        )
    print(f"Importing {checkpoint} (Meshed-Memory Transformer) with the vocabulary {tokens} into {out}", flush=True)
    vocabulary = read_meshed_vocabulary(tokens)
    tensors = read_tensors(checkpoint)
    inferred = convert.infer_meshed_memory(tensors)
    config = convert.complete_meshed_config(inferred, given["model"])
    words = {"count": len(vocabulary), "sos": vocabulary.sos, "eos": vocabulary.eos, "pad": vocabulary.pad}
    model = build_model(config, imported_sizes(inferred, words))
    load_strictly(model, convert.convert_meshed_memory(tensors, config), str(checkpoint))
    info = {"imported_from": checkpoint.name, "format": "meshed_memory"}
    _save(out, Captioner(model), vocabulary, name=out.name, info=info)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{count:,} parameters, {len(vocabulary):,} words, {inferred.max_positions} positions, "
        f"{config.num_memory_slots} memory slots, {config.num_heads} heads"
    )
    print(f"It captions stored region features of width {inferred.feature_width}, with their lengths; not images")
    print(f"The bundle: {out}")


def _save(out: Path, captioner: Captioner, vocabulary: Vocabulary, *, name: str, info: dict[str, Any]) -> None:
    from pipeline.captioning.bundle import save_bundle

    try:
        save_bundle(out, captioner, vocabulary, name=name, info=info)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out} cannot be written: {error}; choose another folder or make room") from error


class Format(NamedTuple):
    """How an upstream project's files are read, and what its model's settings are."""

    importer: Callable[[Order], None]
    config: type


FORMATS = {
    "expansionnet_v2": Format(_import_expansionnet, ExpansionNetConfig),
    "meshed_memory": Format(_import_meshed_memory, MeshedMemoryConfig),
}


def command(
    source: Annotated[str, typer.Option("--from", metavar="FORMAT", help="expansionnet_v2 or meshed_memory.")],
    checkpoint: Annotated[Path, typer.Option(help="The upstream checkpoint. It is read as tensors; no code runs.")],
    tokens: Annotated[Path, typer.Option(help="Its vocabulary pickle. Only plain values are read.")],
    out: Annotated[Path, typer.Option(help="The bundle's folder.")],
    config: Annotated[Path | None, typer.Option(help="YAML with settings that the checkpoint lacks.")] = None,
    set_: Set = None,
    backbone: Annotated[Path | None, typer.Option(help="A Swin checkpoint, for a captioner without one.")] = None,
) -> None:
    """Turn an upstream checkpoint into a model bundle.

    Example: raycap import --from expansionnet_v2 --checkpoint rf_model.pth --tokens demo_coco_tokens.pickle --out model
    """
    import_checkpoint(
        source, checkpoint=checkpoint, tokens=tokens, out=out, config=config, overrides=set_ or (), backbone=backbone
    )
