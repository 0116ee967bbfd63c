"""Extraction that is killed at random moments and run again: its store is that of an undisturbed extraction."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from raycap.jobs.cli import main
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT, small_config
from tests.support.features import gather
from tests.support.logs import on_message

NUM_IMAGES, ROWS = 96, 4


def make_images(folder: Path) -> None:
    """Pictures of noise, all different, in Karpathy layout."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    entries = []
    for number in range(NUM_IMAGES):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / "images" / f"{number}.png")
        split = ("val", "test")[number] if number < 2 else "train"
        sentences = [{"raw": "some noise"}]
        entries.append({"filename": f"images/{number}.png", "imgid": number, "split": split, "sentences": sentences})
    (folder / "images" / "3.png").write_bytes(b"no picture")
    (folder / "dataset.json").write_text(json.dumps({"images": entries}))


class Extraction:
    """`raycap extract` as a process of its own, and its store."""

    def __init__(self, folder: Path, root: str, storage: dict[str, Any]) -> None:
        config = small_config(folder, data={"root": root, "train_splits": ["train"], "min_count": 1})
        config["data"]["max_bad_fraction"] = 0.1
        config["storage"] = storage
        config["features"] = {
            "rows_per_shard": ROWS,
            "batch_size": 2,
            "max_images_for_tasks": 0,
            "compute_dtype": "float32",
        }
        folder.mkdir()
        self.config, self.log = folder / "run.yaml", folder / "log"
        self.config.write_text(yaml.safe_dump(config))
        self.storage = storage_path(storage["uri"], StorageOptions(storage.get("endpoint_url")))
        self.features = self.storage / "features"

    def start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-u", "-m", "raycap", "extract", str(self.config), "--verify"]
        with self.log.open("w") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, text=True)

    def finish(self) -> str:
        """Runs the command to its end, in this process. Returns what it logs."""
        lines: list[str] = []
        with on_message(lines.append):
            assert main(["extract", str(self.config), "--verify"]) == 0
        return "\n".join(lines)

    def manifests(self) -> list[str]:
        return [name for name in self.features.list() if "/manifest/" in name and name.endswith(".parquet")]

    def store(self) -> FeatureStore:
        (folder,) = {name.split("/")[0] for name in self.features.list()}
        return FeatureStore(self.features / folder, cache=self.log.with_name("cache"))


def content(store: FeatureStore) -> dict[str, bytes]:
    keys = store.keys.to_pylist()
    return dict(zip(keys, (row.tobytes() for row in gather(store, keys)), strict=True))


def kill(extraction: Extraction, process: subprocess.Popen[str], what: str, dice: random.Random) -> None:
    """Waits for a random number of shards, and then kills an actor, the driver, or both with kill -9."""
    wanted, begin = dice.randrange(0, NUM_IMAGES // ROWS - 2), time.monotonic()
    while len(extraction.manifests()) < wanted and process.poll() is None and time.monotonic() - begin < 120:
        time.sleep(0.01)
    time.sleep(dice.uniform(0, 0.2))
    victims = []
    if what in ("actor", "both"):
        victims = actors(process)
        while not victims and process.poll() is None and time.monotonic() - begin < 120:
            time.sleep(0.05)
            victims = actors(process)
    for victim in victims:
        victim.kill()
    if what in ("driver", "both"):
        process.kill()
    process.wait(timeout=300)


def actors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The extraction's own actors, which are processes below its driver."""
    found = []
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if "ShardWriter" in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
    except psutil.Error:
        return []
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills") / "set"
    make_images(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(images: Path, ray_session: None) -> dict[str, bytes]:
    folder = images.parent / "undisturbed"
    extraction = Extraction(folder, str(images), {"uri": str(folder / "store")})
    extraction.finish()
    return content(extraction.store())


def check_kill(extraction: Extraction, what: str, seed: int, undisturbed: dict[str, bytes], images: Path) -> None:
    (weights,) = (images.parent / "undisturbed" / "store" / "backbones").glob("*.safetensors")
    # so that the weights are not drawn again
    (extraction.storage / f"backbones/{weights.name}").write_bytes(weights.read_bytes())
    kill(extraction, extraction.start(), what, random.Random(seed))
    text = extraction.finish()
    store = extraction.store()
    assert content(store) == undisturbed and len(undisturbed) == NUM_IMAGES - 1
    there, missing = map(int, re.findall(r"(\d+) of \d+ images there, (\d+) to compute", text)[0])
    assert there + missing == NUM_IMAGES
    assert len(store.keys) - len(store) <= ROWS, "more was computed twice than one shard that was in flight"
    assert "0 images are missing" in text


@pytest.mark.ray
def test_driver_and_actor_killed_once(images: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    extraction = Extraction(tmp_path / "x", str(images), {"uri": str(tmp_path / "x" / "store")})
    check_kill(extraction, "both", 3, undisturbed, images)


@pytest.mark.proof
@pytest.mark.parametrize("what", ["actor", "driver", "both"])
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random(what: str, seed: int, images: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    extraction = Extraction(tmp_path / "x", str(images), {"uri": str(tmp_path / "x" / "store")})
    check_kill(extraction, what, seed, undisturbed, images)
