"""`raycap bench tracker`: a stage's steps without a tracker, with one that answers, and with one that is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycap.jobs.bench.measuring import percent_changes, print_times
from raycap.jobs.bench.ray import random_store, synthetic_settings
from raycap.jobs.options import Threads
from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.tracking.run_tracker import Tracker

if TYPE_CHECKING:
    from raycap.pipeline.runs.folder import RunFolder

MODES = ("no tracker", "answers", "stopped")
# numbers of steps: before the first phase, in each phase, and at the beginning of a phase without being measured
WARM_UP, STEPS, SETTLING = 8, 28, 4
STEPS_PER_EPOCH = 51  # of `synthetic_settings`
SERVER_START_S = 240.0


def bench_tracker(
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each of the three cases.")] = 6,
    threads: Threads = None,
) -> None:
    """Time that tracking adds to a training step.

    The three cases are no tracker, a tracker that answers, and a tracker that is stopped (a port without a listener).
    One stage runs on Ray Train with one worker, and its tracker changes every 28 steps in an order that is reversed
    every round, because the load of a shared machine drifts. The mean times per step and the median ratios over the
    rounds are printed; means, because a tracker disturbs single steps. The MLflow server runs on this machine, so that
    the time it takes to answer counts. The default number of threads is that of all cores.

    Example: raycap bench tracker --rounds 8
    """
    from raycap.jobs.train import fit
    from raycap.pipeline.runs.prepare import prepare
    from raycap.pipeline.training.loop import StageJob

    phases = [mode for turn in range(rounds) for mode in (MODES if turn % 2 == 0 else MODES[::-1])]
    with tempfile.TemporaryDirectory(prefix="raycap-bench-") as scratch, _mlflow_server(Path(scratch)) as address:
        settings = synthetic_settings(Path(scratch))
        settings["stages"][0]["epochs"] = (WARM_UP + len(phases) * STEPS) / STEPS_PER_EPOCH
        settings["workers"]["threads_per_worker"] = threads or os.cpu_count() or 1
        folder = prepare(parse_config(settings))
        store = random_store(folder, Path(scratch) / "store")
        start_ray(folder.config, address=None)
        addresses = {"answers": address, "stopped": f"http://127.0.0.1:{_free_port()}"}
        ended = threading.Event()
        changing = threading.Thread(target=_change_trackers, args=(folder, phases, addresses, ended), daemon=True)
        changing.start()
        try:
            fit(StageJob(folder, ("steps",), store, driver_token=folder.new_driver_token()), folder.config)
        finally:
            ended.set()
            changing.join()
        _print_results(folder.journal, phases)


def _change_trackers(folder: RunFolder, phases: list[str], addresses: dict[str, str], ended: threading.Event) -> None:
    """Runs one tracker per phase, as a run's driver does, until the last phase or until `ended` is set.

    `addresses` are the trackers' addresses by mode; a mode without one has no tracker.
    """
    config = folder.config
    for number, mode in enumerate(phases):
        if not _wait_for_step(folder.journal, WARM_UP + number * STEPS, ended):
            return
        tracking = config.tracking.model_copy(update={"enabled": mode in addresses, "uri": addresses.get(mode)})
        tracker = Tracker(folder, config.model_copy(update={"tracking": tracking}))
        tracker.start()
        _wait_for_step(folder.journal, WARM_UP + (number + 1) * STEPS, ended)
        tracker.close(status=None)


def _wait_for_step(journal: Path, step: int, ended: threading.Event) -> bool:
    """Waits until the journal contains a step. Returns False when training has ended before it."""
    while sum(part.read_bytes().count(b'"kind": "train"') for part in journal.glob("*.jsonl")) < step:
        if ended.wait(0.2):
            return False
    return True


def _print_results(journal: Path, phases: list[str]) -> None:
    """Prints the mean time per step of each phase in milliseconds, and the ratios of the modes."""
    ends = {entry["step"]: entry["time"] for entry in read_journal(journal) if entry["kind"] == "train"}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number, mode in enumerate(phases, 1):
        last = WARM_UP + number * STEPS
        times[mode].append((ends[last] - ends[last - STEPS + SETTLING]) / (STEPS - SETTLING))
    print(f"{STEPS - SETTLING} steps each, {len(times[MODES[0]])} rounds; median of the mean ms per step")
    print_times(times)
    for mode, other in (("stopped", "answers"), ("stopped", "no tracker"), ("answers", "no tracker")):
        median, values = percent_changes([one / two for one, two in zip(times[mode], times[other], strict=True)])
        required = "; required: at most 2" if mode == "stopped" else ""
        print(f"{mode} over {other}: {median} ({values}{required})")


def _free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _mlflow_server(folder: Path) -> Iterator[str]:
    """An MLflow server with its data in a folder; yields its address."""
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + SERVER_START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the MLflow server does not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # ends the server's workers as well, because they share its session
        process.wait()
