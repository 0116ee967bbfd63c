"""Where a local Ray keeps its files, and its token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycap.pipeline.cluster.start import _start_local_ray, private_folder
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.secrets import without_secrets


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


def test_the_token_of_a_local_ray_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("atexit.register", lambda _: None)
    without_secrets("the environment is read once")
    _start_local_ray(2)
    assert without_secrets(f"bad: {os.environ['RAY_AUTH_TOKEN']}") == "bad: ${RAY_AUTH_TOKEN}"
