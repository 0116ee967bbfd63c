"""Saves weights of modules as safetensors files atomically, and loads them strictly."""

from __future__ import annotations

import errno
import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runtime.names import MAX_ERROR, printable
from raycap.pipeline.storage.atomic import atomic_path, write_bytes
from raycap.pipeline.storage.digests import file_digest

if TYPE_CHECKING:  # importing torch takes seconds, and callers that need only a digest can do without it
    from torch import nn


def save_weights(module: nn.Module, path: Path) -> None:
    """Writes the state of a module as a safetensors file. Raises OSError if writing fails, as on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def keep_weights(module: nn.Module, folder: Path) -> Path:
    """Writes the state of a module to a file named by its digest, unless that exists in `folder`. Returns the path."""
    from safetensors.torch import save

    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()})
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{digest[:20]}.safetensors"
    if not path.exists():
        write_bytes(path, content)
    return path


def load_weights(module: nn.Module, path: Path, data: bytes | None = None) -> None:
    """Loads weights from the file `path` into `module`. data: the content of the file, if it was read before.

    Raises ValueError if names or shapes of tensors differ, with some of the names. Raises DamagedError if the file
    cannot be parsed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    try:
        tensors = load_file(path) if data is None else load(data)
    except SafetensorError as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    differences = found.items() ^ expected.items()
    if wrong := sorted({name for name, _ in differences}):
        some = (f"{name} (file: {found.get(name)}, model: {expected.get(name)})" for name in wrong[:3])
        text = printable(", ".join(some))[:MAX_ERROR]
        raise ValueError(f"{path} does not fit: {len(wrong)} tensors differ in name or shape, such as {text}")
    module.load_state_dict(tensors)


def weights_file_digest(path: Path) -> str:
    """The SHA-256 of a safetensors file, which identifies its weights. An unchanged file is hashed once per process."""
    status = path.stat()
    return _digest(str(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """The SHA-256 of a file. Size and time are in the key of the cache, so that a changed file is hashed again."""
    return file_digest(Path(path))
