"""What a search gives to Ray Tune, and which of Ray Tune's snapshots it restores."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.fs
import pytest

from raycap.jobs.tune.tuner import _can_restore, _place, _variants
from raycap.pipeline.storage.path import StoragePath
from tests.support.searches import small_search

BATCH = "stages.xe_frozen.batch_size"
PICKLES = ["tuner.pkl", "callback-states-2.pkl", "search_gen_state-2.json", "searcher-state-2.pkl"]


@pytest.mark.parametrize("name", ["experiment_state-2.json", *PICKLES])
def test_only_a_whole_snapshot_is_restored(tmp_path: Path, name: str) -> None:
    """The files of an earlier process do not stand in for those of the newest one."""

    def can_restore() -> bool:
        return _can_restore(str(tmp_path), None, uses_optuna=True)

    for session in ("1", "2"):
        (tmp_path / f"experiment_state-{session}.json").write_text(json.dumps({"trial_data": [["{}", "{}"]]}))
        for each in PICKLES:
            (tmp_path / each.replace("2", session)).write_bytes(b"whole.")
    assert can_restore()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    assert not can_restore()
    (tmp_path / name).write_bytes(content)
    assert can_restore()
    (tmp_path / "experiment_state-2.json").write_text(json.dumps({"trial_data": []}))
    assert not can_restore(), "Ray Tune cannot read a snapshot without trials"
    (tmp_path / name).unlink()
    assert can_restore() == name.startswith("experiment_state"), "then that of the earlier process is the newest"


def test_integers_of_a_population_keep_their_logarithmic_scale(tmp_path: Path) -> None:
    space = {BATCH: {"low": 1, "high": 64, "log": True}}
    search = small_search(tmp_path, space=space, scheduler="pbt", trial={"epochs": 2})
    numbers = sorted(_variants(search)[BATCH].sample(size=1000, random_state=0))
    assert {type(int(number)) for number in numbers} == {int} and numbers[0] == 1 and numbers[-1] == 64
    assert numbers[500] < 16, "the middle of a linear scale would be 32"


def test_ray_tune_finds_the_server_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9/")
    expected = pyarrow.fs.S3FileSystem(scheme="http", endpoint_override="127.0.0.1:9")
    assert _place(StoragePath("s3://bucket/folder")) == ("bucket/folder", expected)
