"""Every command on a cluster whose nodes share no disk, with the storage on S3: two workers, and a head without CPUs.

Every process asks for a GPU, which the nodes have by number only, so that the placement on GPUs is tested without any.
The first test that needs a trained run makes it, and the others use it. tests/faults/test_lost_nodes.py has the faults.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.bundles import make_bundle, write_images
from tests.support.ray_cluster import HEAD, OUTSIDE, Cluster, worker_cluster


class World:
    """A cluster, its storage, and the commands of its user."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster = cluster
        self.storage = StoragePath("s3://data/private", StorageOptions(url))
        settings = small_config({"uri": "s3://data/private", "endpoint_url": url})
        settings["stages"] = settings["stages"][:2]  # one with frozen features, one end to end
        settings["workers"] |= {"num_workers": 2, "gpus_per_worker": 1}
        settings["features"] |= {"max_images_for_tasks": 0, "rows_per_shard": 16, "gpus_per_actor": 1}
        self.config = cluster.write("run.yaml", settings)

    def write_search(self, name: str, resources: dict[str, int], choices: list[int], **keys: object) -> str:
        """A search with a trial per choice."""
        search = {"base": "run.yaml", "trial": {"stages": ["xe_frozen"]}} | keys
        search |= {"resources": resources, "space": {"model.dynamic_expansion": choices}}
        return self.cluster.write(f"{name}.yaml", search | {"name": name, "algorithm": "grid"})

    def joined(self, command: str, *words: str) -> str:
        """A command whose driver runs on the head."""
        return self.cluster.raycap(command, *words, "--address", self.cluster.address)

    def submitted(self, command: str, *words: str) -> str:
        """A command that is submitted as a job from a machine outside the cluster."""
        return self.cluster.raycap("submit", command, *words, "--address", self.cluster.dashboard, node=OUTSIDE)


@pytest.fixture(scope="module")
def world(s3: str) -> Iterator[World]:
    variables = {
        "RAYCAP_DEVICE": "cpu",  # the nodes' GPUs exist by number only
        "AWS_ENDPOINT_URL_S3": s3,  # `raycap caption` has no configuration that could name the server
    }
    with worker_cluster(options=["--num-gpus=1"], **variables) as cluster:
        yield World(cluster, s3)


@pytest.fixture(scope="module")
def extraction(world: World) -> str:
    """The output of an extraction that was submitted."""
    return world.submitted("extract", world.config)


@pytest.fixture(scope="module")
def training(world: World) -> str:
    """The output of a run whose driver is on the head."""
    return world.joined("run", world.config)


@pytest.mark.proof
def test_doctor(world: World) -> None:
    """First a job on the cluster finds that one node cannot make its cache. Then a joined driver finds no failure."""
    cache = world.cluster.folder / "disks" / "1" / "disk" / "cache"
    cache.touch()
    words = ("submit", "doctor", world.config, "--address", world.cluster.dashboard)
    output = world.cluster.raycap(*words, node=OUTSIDE, exit_code=1)
    assert re.search(r"fail  node cache .*cannot be written", output)
    cache.unlink()
    output = world.joined("doctor", world.config)
    assert re.search(r"ok    nodes +nodes: 2 x \(1 CPU \+ 1 GPU\)", output)
    assert "training asks for 2 x (1 CPU + 1 GPU)" in output
    for name in ("node versions", "node storage", "tracker"):
        assert re.search(rf"ok    {name} ", output), output
    assert re.search(r"warn  node gpus .*can use 0 GPUs, and 1 are wanted", output)


@pytest.mark.proof
def test_extract(world: World, extraction: str, training: str) -> None:
    """The run finds the features in the storage: this module trains it after the extraction if all tests run."""
    assert "job" in extraction and "succeeded" in extraction
    (store,) = {name.split("/")[0] for name in (world.storage / "features").list()}
    assert f"{store}: 60 images" in extraction
    assert "52 of 52 images there, 0 to compute" in training


def test_run(world: World, training: str) -> None:
    assert "registration" in training and "finished in" in training
    (run,) = {name.split("/")[0] for name in (world.storage / "runs").list()}
    for name in ("scores.json", "report.html", "COMPLETE.json"):
        assert (world.storage / "runs" / run / name).exists()
    assert (world.storage / "models" / "demo" / run / "model.safetensors").exists()


@pytest.mark.proof
def test_evaluate(world: World, training: str) -> None:
    assert "CIDEr-D" in world.joined("evaluate", world.config, "--split", "test")


def test_caption(world: World, training: str) -> None:
    """Images on S3 are captioned by an actor that reads the bundle from S3."""
    models = world.storage / "models" / "demo"
    run = next(name.split("/")[0] for name in models.list() if name.endswith("/model.safetensors"))
    (images,) = {name.split("/")[0] for name in (world.storage / "data").list()}
    pattern = f"{world.storage}/data/{images}/images/"
    out = world.cluster.disk / "captions.jsonl"
    world.joined("caption", pattern, "--model", f"{models}/{run}", "--out", str(out))
    text = (world.cluster.folder / "disks" / HEAD / "disk" / "captions.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 60 and all(row["caption"] for row in rows)


@pytest.mark.proof
def test_a_submitted_caption_reads_and_writes_s3(world: World, tmp_path: Path) -> None:
    """Images, model and output are on S3; the machine that submits has none of them."""
    names, bundle = write_images(tmp_path / "images", 10), make_bundle(tmp_path / "bundle")
    place = world.storage / "captioning"
    for path in (*bundle.iterdir(), *map(Path, names)):
        (place / path.parent.name / path.name).upload(path)
    options = ["--model", f"{place}/bundle", "--out", f"{place}/captions"]
    output = world.submitted("caption", f"{place}/images/*.png", *options)
    assert f"captions: {place}/captions (10 images in" in output
    rows = [json.loads(line) for line in (place / "captions/part-000001.jsonl").read_bytes().splitlines()]
    assert len({row["image"] for row in rows}) == len(rows) == 10 and all(row["caption"] for row in rows)


@pytest.mark.proof
def test_tune(world: World) -> None:
    search = world.write_search("search", {"gpus": 1}, [1, 2])
    output = world.submitted("tune", search)
    assert re.search(r"N_E 1\s+finished", output) and re.search(r"N_E 2\s+finished", output)
    (lease,) = [name for name in (world.storage / "searches").list() if "lease" in name]
    assert "/" not in lease, "a push of the search's folder must not replace its lease"
    shutil.rmtree(world.cluster.folder / "disks" / HEAD / "disk" / "cache")  # as on a new machine
    again = world.joined("tune", search)
    assert "continues with 2 of 2 trials done" in again, "the search is in the storage"


@pytest.mark.proof
def test_a_trial_on_two_workers(world: World) -> None:
    """The trial's process runs Ray Train with a worker on each node, and reads their journal from the storage.

    One of the workers' places captions the reported split."""
    search = world.write_search("workers", {"workers": 2, "gpus": 1}, [1], score_split="test")
    output = world.joined("tune", search)
    assert re.search(r"N_E 1\s+finished", output)
    names = (world.storage / "searches").list()
    (name,) = {name.split("/")[0] for name in names if name.startswith("workers-") and "/" in name}
    (record,) = json.loads((world.storage / "searches" / name / "trials.json").read_bytes())
    assert record["state"] == "finished", record["reason"]
    assert record["reports"] and record["scores"]["test CIDEr-D"] >= 0


@pytest.mark.proof
def test_retrain(world: World) -> None:
    assert "decision  first" in world.joined("retrain", world.config)
    assert "the champion stays" in world.submitted("retrain", world.config)
