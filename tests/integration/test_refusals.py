"""Commands that cannot work: they print one line, exit with 2, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raycap.jobs.cli import main
from tests.conftest import small_config, write_karpathy
from tests.support.runs import write_config
from tests.support.searches import G, write_search

GROUPS = f"space={{{G}: [[4], [0]]}}"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["run", "nothing.yaml"], "nothing.yaml"),
        (["run", "run.yaml", "--set", "model.d_modle=64"], "unknown key model.d_modle"),
        (["run", "run.yaml", "--set", "model.static_expansion=[1000000000000]"], "input should be less than"),
        (["run", "run.yaml", "--set", "workers.num_workers=9"], "9 workers"),
        (["run", "run.yaml", "--set", "backbone.name=resnet50"], "backbone.num_heads does not apply to resnet50"),
        (["run", "run.yaml", "--set", "data.test_splits=[tset]"], "data names the split 'tset'"),
        (["run", "run.yaml", "--address", "nonsense"], "nonsense (or RAY_ADDRESS) is no address of a Ray cluster"),
        (["extract", "run.yaml", "--set", "backbone.weights=/nowhere"], "backbone.weights: /nowhere does not exist"),
        (["evaluate", "run.yaml"], "run demo is not finished in"),
        (["evaluate", "run.yaml", "--stage", "nothing"], "--stage nothing: the configuration has the stages"),
        (["evaluate", "run.yaml", "--out", "/proc/x"], "--out: /proc/x cannot be written"),
        (["evaluate", "run.yaml", "--ensemble"], "--ensemble joins the models of several seeds; give --seeds"),
        (
            ["evaluate", "run.yaml", "--seeds", "2", "--stage", "xe_frozen"],
            "stage xe_frozen of run demo is not finished",
        ),
        (["evaluate", "run.yaml", "--seeds", "3", "--model", "a", "--model", "b"], "--seeds 3: 2 bundles are given"),
        (["check", "run.yaml", "--json", "nowhere/x.json"], "--json"),
        (["check", "run.yaml", "--set", "data.val_split=dev"], "data names the split 'dev'"),
        (["run", "search.yaml"], "is missing; this configuration is for `raycap tune`"),
        (["tune", "run.yaml"], "is missing; this configuration is for `raycap run`"),
        (["retrain", "run.yaml", "--set", "init_from=/nowhere"], "init_from: /nowhere is not a model bundle"),
        (
            ["tune", "search.yaml", "--set", GROUPS],
            "space, at G 0: model.static_expansion.0 = 0: input should be greater",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_command_that_cannot_be_meant_leaves_nothing_behind(
    tmp_path: Path, words: list[str], found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    write_search(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("raycap: ") and printed.err.count("\n") == 1 and found in printed.err
    assert not printed.out and sorted(tmp_path.rglob("*")) == before


def test_missing_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 8, "val": 2, "test": 2})
    data = small_config(tmp_path / "storage", data={"root": str(root), "train_splits": ["train"], "min_count": 1})

    def refused(**changes: object) -> str:
        config = write_config(tmp_path / "run.yaml", data | {"data": data["data"] | changes})
        assert main(["run", str(config)]) == 2
        return capsys.readouterr().err

    assert "nowhere" in refused(root=str(tmp_path / "nowhere")) and "other.json" in refused(annotations="other.json")
    assert "vocabulary is empty" in refused(min_count=100_000)
    for path in list((root / "images").iterdir())[:4]:
        path.unlink()
    assert "4 of 12 images cannot be read" in refused()
    assert not (tmp_path / "storage" / "runs").exists()
