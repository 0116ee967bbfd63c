"""The folder of this machine's caches, and how much space of its disk they may take.

By default a cache takes at most half of the space that it can use: what is free and what it holds already. So the limit
does not change while the cache grows, and processes that start at different times have the same one. The other half is
for the other cache, the copies of runs (`pipeline.storage.copies`), checkpoints, and what Ray spills. Nothing is added
that would leave less than a reserve of the disk, whatever the limit is.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from raycap.pipeline.runtime.names import expanded_path

CACHE_VARIABLE = "RAYCAP_CACHE"
# The size in GiB of the cache's volume, for an emptyDir of Kubernetes: the system reports the size of the whole disk.
SIZE_VARIABLE = "RAYCAP_CACHE_GIB"
PRIVATE = stat.S_IRWXU  # the rights of the cache's folder
REWARD_INDEXES = "ciderd"  # the folder of the rewards' indexes, which `pipeline.training.rewards.cider_d` makes
CACHE_SHARE = 0.5  # of the space that a cache can use
RESERVE_SHARE, RESERVE_BYTES = 0.1, 10 * 2**30  # the smaller one of a tenth of the disk and this number stays free


def cache_folder() -> Path:
    """$RAYCAP_CACHE, or ~/.cache/raycap. Others cannot read it, because its copies of private data may be readable.

    A folder that exists at $RAYCAP_CACHE keeps its rights, which somebody has chosen.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = expanded_path(chosen or Path.home() / ".cache" / "raycap")
    with suppress(OSError):  # a later write names the problem
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if not chosen and stat.S_IMODE(folder.stat().st_mode) & ~PRIVATE:  # of an older version
            folder.chmod(PRIVATE)
    return folder


def free_bytes(folder: Path) -> int:
    """The bytes that caches may still write to the disk of a folder, which need not exist yet.

    Negative when less than the reserve is free.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return usage.free - min(int(RESERVE_SHARE * usage.total), RESERVE_BYTES)


def usable_bytes(folder: Path, held: int) -> int:
    """The size that a folder with `held` bytes can reach: as much as is free, within the size of its volume."""
    volume = os.environ.get(SIZE_VARIABLE)
    space = max(0, free_bytes(folder) + held)
    return space if not volume else min(space, int(float(volume) * 2**30))


def cache_limit(folder: Path, held: int, most: int | None) -> int:
    """The size in bytes of a cache that holds `held` bytes. most: the configured limit; None: half of the space."""
    space = usable_bytes(folder, held)
    return int(CACHE_SHARE * space) if most is None else min(most, space)


def used_bytes(folders: Iterable[Path]) -> int:
    """The size of the files in these folders of caches, which need not exist."""
    return sum(status.st_size for folder in folders for status, _ in cached_files(folder))


def cached_files(folder: Path) -> list[tuple[os.stat_result, Path]]:
    """The cached files in a folder, without those that another process removes meanwhile."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if path.suffix != ".lock":
                found.append((path.stat(), path))
    return found
