"""What a waiting stage reports. A stage without progress is reported and then ended."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from raycap.pipeline.cluster import stalls
from raycap.pipeline.cluster.stalls import SIGNAL, ClusterStatus, StallWatch
from raycap.pipeline.config.sections import WorkersSection
from raycap.pipeline.errors import JobFailedError

WORKERS = WorkersSection(max_stall_minutes=10)
PENDING = ClusterStatus(nodes=[{"CPU": 1}], pending=[{"CPU": 8}], num_starting=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The watch's clock, which only the test moves; the watch polls it very often."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stalls, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(stalls, "POLL_S", 0.01)
    monkeypatch.setattr(stalls, "cluster_status", lambda: PENDING)
    return clock


def wait_for_message(log_lines: list[str], text: str) -> None:
    for _ in range(3000):
        if any(text in line for line in log_lines):
            return
        threading.Event().wait(0.01)
    raise AssertionError(log_lines)


def test_a_stall_is_reported_repeatedly_and_ended(clock: SimpleNamespace, log_lines: list[str]) -> None:
    handler = signal.getsignal(SIGNAL)
    with pytest.raises(JobFailedError) as raised, StallWatch("training", WORKERS):
        for now in (121.0, 152.0):
            clock.now = now
            wait_for_message(log_lines, f"training has finished nothing for {now:.0f} s")
        clock.now = 601.0
        threading.Event().wait(60)
    assert str(raised.value).startswith(
        "training finished nothing within 10 min (workers.max_stall_minutes of a configuration); nodes: 1 x (1 CPU); "
        "pending: 1 x (8 CPU); the same command"
    )
    assert log_lines[0].endswith("nodes: 1 x (1 CPU); pending: 1 x (8 CPU)") and len(log_lines) == 2
    assert signal.getsignal(SIGNAL) == handler


def test_progress_postpones_report_and_end(
    clock: SimpleNamespace, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[float] = []

    def status() -> ClusterStatus:
        polls.append(clock.now)
        raise RuntimeError("no answer")

    monkeypatch.setattr(stalls, "cluster_status", status)
    with StallWatch("training", WORKERS) as progressed:
        for _ in range(3):
            clock.now += 400
            wait_for_message(log_lines, "finished nothing for 400 s; the cluster does not report its state (no answer)")
            progressed()
            log_lines.clear()
    assert polls == [400, 800, 1200], "one report after each of three quiet times of 400 s, and no end after 600 s"


def status(*nodes: dict[str, float], **changes: object) -> ClusterStatus:
    values = {"pending": [], "num_starting": 0}
    return ClusterStatus(nodes=nodes, **values | changes)  # type: ignore[arg-type]


def test_the_text_counts_nodes_and_requests() -> None:
    nodes = [{"CPU": 1, "memory": 1e9}, {"CPU": 1, "memory": 2e9}, {"memory": 1e9}]
    text = status(*nodes, pending=[{"CPU": 8, "GPU": 1}] * 2, num_starting=3).text
    assert text == "nodes: 2 x (1 CPU); 3 more starting; pending: 2 x (8 CPU + 1 GPU)"
    assert status({"memory": 1e9}).text == "no node has CPUs"
