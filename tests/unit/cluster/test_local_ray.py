"""Where a local Ray keeps its files, and who may read its token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from raycap.pipeline.cluster.start import ending_children, private_folder, protect_token
from raycap.pipeline.errors import UserError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_rays_folder_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    folder = private_folder()
    assert folder.parent == tmp_path / "new" and mode(folder) == 0o700
    folder.chmod(0o777)
    assert mode(private_folder()) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{folder}.* belongs to another user; remove it or set RAY_TMPDIR"):
        private_folder()


def test_the_token_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray" / "auth_token"
    protect_token()
    token = path.read_text()
    assert len(token) == 64 and mode(path) == 0o600 and mode(path.parent) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["auth_token"]
    path.chmod(0o644)  # as Ray makes it
    protect_token()
    assert path.read_text() == token and mode(path) == 0o600


def test_a_token_from_elsewhere_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    protect_token()
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", "/proc/nowhere")  # cannot be written
    protect_token()


def test_an_interrupted_start_leaves_no_process() -> None:
    """Neither children nor their children; those from before the block remain."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    nested = f"import subprocess, time; subprocess.Popen({sleep!r}); print('started', flush=True); time.sleep(600)"
    earlier = subprocess.Popen(sleep)
    try:
        with pytest.raises(KeyboardInterrupt), ending_children():
            later = subprocess.Popen([sys.executable, "-c", nested], stdout=subprocess.PIPE, text=True)
            assert later.stdout is not None and later.stdout.readline() == "started\n"
            started = [psutil.Process(later.pid), *psutil.Process(later.pid).children()]
            raise KeyboardInterrupt
        assert len(started) == 2 and not psutil.wait_procs(started, timeout=10)[1]
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()
