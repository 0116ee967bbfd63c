"""Runs and searches on nodes without a common disk that lose a node, a process or their driver, or get further nodes.

Each run has a storage of its own, so that it extracts features.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.training.loop import NOTICE
from tests.conftest import small_config
from tests.support.ray_cluster import HEAD, OUTSIDE, Cluster, processes, wait_until, worker_cluster

SPOT_NODE = """
import ray
ray.init('{}', log_to_driver=False)
print(*(node['NodeID'] for node in ray.nodes() if 'spot' in node['Resources']))
"""
pytestmark = pytest.mark.proof


def settings(url: str, name: str, num_stages: int = 1) -> dict[str, Any]:
    """Stages that two workers train. Shards are small, so that a fault can hit the middle of an extraction."""
    values = small_config({"uri": f"s3://data/{name}", "endpoint_url": url}, name=name)
    values["stages"] = values["stages"][:num_stages]
    values["stages"][0] |= {"epochs": 30, "validate_every_epochs": 10}
    values["workers"] |= {"num_workers": 2, "dry_run": False}
    values["features"] |= {"max_images_for_tasks": 0, "rows_per_shard": 4, "batch_size": 2}
    values["evaluation"]["batch_size"] = 1
    return values


def scores(output: str) -> list[str]:
    """The lines of the final table, which end with the share of main objects."""
    lines = [line for line in output.splitlines() if line.rstrip().endswith("%") and "images)" in line]
    assert len(lines) == 3, output[-3000:]
    return lines


def run(cluster: Cluster, values: dict[str, Any], meanwhile: Callable[[Path], object] | None = None) -> str:
    """The output of a run from the head."""
    words = ["run", cluster.write("run.yaml", values), "--address", cluster.address]
    return cluster.raycap(*words, meanwhile=meanwhile)


def replace_node(cluster: Cluster, title: str) -> None:
    """Kills the node with a process of this title; another node joins."""
    (node, *_) = [node for node in cluster.nodes[1:] if node.poll() is None and processes(node, title)]
    cluster.kill(node)
    cluster.join_nodes()


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with worker_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(pair: Cluster, s3: str) -> list[str]:
    return scores(run(pair, settings(s3, "undisturbed")))


def test_a_node_is_lost_in_extraction_and_another_in_evaluation(pair: Cluster, s3: str, undisturbed: list[str]) -> None:
    features = StoragePath("s3://data/extraction/features", StorageOptions(s3))

    def disturb(log: Path) -> None:
        wait_until(log, lambda _: sum("/manifest/" in name for name in features.list()) > 1)
        assert "images in" not in log.read_text(), "the extraction was over before"
        replace_node(pair, "ShardWriter")
        wait_until(log, lambda _: any(processes(node, "_caption_shard") for node in pair.nodes if node.poll() is None))
        replace_node(pair, "_caption_shard")

    assert scores(run(pair, settings(s3, "extraction"), disturb)) == undisturbed


def test_the_driver_is_killed_and_another_node_continues(pair: Cluster, s3: str, undisturbed: list[str]) -> None:
    words = ["run", pair.write("run.yaml", settings(s3, "driver")), "--address", pair.address]
    log = pair.folder / "driver.txt"
    program = pair.start(HEAD, [sys.executable, "-m", "raycap", *words], log)
    wait_until(log, lambda text: "xe_frozen  2/" in text)
    pair.kill(program)
    output = pair.raycap(*words, node=str(len(pair.nodes) - 1))
    assert re.search(r"xe_frozen  continues from step [1-9]", output)
    assert scores(output) == undisturbed


def test_a_run_survives_the_death_of_its_controller(pair: Cluster, s3: str, undisturbed: list[str]) -> None:
    """Ray Train's controller is an actor that starts and watches the workers."""

    def kill_the_controller(log: Path) -> None:
        wait_until(log, lambda text: "xe_frozen  2/" in text)
        (controller,) = processes(pair.nodes[0], "TrainController")
        controller.kill()

    output = run(pair, settings(s3, "controller"), kill_the_controller)
    assert "Ray Train's controller died; training resumes" in output and scores(output) == undisturbed


def search(cluster: Cluster, url: str, name: str, epochs: int = 20) -> list[str]:
    """The words of a search with two trials."""
    cluster.write("base.yaml", settings(url, name))
    values = {"name": name, "base": "base.yaml", "algorithm": "grid", "space": {"model.dynamic_expansion": [1, 2]}}
    values["trial"] = {"stages": ["xe_frozen"], "epochs": epochs}
    return ["tune", cluster.write("search.yaml", values), "--address", cluster.address]


def assert_finished_once(output: str, epochs: int = 20) -> None:
    assert output.count(f"finished at epoch {epochs}") == 2 and "  failed: " not in output
    assert output.count("  epoch 10: ") == 2, "no trial starts over"


def test_a_search_survives_a_lost_node(pair: Cluster, s3: str) -> None:
    """The lost node's trial resumes from its checkpoint, which is on S3, on the other node."""

    def lose_a_node(log: Path) -> None:
        wait_until(log, lambda text: text.count("  epoch 10: ") == 2)
        pair.kill(next(node for node in pair.nodes[1:] if node.poll() is None))
        pair.join_nodes()

    output = pair.raycap(*search(pair, s3, "lost", epochs=200), meanwhile=lose_a_node)
    assert "is repeated from its last checkpoint" in output
    assert_finished_once(output, epochs=200)


def test_the_driver_of_a_search_is_killed_and_another_node_continues(pair: Cluster, s3: str) -> None:
    words, log = search(pair, s3, "moved", epochs=100), pair.folder / "moved.txt"
    program = pair.start(HEAD, [sys.executable, "-m", "raycap", *words], log)
    wait_until(log, lambda text: "  epoch 20: " in text)
    pair.kill(program)
    output = pair.raycap(*words, node=str(len(pair.nodes) - 1))
    assert output.count("finished at epoch 100") == 2 and "  failed: " not in output
    runs = StoragePath("s3://data/moved/runs", StorageOptions(endpoint_url=s3))
    journals = [(runs / path).read_bytes().decode() for path, _ in runs.walk() if f"/{JOURNAL}/" in path]
    assert re.search(r"continues from step \d{2}", "".join(journals)), "the trial with epoch 20 had a checkpoint"


@pytest.mark.parametrize("count", [2, 3])
def test_a_search_starts_before_its_nodes(s3: str, count: int) -> None:
    with worker_cluster(0) as cluster:

        def join_nodes(log: Path) -> None:
            wait_until(log, lambda text: "waiting   " in text)
            cluster.join_nodes(count)

        assert_finished_once(cluster.raycap(*search(cluster, s3, f"later-{count}"), meanwhile=join_nodes))


def test_a_job_waits_for_nodes_that_come_later(s3: str) -> None:
    with worker_cluster(0) as cluster:

        def join_nodes(log: Path) -> None:
            wait_until(log, lambda text: "waiting   " in text)
            cluster.join_nodes(2)

        words = ["submit", "run", cluster.write("run.yaml", settings(s3, "later")), "--address", cluster.dashboard]
        assert "succeeded" in cluster.raycap(*words, node=OUTSIDE, meanwhile=join_nodes)


def drain_a_node(cluster: Cluster, log: Path) -> None:
    """Ray learns that a node will be taken in 20 s, as from a provider of spot nodes, and the node is then killed."""
    cluster.join_nodes()  # the replacement
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
    """The output of a program on the head, which must succeed."""
    log = cluster.folder / "printed.txt"
    assert cluster.start(HEAD, command, log).wait(300) == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("fault", [drain_a_node, terminate_a_worker])
def test_a_notice_saves_the_next_step(s3: str, fault: Callable[[Cluster, Path], None]) -> None:
    """The run resumes from the checkpoint of the notice, which is its only one."""
    with worker_cluster(1) as cluster:
        cluster.join_nodes(options=['--resources={"spot": 1}'])
        values = settings(s3, fault.__name__.replace("_", "-"))
        values["stages"][0] |= {"epochs": 150, "validate_every_epochs": 150, "checkpoint_every_steps": 10**6}

        def cause(log: Path) -> None:
            wait_until(log, lambda text: "xe_frozen  20/" in text)
            fault(cluster, log)

        output = run(cluster, values, cause)
        (resumed,) = map(int, re.findall(r"xe_frozen  continues from step (\d+)", output))
        last = int(re.findall(r"xe_frozen  (\d+)/", output[: output.index(NOTICE)])[-1])
        assert last <= resumed <= last + 2, "the step after the notice"
        assert ("failure 1 within an hour" in output) == (fault is terminate_a_worker), "a drained node is no failure"
        assert scores(output)


def test_a_run_continues_with_fewer_workers_and_then_with_more(s3: str) -> None:
    """Four workers, two after a loss, and four again, on batches of 10 samples."""
    with worker_cluster(4) as cluster:
        values = settings(s3, "elastic", num_stages=2)
        values["workers"] |= {"num_workers": 4, "min_workers": 2, "log_every_steps": 20}
        values["stages"] = [stage | {"batch_size": 10} for stage in values["stages"]]
        # Ray Train looks for new nodes every 60 s, so the stage must take minutes
        values["stages"][0] |= {"epochs": 1000, "validate_every_epochs": 250, "checkpoint_every_steps": 50}

        def cause(log: Path) -> None:
            wait_until(log, lambda text: "xe_frozen  60/" in text)
            for node in cluster.nodes[3:]:
                cluster.kill(node)
            wait_until(log, lambda text: "with 2 workers" in text)
            cluster.join_nodes(2)
            wait_until(log, lambda text: text.count("with 4 workers") > 1)

        output = run(cluster, values, cause)
        assert scores(output)
        assert re.findall(r"xe_frozen .* with (\d) workers", output)[:3] == ["4", "2", "4"]
