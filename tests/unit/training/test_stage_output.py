"""Rank 0 of a run on S3 logs without waiting for a request, and still stops when another driver takes over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError
from raycap.pipeline.training import stage_output
from raycap.pipeline.training.stage_output import AbandonedError, StageOutput
from tests.support.runs import empty_run


def opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass(frozen=True)
class Home(StoragePath):
    """A folder in place of S3. Requests wait while `gate` is closed, and fail while `fails` is set."""

    gate: threading.Event = field(default_factory=opened)
    fails: threading.Event = field(default_factory=threading.Event)

    def __truediv__(self, name: str) -> Home:
        return Home(f"{self.uri}/{name}", self.options, self.gate, self.fails)

    def _request(self) -> None:
        self.gate.wait()
        if self.fails.is_set():
            raise StorageError("503")

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        self._request()
        return super().read_bytes(max_bytes)

    def write_bytes(self, data: bytes | memoryview) -> str:
        self._request()
        return super().write_bytes(data)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr(stage_output, "JOURNAL_EVERY_S", 0.0)
    home = Home(str(tmp_path / "home"))
    yield home
    home.gate.set()  # a thread that waited for ever would keep the process


@pytest.fixture
def output(home: Home, tmp_path: Path) -> StageOutput:
    folder = empty_run(tmp_path / "run", home)
    output = StageOutput(folder, "a", writes=True, driver_token=folder.new_token("driver_token"))
    output.open_journal(0)
    return output


def uploaded(home: Home) -> list[int]:
    return [entry["step"] for entry in read_journal(Path(home.uri) / JOURNAL)]


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_logging_waits_for_no_request(home: Home, output: StageOutput) -> None:
    home.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        try:
            for step in range(1, 21):
                pool.submit(output.log, "train", step, {}).result(timeout=60)
        finally:
            home.gate.set()
    wait_until(lambda: uploaded(home) == list(range(1, 21)))


def test_a_failed_upload_is_repeated_later(home: Home, output: StageOutput) -> None:
    home.fails.set()
    for step in (1, 2, 3):
        output.log("train", step, {})
        time.sleep(0.05)  # let the upload fail
    assert uploaded(home) == []
    home.fails.clear()

    def log_and_look() -> bool:
        output.log("train", 4, {})
        return uploaded(home)[:4] == [1, 2, 3, 4]

    wait_until(log_and_look)


@pytest.mark.parametrize(("token", "error"), [("driver_token", AbandonedError), ("worker_group_token", RuntimeError)])
def test_a_worker_that_is_replaced_uploads_nothing_and_stops(
    token: str, error: type[Exception], home: Home, tmp_path: Path
) -> None:
    folder = empty_run(tmp_path / "run", home)
    output = StageOutput(folder, "a", True, folder.new_token("driver_token"), folder.new_token("worker_group_token"))
    output.open_journal(0)
    output.log("train", 1, {})
    wait_until(lambda: uploaded(home) == [1])
    folder.new_token(token)

    def log_forever() -> None:
        for step in range(2, 6000):
            output.log("train", step, {})
            time.sleep(0.01)

    with pytest.raises(error, match="stops"):
        log_forever()
    assert uploaded(home) == [1]
