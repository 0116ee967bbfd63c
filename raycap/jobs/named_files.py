"""Opens the model bundles that options name, and checks the output files and folders that options name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, fetched, load_bundle
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.atomic import require_writable
from raycap.pipeline.storage.path import StoragePath, storage_path, try_writing
from raycap.pipeline.storage.s3 import StorageError, StorageOptions


class OpenedBundle(NamedTuple):
    """A loaded model bundle. location: where the user has it. folder: on this machine, a copy if it is on S3."""

    location: StoragePath
    folder: Path
    bundle: Bundle


def open_bundle(option: str, model: str, storage: StorageOptions = StorageOptions()) -> OpenedBundle:
    """Loads the bundle that an option names. Raises UserError if the bundle does not exist or is damaged."""
    location = storage_path(model, storage)
    if not location.is_remote and not location.path.is_dir():
        raise UserError(f"{option} {model}: no such folder; give a model bundle, such as results/models/NAME/RUN")
    location.require_answer()
    folder = fetched(location)
    try:
        return OpenedBundle(location, folder, load_bundle(folder))
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def check_output_folder(option: str, path: Path, *, must_be_empty: bool = False) -> None:
    """Raises UserError if the folder that an option names cannot be made or written, or must be empty and is not."""
    require_writable(option, path.absolute())
    if must_be_empty and path.exists() and any(path.iterdir()):
        raise UserError(f"{option} {path} exists and is not empty; choose another folder or remove it")


def check_output_place(option: str, place: StoragePath) -> None:
    """Raises UserError if the folder that an option names, local or on S3, cannot be written."""
    if not place.is_remote:
        check_output_folder(option, place.path)
        return
    try:
        try_writing(place)
    except (StorageError, ValueError) as error:  # boto3 raises ValueError if it refuses the address
        remedy = "check the bucket, its policy, storage.endpoint_url and the credentials, or give another folder"
        raise UserError(f"{option} {place} cannot be written: {error}; {remedy}") from error


def check_output_file(option: str, path: Path) -> None:
    """Raises UserError if the file that an option names cannot be written."""
    try:
        has_folder, is_special = path.absolute().parent.is_dir(), path.exists() and not path.is_file()
    except OSError as error:
        raise UserError(f"{option} {shown(path)}: {error.strerror}; give another file") from error
    if not has_folder:
        raise UserError(f"{option} {path}: the folder {path.absolute().parent} does not exist; make it first")
    if is_special:
        raise UserError(f"{option} {path}: this is a folder or a device; give a file's name")
