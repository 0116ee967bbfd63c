"""The JSON schema for editors, and what a configuration changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raycap.jobs.config import REQUIRED, changes
from raycap.pipeline.config.load import load_config, read_values, shown_values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.schema import config_schema
from raycap.pipeline.config.variables import variable_names
from tests.conftest import ROOT, small_config
from tests.support.checkout import own

CONFIGS = ROOT / "raycap" / "configs"
SEARCH_KEYS = {"base", "space", "rows"}
FILES = [path for path in own(CONFIGS.glob("*.yaml")) if not SEARCH_KEYS & yaml.safe_load(path.read_text()).keys()]


def problems(values: Any) -> list[str]:
    """What an editor marks in the plain values of a file."""
    validator = jsonschema.Draft202012Validator(config_schema())
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(values)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_editor_accepts_the_shipped_files(path: Path) -> None:
    assert not problems(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sede": 1}, "'sede' was unexpected"),
        ({"seed": -1}, "seed: -1 is less than the minimum"),
        ({"workers": {"num_workers": "two"}}, "workers.num_workers: 'two' is not of type 'integer'"),
        ({"features": {"store": "none"}}, "features.store: 'none' is not one of"),
        ({"storage": 1}, "storage: 1 is not valid"),
        ({"data": None}, "data: None is not of type 'object'"),
    ],
)
def test_an_editor_marks_mistakes(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    values = small_config(tmp_path)
    assert not problems(values) and not problems(values | {"storage": {"uri": "results", "region": "x"}})
    assert problem in "\n".join(problems(values | change))


def test_required_keys_may_come_from_an_extended_file(tmp_path: Path) -> None:
    values = small_config(tmp_path)
    del values["data"]
    assert problems(values)
    assert not problems(values | {"extends": "other.yaml", "stages": [{"name": "xe_frozen", "epochs": 2}], "model": {}})


def test_comments_of_the_code_are_descriptions() -> None:
    schema = config_schema()
    stage, storage = schema["$defs"]["StageSection"], schema["$defs"]["StorageSection"]
    assert stage["properties"]["ema"]["description"].startswith(
        "the decay per step of an average of the weights, which"
    )
    assert stage["properties"]["dropout"]["description"] == "None: the model's dropout"
    assert storage["properties"]["retry_minutes"]["default"] == 10 and storage["properties"]["retry_minutes"]["maximum"]
    assert storage["description"].startswith("The folder of all results")
    assert schema["$defs"]["BackboneConfig"]["description"].startswith("A timm model")
    assert schema["properties"]["init_from"]["description"].startswith("a model bundle whose weights")
    assert schema["properties"].keys() == {"extends", *RunConfig.model_fields}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_changes_are_what_a_file_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that the file sets to something else than its default, and no other one."""
    for name in variable_names("".join(file.read_text() for file in own(CONFIGS.rglob("*.yaml")))):
        monkeypatch.setenv(name, "/data")
    config, written = load_config(path), read_values(path)
    found = list(changes(config, shown_values(config)))
    assert found[0][:3] == ("name", config.name, REQUIRED)
    assert len({change.key for change in found}) == len(found)
    for change in found:
        parts = change.key.split(".")
        assert parts[0] in written, change
        assert change.value != change.default or change.value == {}
    assert not [change for change in found if change.key.startswith("backbone.") and not config.has_backbone]
