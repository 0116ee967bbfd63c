"""Where a local Ray keeps its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.cluster.start import private_folder
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
