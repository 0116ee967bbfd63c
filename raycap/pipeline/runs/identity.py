"""The identity of a run: a hash of what decides its result.

The hash covers configuration, data and RESULTS_VERSION. If a change of the code changes the losses, captions or scores
of small runs, `tests/integration/test_curves.py` fails and asks for a higher RESULTS_VERSION.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

from raycap.models.config import Identity
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC, TEXT_ENCODER_FILES
from raycap.pipeline.evaluation.captioning.bundle import CONTENT_FILES, bundle_digests, fetched
from raycap.pipeline.features.regions import ends_digest
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.weights import weights_file_digest

RESULTS_VERSION = 2  # raised by hand if new code gives other results for the same configuration and data


def run_identity(config: RunConfig, fingerprint: str) -> str:
    """The run id: the configured name and a hash of configuration, data and RESULTS_VERSION.

    If all three are equal, two runs have the same id, so they are the same run. fingerprint: of the data set.
    """
    digest = hashlib.sha256(f"{config_identity(config)} {fingerprint} {RESULTS_VERSION}".encode()).hexdigest()
    return f"{config.name}-{digest[:10]}"


def config_identity(config: RunConfig) -> str:
    """A hash of the configuration keys that affect the result. Keys without effect are marked (`config.Identity`).

    The location of the data set is left out, because `run_identity` adds a fingerprint of its content. Raises
    UserError if a bundle or an HDF5 file is missing.
    """
    relevant = json.dumps(_relevant_values(config, config), sort_keys=True)
    return hashlib.sha256(relevant.encode()).hexdigest()


def _relevant_values(value: Any, config: RunConfig) -> Any:
    """A value of the configuration, ready for JSON. A section loses the keys that do not affect the result."""
    if isinstance(value, tuple):
        return [_relevant_values(item, config) for item in value]
    if not (isinstance(value, BaseModel) or is_dataclass(value)):
        return value
    section: Any = type(value)
    # A run with a backbone does not use the keys for region features. A run with regions does not use backbone keys.
    ignored = {Identity.IGNORED, Identity.WITH_REGIONS if config.has_backbone else Identity.WITH_BACKBONE}
    return {
        key: _relevant_values(_value_or_digest(getattr(value, key), mark, config), config)
        for key, mark in identity_marks(section).items()
        if mark not in ignored
    }


@cache
def identity_marks(section: Any) -> dict[str, Identity | None]:
    """The mark of each key, or None if the key has no mark. section: the class, a pydantic model or a dataclass."""
    names = list(section.model_fields) if issubclass(section, BaseModel) else [field.name for field in fields(section)]
    hints = get_type_hints(section, include_extras=True)
    marks: dict[str, Identity | None] = dict.fromkeys(names)
    for name in names:
        for argument in get_args(hints[name]):
            if isinstance(argument, Identity):
                marks[name] = argument
    return marks


def _value_or_digest(value: Any, mark: Identity | None, config: RunConfig) -> Any:
    """A digest of the file or bundle that a key's value names, or the value itself if it names none.

    Because of the digest, a file that was moved is still the same input.
    """
    if mark is Identity.FILE and value not in (None, "none", "pretrained"):
        file = Path(value).expanduser()
        return weights_file_digest(file) if file.is_file() else value
    if mark is Identity.TEXT_ENCODER:
        files = [Path(value).expanduser() / name for name in TEXT_ENCODER_FILES]
        return [weights_file_digest(file) for file in files if file.is_file()] or value
    if mark is Identity.LARGE_FILE and value not in (None, SYNTHETIC):
        return ends_digest(Path(value).expanduser())
    if mark is Identity.BUNDLE and value is not None:
        return bundle_digests(fetched(storage_path(value, config.storage.options)), CONTENT_FILES)
    return value
