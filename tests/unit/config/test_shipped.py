"""`raycap config`, and configurations that arguments name without folder and suffix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.config import DATA_HEADING, config_schema
from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config, named_data, named_place, shipped_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.version import package_folder
from tests.conftest import small_config

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


def write(path: Path, values: object) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_the_output_is_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "base.yaml", small_config(tmp_path / "ü"))
    file = write(tmp_path / "run.yaml", {"extends": Path(base).name, "seed": 3})
    for option in ([], ["--changes"]):
        assert main(["config", file, "--set", "stages.xe_frozen.epochs=7", *option]) == 0
        values = yaml.safe_load(capsys.readouterr().out)
        assert parse_config(values) == load_config(Path(file), ["stages.xe_frozen.epochs=7"])
        assert values["seed"] == 3 and values["stages"][0]["epochs"] == 7
        assert ("max_wait_minutes" in values["workers"]) == (not option)


def test_no_secret_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKER", "https://me:secret-word@host/a")
    for uri, shown in (("${TRACKER}", "${TRACKER}"), ("https://me:secret-word@host/a", "https://host/a")):
        file = write(tmp_path / "run.yaml", small_config(tmp_path, tracking={"uri": uri}))
        for extra in ([], ["--changes"]):
            assert main(["config", file, *extra]) == 0
            assert f"uri: {shown}" in (out := capsys.readouterr().out) and "secret-word" not in out


def problems(values: Any) -> list[str]:
    """What an editor marks in the plain values of a file."""
    validator = jsonschema.Draft202012Validator(config_schema())
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(values)]


def test_an_editor_marks_mistakes(tmp_path: Path) -> None:
    values = small_config(tmp_path)
    assert not problems(values) and not problems(values | {"storage": {"uri": "results", "region": "x"}})
    for change, problem in (
        ({"sede": 1}, "'sede' was unexpected"),
        ({"seed": -1}, "seed: -1 is less than the minimum"),
        ({"workers": {"num_workers": "two"}}, "workers.num_workers: 'two' is not of type 'integer'"),
        ({"storage": 1}, "storage: 1 is not valid"),
    ):
        assert problem in "\n".join(problems(values | change))
    del values["data"]
    assert problems(values)
    assert not problems(values | {"extends": "other.yaml", "stages": [{"name": "xe_frozen", "epochs": 2}], "model": {}})


def test_docstrings_of_the_code_are_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["StageSection"]["properties"]["dropout"]["description"].startswith("The dropout in this")
    slots = schema["$defs"]["MeshedMemoryConfig"]["properties"]["num_memory_slots"]
    assert slots["description"].startswith("The number of learned keys"), "a dataclass has docstrings, too"
    assert schema["$defs"]["BackboneConfig"]["description"].startswith("A timm model")
    assert schema["properties"].keys() == {"extends", *RunConfig.model_fields}
