"""Output folders that options name are checked before a command works for them, and kinds of configurations."""

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


def test_commands_refuse_their_output_before_they_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = str(ROOT / "raycap" / "configs" / "demo.yaml")
    assert main(["check", demo, "--json", str(tmp_path / "nowhere" / "x.json")]) == 2
    assert "--json" in capsys.readouterr().err
    assert main(["evaluate", demo, "--out", "/proc/x"]) == 2
    assert "--out: /proc/x cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "config", "text"),
    [
        ("run", "search_demo", "`raycap tune`"),
        ("tune", "demo", "`raycap run`"),
    ],
)
def test_a_configuration_of_another_command_is_named(
    command: str, config: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(ROOT / "raycap" / "configs" / f"{config}.yaml")]) == 2
    assert f"is missing; this configuration is for {text}" in capsys.readouterr().err
