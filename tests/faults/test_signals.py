"""SIGTERM and Ctrl-C at any moment of a command: its exit code and last line, no processes left, and its continuation.

Long tests (`make proof`); `tests/integration/test_stopping.py` and `tests/unit/runtime/test_stopping.py` are the short
ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from raycap.pipeline.runtime.stopping import STOPPED
from raycap.pipeline.training.loop import STOPPING
from tests.conftest import ROOT, small_config
from tests.support.bundles import make_bundle
from tests.support.ray_cluster import HEAD, OUTSIDE, Cluster, wait_until, worker_cluster
from tests.support.runs import STAGES, assert_same_weights, weights_of_stages, write_config
from tests.support.searches import write_search

TIMEOUT_S = 400
pytestmark = [pytest.mark.proof, pytest.mark.ray]


class Command:
    """A command in a process group of its own, whose output goes to a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.log = folder / "output.txt"
        with self.log.open("wb") as output:
            command = [sys.executable, "-u", "-m", "raycap", *words]
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> None:
        self.wait_until(lambda: re.search(pattern, self.output))

    def wait_until(self, is_reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_reached():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.05)

    def stop(
        self,
        number: signal.Signals,
        send: Callable[[int, int], None] = os.kill,
        agents_s: float = 20,
        *,
        may_meet_ray: bool = False,
    ) -> None:
        """Sends a signal. The command must end as documented, with all processes below it.

        may_meet_ray: also allow the handler of Ray's native code, which gets a SIGTERM while the command connects.
        """
        below = psutil.Process(self.process.pid).children(recursive=True)
        send(self.process.pid, number)
        code = self.process.wait(90)
        lines = self.output.splitlines()
        if may_meet_ray and number == signal.SIGTERM and code == -signal.SIGABRT:
            assert not psutil.wait_procs(below, timeout=120)[1], "orphans"
            return
        assert code == 128 + number, (code, self.output[-4000:])
        assert lines[-1] == STOPPED and lines.count(STOPPED) == 1, self.output[-4000:]
        for trace in ("Traceback", "*** SIG", "Fatal Python error"):
            assert trace not in self.output, self.output[-6000:]
        assert not psutil.wait_procs(below, timeout=agents_s)[1], "orphans"

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def finish(folder: Path, *words: str) -> str:
    """The output of a command that must succeed."""
    command = Command(folder, *words)
    try:
        assert command.process.wait(TIMEOUT_S) == 0, command.output[-4000:]
        return command.output
    finally:
        command.close()


def run_config(folder: Path, **changes: Any) -> Path:
    """Four stages, with few checkpoints of their own."""
    stages = small_config(folder)["stages"]
    for stage in stages:
        stage |= {"epochs": 12, "validate_every_epochs": 5, "checkpoint_every_steps": 10**6}
    features = {"max_images_for_tasks": 0, "rows_per_shard": 4, "batch_size": 2}
    settings: dict[str, Any] = {"stages": stages, "workers__dry_run": False, "workers__num_workers": 2}
    values = small_config(folder / "results", **settings)
    values["features"] = values.get("features", {}) | features
    values["tracking"] = {"enabled": True}
    return write_config(folder / "run.yaml", values | changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder, "run", str(run_config(folder)))
    return folder / "results"


def statuses(folder: Path) -> set[str]:
    client = MlflowClient(f"sqlite:///{folder / 'results' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("raycap")
    return {run.info.status for run in client.search_runs([experiment.experiment_id])}


MOMENTS = {
    "before Ray": r"run       ",
    "extraction": "",  # when the first shard is stored, because nothing is logged then
    "workers start": r"features    \d+ images in",
    "training": r"xe_frozen  4/",
    "end to end": r"xe_finetune  4/",
    "reward": r"scst_frozen  4/",
    "evaluation": r"evaluate  ",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_stopped_at_each_moment(tmp_path: Path, undisturbed: Path, moment: str, number: signal.Signals) -> None:
    config = run_config(tmp_path)
    command = Command(tmp_path, "run", str(config))
    try:
        command.wait_for(MOMENTS[moment])
        if moment == "extraction":
            command.wait_until(lambda: list(tmp_path.glob("results/features/*/manifest/*")))
            assert not re.search(MOMENTS["workers start"], command.output), "the extraction was over before"
        if moment == "workers start":
            assert "xe_frozen  starts" not in command.output, "the workers had started before"
        command.stop(number)
    finally:
        command.close()
    if moment in ("training", "end to end", "reward"):
        assert STOPPING in command.output and "KILLED" in statuses(tmp_path)
    output = finish(tmp_path, "run", str(config))
    if moment in ("training", "end to end", "reward"):
        assert "continues from step" in output
    assert statuses(tmp_path) == {"FINISHED"}
    assert_same_weights(weights_of_stages(tmp_path / "results", STAGES), weights_of_stages(undisturbed, STAGES))


def words_of(name: str, folder: Path) -> tuple[list[str], str]:
    """The words of a command, and the output after which it is stopped."""
    if name == "tune":
        trial = {"epochs": 40, "set": {"stages.xe_frozen.validate_every_epochs": 10}}
        return ["tune", str(write_search(folder, trial=trial))], "epoch"
    if name == "retrain":
        values = yaml.safe_load((ROOT / "raycap/configs/retrain_demo.yaml").read_text()) | {
            "storage": str(folder / "results")
        }
        return ["retrain", str(write_config(folder / "run.yaml", values))], r"xe_finetune  \d"
    config = run_config(folder)
    if name == "extract":
        return ["extract", str(config)], "data  "
    finish(folder, "extract", str(config))
    if name == "evaluate":
        model = str(make_bundle(folder / "bundle"))
        return ["evaluate", str(config), "--model", model], "."
    images = [str(path) for path in sorted(folder.glob("results/data/*/images/*.png"))] * 40
    return ["caption", *images, "--model", str(make_bundle(folder / "bundle"))], r"\.png"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["tune", "retrain", "extract", "evaluate", "caption"])
def test_each_command_stops_and_continues(tmp_path: Path, name: str, number: signal.Signals) -> None:
    words, pattern = words_of(name, tmp_path)
    command = Command(tmp_path, *words)
    try:
        command.wait_for(pattern)
        command.stop(number)
    finally:
        command.close()
    finish(tmp_path, *words)


@pytest.mark.parametrize("how", ["job stop", "SIGTERM"])
def test_a_run_on_a_cluster_saves_before_it_ends(s3: str, how: str) -> None:
    """Two workers on nodes without a common disk; the storage is on S3; stopped as a job, and by a signal."""
    values = small_config({"uri": f"s3://data/{how.replace(' ', '-')}", "endpoint_url": s3}, workers__dry_run=False)
    values["workers"]["num_workers"] = 2
    values["stages"] = [values["stages"][1] | {"checkpoint_every_steps": 10**6}]
    values["stages"][0] |= {"epochs": 100, "validate_every_epochs": 50}
    with worker_cluster() as cluster:
        cluster.write("run.yaml", values)
        program, log = start(cluster, how)
        wait_until(log, lambda text: "xe_finetune  10/" in text)
        if how == "SIGTERM":
            (driver,) = [each for each in below(program) if "raycap" in each.cmdline()]
            driver.send_signal(signal.SIGTERM)
            assert program.wait(90) == 143 and log.read_text().rstrip().endswith(STOPPED), log.read_text()[-3000:]
        else:
            job = re.findall(r"job       (\S+):", log.read_text())[0]
            stop = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", job, "--address", cluster.dashboard]
            assert cluster.start(OUTSIDE, stop, cluster.folder / "stop.txt").wait(TIMEOUT_S) == 0
            assert program.wait(90) == 1 and STOPPED in log.read_text(), log.read_text()[-3000:]
        assert STOPPING in log.read_text()
        last = int(re.findall(r"xe_finetune  (\d+)/", log.read_text())[-1])
        again, log = start(cluster, how)
        assert again.wait(TIMEOUT_S) == 0, log.read_text()[-3000:]
        (resumed,) = map(int, re.findall(r"xe_finetune  continues from step (\d+)", log.read_text()))
        assert resumed == last


def start(cluster: Cluster, how: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The run as a program on the head, or submitted as a job."""
    log = cluster.folder / f"run-{len(cluster.programs)}.txt"
    raycap, config = [sys.executable, "-u", "-m", "raycap"], str(cluster.folder / "run.yaml")
    if how == "SIGTERM":
        return cluster.start(HEAD, [*raycap, "run", config, "--address", cluster.address], log), log
    return cluster.start(OUTSIDE, [*raycap, "submit", "run", config, "--address", cluster.dashboard], log), log


def below(program: subprocess.Popen[bytes]) -> list[psutil.Process]:
    process = psutil.Process(program.pid)
    return [process, *process.children(recursive=True)]
