"""Faults and slow starts on a cluster whose nodes share no disk: no worker at first, requests too large, lost nodes."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.pipeline.training.loop import NOTICE
from tests.conftest import ROOT, small_config
from tests.support.ray_cluster import HEAD, Cluster, processes, ray_cluster
from tests.support.s3_server import CREDENTIALS

OUTSIDE = "laptop"
TIMEOUT_S = 900
SPOT_NODE = """
import ray
ray.init('{}', log_to_driver=False)
print(*(node['NodeID'] for node in ray.nodes() if 'spot' in node['Resources']))
"""
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
    program = cluster.start(node, [sys.executable, "-m", "raycap", *words], log)
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
def pair(s3: str, variables: dict[str, str]) -> Iterator[Cluster]:
    """A cluster with two workers."""
    with ray_cluster(cpus=0, variables=variables) as cluster:
        for _ in range(2):
            cluster.join_node(cpus=1)
        yield cluster


def test_a_job_waits_for_nodes_that_come_later(s3: str, variables: dict[str, str]) -> None:
    with ray_cluster(cpus=0, variables=variables) as cluster:

        def join_nodes(log: Path) -> None:
            wait_until(log, lambda text: "waiting   " in text)
            for _ in range(2):
                cluster.join_node(cpus=1)

        run = write(cluster, "run.yaml", settings(s3))
        words = ["submit", "run", run, "--address", cluster.dashboard]
        assert "succeeded" in raycap(cluster, *words, node=OUTSIDE, meanwhile=join_nodes)


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


def most_at_a_time(output: str) -> int:
    """The largest number of trials of a search that ran at the same time, by its lines about starts and ends."""
    running, most = set[str](), 0
    for number, event in re.findall(r"trial (\d+)/\d+  (starts|finished)", output):
        running = running | {number} if event == "starts" else running - {number}
        most = max(most, len(running))
    return most


def test_a_search_grows_with_its_cluster(s3: str, variables: dict[str, str]) -> None:
    """It asks for as many processes as it has trials, which read images and need no features."""
    with ray_cluster(cpus=0, variables=variables) as cluster:
        cluster.join_node(cpus=1)

        def join_nodes(log: Path) -> None:
            wait_until(log, lambda text: "trial 1/5  epoch 1" in text)
            for _ in range(2):
                cluster.join_node(cpus=1)

        write(cluster, "run.yaml", settings(s3))
        space = {"model.dynamic_expansion": [1, 2, 4, 8, 16]}
        trial = {"stages": ["xe_finetune"], "epochs": 20}
        trials = write(cluster, "search.yaml", search(name="grow", trial=trial, space=space))
        words = ["submit", "tune", trials, "--address", cluster.dashboard]
        output = raycap(cluster, *words, node=OUTSIDE, meanwhile=join_nodes)
    assert "succeeded" in output and output.count("finished at epoch 20") == 5
    assert most_at_a_time(output) == 3, output[-4000:]


def test_a_run_survives_the_death_of_its_controller(pair: Cluster, s3: str) -> None:
    """Ray Train's controller is an actor that starts and watches the workers."""
    run = write(pair, "run.yaml", settings(s3, name="lost-controller"))

    def kill_the_controller(log: Path) -> None:
        wait_until(log, lambda text: "xe_finetune  2/" in text)
        (controller,) = processes(pair.nodes[0], "TrainController")
        controller.kill()

    disturbed = raycap(pair, "run", run, "--address", pair.address, meanwhile=kill_the_controller)
    assert "Ray Train's controller died; training resumes" in disturbed
    whole = write(pair, "whole.yaml", settings(s3, name="whole"))
    assert scores(disturbed) == scores(raycap(pair, "run", whole, "--address", pair.address))


def drain_a_node(cluster: Cluster, log: Path) -> None:
    """Ray learns that a node will be taken in 20 s, as from a provider of spot nodes, and the node is then killed."""
    cluster.join_node(cpus=1)  # the replacement
    node_id = printed(cluster, sys.executable, "-c", SPOT_NODE.format(cluster.address)).split()[-1]
    drain = ["drain-node", "--address", cluster.address, "--node-id", node_id, "--deadline-remaining-seconds", "20"]
    drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    printed(cluster, sys.executable, "-m", "ray.scripts.scripts", *drain)
    wait_until(log, lambda text: "continues from step" in text)
    cluster.kill(cluster.nodes[2])


def terminate_a_worker(cluster: Cluster, log: Path) -> None:
    """A worker's process gets SIGTERM, and is killed after the notice."""
    (worker,) = processes(cluster.nodes[2], "RayTrainWorker")
    worker.send_signal(signal.SIGTERM)
    wait_until(log, lambda text: NOTICE in text)
    worker.kill()


def printed(cluster: Cluster, *command: str) -> str:
    """What a program prints that runs on the head and must succeed."""
    log = cluster.folder / "printed.txt"
    assert cluster.start(HEAD, command, log).wait(TIMEOUT_S) == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("fault", [drain_a_node, terminate_a_worker])
def test_a_notice_saves_the_next_step(
    s3: str, variables: dict[str, str], fault: Callable[[Cluster, Path], None]
) -> None:
    """The run resumes from the checkpoint of the notice, which is its only one."""
    with ray_cluster(cpus=0, variables=variables) as cluster:
        cluster.join_node(cpus=1)
        cluster.join_node(cpus=1, options=['--resources={"spot": 1}'])
        values = settings(s3, name=fault.__name__.replace("_", "-"))
        values["stages"] = [values["stages"][0] | {"checkpoint_every_steps": 10**6}]
        values["stages"][0] |= {"epochs": 150, "validate_every_epochs": 150}

        def cause(log: Path) -> None:
            wait_until(log, lambda text: "xe_frozen  20/" in text)
            fault(cluster, log)

        output = raycap(
            cluster, "run", write(cluster, "run.yaml", values), "--address", cluster.address, meanwhile=cause
        )
        (resumed,) = map(int, re.findall(r"xe_frozen  continues from step (\d+)", output))
        last = int(re.findall(r"xe_frozen  (\d+)/", output[: output.index(NOTICE)])[-1])
        assert last <= resumed <= last + 2, "the step after the notice"
        assert ("failure 1 within an hour" in output) == (fault is terminate_a_worker), "a drained node is no failure"
        assert scores(output)


def test_a_run_continues_with_fewer_workers_and_then_with_more(s3: str, variables: dict[str, str]) -> None:
    """Four workers, two after a loss, and four again, on batches of 10 samples."""
    with ray_cluster(cpus=0, variables=variables) as cluster:
        for _ in range(4):
            cluster.join_node(cpus=1)
        values = settings(s3, name="elastic")
        values["workers"] |= {"num_workers": 4, "min_workers": 2, "log_every_steps": 20}
        values["stages"] = [stage | {"batch_size": 10} for stage in values["stages"]]
        # Ray Train looks for new nodes every 60 s, so the stage must take minutes
        values["stages"][0] |= {"epochs": 1000, "validate_every_epochs": 250, "checkpoint_every_steps": 50}

        def cause(log: Path) -> None:
            wait_until(log, lambda text: "xe_frozen  60/" in text)
            for node in cluster.nodes[3:]:
                cluster.kill(node)
            wait_until(log, lambda text: "with 2 workers" in text)
            for _ in range(2):
                cluster.join_node(cpus=1)
            wait_until(log, lambda text: text.count("with 4 workers") > 1)

        run = write(cluster, "run.yaml", values)
        output = raycap(cluster, "run", run, "--address", cluster.address, meanwhile=cause)
        assert "2 to 4 workers x 2 to 5" in output
        assert re.findall(r"xe_frozen .* with (\d) workers", output)[:3] == ["4", "2", "4"]
        print("\n".join(scores(output)))


def scores(output: str) -> list[str]:
    """The lines of the final table, which end with the share of main objects."""
    lines = [line for line in output.splitlines() if line.rstrip().endswith("%") and "images)" in line]
    assert len(lines) == 3, output[-3000:]
    return lines
