"""Searches, retrainings and a served model beside each other on one S3 storage, for a long time and with faults.

A seeded generator kills drivers and workers, lets S3 refuse requests, and fills the disk. All the while S3 answers
late, refuses or cuts a small share of the requests. At the end nothing that was acknowledged is lost, no process is
left, and the served model needs no more memory, handles or threads than before.

RAYCAP_SOAK_MINUTES is the length (60), RAYCAP_SOAK_SEED the generator's seed (0), and RAYCAP_SOAK_OUT the folder of
soak.csv, events.csv and soak.png (the test's temporary folder).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import boto3
import psutil
import pytest
import yaml

from raycap.pipeline.retrain.champion import FileRecord
from raycap.pipeline.storage.path import StoragePath
from tests.conftest import small_config
from tests.support.bundles import make_bundle
from tests.support.champion_check import decisions, errors_of
from tests.support.retrain_world import COLORS, World
from tests.support.s3_server import CREDENTIALS, plan_outage, s3_server
from tests.support.searches import LR, N_E
from tests.support.soak import MIB, Samples, SmallDisk, folder_bytes, marked_processes, start

MINUTES = float(os.environ.get("RAYCAP_SOAK_MINUTES", 60))
SEED = int(os.environ.get("RAYCAP_SOAK_SEED", 0))
SHARE = 0.01  # of S3's answers that are late, refused or cut
SAMPLE_S = 3.0
CACHE_MIB = 400
PATIENCE_S = 900.0  # for what must end by itself after the last fault
DYING_LINES = ("step 1/5", "step 2/5", "step 3/5", "step 4/5", "step 5/5")
pytestmark = [pytest.mark.proof, pytest.mark.ray]


class Soak:
    """The storage, the processes of the present, and what each of them has acknowledged."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.random = folder, url, Random(SEED)
        self.mark, self.over = uuid.uuid4().hex, threading.Event()
        self.disk = SmallDisk(folder / "disk", CACHE_MIB)
        for name in ("tmp", "logs"):
            (folder / name).mkdir()
        temporary = str(folder / "tmp")
        folders = {"RAYCAP_CACHE": str(self.disk.folder), "TMPDIR": temporary, "RAY_TMPDIR": temporary}
        self.variables = CREDENTIALS | folders | {"RAYCAP_SOAK_MARK": self.mark}
        self.world = World(folder, url, lease_seconds=4)
        self.world.begin()
        self.search: subprocess.Popen[Any] | None = None
        self.num_searches, self.num_starts = 0, 0
        self.ended_trials: dict[str, dict[str, Any]] = {}  # by the name of the trial's file
        self.decided = set[FileRecord]()  # the last decision after each call that has ended well
        self.count = folder / "count"
        images = f"{self.world.data}/images"
        bundle = str(make_bundle(folder / "bundle"))
        words = ["tests.support.soak", "serve", bundle, images, url, str(self.count)]
        self.server = psutil.Process(start(words, folder / "logs/server.txt", self.variables).pid)
        client = boto3.client("s3", endpoint_url=url)
        self.samples = Samples(
            {
                "server: memory (MiB)": lambda: self.server.memory_full_info().pss / MIB,
                "server: handles": lambda: self.server.num_fds(),
                "server: threads": lambda: self.server.num_threads(),
                "search: memory of all processes (MiB)": self._search_mib,
                "caches (MiB)": lambda: folder_bytes(self.disk.folder) / MIB,
                "temporary files (MiB)": lambda: folder_bytes(folder / "tmp") / MIB,
                "storage (MiB)": lambda: _bucket_bytes(client) / MIB,
            }
        )

    def _search_mib(self) -> float:
        assert self.search is not None
        driver = psutil.Process(self.search.pid)
        return sum(each.memory_info().rss for each in (driver, *driver.children(recursive=True))) / MIB

    def sample(self) -> None:
        """Takes samples until the end."""
        while not self.over.wait(SAMPLE_S):
            self.samples.take()

    def searches(self) -> None:
        """Searches, each under a new name. A search that ended early continues."""
        while not self.over.is_set():
            name = f"soak{self.num_searches}"
            self.num_searches += 1
            path = self._write_search(name)
            deadline = time.monotonic() + PATIENCE_S
            while (code := self._run_search(path)) != 0:
                if not self.over.is_set():
                    deadline = time.monotonic() + PATIENCE_S
                assert time.monotonic() < deadline, f"{name} does not end any more (exit code {code})"
                time.sleep(2)

    def _write_search(self, name: str) -> Path:
        """A grid of four short trials, which train on the synthetic data set."""
        values = small_config({"uri": f"{self.world.storage}/searches", "endpoint_url": self.url})
        (self.folder / "base.yaml").write_text(yaml.safe_dump(values))
        search = {"name": name, "base": "base.yaml", "backbone": {"weights": "base"}, "algorithm": "grid"}
        search |= {"space": {N_E: [2, 4], LR: [1e-3, 2e-3]}, "trial": {"stages": ["xe_frozen"], "epochs": 2}}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(search))
        return path

    def _run_search(self, path: Path) -> int:
        self.num_starts += 1
        log = self.folder / f"logs/{path.stem}.txt"
        self.search = start(["tests.support.soak", "tune", str(path)], log, self.variables)
        code = self.search.wait()
        self.samples.note(f"{path.stem} ended with exit code {code}")
        self.acknowledge_trials()
        return code

    def acknowledge_trials(self) -> None:
        """Remembers the trials that have ended; what was remembered before is unchanged."""
        found = {}
        storage = StoragePath(f"{self.world.storage}/searches/searches", self.world.options)
        for name in storage.list():
            if "/trials/" in name and name.endswith(".json") and "/." not in name:
                record = json.loads((storage / name).read_bytes())
                if record["state"] != "running":
                    found[name] = record
        lost = {name for name, record in self.ended_trials.items() if found.get(name) != record}
        assert not lost, f"ended trials are gone or have changed: {sorted(lost)}"
        self.ended_trials = found

    def retrainings(self) -> None:
        """A retraining every minute on a growing data set. Some are killed at one of their steps."""
        random, pause = Random(SEED + 1), min(60.0, MINUTES * 6)
        while not self.over.wait(pause):
            colors = range(random.randrange(3, len(COLORS) + 1))
            self.world.add("train", random.randrange(1, 6), colors, wrong=random.random() < 0.2)
            self.retrain(["--die", random.choice(DYING_LINES)] if random.random() < 0.4 else [])

    def retrain(self, options: list[str]) -> int:
        """One call. If it has ended well, its decision counts as acknowledged. The champion is intact in any case."""
        words = ["tests.support.retrain_world", str(self.world.path()), *options]
        process = start(words, self.folder / "logs/retrain.txt", self.variables)
        code = process.wait()
        store = self.world.store
        assert errors_of(store) == []
        state = store.read()
        self.samples.note(f"retraining ended with exit code {code}; decision {state.number}")
        if code == 0 and state.decision is not None:
            self.decided.add(state.decision)
        return code

    def faults(self) -> None:
        """Faults in random order and at random times."""
        kinds: dict[str, Callable[[], None]] = {
            "kill the search": self._kill_search,
            "kill a worker": self._kill_worker,
            "S3 refuses": lambda: plan_outage(self.url, self.random.uniform(2, 15)),
        }
        if self.disk.is_mounted:
            kinds["the disk is full"] = self._fill_disk
        while not self.over.wait(self.random.uniform(6, 24)):
            name = self.random.choice(list(kinds))
            self.samples.note(name)
            kinds[name]()

    def _kill_search(self) -> None:
        if self.search is not None:
            with suppress(ProcessLookupError):
                self.search.kill()

    def _kill_worker(self) -> None:
        with suppress(psutil.Error):
            below = psutil.Process(self.search.pid).children(recursive=True) if self.search else []
            workers = [each for each in below if "ray::" in " ".join(each.cmdline())]
            if workers:
                self.random.choice(workers).kill()

    def _fill_disk(self) -> None:
        self.disk.fill()
        self.over.wait(self.random.uniform(3, 10))
        self.disk.free()

    def close(self) -> list[str]:
        """Ends the server and waits for all other processes. Returns the command lines of those that are left."""
        self.over.set()
        with suppress(psutil.NoSuchProcess):  # an earlier call has ended it
            self.server.kill()
        deadline = time.monotonic() + 120
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(1)
        names = [" ".join(each.cmdline())[:200] for each in left]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        self.disk.close()
        return names


def _bucket_bytes(client: Any) -> int:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="data")
    return sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))


@pytest.fixture
def soak() -> Iterator[Soak]:
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short, because paths of sockets are limited
    with s3_server(SHARE) as url:
        soak = Soak(folder, url)
        try:
            yield soak
        finally:
            soak.close()
            shutil.rmtree(folder, ignore_errors=True)


def test_nothing_is_lost_and_nothing_grows(soak: Soak, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, world = soak.samples, soak.world
    with capsys.disabled(), ThreadPoolExecutor(4) as pool:
        actors = [pool.submit(act) for act in (soak.sample, soak.searches, soak.retrainings, soak.faults)]
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end and not any(actor.done() for actor in actors):
            time.sleep(1)
        soak.over.set()
        for actor in actors:  # a search that was killed continues to its end, without faults
            actor.result()
        time.sleep(5)  # the lease of a killed retraining
        assert soak.retrain([]) == 0
        left = soak.close()
        samples.write(Path(os.environ.get("RAYCAP_SOAK_OUT", tmp_path)))
        trials = (
            f"{soak.num_searches} searches with {len(soak.ended_trials)} ended trials in {soak.num_starts} processes"
        )
        print(f"{trials}, {world.store.read().number} decisions, {soak.count.read_text()} requests to the server")

    assert not left, f"processes are left: {left}"
    assert errors_of(world.store) == []
    state = world.store.read()
    history = [state.decision, *(decision.previous for decision in decisions(world.store, state))]
    assert soak.decided and all(record in history for record in soak.decided), "an acknowledged decision is lost"
    soak.acknowledge_trials()
    assert len(soak.ended_trials) >= 4 * (soak.num_searches - 1), "a search has ended without all its trials"
    for name, slack in (("server: memory (MiB)", 16.0), ("server: handles", 4.0), ("server: threads", 3.0)):
        growth, median = samples.growth(name)
        assert growth <= slack + 0.05 * median, f"{name} grows by {growth:.1f} of {median:.1f} in the second half"
    most = max(row["temporary files (MiB)"] for row in samples.rows)
    assert most < 100 + 20 * soak.num_starts, f"{most:.0f} MiB of temporary files"
