"""How long training waits for features on two nodes with private disks whose caches hold half of the store.

The times are printed; `pytest -m proof -s tests/faults/test_data_wait.py` shows them. What is asserted is the number of
requests: the order of samples reads single rows, and the order of shards whole shards only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml

from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT, small_config
from tests.support.ray_cluster import HEAD, Cluster, ray_cluster
from tests.support.s3_server import CREDENTIALS, reads, s3_server

IMAGES, ROWS_PER_SHARD, EPOCHS, DELAY_S = 600, 16, 3, 0.03
TIMEOUT_S = 1200
pytestmark = [pytest.mark.proof, pytest.mark.ray]


class World:
    """Two nodes, and a bucket whose answers are late."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster, self.url = cluster, url
        self.storage = StoragePath("s3://data/wait", StorageOptions(url))
        self.features: dict[str, Any] = {}

    def raycap(self, command: str, **features: Any) -> str:
        """The id of the run that a command starts with these keys of `features`; "" for an extraction."""
        values = small_config({"uri": self.storage.uri, "endpoint_url": self.url})
        values["name"] = f"wait-{len(self.runs())}"  # a run of its own, with the same backbone
        values["data"]["synthetic"] = {"num_images": IMAGES, "image_size": 64, "seed": 3}
        values["backbone"] |= {"image_size": 64, "embed_dim": 96, "num_heads": [2, 2], "window_size": 4}
        values["stages"] = [values["stages"][0] | {"epochs": EPOCHS, "batch_size": 32, "captions_per_image": 5}]
        values["stages"][0] |= {"checkpoint_every_steps": 10000, "validate_every_epochs": EPOCHS}
        values["workers"] |= {"num_workers": 2, "log_every_steps": 1, "dry_run": False}
        values["features"] |= {"max_images_for_tasks": 0, "rows_per_shard": ROWS_PER_SHARD, "stored_dtype": "float32"}
        values["features"] |= features
        path, log, before = self.cluster.folder / "run.yaml", self.cluster.folder / "log.txt", self.runs()
        path.write_text(yaml.safe_dump(values))
        words = [sys.executable, "-m", "raycap", command, str(path), "--address", self.cluster.address]
        assert self.cluster.start(HEAD, words, log).wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
        return "".join(self.runs() - before)

    def runs(self) -> set[str]:
        return {name.split("/")[0] for name in (self.storage / "runs").list()}

    def store_bytes(self) -> int:
        entries = (self.storage / "features").list().items()
        return sum(entry.size for name, entry in entries if name.endswith(".npy"))

    def waits(self, run: str) -> list[tuple[float, float]]:
        """The seconds that training waited for data, and all its seconds, of each epoch of a run."""
        folder = self.storage / f"runs/{run}/log/journal"
        lines = [line for name in sorted(folder.list()) for line in (folder / name).read_bytes().splitlines()]
        steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
        per_epoch = len(steps) // EPOCHS
        assert len(steps) == EPOCHS * per_epoch > 0
        times = [steps[0]["time"], *(step["time"] for step in steps)]
        seconds = [end - begin for begin, end in pairwise(times)]
        waits = [step["data_wait"] * second for step, second in zip(steps, seconds, strict=True)]
        starts = range(0, len(steps), per_epoch)
        return [(sum(waits[n : n + per_epoch]), sum(seconds[n : n + per_epoch])) for n in starts]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with s3_server(delay_s=DELAY_S) as url:
        variables = CREDENTIALS | {"PYTHONPATH": str(ROOT), "RAYCAP_DEVICE": "cpu"}
        with ray_cluster(cpus=0, variables=variables) as cluster:
            for _ in range(2):
                cluster.join_node(cpus=1)
            found = World(cluster, url)
            found.raycap("extract")
            yield found


@pytest.mark.parametrize("order", ["samples", "shards"])
def test_the_wait_for_data(world: World, order: str) -> None:
    size = world.store_bytes()
    before = len(reads(world.url))
    run = world.raycap("run", order=order, shuffle_buffer=0.1, cache_gib=size / 2 / 2**30)
    num_reads = sum(".npy" in path for path in reads(world.url)[before:])
    for epoch, (wait, seconds) in enumerate(world.waits(run), 1):
        print(f"{order}, epoch {epoch}: waits {wait:.2f} s of {seconds:.2f} s")
    print(f"{order}: store {size / 1e6:.0f} MB, {num_reads} requests for shards")
    shards = -(-IMAGES // ROWS_PER_SHARD)
    most = 2 * shards * (EPOCHS + 2)  # both nodes read each shard in each epoch, before it, and for the evaluation
    assert num_reads <= most if order == "shards" else num_reads > IMAGES
