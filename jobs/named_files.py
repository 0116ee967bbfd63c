"""Model bundles and output files that options name, with the checks that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.captioning.bundle import Bundle, load_bundle
from pipeline.captioning.bundle_files import fetched
from pipeline.errors import UserError
from pipeline.storage.atomic import require_writable
from pipeline.storage.path import StorageOptions, StoragePath, storage_path


class OpenedBundle(NamedTuple):
    """A loaded model bundle; `folder` is a local copy of `location`."""

    location: StoragePath
    folder: Path
    bundle: Bundle


def open_bundle(option: str, model: str, storage: StorageOptions = StorageOptions()) -> OpenedBundle:
    """Loads the bundle that an option names. Raises UserError if this is not possible."""
    location = storage_path(model, storage)
    if not location.is_remote and not location.path.is_dir():
        raise UserError(f"{option} {model}: no such folder; give a model bundle, such as results/models/NAME/RUN")
    location.require_answer()
    folder = fetched(location)
    try:
        return OpenedBundle(location, folder, load_bundle(folder))
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def check_output_folder(option: str, path: Path) -> None:
    """Raises UserError if the folder that an option names cannot be made or written."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(f"{option} {path}: {existing} is a file; give a folder")
    require_writable(f"{option} {path}", existing)


def check_output_file(option: str, path: Path) -> None:
    """Raises UserError if the file that an option names cannot be written."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.absolute().parent} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise UserError(f"{option} {path}: this is a folder or a device; give a file's name")
