"""Where a local Ray keeps its files, and who may read its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.cluster.start import private_folder, protect_token
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
