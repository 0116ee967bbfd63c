"""The model bundle: a folder with everything that captioning needs.

model.safetensors    tensors under "model." and "backbone."
config.yaml          format, name, model, backbone (or null), sizes, info
vocabulary.json      the words in the order of their ids
preprocessing.json   the image transform, or null for a model of stored features
card.md              a summary for people
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from models.config import BackboneConfig, ModelSizes
from pipeline.config.load import parse_section
from pipeline.config.sections import ModelSection
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError
from pipeline.storage.atomic import atomic_folder
from pipeline.storage.cache import cache_folder
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import StoragePath

if TYPE_CHECKING:
    from models.captioner import Captioner
    from models.transform import ImageTransform

FORMAT = 2  # Format 2 introduced the parameter names in_proj, out_proj, token_embedding and lm_head.
REQUIRED_FILES = ("config.yaml", "model.safetensors", "vocabulary.json")
# The identity of a run that starts from a bundle contains the digests of these files: the weights and the words.
CONTENT_FILES = ("model.safetensors", "vocabulary.json")


@dataclass
class Bundle:
    """A loaded bundle. `transform` is None for a model of stored features. `config` is the content of config.yaml."""

    captioner: Captioner
    vocabulary: Vocabulary
    transform: ImageTransform | None
    config: dict[str, Any]


def save_bundle(
    folder: Path, captioner: Captioner, vocabulary: Vocabulary, *, name: str, info: Mapping[str, Any]
) -> None:
    """Writes a bundle atomically. An older bundle in `folder` is removed only after the new one is complete.

    info: JSON values such as scores, run id and versions, for config.yaml and the card.
    Raises ValueError if the model needs a vocabulary of another size.
    """
    from safetensors.torch import save_file

    from models.transform import ImageTransform

    model, backbone = captioner.model, captioner.backbone
    if len(vocabulary) != model.sizes.vocabulary_size:
        raise ValueError(
            f"the vocabulary has {len(vocabulary)} words, the model {model.sizes.vocabulary_size}; they must be equal"
        )
    with atomic_folder(folder) as temporary:
        tensors = {key: value.detach().cpu().contiguous() for key, value in captioner.state_dict().items()}
        save_file(tensors, temporary / "model.safetensors")
        # Loading the bundle must not need the original files of backbone weights and word vectors, because
        # model.safetensors contains both.
        config = {
            "format": FORMAT,
            "name": name,
            "model": asdict(model.config) | {"word_vectors": None},
            "backbone": None if backbone is None else asdict(backbone.config) | {"weights": "none"},
            "sizes": asdict(model.sizes),
            "info": dict(info),
        }
        # YAML's safe dumper accepts no tuples, which JSON turns into lists.
        text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)
        (temporary / "config.yaml").write_text(text, encoding="utf-8")
        vocabulary.save(temporary / "vocabulary.json")
        transform = None if backbone is None else ImageTransform(backbone.config.image_size).describe()
        (temporary / "preprocessing.json").write_text(json.dumps(transform, indent=2), encoding="utf-8")
        (temporary / "card.md").write_text(_card(name, captioner, info), encoding="utf-8")


def load_bundle(folder: Path) -> Bundle:
    """Reads a bundle. The captioner is on the CPU and in evaluation mode.

    Raises ValueError for a folder that is not a bundle, for a newer format, and for parts that do not fit together.
    """
    from safetensors.torch import load_file

    from models.backbone import Backbone
    from models.base import load_strictly
    from models.captioner import Captioner
    from models.registry import build_model
    from models.transform import ImageTransform

    if missing := [name for name in REQUIRED_FILES if not (folder / name).is_file()]:
        raise ValueError(f"{folder} is not a model bundle: it lacks {', '.join(missing)}")
    config = _read_config(folder)
    vocabulary = _read(folder / "vocabulary.json", Vocabulary.load)
    try:
        model_config = parse_section(ModelSection, config.get("model"), "model")
        sizes = parse_section(ModelSizes, config.get("sizes"), "sizes")
        settings = config.get("backbone")
        backbone_config = None if settings is None else parse_section(BackboneConfig, settings, "backbone")
    except UserError as error:
        raise ValueError(f"{folder / 'config.yaml'}: {error}") from error
    if len(vocabulary) != sizes.vocabulary_size:
        raise ValueError(
            f"{folder}: vocabulary.json has {len(vocabulary)} words, config.yaml says {sizes.vocabulary_size}"
        )
    backbone = transform = None
    if backbone_config is not None:
        backbone, transform = Backbone(backbone_config), ImageTransform(backbone_config.image_size)
        recorded = _read(folder / "preprocessing.json", lambda path: json.loads(path.read_text(encoding="utf-8")))
        if recorded != transform.describe():
            raise ValueError(f"{folder / 'preprocessing.json'} describes a transform that this version does not have")
    captioner = Captioner(build_model(model_config, sizes), backbone)
    weights = _read(folder / "model.safetensors", load_file)
    load_strictly(captioner, weights, str(folder / "model.safetensors"))
    return Bundle(captioner.eval(), vocabulary, transform, config)


def _read_config(folder: Path) -> dict[str, Any]:
    """The content of config.yaml. ValueError if it does not have the format that this version reads."""
    path = folder / "config.yaml"
    config = _read(path, lambda file: yaml.safe_load(file.read_text(encoding="utf-8")))
    version = config.get("format") if isinstance(config, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"{path} does not belong to a bundle: it has no format number")
    if version != FORMAT:
        newer = f"; this version of raycap reads up to {FORMAT}: update raycap"
        older = (
            f", whose parameters have other names; this version of raycap reads format {FORMAT}: import or train the "
            "model again"
        )
        raise ValueError(f"{folder} is a bundle of format {version}{newer if version > FORMAT else older}")
    return dict(config)


def _read(path: Path, parse: Callable[[Path], Any]) -> Any:
    """The content of a file of a bundle. Raises ValueError with the file's path if `parse` fails."""
    from safetensors import SafetensorError

    try:
        return parse(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _card(name: str, captioner: Captioner, info: Mapping[str, Any]) -> str:
    """The text of card.md."""
    model, backbone, sizes = captioner.model, captioner.backbone, captioner.model.sizes
    count = sum(parameter.numel() for parameter in model.parameters())
    inputs = f"It has no backbone: it captions stored features of width {sizes.feature_width}, not images."
    if backbone is not None:
        inputs = (
            f"It captions images through {backbone.config.name} at {backbone.config.image_size} px "
            f"({backbone.num_tokens} tokens of width {backbone.width})."
        )
    table = "".join(f"| {key} | {value} |\n" for key, value in info.items())
    return (
        f"# {name}\n\nA raycap model bundle: {model.config.name}, {count:,} parameters without the backbone, "
        f"{sizes.vocabulary_size:,} words, captions up to {sizes.max_positions} tokens.\n\n{inputs}\n"
        + (f"\n| | |\n|---|---|\n{table}" if info else "")
    )


def fetched(bundle: StoragePath) -> Path:
    """The local folder of a bundle. For a bundle on S3 it is a local copy, which is brought up to date first."""
    if not bundle.is_remote:
        return bundle.path
    copy = cache_folder() / "bundles" / hashlib.sha256(bundle.uri.encode()).hexdigest()[:20]
    Mirror(bundle, copy).pull()
    return copy


def bundle_digests(folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """{file: sha256} of the named files of a bundle, by default of all. UserError when one of them is missing."""
    # For an empty folder, the error below names a file that every bundle needs.
    names = names or sorted(path.name for path in folder.glob("[!.]*") if path.is_file()) or CONTENT_FILES
    digests = {}
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise UserError(f"{folder} is not a model bundle: it lacks {name}; give the folder of a bundle") from error
    return digests
