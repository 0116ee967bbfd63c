"""A bucket on S3 without a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import Entry


class Bucket:
    """Objects on S3. It records which names were listed or asked for."""

    def __init__(self, names: list[str]) -> None:
        self.objects = {f"s3://bucket/{name}": Entry(1, name) for name in names}
        self.listed: list[str] = []
        self.asked: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = StoragePath.stat, StoragePath.read_bytes, StoragePath.walk

        def walk(path: StoragePath) -> Iterator[tuple[str, Entry]]:
            if not path.is_remote:
                yield from original[2](path)
                return
            prefix = f"{path.uri}/"
            for uri, entry in self.objects.items():
                if uri.startswith(prefix):
                    self.listed.append(uri)
                    yield uri.removeprefix(prefix), entry

        def stat(path: StoragePath) -> Entry:
            if not path.is_remote:
                return original[0](path)
            self.asked.append(path.uri)
            if path.uri not in self.objects:
                raise FileNotFoundError(path.uri)
            return self.objects[path.uri]

        def read_bytes(path: StoragePath, max_bytes: int | None = None) -> bytes:
            return path.uri.encode() if path.is_remote else original[1](path, max_bytes)

        for name, method in (("walk", walk), ("stat", stat), ("read_bytes", read_bytes)):
            monkeypatch.setattr(StoragePath, name, method)
