"""The model bundle: a folder with everything that captioning needs.

model.safetensors    tensors under "model." and "backbone."
config.yaml          format, name, model, backbone (or null), sizes, info
vocabulary.json      the words
preprocessing.json   the image transform, or null for a model of stored features
card.md              what a reader should know
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError
from pipeline.storage.cache import cache_folder
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import StoragePath

if TYPE_CHECKING:
    from models.captioner import Captioner
    from models.transform import ImageTransform

FORMAT = 2  # 2: parameters have the names in_proj, out_proj, token_embedding and lm_head


@dataclass
class Bundle:
    """A loaded bundle. `transform` is None for a model of stored features; `config` is config.yaml as read."""

    captioner: Captioner
    vocabulary: Vocabulary
    transform: ImageTransform | None
    config: dict[str, Any]


def save_bundle(
    folder: Path, captioner: Captioner, vocabulary: Vocabulary, *, name: str, info: Mapping[str, Any]
) -> None:
    """Writes the bundle beside `folder` under a temporary name, then renames; an older bundle goes only after that.

    `info` (scores, run id, versions: JSON values) is stored in config.yaml and shown on the card.
    """
    from safetensors.torch import save_file

    from models.transform import ImageTransform

    model, backbone = captioner.model, captioner.backbone
    if len(vocabulary) != model.sizes.vocabulary_size:
        raise ValueError(
            f"the vocabulary has {len(vocabulary)} words, the model {model.sizes.vocabulary_size}; they must be equal"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        tensors = {key: value.detach().cpu().contiguous() for key, value in captioner.state_dict().items()}
        save_file(tensors, temporary / "model.safetensors")
        backbone_config = None
        if backbone is not None:
            # the weights travel in the bundle: where they first came from must not be needed again
            backbone_config = asdict(backbone.config) | {"weights": "none"}
        config = {
            "format": FORMAT,
            "name": name,
            "model": asdict(model.config) | {"word_vectors": None},  # the vectors travel in the bundle too
            "backbone": backbone_config,
            "sizes": asdict(model.sizes),
            "info": dict(info),
        }
        text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
        (temporary / "config.yaml").write_text(text, encoding="utf-8")
        vocabulary.save(temporary / "vocabulary.json")
        transform = None if backbone is None else ImageTransform(backbone.config.image_size).describe()
        (temporary / "preprocessing.json").write_text(json.dumps(transform, indent=2), encoding="utf-8")
        (temporary / "card.md").write_text(_card(name, captioner, vocabulary, info), encoding="utf-8")
        _replace_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_bundle(folder: Path) -> Bundle:
    """Reads a bundle; the captioner is in evaluation mode, on the CPU.

    Raises ValueError for a folder that is no bundle, for a newer format, and for parts that do not fit each other.
    """
    from safetensors.torch import load_file

    from models.backbone import Backbone
    from models.base import ModelSizes, load_strictly
    from models.captioner import Captioner
    from models.config import MODEL_CONFIGS, BackboneConfig
    from models.registry import build_model
    from models.transform import ImageTransform

    missing = [
        part for part in ("config.yaml", "model.safetensors", "vocabulary.json") if not (folder / part).is_file()
    ]
    if missing:
        raise ValueError(f"{folder} is not a model bundle: it lacks {', '.join(missing)}")
    config = _read(folder / "config.yaml", lambda path: yaml.safe_load(path.read_text(encoding="utf-8")))
    version = config.get("format") if isinstance(config, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"{folder / 'config.yaml'} is not a bundle's: it has no format number")
    if version > FORMAT:
        raise ValueError(
            f"{folder} is a bundle of format {version}; this version of raycap reads up to {FORMAT}: update raycap"
        )
    if version < FORMAT:
        raise ValueError(
            f"{folder} is a bundle of format {version}, whose parameters have other names; this version of raycap "
            f"reads format {FORMAT}: import or train the model again"
        )
    where = str(folder / "config.yaml")
    vocabulary = _read(folder / "vocabulary.json", Vocabulary.load)
    model_section = config.get("model")
    system = model_section.get("name") if isinstance(model_section, dict) else None
    if system not in MODEL_CONFIGS:
        raise ValueError(
            f"{where}: model.name is {system!r}, which is unknown; known: {', '.join(sorted(MODEL_CONFIGS))}"
        )
    model_config = _section(MODEL_CONFIGS[str(system)], config, "model", where)
    sizes = _section(ModelSizes, config, "sizes", where)
    try:
        model = build_model(model_config, sizes)
    except TypeError as error:
        raise ValueError(f"{where}: sections 'model' and 'sizes' make no model: {error}") from error
    if len(vocabulary) != model.sizes.vocabulary_size:
        raise ValueError(
            f"{folder}: vocabulary.json has {len(vocabulary)} words, config.yaml says {model.sizes.vocabulary_size}"
        )
    backbone = transform = None
    if config.get("backbone") is not None:
        try:
            backbone = Backbone(_section(BackboneConfig, config, "backbone", where))
        except TypeError as error:
            raise ValueError(f"{where}: section 'backbone' makes no backbone: {error}") from error
        transform = ImageTransform(backbone.config.image_size)
        recorded = _read(folder / "preprocessing.json", lambda path: json.loads(path.read_text(encoding="utf-8")))
        if recorded != transform.describe():
            raise ValueError(f"{folder / 'preprocessing.json'} describes a transform that this version does not have")
    captioner = Captioner(model, backbone)
    weights = folder / "model.safetensors"
    load_strictly(captioner, _read(weights, load_file), str(weights))
    return Bundle(captioner.eval(), vocabulary, transform, config)


def _read(path: Path, parse: Callable[[Path], Any]) -> Any:
    """A part of a bundle; ValueError naming the file where it is missing, damaged or not to be understood."""
    from safetensors import SafetensorError

    try:
        return parse(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _section(kind: type, config: Mapping[str, Any], key: str, where: str) -> Any:
    """A section of config.yaml as its dataclass; lists become tuples, unknown keys are refused."""
    values = config.get(key)
    if not isinstance(values, dict):
        raise ValueError(f"{where} has no section {key!r}")
    known = {field.name for field in fields(kind)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(f"{where}: {key}.{unknown[0]} is unknown; known: {', '.join(sorted(known))}")
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{where}: section {key!r} lacks a value, or one is of another type: {error}") from error


def _plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts, for YAML's safe form."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _replace_folder(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(old / "bundle")
    try:
        temporary.rename(folder)
    except BaseException:
        (old / "bundle").rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _card(name: str, captioner: Captioner, vocabulary: Vocabulary, info: Mapping[str, Any]) -> str:
    model, backbone = captioner.model, captioner.backbone
    count = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"# {name}",
        "",
        f"A raycap model bundle: {model.config.name}, {count:,} parameters without the backbone, "
        f"{len(vocabulary):,} words, captions up to {model.sizes.max_positions} tokens.",
        "",
    ]
    if backbone is None:
        lines.append(
            f"It has no backbone: it captions stored features of width {model.sizes.feature_width}, not images."
        )
    else:
        lines.append(
            f"It captions images through {backbone.config.name} at {backbone.config.image_size} px "
            f"({backbone.num_tokens} tokens of width {backbone.width})."
        )
    if info:
        lines += ["", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in info.items())]
    return "\n".join(lines) + "\n"


# A model bundle's files, wherever they lie: their digests, and a local copy of one on S3. No torch here.

WEIGHING = ("model.safetensors", "vocabulary.json")  # what decides the captions of a bundle, its settings apart


def fetched(bundle: StoragePath) -> Path:
    """A bundle as a local folder: itself, or this machine's copy of what lies on S3, brought up to date."""
    if not bundle.is_remote:
        return bundle.path
    copy = cache_folder() / "bundles" / hashlib.sha256(bundle.uri.encode()).hexdigest()[:20]
    Mirror(bundle, copy).pull()
    return copy


def bundle_digests(folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """sha256 by file of a local bundle, of all its files without `names`. UserError where one is not there."""
    wanted = names or sorted(path.name for path in folder.glob("*") if path.is_file() and path.name[0] != ".")
    found = {}
    for name in wanted or WEIGHING:
        try:
            with (folder / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise UserError(f"{folder} is not a model bundle: {name} is not there; give the folder of one") from error
    return found
