"""Runs on S3 while requests fail: nobody reads half of a checkpoint, and another machine continues after one died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.runs import (
    FROZEN_STAGES,
    STAGES,
    Killed,
    assert_same_weights,
    best_weights,
    break_each_stage_once,
    prepare_run,
    run_with_own_cache,
)
from tests.support.s3_server import s3_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server(share=0.05) as address:
        yield address


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_a_copy_follows_its_home(url: str, tmp_path: Path) -> None:
    home = StoragePath("s3://data/follows", StorageOptions(url))
    one, two = Mirror(home, tmp_path / "one"), Mirror(home, tmp_path / "two")
    files = {"a.txt": "1", "s/step-1/state.pt": "x" * 1000, "s/step-1/progress.json": "{}", "s/best-1/model": "m"}
    write(one.local, files | {".a.txt.tmp": "not yet", "s/.step-2.tmp/state.pt": "half"})
    one.push()
    two.pull()
    assert content(two.local) == files
    write(one.local, {"a.txt": "2", "s/step-2/state.pt": "y", "s/step-2/progress.json": "{}", "b/c": "new"})
    (one.local / "s/step-1/state.pt").unlink()
    (one.local / "s/step-1/progress.json").unlink()
    one.push("s")
    two.pull()
    expected = {"a.txt": "1", "s/best-1/model": "m", "s/step-2/state.pt": "y", "s/step-2/progress.json": "{}"}
    assert content(two.local) == expected, "only what lies below s was pushed"
    write(two.local, {"a.txt": "somebody changed the copy"})
    two.pull("a.txt")
    assert content(two.local) == expected
    assert not (two.local / "s/step-1").exists()


def test_half_a_checkpoint_is_left_alone(url: str, tmp_path: Path) -> None:
    home = StoragePath("s3://data/half", StorageOptions(url))
    for name in ("s/step-4/state.pt", "s/step-4/progress.json", "s/step-8/state.pt", "s/DONE.json"):
        (home / name).write_bytes(b"{}")
    copy = Mirror(home, tmp_path / "copy")
    copy.pull()
    assert sorted(content(copy.local)) == ["s/DONE.json", "s/step-4/progress.json", "s/step-4/state.pt"]


def test_markers_go_up_last_and_away_first(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = StoragePath("s3://data/order", StorageOptions(url))
    copy = Mirror(home, tmp_path / "copy")
    write(copy.local, {"s/step-1/progress.json": "{}", "s/step-1/a": "", "s/best-1/model": "m"})
    copy.push()
    (home / "s/step-9/progress.json").write_bytes(b"of somebody who came later")
    done: list[str] = []
    upload, delete = StoragePath.upload, StoragePath.delete
    monkeypatch.setattr(StoragePath, "upload", lambda self, path: [done.append(self.uri), upload(self, path)][1])
    monkeypatch.setattr(StoragePath, "delete", lambda self: [done.append("gone " + self.uri), delete(self)][1])
    (copy.local / "s/step-1/progress.json").unlink()
    (copy.local / "s/step-1/a").unlink()
    write(copy.local, {"s/step-2/progress.json": "{}", "s/step-2/state.pt": "", "s/step-2/z": ""})
    copy.push("s", lambda: done.append("asked"))
    names = [name.replace(f"{home}/s/", "") for name in done]
    assert sorted(names[:2]) == ["step-2/state.pt", "step-2/z"]
    assert names[2:] == ["asked", "step-2/progress.json", "gone step-1/progress.json", "gone step-1/a"]
    assert (home / "s/step-9/progress.json").exists(), "what this copy never knew is not its to remove"


def test_another_machine_goes_on_where_one_died(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of two stages is on S3. Each is broken off once and continued with an empty cache."""
    stages = [stage for stage in small_config(tmp_path)["stages"] if stage["name"] in FROZEN_STAGES]
    local, local_store = prepare_run(tmp_path / "local", stages=stages)
    train_stages(LocalContext("cpu"), StageJob(local, FROZEN_STAGES, local_store))

    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "machine"))
    storage = {"uri": "s3://data/runs-test", "endpoint_url": url}
    folder, store = prepare_run(storage, stages=stages)
    assert folder.home is not None and folder.run_id == local.run_id
    broken = break_each_stage_once(monkeypatch, 3)
    resumed = []
    for machine in range(len(FROZEN_STAGES) + 1):
        monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / f"machine{machine}"))
        folder = prepare(folder.config)  # as a driver on that machine would
        try:
            train_stages(
                LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store, (), folder.new_token("driver_token"))
            )
        except Killed:
            continue
    assert broken == set(FROZEN_STAGES)
    folder.pull()
    resumed = [entry["text"] for entry in read_journal(folder.journal) if entry["kind"] == "event"]
    assert len([text for text in resumed if text.startswith("continues from step 2")]) == len(FROZEN_STAGES)
    for stage in FROZEN_STAGES:
        assert_same_weights(best_weights(folder.stage(stage)), best_weights(local.stage(stage)))


@pytest.mark.proof
@pytest.mark.ray
def test_a_whole_run_with_everything_on_s3_on_a_bad_day(url: str, tmp_path: Path) -> None:
    """Two workers, all stages, every twentieth request refused or cut; then the same command on another machine."""
    settings = small_config({"uri": "s3://data/whole", "endpoint_url": url}, workers__num_workers=2)
    settings["tracking"] = {"enabled": True}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    first = run_with_own_cache(config, tmp_path / "one")
    assert "report       s3://data/whole/runs/" in first and "scst_finetune  done" in first, first
    assert "MLflow's data are only on this machine" in first
    there = StoragePath("s3://data/whole", StorageOptions(url)).list()
    for name in ("report.html", "COMPLETE.json", "scores.json", "predictions/test.json", "log/journal/00001.jsonl"):
        assert any(path.startswith("runs/demo-") and path.endswith(name) for path in there), name
    assert any(path.startswith("models/demo/") and path.endswith("model.safetensors") for path in there)
    assert not [path for path in there if "/step-" in path], "checkpoints that only served to go on are gone"
    (report,) = (path for path in there if path.endswith("report.html"))
    page = (StoragePath("s3://data/whole", StorageOptions(url)) / report).read_bytes().decode()
    assert page.count('src="data:image/jpeg') == 8
    second = run_with_own_cache(config, tmp_path / "two")
    assert "is complete; nothing to do" in second and first.partition("BLEU-1")[2][:400] in second


def test_an_abandoned_driver_on_another_machine_writes_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "one"))
    folder, store = prepare_run({"uri": "s3://data/abandoned", "endpoint_url": url})
    old = folder.new_token("driver_token")
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "two"))
    prepare(folder.config).new_token("driver_token")
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "one"))
    with pytest.raises(RuntimeError, match="another driver"):
        train_stages(LocalContext("cpu"), StageJob(folder, STAGES, store, (), old))
    assert not [name for name in folder.root.list() if name.startswith("stages/")]
