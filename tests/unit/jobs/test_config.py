"""`raycap config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config, parse_config
from tests.conftest import ROOT, small_config


def write(path: Path, values: object) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_the_output_is_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "base.yaml", small_config(tmp_path / "ü"))
    file = write(tmp_path / "run.yaml", {"extends": Path(base).name, "seed": 3})
    assert main(["config", file, "--set", "stages.xe_frozen.epochs=7"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert parse_config(values) == load_config(Path(file), ["stages.xe_frozen.epochs=7"])
    assert values["seed"] == 3 and values["stages"][0]["epochs"] == 7 and values["workers"]["max_wait_minutes"] == 30


def test_the_changes_name_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = small_config({"uri": "results", "region": "eu"})
    values["stages"][2]["scst"] = {}
    assert main(["config", write(tmp_path / "run.yaml", values), "--changes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "stages.xe_frozen.objective: cross_entropy  # no default" in lines
    assert "storage.region: eu  # default: null" in lines
    assert "data.train_splits: [train]  # default: [train, restval]" in lines
    assert "stages.scst_frozen.scst: {}  # default: null" in lines
    assert "stages.scst_finetune.scst.num_samples: 3  # default: 5" in lines
    assert not any(line.startswith(("seed", "storage.uri", "evaluation.decoding")) for line in lines)
    assert all(yaml.safe_load(line) for line in lines)


def test_no_secret_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKER", "https://me:secret-word@host/a")
    values = small_config(tmp_path, tracking={"uri": "${TRACKER}"})
    for extra in ([], ["--changes"]):
        assert main(["config", write(tmp_path / "run.yaml", values), *extra]) == 0
        assert "uri: ${TRACKER}" in (out := capsys.readouterr().out) and "secret-word" not in out
    values["tracking"] = {"uri": "https://me:secret-word@host/a"}
    for extra in ([], ["--changes"]):
        assert main(["config", write(tmp_path / "run.yaml", values), *extra]) == 0
        assert "uri: https://host/a" in (out := capsys.readouterr().out) and "secret-word" not in out


def test_the_schema_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert "stages" in json.loads(capsys.readouterr().out)["properties"]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 2
    assert "give its YAML file, or --schema" in capsys.readouterr().err
    assert main(["config", str(ROOT / "raycap/configs/demo.yaml"), "--set", "sede=1"]) == 2
    assert "unknown key sede: did you mean seed?" in capsys.readouterr().err
