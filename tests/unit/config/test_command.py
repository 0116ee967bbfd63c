"""`raycap config`: the resolved configuration, its changes, and the JSON schema for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.config import config_schema
from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.config.run import RunConfig
from tests.conftest import small_config


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
