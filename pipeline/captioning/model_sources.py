"""How Ray's workers get a model bundle: from the storage, or as the contents of its files.

A path on the driver's disk means nothing on a node that does not share this disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.captioning.bundle import Bundle, bundle_digests, fetched, load_bundle
from pipeline.config.run import RunConfig
from pipeline.storage.path import StoragePath


class ModelSource(Protocol):
    """A model that a worker can load; it is pickled into tasks."""

    def load(self) -> Bundle: ...


@dataclass(frozen=True)
class StoredBundle:
    """A bundle in the storage. `digests` (sha256 by file name) are compared on loading; empty: no comparison."""

    location: StoragePath
    digests: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Bundle:
        """Raises OSError when the files do not have the digests."""
        folder = fetched(self.location)
        if self.digests and bundle_digests(folder, tuple(self.digests)) != self.digests:
            raise OSError(f"{self.location} is not what it was when it was written; restore it from a copy")
        return load_bundle(folder)


@dataclass(frozen=True)
class SentBundle:
    """A bundle that is on the driver's disk only: its files travel through Ray's object store."""

    files: Any  # a reference to {file name: bytes}

    @classmethod
    def of(cls, folder: Path) -> SentBundle:
        """Ray must have been started. The object store holds a copy of the whole bundle."""
        import ray

        contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return cls(ray.put(contents))

    def load(self) -> Bundle:
        import ray

        with tempfile.TemporaryDirectory(prefix="raycap-bundle-") as folder:
            for name, content in ray.get(self.files).items():
                (Path(folder) / name).write_bytes(content)
            return load_bundle(Path(folder))


def bundle_source(bundle: StoragePath, config: RunConfig) -> ModelSource:
    """A bundle for the workers of a run whose storage is local (all nodes share it) or on S3 (they share no disk).

    Ray must have been started when the bundle is local and the storage is on S3.
    """
    if bundle.is_remote or not config.storage_place.is_remote:
        return StoredBundle(bundle)
    if bundle.path.is_relative_to(config.working_path):  # the driver's copy of a bundle in the storage
        return StoredBundle(config.storage_place / bundle.path.relative_to(config.working_path).as_posix())
    return SentBundle.of(bundle.path)
