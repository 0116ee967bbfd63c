"""Faults and slow starts on a cluster whose nodes share no disk: no worker at first, requests too large, lost nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, small_config
from tests.support.ray_cluster import HEAD, Cluster, ray_cluster
from tests.support.s3_server import CREDENTIALS

OUTSIDE = "laptop"
TIMEOUT_S = 500
pytestmark = pytest.mark.proof


def settings(url: str, **changes: Any) -> dict[str, Any]:
    """Two stages, trained by two workers."""
    values = small_config({"uri": "s3://data/faults", "endpoint_url": url}, **changes)
    values["stages"] = values["stages"][:2]
    values["workers"]["num_workers"] = 2
    values["features"] |= {"max_images_for_tasks": 0, "rows_per_shard": 16}
    return values


def search(**changes: Any) -> dict[str, Any]:
    trial = {"stages": ["xe_frozen"]}
    space = {"model.dynamic_expansion": [1, 2]}
    common = {"name": "search", "base": "run.yaml", "backbone": {"weights": "base"}, "algorithm": "grid"}
    return common | {"trial": trial, "space": space} | changes


def write(cluster: Cluster, name: str, values: dict[str, Any]) -> str:
    path = cluster.folder / name
    path.write_text(yaml.safe_dump(values))
    return str(path)


def raycap(cluster: Cluster, *words: str, node: str = HEAD, meanwhile: Callable[[Path], None] | None = None) -> str:
    """The output of a command that must succeed. `meanwhile` is called with its log while it runs."""
    log = cluster.folder / "command.txt"
    program = cluster.start(node, [sys.executable, "-m", "jobs", *words], log)
    if meanwhile is not None:
        meanwhile(log)
    assert program.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
    return log.read_text()


def wait_until(log: Path, is_reached: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_reached(log.read_text()):
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)


@pytest.fixture
def variables() -> dict[str, str]:
    return CREDENTIALS | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def growing(s3: str, variables: dict[str, str]) -> Iterator[Cluster]:
    """A cluster without a worker, whose autoscaler may add two."""
    with ray_cluster(cpus=0, variables=variables, max_workers=2) as cluster:
        yield cluster


@pytest.fixture
def pair(s3: str, variables: dict[str, str]) -> Iterator[Cluster]:
    """A cluster with two workers."""
    with ray_cluster(cpus=0, variables=variables) as cluster:
        for _ in range(2):
            cluster.join_node(cpus=1)
        yield cluster


def test_jobs_start_a_cluster_without_workers(growing: Cluster, s3: str) -> None:
    run, trials = write(growing, "run.yaml", settings(s3)), write(growing, "search.yaml", search())
    for command, config in (("run", run), ("tune", trials)):
        output = raycap(growing, "submit", command, config, "--address", growing.dashboard, node=OUTSIDE)
        assert "succeeded" in output
        assert command == "tune" or "waiting   " in output, "the first stage reports the nodes that are missing"


def test_doctor_without_workers(growing: Cluster, s3: str) -> None:
    """The head is checked, and the stages against the node types of the autoscaler, which starts no node for it."""
    run = write(growing, "run.yaml", settings(s3))
    output = raycap(growing, "doctor", run, "--address", growing.address)
    assert "no worker is up, so only the head is checked; the autoscaler can start 2 x (1 CPU)" in output
    assert "training asks for 2 x (1 CPU), and the autoscaler can start 2 x (1 CPU)" in output
    large = write(growing, "run.yaml", settings(s3, workers__cpus_per_worker=8))
    log = growing.folder / "command.txt"
    program = growing.start(HEAD, [sys.executable, "-m", "jobs", "doctor", large, "--address", growing.address], log)
    assert program.wait(TIMEOUT_S) == 1
    assert "training asks for 2 x (8 CPU), and the autoscaler can start only 2 x (1 CPU)" in log.read_text()
    assert growing.num_alive() == 1


def test_a_request_that_no_node_can_serve_is_refused(growing: Cluster, s3: str) -> None:
    run = write(growing, "run.yaml", settings(s3, workers__cpus_per_worker=8))
    log = growing.folder / "command.txt"
    program = growing.start(HEAD, [sys.executable, "-m", "jobs", "run", run, "--address", growing.address], log)
    assert program.wait(TIMEOUT_S) == 2
    assert "asks for 1 x (8 CPU), which no node type of this cluster can serve" in log.read_text()


def test_a_search_survives_a_lost_node(pair: Cluster, s3: str) -> None:
    """The lost node's trial resumes from its checkpoint, which is on S3, on the other node."""
    write(pair, "run.yaml", settings(s3))
    trials = write(pair, "search.yaml", search(name="lost", trial={"stages": ["xe_frozen"], "epochs": 20}))

    def lose_a_node(log: Path) -> None:
        wait_until(log, lambda text: all(f"trial {number}/2  epoch 2" in text for number in (1, 2)))
        pair.kill(pair.nodes[1])

    output = raycap(pair, "tune", trials, "--address", pair.address, meanwhile=lose_a_node)
    assert "lost its node; it resumes on another" in output and "resumes from epoch" in output
    assert output.count("finished at epoch 20") == 2 and "failed" not in output


def replace_a_node(cluster: Cluster) -> None:
    cluster.kill(cluster.nodes[1])
    cluster.join_node(cpus=1)


def test_a_run_survives_a_lost_node(pair: Cluster, s3: str) -> None:
    """The run ends with the scores of an undisturbed one, which has the same seed and another name."""
    run = write(pair, "run.yaml", settings(s3, name="lost-node"))

    def cause(log: Path) -> None:
        wait_until(log, lambda text: "xe_finetune  2/" in text)
        replace_a_node(pair)

    disturbed = scores(raycap(pair, "run", run, "--address", pair.address, meanwhile=cause))
    whole = write(pair, "whole.yaml", settings(s3, name="whole"))
    assert disturbed == scores(raycap(pair, "run", whole, "--address", pair.address))


def scores(output: str) -> list[str]:
    """The lines of the final table, which end with the share of main objects."""
    lines = [line for line in output.splitlines() if line.rstrip().endswith("%") and "images)" in line]
    assert len(lines) == 3, output[-3000:]
    return lines
