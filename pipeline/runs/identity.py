"""The identity of a run: a hash of its configuration, its data and the code, as far as they decide its result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

from models.config import Identity
from pipeline.captioning.bundle import CONTENT_FILES, bundle_digests, fetched
from pipeline.config.run import RunConfig
from pipeline.config.sections import SYNTHETIC
from pipeline.features.regions import ends_digest
from pipeline.storage.path import storage_path
from pipeline.version import project_root

# Sources that decide a result: a change in one of them makes other runs, a change elsewhere (reports) does not.
RESULT_SOURCES = (
    "models",
    "pipeline/captioning",
    "pipeline/config",
    "pipeline/data",
    "pipeline/features",
    "pipeline/runs",
    "pipeline/runtime",
    "pipeline/scoring",
    "pipeline/storage/weights.py",
    "pipeline/training",
)


def run_identity(config: RunConfig, fingerprint: str) -> str:
    """The run id: the configured name and a hash of configuration, data and code. Equal inputs give the same run."""
    digest = hashlib.sha256(f"{config_identity(config)} {fingerprint} {code_digest()}".encode()).hexdigest()
    return f"{config.name}-{digest[:10]}"


def code_digest() -> str:
    """Hash of RESULT_SOURCES: the files, and all files of the folders."""
    digest = hashlib.sha256()
    for source in RESULT_SOURCES:
        root = project_root() / source
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(project_root())).encode() + path.read_bytes())
    return digest.hexdigest()


def config_identity(config: RunConfig) -> str:
    """Hash of the configuration keys that affect the result; fields are marked with `models.config.Identity`.

    The location of the data set is left out, because `run_identity` adds a fingerprint of its content. Raises
    UserError for a missing bundle or HDF5 file.
    """
    relevant = json.dumps(_relevant_values(config, config), sort_keys=True)
    return hashlib.sha256(relevant.encode()).hexdigest()


def _relevant_values(value: Any, config: RunConfig) -> Any:
    """A section, or a value in one, as plain values, without the keys that do not affect the result."""
    if isinstance(value, BaseModel) or is_dataclass(value):
        kind: Any = type(value)
        marks = identity_marks(kind)
        keys = [key for key, mark in marks.items() if _is_relevant(mark, config)]
        values = {key: _value_or_digest(getattr(value, key), marks[key], config) for key in keys}
        return {key: _relevant_values(item, config) for key, item in values.items()}
    if isinstance(value, tuple):
        return [_relevant_values(item, config) for item in value]
    return value


@cache
def identity_marks(section: Any) -> dict[str, Identity | None]:
    """The mark of each key of a section (a pydantic model or a dataclass); None for a key without a mark."""
    names = list(section.model_fields) if issubclass(section, BaseModel) else [field.name for field in fields(section)]
    hints = get_type_hints(section, include_extras=True)
    return {
        name: next((argument for argument in get_args(hints[name]) if isinstance(argument, Identity)), None)
        for name in names
    }


def _is_relevant(mark: Identity | None, config: RunConfig) -> bool:
    """True when a key with this mark affects the result of the configuration."""
    if mark is Identity.WITH_BACKBONE:
        return config.has_backbone
    if mark is Identity.WITH_REGIONS:
        return not config.has_backbone
    return mark is not Identity.IGNORED


def _value_or_digest(value: Any, mark: Identity | None, config: RunConfig) -> Any:
    """The value of a key, or a digest of the file or bundle that the value names."""
    if mark is Identity.FILE and value is not None:
        file = Path(value).expanduser()
        if value not in ("none", "pretrained") and file.is_file():
            return _file_digest(file, file.stat().st_size, file.stat().st_mtime_ns)
    if mark is Identity.LARGE_FILE and value not in (None, SYNTHETIC):
        return ends_digest(Path(value).expanduser())
    if mark is Identity.BUNDLE and value is not None:
        return bundle_digests(fetched(storage_path(value, config.storage.options)), CONTENT_FILES)
    return value


@lru_cache
def _file_digest(path: Path, size: int, changed_ns: int) -> str:
    """sha256 of a file, cached for its size and time of change: word vectors are gigabytes and are hashed often."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
