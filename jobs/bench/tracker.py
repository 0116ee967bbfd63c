"""`raycap bench tracker`: a stage's steps without a tracker, with one that answers, and with one that is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.bench.ray import embedded_settings, random_store

if TYPE_CHECKING:
    from pipeline.config.run import RunConfig
    from pipeline.runs.folder import RunFolder

MODES = ("no tracker", "answers", "stopped")
WARM, STEPS, SETTLING = 8, 28, 4  # steps before the first phase, of a phase, and at its beginning that do not count
START_S = 240.0  # the longest that MLflow's server may take to start


def bench_tracker(rounds: int = 6, threads: int | None = None) -> None:
    """Prints mean seconds a step of the three, and the medians over the rounds of their neighbors' ratios.

    One stage on Ray Train with one worker; the driver's tracker changes every 28 steps, in an order that turns from
    round to round: what the machine does besides is shared by neighbors. Means, not medians: a tracker disturbs now
    and then. `threads` (None: every core) are torch's. MLflow's own server runs on this machine too, so that what it
    costs to answer counts; "stopped" is a port of this machine that nobody listens at.
    """
    from jobs.cluster import start_ray
    from jobs.train import fit
    from pipeline.config.load import parse_config
    from pipeline.runs.prepare import prepare
    from pipeline.training.loop import StageJob

    phases = [mode for turn in range(rounds) for mode in (MODES if turn % 2 == 0 else MODES[::-1])]
    with tempfile.TemporaryDirectory(prefix="raycap-bench-") as scratch, _mlflow_server(Path(scratch)) as port:
        config = parse_config(_settings(Path(scratch), WARM + len(phases) * STEPS, threads or os.cpu_count() or 1))
        folder = prepare(config)
        store = random_store(folder, Path(scratch) / "store")
        start_ray(config, None)
        where = {"answers": f"http://127.0.0.1:{port}", "stopped": f"http://127.0.0.1:{_free_port()}"}
        stop = threading.Event()
        changing = threading.Thread(target=_change_trackers, args=(folder, config, phases, where, stop), daemon=True)
        changing.start()
        try:
            fit(StageJob(folder, ("steps",), store, driver_token=folder.new_driver_token()), config)
        finally:
            stop.set()
            changing.join()
        _print(_means(folder.journal, len(phases)), phases)


def _settings(root: Path, steps: int, threads: int) -> dict[str, Any]:
    settings = embedded_settings(root)
    settings["stages"][0] |= {"epochs": steps / 51}
    settings["workers"] |= {"threads_per_worker": threads}
    return settings


def _change_trackers(
    folder: RunFolder, config: RunConfig, phases: list[str], where: dict[str, str], stop: threading.Event
) -> None:
    """One tracker a phase, of those that a run has, with the pauses that it has in a run."""
    from pipeline.tracking.run_tracker import Tracker

    for number, mode in enumerate(phases):
        if not _reached(folder.journal, WARM + number * STEPS, stop):
            return
        tracking = config.tracking.model_copy(update={"enabled": mode in where, "uri": where.get(mode)})
        tracker = Tracker(folder, config.model_copy(update={"tracking": tracking}))
        tracker.start()
        _reached(folder.journal, WARM + (number + 1) * STEPS, stop)
        tracker.close(None)


def _reached(journal: Path, step: int, stop: threading.Event) -> bool:
    """Waits until a step is in the journal; False when there is no more to wait for."""
    while not journal.is_file() or journal.read_bytes().count(b'"kind": "train"') < step:
        if stop.wait(0.2):
            return False
    return True


def _means(journal: Path, phases: int) -> list[float]:
    """Mean seconds a step of each phase."""
    from pipeline.runs.journal import read_journal

    times = {entry["step"]: entry["time"] for entry in read_journal(journal) if entry["kind"] == "train"}
    means = []
    for number in range(phases):
        first, last = WARM + number * STEPS + SETTLING, WARM + (number + 1) * STEPS
        means.append((times[last] - times[first]) / (last - first))
    return means


def _print(means: list[float], phases: list[str]) -> None:
    found = {mode: [mean for mean, each in zip(means, phases, strict=True) if each == mode] for mode in MODES}
    print(f"{STEPS - SETTLING} steps each, {len(found[MODES[0]])} rounds; median of the mean ms a step")
    for mode, values in found.items():
        spread = ", ".join(f"{1e3 * value:.1f}" for value in values)
        print(f"{mode:<12}{1e3 * statistics.median(values):>9.1f}   ({spread})")
    for mode, other in (("stopped", "answers"), ("stopped", "no tracker"), ("answers", "no tracker")):
        ratios = [one / two for one, two in zip(found[mode], found[other], strict=True)]
        spread = ", ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios)
        asked = "; asked: at most 2" if mode == "stopped" else ""
        print(f"{mode} over {other}: {100 * (statistics.median(ratios) - 1):+.1f} % ({spread}{asked})")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _mlflow_server(folder: Path) -> Iterator[int]:
    """MLflow's own server with its data in a folder; its port."""
    port = _free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"MLflow's server does not start: {(folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with its workers: a session of its own
        process.wait()
