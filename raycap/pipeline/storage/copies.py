"""Removes this machine's copies of runs, searches and bundles on S3 when they take more than a share of the disk.

The copies that were used longest ago are removed first. A search removes the copies of a trial when the trial ends. A
copy in use, or one with a file that S3 lacks, remains. A removed copy is downloaded again when it is needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raycap.pipeline.storage.atomic import file_lock, try_file_lock
from raycap.pipeline.storage.cache import cache_folder, usable_bytes
from raycap.pipeline.storage.mirror import RECORD_SUFFIX, Mirror
from raycap.pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)

COPIES_SHARE = 1 / 8  # of the space that copies can use; the two caches may take half of it each
# Some readers of a copy, such as `raycap evaluate`, do not lock it. They have read it this long after their last pull.
UNUSED_FOR_S = 6 * 3600.0
PASS_S = 15.0  # other processes wait for a pass, and each copy of a server that is down takes 10 s
COPIES = ("storage", "workers", "bundles")  # the folders of the cache that contain copies


def prune_copies(keep: Path) -> None:
    """Removes copies until the others fit the share of the disk. keep: a copy that is needed now.

    Does nothing while another process of this machine removes copies. Ends after PASS_S seconds, because S3 may not
    answer. Files that other processes remove meanwhile end it, too.
    """
    with suppress(FileNotFoundError):
        _prune(keep, time.monotonic() + PASS_S)


def _prune(keep: Path, deadline: float) -> None:
    root = cache_folder()
    with try_file_lock(_lock(root)) as is_alone:
        if not is_alone:
            return
        copies = _copies(root)
        sizes = {copy.local: copy.size() for copy in copies}
        excess = sum(sizes.values()) - int(COPIES_SHARE * usable_bytes(root, sum(sizes.values())))
        for copy in copies:
            if excess <= 0 or time.monotonic() > deadline:
                return
            if copy.local != keep and _remove(copy, UNUSED_FOR_S):
                excess -= sizes[copy.local]
                logger.debug(f"removed   {copy.local}, the copy of {copy.home}")


def remove_copy(copy: Mirror, unused_for_s: float) -> None:
    """Removes a copy that its last user needs no more. See `Mirror.remove_copy` for the cases in which it remains."""
    with suppress(OSError), file_lock(_lock(cache_folder())):
        if copy.local.is_dir():  # otherwise another of its users has removed it, and a lock would create the folder
            _remove(copy, unused_for_s)


@contextmanager
def no_pruning(folder: Path) -> Iterator[None]:
    """Keeps the removals of other processes out of the context if the folder is a copy in the cache."""
    if not folder.is_relative_to(cache_folder()):
        yield
        return
    with file_lock(_lock(cache_folder()), shared=True):
        yield


def _copies(root: Path) -> list[Mirror]:
    """All copies below the cache's folder, beginning with the one that was used longest ago."""
    found = []
    for path in (path for name in COPIES for path in (root / name).rglob(f".*{RECORD_SUFFIX}")):
        with suppress(FileNotFoundError):  # a worker of a newer driver removes the copies of earlier ones
            last_use, copy = path.stat().st_mtime, Mirror.of_record(path)
            if copy is not None:
                found.append((last_use, copy))
    return [copy for _, copy in sorted(found, key=lambda pair: pair[0])]


def _lock(root: Path) -> Path:
    return root / ".copies.lock"


def _remove(copy: Mirror, unused_for_s: float) -> bool:
    """Removes a copy that nobody has used for a time. Returns False if it must remain, or S3 cannot be asked."""
    home = StoragePath(copy.home.uri, copy.home.options.hasty)
    with suppress(OSError):
        return Mirror(home, copy.local).remove_copy(unused_for_s)
    return False
