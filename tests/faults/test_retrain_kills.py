"""`raycap retrain` with real trainings on Ray, killed with kill -9 at each of its steps and in the middle of training.

A long proof (`make proof`) on a cluster whose nodes share no disk.
`tests/integration/test_retrain*.py` hold the short ones, with a trainer that needs no Ray.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.synthetic.scenes import write_dataset
from raycap.pipeline.retrain.champion import ChampionStore
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT
from tests.support.champion_check import decisions, errors_of
from tests.support.ray_cluster import HEAD, Cluster, worker_cluster

LEASE_S = 6
TIMEOUT_S = 900
KILLED_AT = ("step 1/5", "step 2/5", "step 3/5", "xe_finetune  50/", "step 4/5", "step 5/5")


class Scenes:
    """A growing part of the synthetic data set, a storage, and the cluster that retrains."""

    def __init__(self, folder: Path, storage: StoragePath, cluster: Cluster) -> None:
        self.folder, self.cluster, self.num_calls = folder, cluster, 0
        self.data, self.results = storage / "data", storage / "results"
        write_dataset(folder / "all", SceneConfig(num_images=1200, image_size=32))
        for image in (folder / "all/images").iterdir():
            (self.data / "images" / image.name).write_bytes(image.read_bytes())
        every = json.loads((folder / "all/dataset.json").read_text())["images"]
        self.entries = [entry for entry in every if entry["split"] in ("val", "test")]
        self.rest = [entry for entry in every if entry["split"] == "train"]
        values = yaml.safe_load((ROOT / "raycap/configs/retrain_demo.yaml").read_text())
        values |= {"storage": {"uri": str(self.results), "endpoint_url": storage.options.endpoint_url}}
        values["data"] = values["data"] | {"synthetic": None, "root": str(self.data)}
        values["retrain"] |= {"lease_seconds": LEASE_S}
        self.config = folder / "retrain.yaml"
        self.config.write_text(yaml.safe_dump(values))

    @property
    def store(self) -> ChampionStore:
        return ChampionStore(self.results, "retrain_demo")

    def add(self, count: int, shuffled: bool = False) -> None:
        fresh, self.rest = self.rest[:count], self.rest[count:]
        if shuffled:
            sentences = [entry["sentences"] for entry in fresh]
            fresh = [entry | {"sentences": sentences[at - 7]} for at, entry in enumerate(fresh)]
        self.entries += fresh
        (self.data / "dataset.json").write_bytes(json.dumps({"images": self.entries}).encode())

    def start(self, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A call's process and the file of its output. Each driver has a cache of its own."""
        self.num_calls += 1
        log = self.folder / f"call-{self.num_calls}.txt"
        words = [sys.executable, "-u", "-m", "raycap", "retrain", str(self.config), *options]
        words += ["--address", self.cluster.address]
        return self.cluster.start(HEAD, words, log, RAYCAP_CACHE=str(self.cluster.disk / log.stem)), log

    def call(self, *options: str) -> str:
        process, log = self.start(*options)
        return self.output(process, log)

    def output(self, process: subprocess.Popen[bytes], log: Path) -> str:
        """The output of a call, which must succeed."""
        try:
            assert process.wait(TIMEOUT_S) == 0, log.read_text()
        finally:
            if process.poll() is None:
                self.cluster.kill(process)
        return log.read_text()

    def killed_at(self, line: str) -> str:
        process, log = self.start()
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(f"^ *{re.escape(line)}", log.read_text(), re.MULTILINE):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.cluster.kill(process)
        return log.read_text()

    def sound(self, number: int) -> dict[str, Any]:
        assert errors_of(self.store) == []
        state = self.store.read()
        assert state.number == number
        return decisions(self.store, state)[0].model_dump(exclude_unset=True) if number else {}


@pytest.fixture
def scenes(s3: str, tmp_path: Path) -> Iterator[Scenes]:
    with worker_cluster() as cluster:
        yield Scenes(tmp_path, StoragePath("s3://data/retrain", StorageOptions(s3)), cluster)


@pytest.mark.proof
@pytest.mark.ray
def test_retraining_for_real_killed_at_each_step(scenes: Scenes) -> None:
    scenes.add(240)
    for line in KILLED_AT:
        scenes.killed_at(line)
        scenes.sound(0)
        time.sleep(LEASE_S)
    said = scenes.call()
    assert "is complete; nothing to do" in said, "training was not done again"
    first = scenes.sound(1)
    assert first["decision"] == "first" and not scenes.store.orphans(scenes.store.read())
    assert "nothing new since decision 1" in scenes.call()

    scenes.add(360)
    said = scenes.killed_at("xe_finetune  150/")
    assert "training from the champion's weights" in said
    time.sleep(LEASE_S)
    calls = [scenes.start(), scenes.start()]  # two at once: one retrains, and the other does nothing
    said, other = sorted((scenes.output(*call) for call in calls), key=len, reverse=True)
    assert "lease     held by" in other
    record = scenes.sound(2)
    assert record["decision"] == "promoted" and record["data"]["new_images"] == 360, said
    # the step varies, because a worker outlives its driver for a moment and saves later checkpoints
    assert re.search(r"xe_finetune  continues from step \d{3} of 480", said), said
    print(record["reason"])

    scenes.add(300, shuffled=True)
    scenes.call()
    record = scenes.sound(3)
    assert record["decision"] == "kept" and "the champion stays" in record["reason"]
    print(record["reason"])

    scenes.call("--rollback")
    record = scenes.sound(4)
    assert record["decision"] == "rolled back" and not scenes.store.orphans(scenes.store.read())
    assert record["champion"]["run_id"] == first["champion"]["run_id"]
