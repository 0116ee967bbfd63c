"""Training killed with kill -9 at random moments, ten times over: the final weights are those of an undisturbed run.

A long proof (`make proof`); `tests/integration/test_run.py` holds a shrunken one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import small_config
from tests.support.processes import finished, start, weights, write

VICTIMS = ("worker", "driver", "both", "worker", "driver", "both", "worker", "driver", "both", "worker")


def configuration(folder: Path) -> Path:
    """Both objectives, frozen and end to end, long enough to be hit in the middle."""
    stages = small_config(folder)["stages"]
    for stage in stages:
        stage |= {"epochs": 10, "validate_every_epochs": 4, "checkpoint_every_steps": 5}
    settings = {"stages": stages, "workers__num_workers": 2, "workers__dry_run": False}
    return write(folder.with_suffix(".yaml"), small_config(folder, **settings))


def workers_of(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """The Ray Train workers below a driver that this test started."""
    try:
        below = psutil.Process(driver.pid).children(recursive=True)
        return [process for process in below if "RayTrainWorker" in process.name() + " ".join(process.cmdline())]
    except psutil.Error:
        return []


@pytest.mark.proof
@pytest.mark.ray
@pytest.mark.parametrize(("repetition", "victim"), list(enumerate(VICTIMS)))
def test_killed_at_random_the_weights_are_bit_identical(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, repetition: int, victim: str
) -> None:
    names = [stage["name"] for stage in small_config(tmp_path)["stages"]]
    whole = tmp_path_factory.getbasetemp() / "undisturbed"
    if not whole.exists():
        process = start(configuration(whole))
        output = finished(process)
        assert process.returncode == 0, output
    generator = random.Random(repetition)
    folder = tmp_path / "killed"
    config, kills = configuration(folder), 0
    process = start(config)
    deadline = time.monotonic() + 300
    while kills < 2 and process.poll() is None and time.monotonic() < deadline:
        found = workers_of(process)
        if not found or not list(folder.glob("runs/*/stages/*/step-*")):
            time.sleep(0.1)
            continue
        time.sleep(generator.uniform(0, 4))
        if victim in ("worker", "both"):
            for worker in found[:1]:
                if worker.is_running():
                    worker.kill()
        if victim in ("driver", "both") and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            process = start(config)
        kills += 1
        time.sleep(1)
    output = finished(process)
    assert process.returncode == 0, output
    assert kills, "nothing was killed: the run was over before"
    ours, theirs = weights(folder, names), weights(whole, names)
    assert ours.keys() == theirs.keys() and ours
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), f"{victim}: {key}"
