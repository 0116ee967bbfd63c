"""A model bundle's files, wherever they lie: their digests, and a local copy of one on S3. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.mirror import Mirror
from pipeline.staging import cache_folder
from pipeline.storage import Place

WEIGHING = ("model.safetensors", "vocabulary.json")  # what decides the captions of a bundle, its settings apart


def fetched(bundle: Place) -> Path:
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
