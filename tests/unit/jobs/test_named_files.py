"""Output folders that options name are checked before a command works for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.jobs.cli import main
from raycap.jobs.named_files import check_output_folder, check_output_place
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    check_output_folder("--out", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"^--out: {path} cannot be written .Not a directory.; .* another folder$"):
            check_output_folder("--out", path)
    with pytest.raises(UserError, match="^--explain: /proc/x cannot be written .* give another folder$"):
        check_output_folder("--explain", Path("/proc/x"))


def test_an_output_on_s3_is_tried_before_a_command_works(s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = StoragePath("s3://data/new/out", StorageOptions(s3))
    check_output_place("--out", place)
    assert not place.list(), "the file that was written is removed"
    demo, options = str(ROOT / "raycap" / "configs" / "demo.yaml"), ["--set", f"storage.endpoint_url={s3}"]
    assert main(["evaluate", demo, *options, "--out", "s3://nowhere/out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("raycap: --out s3://nowhere/out cannot be written: s3://nowhere/out") and "bucket" in error
    for address in ("nothing", "http://127.0.0.1:1"):
        options = ["--set", f"storage.endpoint_url={address}", "--set", "storage.retry_minutes=0"]
        assert main(["evaluate", demo, *options, "--out", "s3://data/out"]) == 2
        assert "--out s3://data/out cannot be written" in capsys.readouterr().err
