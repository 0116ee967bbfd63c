"""The sizes of caches follow from the size of the disk, whatever else is on it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycap.pipeline.storage import cache, digests
from raycap.pipeline.storage.cache import ImageCache, ShardCache, cached_image, image_cache, shard_cache
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError

DISK = 10_000  # bytes; a tenth is the reserve
Disk = Callable[[int], None]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk of DISK bytes with the test's files; the function sets how much other programs use."""
    others = [0]

    def usage(_: Path) -> SimpleNamespace:
        used = 0
        for path in tmp_path.rglob("*"):
            with suppress(FileNotFoundError):  # another thread has removed it
                used += path.stat().st_size if path.is_file() else 0
        return SimpleNamespace(total=DISK, free=DISK - used - others[0])

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    return lambda number: others.__setitem__(0, number)


@pytest.fixture
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[StoragePath, int, str]]:
    """Forty files of 300 bytes, with size and digest, on another disk."""
    folder, found = tmp_path_factory.mktemp("sources"), []
    for number in range(40):
        data = bytes([number]) * 300
        (folder / f"{number}.npy").write_bytes(data)
        found.append((StoragePath(str(folder / f"{number}.npy")), len(data), hashlib.sha256(data).hexdigest()))
    return found


def size(found: ShardCache) -> int:
    return cache.used_bytes(found.folder)


def test_processes_share_a_cache_without_filling_the_disk(
    disk: Disk, sources: list[tuple[StoragePath, int, str]]
) -> None:
    """The second process starts when the first has filled the cache, and has the same limit."""
    first = shard_cache(None)
    for source in sources[:20]:
        first.get(*source)
    second = shard_cache(None)
    assert second.limit == first.limit == 4500 and size(first) == 15 * 300
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(found.get, *source) for source in sources for found in (first, second)]
        assert all(call.result() is not None for call in calls)
    assert size(first) <= first.limit


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"?"])
def test_a_damaged_copy_is_fetched_again(
    tmp_path: Path, sources: list[tuple[StoragePath, int, str]], damage: Callable[[bytes], bytes]
) -> None:
    found, images = ShardCache(tmp_path / "cache", 10**6), ImageCache(tmp_path / "images", 10**6)
    (source, size, digest), (image, _, image_digest) = sources[:2]
    for _ in range(2):
        path = found.get(source, size, digest)
        assert path is not None and path.read_bytes() == bytes(300)
        assert images.read(image, image_digest) == bytes([1]) * 300
        for copy in (path, images.folder / image_digest[:2] / image_digest):
            copy.write_bytes(damage(copy.read_bytes()))


def test_a_whole_shard_is_hashed_once_and_a_use_keeps_it_in_the_cache(
    tmp_path: Path, sources: list[tuple[StoragePath, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[Path]()
    monkeypatch.setattr(digests, "file_digest", lambda path: (hashed.append(path), path.stem)[1])
    found = ShardCache(tmp_path / "cache", 600)  # two files
    paths = [found.get(*sources[number]) for number in (0, 1, 0, 0, 0)]
    assert hashed == paths[:1], "at its first use after the download"
    found.get(*sources[2])
    assert [path is not None and path.is_file() for path in paths[:2]] == [True, False], "the other one was used before"


def test_a_digest_cannot_choose_another_file(tmp_path: Path, sources: list[tuple[StoragePath, int, str]]) -> None:
    (tmp_path / "victim.npy").write_bytes(b"mine")
    (tmp_path / "cache").mkdir()
    source, size, digest = sources[0]
    for text in ("../victim", str(tmp_path / "victim"), "", digest.upper(), digest[1:], f"{digest}\n"):
        for read in (
            lambda text=text: ShardCache(tmp_path / "cache", 10**6).get(source, size, text),
            lambda text=text: image_cache(10**6).read(source, text),
        ):
            with pytest.raises(StorageError, match="not a SHA-256"):
                read()
        assert cached_image(text) is None
    assert (tmp_path / "victim.npy").read_bytes() == b"mine"


def test_others_cannot_read_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rights(folder: Path) -> int:
        return folder.stat().st_mode & 0o777

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAYCAP_CACHE")
    assert cache.cache_folder() == tmp_path / ".cache" / "raycap" and rights(cache.cache_folder()) == 0o700
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "new"))
    assert rights(cache.cache_folder()) == 0o700
    (tmp_path / "new").chmod(0o770)  # shared with a group on purpose
    assert rights(cache.cache_folder()) == 0o770
    monkeypatch.setenv("RAYCAP_CACHE", "/proc/nowhere")
    assert cache.cache_folder() == Path("/proc/nowhere")
