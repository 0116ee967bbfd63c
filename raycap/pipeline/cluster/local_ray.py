"""Starts Ray on this machine for this user alone.

Ray's processes listen on the loopback interface, and ask for a token (RAY_AUTH_MODE) that only this user can read. Logs
and sockets are in a folder that only this user can open. docs/cluster.md names what Ray leaves open.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from raycap.pipeline.errors import UserError

AGENTS_S = 3.0  # for processes to end


def listen_on_loopback() -> None:
    """Makes a Ray that this process starts use the address 127.0.0.1. Must be called before Ray is imported.

    Ray replaces a loopback address that is given to `ray.init` by the machine's own, but for this setting.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def start_local_ray(**options: Any) -> None:
    """`ray.init` for a new Ray. Raises UserError if another user owns the folder for its files."""
    # Where torch's workers exchange gradients; by default the address of the machine's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import ray

    protect_token()
    with ending_children():
        ray.init(include_dashboard=False, _temp_dir=str(private_folder() / "ray"), **options)
    atexit.register(_shut_down)  # before Ray's own shutdown, which was registered earlier


def _shut_down() -> None:
    """Ends Ray, and those of its agents that have not ended with it, because they were just starting."""
    import ray

    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    _kill(psutil.wait_procs(started, AGENTS_S)[1])


@contextmanager
def ending_children() -> Iterator[None]:
    """Ends the processes that the block has started if it raises an exception, also KeyboardInterrupt.

    Ray itself ends its node's main process, and the node's agents notice that only up to two minutes later.
    """
    process = psutil.Process()
    before = set(process.children(recursive=True))
    try:
        yield
    except BaseException:
        _kill([child for child in process.children(recursive=True) if child not in before])
        raise


def _kill(processes: list[psutil.Process]) -> None:
    """Kills processes and waits until they have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, AGENTS_S)


def private_folder() -> Path:
    """The folder for Ray's files, which only this user can open, below RAY_TMPDIR or /tmp.

    Ray lets everybody into its own folder, /tmp/ray, and the paths of its sockets must be short.
    """
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"raycap-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or folder.is_symlink():
        raise UserError(f"{folder}, where Ray keeps its files, belongs to another user; remove it or set RAY_TMPDIR")
    folder.chmod(0o700)
    return folder


def protect_token() -> None:
    """Makes ~/.ray/auth_token if Ray would make it, because Ray lets others read it. Takes their right to read it.

    A home that cannot be written is left to Ray, which reports it.
    """
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    path = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
            return
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32))
        try:
            os.link(new, path)  # unlike a rename, it does not replace the token of another process
        finally:
            new.unlink()
