"""Model bundles for Ray's workers: read from the storage, or sent as file contents.

A path on the driver's disk cannot be used on a node that does not share this disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.evaluation.captioning.bundle import Bundle, load_bundle
from raycap.pipeline.evaluation.captioning.bundle_files import BUNDLE_FILES, bundle_digests, fetched
from raycap.pipeline.storage.path import StoragePath


class ModelSource(Protocol):
    """A place from which a worker can load a model. Ray pickles it into the worker's tasks."""

    def load(self) -> Bundle:
        """The model, on the CPU."""
        ...


@dataclass(frozen=True)
class StoredBundle:
    """A bundle in the storage. If `digests` (sha256 by file name) are given, loading compares them with the files."""

    location: StoragePath
    digests: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Bundle:
        """The model from the storage. Raises OSError when a file does not have its digest."""
        folder = fetched(self.location)
        if self.digests and bundle_digests(folder, tuple(self.digests)) != self.digests:
            raise OSError(f"{self.location} is not what it was when it was written; restore it from a copy")
        return load_bundle(folder)


@dataclass(frozen=True)
class SentBundle:
    """A bundle that is only on the driver's disk. Workers get its files through Ray's object store."""

    files: Any  # a reference in Ray's object store to {file name: bytes}

    @classmethod
    def of(cls, folder: Path) -> SentBundle:
        """Copies the whole bundle to Ray's object store. Ray must have been started."""
        import ray

        return cls(ray.put({name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()}))

    def load(self) -> Bundle:
        """The model from Ray's object store, by way of a temporary folder."""
        import ray

        with tempfile.TemporaryDirectory(prefix="raycap-bundle-") as folder:
            for name, content in ray.get(self.files).items():
                (Path(folder) / name).write_bytes(content)
            return load_bundle(Path(folder))


def bundle_source(bundle: StoragePath, config: RunConfig) -> ModelSource:
    """The source from which workers load a bundle.

    With a local storage, all nodes share a disk and can read the bundle there. With a storage on S3 they share no disk:
    a bundle that is only on the driver's disk is then sent through Ray, which must have been started. Workers refuse a
    bundle on S3 that differs from the one that this process has checked.
    """
    if bundle.is_remote:
        return StoredBundle(bundle, bundle_digests(fetched(bundle)))
    if not config.storage_place.is_remote:
        return StoredBundle(bundle)
    if bundle.path.is_relative_to(config.working_path):  # a local copy of a bundle on S3
        place = config.storage_place / bundle.path.relative_to(config.working_path).as_posix()
        return StoredBundle(place, bundle_digests(bundle.path))
    return SentBundle.of(bundle.path)
