"""A PostgreSQL server for tests, where PostgreSQL is installed: its data in a temporary folder, on the loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _binaries() -> Path | None:
    """The folder with initdb and pg_ctl; Debian keeps them off the PATH."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


@contextmanager
def postgres() -> Iterator[str]:
    """The URI of an empty database, as SQLAlchemy takes it; skips where PostgreSQL is not installed."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed; on Debian: apt-get install postgresql")
    prefix: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: its socket's path has a limit
    if os.geteuid() == 0:  # the server refuses to run as root
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        prefix = ["runuser", "-u", "postgres", "--"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call(program: str, *options: str) -> None:
        command = [*prefix, str(binaries / program), *options]
        done = subprocess.run(
            command, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    data = str(folder / "data")
    try:
        call("initdb", "-D", data, "-U", "raycap", "--auth=trust", "--no-sync", "--encoding=UTF8")
        settings = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        # its output would hold our pipe open for as long as it runs
        call("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", settings, "start")
        try:
            yield f"postgresql+psycopg2://raycap@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
