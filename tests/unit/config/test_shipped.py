"""Configurations that arguments name without folder and suffix."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.jobs.cli import main
from raycap.jobs.config import DATA_HEADING
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_config, named_data, named_place, shipped_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.search.spec import load_search
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


def test_a_file_here_comes_first_and_a_folder_only_where_one_is_expected(empty_folder: Path) -> None:
    (empty_folder / "demo").write_text("name: mine\n")
    (empty_folder / "demo_zh").mkdir()
    assert named_config(Path("demo")) == named_place(Path("demo")) == Path("demo")
    assert named_config(Path("demo_zh")) == CONFIGS / "demo_zh.yaml" and named_place(Path("demo_zh")) == Path("demo_zh")
    assert named_place(Path("demo_vit")) == CONFIGS / "demo_vit.yaml" and named_place(Path("dmo")) is None


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".yaml"])
def test_what_cannot_be_a_path_is_a_mistake(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", name], ["evaluate", "demo", "--data", name], ["runs", name]):
        assert main(words) == 2
        message = capsys.readouterr().err.strip()
        assert message.count("\n") == 0 and ("does not exist;" in message)
    with pytest.raises(UserError, match="does not exist; give the path of a YAML file$"):
        load_config(Path(name))
    assert named_place(Path("a\0b")) is None


def test_commands_take_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "demo", "--changes"]) == 0
    assert "name: demo" in capsys.readouterr().out
    assert main(["config", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [*shipped_names(), "", DATA_HEADING, *shipped_names("data")]
    for words in (["run", "dmo"], ["tune", "dmo"], ["doctor", "dmo"], ["compare", "a", "--config", "dmo"]):
        assert main(words) == 2
        assert "did you mean demo" in capsys.readouterr().err, words
    assert main(["runs", "demo"]) == 0
    assert main(["sync", "demo"]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_a_configuration_extends_a_shipped_one_by_its_name(tmp_path: Path) -> None:
    """A copy of a shipped file elsewhere can also name other shipped files by their paths among these."""
    for name in ("demo", "demo.yaml"):
        (tmp_path / "mine.yaml").write_text(f"extends: {name}\nname: mine\n")
        assert load_config(tmp_path / "mine.yaml") == load_config(CONFIGS / "demo.yaml", ["name=mine"])
    (tmp_path / "search.yaml").write_text((CONFIGS / "search_demo.yaml").read_text())
    copied, shipped = (load_search(path) for path in (tmp_path / "search.yaml", CONFIGS / "search_demo.yaml"))
    assert copied.config == shipped.config and copied.base == shipped.base
    for name in ("nowhere", "../secret.yaml", str(CONFIGS / "demo.yaml")):
        (tmp_path / "mine.yaml").write_text(f"extends: {name}\n")
        with pytest.raises(UserError, match="does not exist|is outside of"):
            load_config(tmp_path / "mine.yaml")


def test_a_shipped_file_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "search_demo", "--file"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "search_demo.yaml").read_text()
