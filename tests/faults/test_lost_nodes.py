"""Runs that lose a node, an actor or their driver, or whose worker is stopped, end with undisturbed scores.

All runs share one cluster of nodes without a common disk. Each has a storage of its own, so that it extracts features.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import yaml

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT, small_config
from tests.support.ray_cluster import HEAD, Cluster, ray_cluster
from tests.support.s3_server import CREDENTIALS

TIMEOUT_S = 500
STOPPED_S = 30  # how long a worker is stopped
pytestmark = pytest.mark.proof


class World:
    """A cluster with two workers, and the commands of its user."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster, self.url = cluster, url
        self.log = cluster.folder / "command.txt"

    def settings(self, name: str) -> dict[str, Any]:
        """One stage, trained by two workers; shards are small, so that an extraction has a middle."""
        values = small_config({"uri": f"s3://data/{name}", "endpoint_url": self.url})
        values["stages"] = [values["stages"][0] | {"epochs": 30, "validate_every_epochs": 10}]
        values["workers"] |= {"num_workers": 2, "dry_run": False}
        values["features"] |= {"max_images_for_tasks": 0, "rows_per_shard": 4, "batch_size": 2}
        values["evaluation"]["batch_size"] = 1
        return values

    def write(self, values: dict[str, Any]) -> str:
        path = self.cluster.folder / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        return str(path)

    def start(self, command: str, config: str, node: str = HEAD, **variables: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "raycap", command, config, "--address", self.cluster.address]
        return self.cluster.start(node, words, self.log, **variables)

    def finish(self, program: subprocess.Popen[bytes]) -> str:
        """The output of a command that must succeed."""
        try:
            code = program.wait(TIMEOUT_S)
        finally:
            if program.poll() is None:
                self.cluster.kill(program)
        assert code == 0, self.output[-6000:]
        return self.output

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_until(self, is_reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_reached():
            assert time.monotonic() < deadline, self.output[-6000:]
            time.sleep(0.05)

    def processes(self, title: str) -> list[tuple[int, psutil.Process]]:
        """(number of the node, process) of Ray's processes with this text in their title."""
        found = []
        for number, node in enumerate(self.cluster.nodes):
            with suppress(psutil.Error):
                for process in psutil.Process(node.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        if title in " ".join(process.cmdline()):
                            found.append((number, process))
        return found

    def manifests(self, name: str) -> int:
        features = StoragePath(f"s3://data/{name}/features", StorageOptions(self.url))
        return sum("/manifest/" in name for name in features.list())

    def replace_node(self, number: int) -> None:
        self.cluster.kill(self.cluster.nodes[number])
        self.cluster.join_node(cpus=1)


def scores(output: str) -> list[str]:
    """The lines of the final table, which end with the share of main objects."""
    lines = [line for line in output.splitlines() if line.rstrip().endswith("%") and "images)" in line]
    assert len(lines) == 3, output[-3000:]
    return lines


@pytest.fixture(scope="module")
def world(s3: str) -> Iterator[World]:
    with ray_cluster(cpus=0, variables=CREDENTIALS | {"PYTHONPATH": str(ROOT)}) as cluster:
        for _ in range(2):
            cluster.join_node(cpus=1)
        yield World(cluster, s3)


@pytest.fixture(scope="module")
def undisturbed(world: World) -> list[str]:
    return scores(world.finish(world.start("run", world.write(world.settings("undisturbed")))))


def run(world: World, name: str, disturb: Callable[[], None]) -> list[str]:
    """The scores of a run during which `disturb` is called."""
    program = world.start("run", world.write(world.settings(name)))
    disturb()
    return scores(world.finish(program))


def test_an_actor_is_killed_while_it_starts(world: World, undisturbed: list[str]) -> None:
    def disturb() -> None:
        for _ in range(2):  # its successor as well
            world.wait_until(lambda: world.processes("ShardWriter"))
            for _, process in world.processes("ShardWriter"):
                process.kill()
            world.wait_until(lambda: not world.processes("ShardWriter"))
        assert not world.manifests("starting")

    assert run(world, "starting", disturb) == undisturbed
    assert world.manifests("starting") == world.manifests("undisturbed")


def test_a_node_is_lost_in_extraction(world: World, undisturbed: list[str]) -> None:
    """The node of the actor, once the first shards are there."""

    def disturb() -> None:
        world.wait_until(lambda: world.manifests("extraction") > 1)
        assert "images in" not in world.output, "the extraction was over before"
        world.replace_node(world.processes("ShardWriter")[0][0])

    assert run(world, "extraction", disturb) == undisturbed
    assert world.manifests("extraction") == world.manifests("undisturbed")


def test_a_node_is_lost_in_evaluation(world: World, undisturbed: list[str]) -> None:
    def disturb() -> None:
        world.wait_until(lambda: world.processes("_caption_shard"))
        world.replace_node(world.processes("_caption_shard")[0][0])

    assert run(world, "evaluation", disturb) == undisturbed


def test_rank_0_is_stopped_for_a_while(world: World, undisturbed: list[str]) -> None:
    def disturb() -> None:
        world.wait_until(lambda: "xe_frozen  2/" in world.output)
        # only rank 0 has a journal in its copy of the run
        copies = f"disks/*/disk/cache/workers/{parse_config(world.settings('stopped')).working_path.name}"
        journals = world.cluster.folder.glob(f"{copies}/**/{JOURNAL}/*.jsonl")
        (number,) = {int(journal.relative_to(world.cluster.folder).parts[1]) for journal in journals}
        (rank_0,) = [process for node, process in world.processes("RayTrainWorker") if node == number]
        rank_0.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        rank_0.send_signal(signal.SIGCONT)

    assert run(world, "stopped", disturb) == undisturbed


def test_the_driver_is_killed_and_another_node_continues(world: World, undisturbed: list[str]) -> None:
    config = world.write(world.settings("driver"))
    program = world.start("run", config)
    world.wait_until(lambda: "xe_frozen  2/" in world.output)
    world.cluster.kill(program)
    output = world.finish(world.start("run", config, node=str(len(world.cluster.nodes) - 1)))
    assert re.search(r"xe_frozen  continues from step [1-9]", output)
    assert scores(output) == undisturbed
