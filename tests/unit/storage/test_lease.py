"""Conditional writes and the lease: one holder at a time, growing tokens, late writers fenced out."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.lease import Lease, LeaseRecord, LostLeaseError, take_lease
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import ConflictError, StorageOptions
from tests.support.s3_server import s3_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server(share=0.1) as address:
        yield address


@pytest.fixture(params=["disk", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """A folder on disk, or on an S3 server where a tenth of the requests fails."""
    if request.param == "disk":
        return storage_path(tmp_path)
    options = StorageOptions(request.getfixturevalue("url"))
    return StoragePath(f"s3://data/{tmp_path.name}", options)


def taken(where: StoragePath, seconds: float = 30, **options: int) -> Lease:
    lease = take_lease(where, seconds, **options)
    assert isinstance(lease, Lease), lease
    return lease


def test_a_conditional_write_is_refused_after_another_write(folder: StoragePath) -> None:
    file = folder / "file"
    with pytest.raises(FileNotFoundError):
        file.read_tagged()
    with pytest.raises(ConflictError):
        file.write_if(b"not there yet", "0" * 32)
    first = file.write_if(b"one", None)
    assert file.read_tagged() == (b"one", first)
    with pytest.raises(ConflictError):
        file.write_if(b"another one", None)
    second = file.write_if(b"two", first)
    with pytest.raises(ConflictError):
        file.write_if(b"three", first)
    assert file.read_tagged() == (b"two", second) and first != second


def test_a_missing_bucket_is_not_a_conflict(url: str) -> None:
    """If it were reported as a conflict, `take_lease` would try again without end."""
    where = StoragePath("s3://absent/lease.json", StorageOptions(url))
    for tag in (None, "0" * 32):
        with pytest.raises(FileNotFoundError if tag is None else ConflictError):
            where.write_if(b"one", tag)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        take_lease(where, 30)


def test_concurrent_increments_are_not_lost(folder: StoragePath) -> None:
    """Eight threads increment a number by compare and swap, also where answers are lost."""
    file = folder / "number"
    file.write_if(b"0", None)

    def add(worker: int) -> None:
        for turn in range(6):
            while True:
                data, tag = file.read_tagged()
                try:
                    file.write_if(f"{int(data.split()[0]) + 1} {worker} {turn}".encode(), tag)
                    break
                except ConflictError:
                    continue

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert file.read_bytes().split()[0] == b"48"


def test_one_of_many_takes_the_lease_and_the_others_learn_its_holder(folder: StoragePath) -> None:
    where, gate, others = folder / "lease.json", threading.Barrier(8), threading.Semaphore(0)

    def ask(_: int) -> Lease | LeaseRecord:
        gate.wait()
        answer = take_lease(where, 6)
        if isinstance(answer, Lease):
            with answer:
                for _ in range(7):
                    assert others.acquire(timeout=60)
        else:
            others.release()
        return answer

    began = time.time()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    leases = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(leases) == 1 and leases[0].token == 1
    holders = [answer for answer in answers if isinstance(answer, LeaseRecord)]
    assert {holder.holder for holder in holders} == {json.loads(where.read_bytes())["holder"]}
    assert all(began < holder.until < time.time() + 7 and " UTC" in str(holder) for holder in holders)


def test_tokens_grow_however_a_lease_ends(folder: StoragePath) -> None:
    where = folder / "lease.json"
    with taken(where) as lease:
        assert lease.token == 1
    with taken(where) as lease:  # returned, not removed
        assert lease.token == 2
    assert taken(where, 0.01).token == 3
    time.sleep(0.05)
    assert taken(where, 0.01).token == 4  # the holder was killed, and its lease has expired
    where.delete()
    assert taken(where, above=9).token == 10


def test_a_lease_is_renewed_in_the_background(folder: StoragePath) -> None:
    where = folder / "lease.json"
    with taken(where, 6.0) as lease:
        ends: set[float] = set()
        while len(ends) < 2:
            held = take_lease(where, 6.0)
            assert isinstance(held, LeaseRecord)
            ends.add(held.until)
        lease.check()
    assert isinstance(take_lease(where, 6.0), Lease)


def test_the_lease_of_a_killed_holder_is_taken_when_it_expires(
    folder: StoragePath, caplog: pytest.LogCaptureFixture
) -> None:
    """It expires by the clock of the waiting process, even if the clock of the killed holder is years ahead."""
    caplog.set_level("INFO")
    where = folder / "lease.json"
    first = taken(where, 4)
    assert taken(where, 4).token == 2 and first.token == 1
    assert caplog.text.count("waiting 2 s to see whether it is renewed") == 2
    record = {"token": 5, "nonce": "n", "holder": "h", "until": 2.0**35, "seconds": 0.3}
    where.write_bytes(json.dumps(record).encode())
    assert taken(where, 0.3).token == 6


def test_a_process_with_a_shorter_lease_waits_for_the_renewal_of_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the holder is so far behind that its lease seems to have expired. It renews the lease every 10 s."""
    where, slept = storage_path(tmp_path / "lease.json"), 0.0
    record = {"token": 5, "nonce": "n", "holder": "h", "until": 1.0, "seconds": 30}
    where.write_bytes(json.dumps(record).encode())

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        where.write_bytes(json.dumps(record | {"until": 1.0 + 10 * (slept // 10)}).encode())

    monkeypatch.setattr("raycap.pipeline.storage.lease.time.sleep", sleep)
    assert isinstance(take_lease(where, 3), LeaseRecord)


def test_a_late_holder_finds_that_the_lease_has_passed_on(folder: StoragePath) -> None:
    where = folder / "lease.json"
    early = taken(where, 0.01)
    time.sleep(0.05)
    late = taken(where)
    with pytest.raises(LostLeaseError, match="token 1 is too late"):
        early.check()
    late.check()
    with pytest.raises(LostLeaseError), early:
        early.check()
    late.check()  # the early holder has not returned it


def test_a_lease_can_be_taken_by_force(folder: StoragePath) -> None:
    where = folder / "lease.json"
    first = taken(where)
    second = take_lease(where, 30, by_force=True)
    assert isinstance(second, Lease) and second.token == 2
    with pytest.raises(LostLeaseError):
        first.check()


@pytest.mark.parametrize("change", [{"token": -1}, {"until": math.inf}, {"seconds": 1e308}, {"holder": None}])
def test_a_file_that_is_not_a_lease_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "lease.json"
    record = {"token": 1, "nonce": "n", "holder": "h", "until": 0, "seconds": 1}
    for text in (json.dumps(record | change), "[" * 100_000):
        file.write_text(text)
        with pytest.raises(UserError, match="is not a lease"):
            take_lease(storage_path(file), 30)
