"""Configurations that arguments name without folder and suffix."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_config, named_data, shipped_file, shipped_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.version import package_folder

CONFIGS = package_folder() / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_the_shipped_file() -> None:
    assert named_config(Path("demo")) == CONFIGS / "demo.yaml"
    assert named_data(Path("nocaps_val")) == CONFIGS / "data" / "nocaps_val.yaml"
    assert named_config(None) is None
    assert {"demo", "search_demo"} <= set(shipped_names()) and "nocaps_val_regions" in shipped_names("data")


def test_a_file_or_folder_here_comes_first(empty_folder: Path) -> None:
    (empty_folder / "demo").write_text("name: mine\n")
    (empty_folder / "demo_de").mkdir()
    assert named_config(Path("demo")) == Path("demo") and shipped_file(Path("demo")) is None
    assert named_config(Path("demo_de")) == Path("demo_de")


@pytest.mark.parametrize("path", ["demo.yaml", "configs/demo.yaml", "./a/demo", "/demo"])
def test_a_path_is_no_name(path: str) -> None:
    assert named_config(Path(path)) == Path(path)


def test_an_unknown_name_is_answered_with_similar_ones() -> None:
    with pytest.raises(UserError, match=r"^search_demmo is neither a file here nor .*; did you mean search_demo or "):
        named_config(Path("search_demmo"))
    with pytest.raises(
        UserError, match=r"^xyz is neither a file here nor .*; `raycap config --list` prints the names$"
    ):
        named_config(Path("xyz"))
    with pytest.raises(
        UserError, match=r"configs/demo_de.yaml does not exist; .* without folder and suffix, .* demo_de$"
    ):
        load_config(Path("configs/demo_de.yaml"))
    with pytest.raises(UserError, match=r"mine.yaml does not exist; .* for example demo$"):
        load_config(Path("mine.yaml"))


def test_commands_take_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "demo", "--changes"]) == 0
    assert "name: demo" in capsys.readouterr().out
    assert main(["config", "--list"]) == 0
    assert capsys.readouterr().out.split() == shipped_names()
    for words in (["run", "dmo"], ["check", "dmo"], ["extract", "dmo"], ["tune", "dmo"], ["retrain", "dmo"],
                  ["evaluate", "dmo"], ["doctor", "dmo"], ["compare", "a", "--config", "dmo"],
                  ["soup", "a", "--config", "dmo"], ["config", "dmo"],
                  ["submit", "run", "dmo", "--address", "http://127.0.0.1:9"]):  # fmt: skip
        assert main(words) == 2
        assert "did you mean demo" in capsys.readouterr().err, words
    assert main(["runs", "demo"]) == 0
    assert main(["sync", "demo"]) == 2
    assert "contains no run" in capsys.readouterr().err
