"""Retrainings that are killed, sleep or meet another one: the lease lets one decide, and what it decides is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.retrain import retrain as retrain_module
from pipeline.storage.lease import Lease
from pipeline.storage.path import StoragePath
from tests.conftest import ROOT
from tests.integration.conftest import ON_DISK_AND_S3
from tests.support.retrain_world import Colors, World, first, sound

STEPS = ("step 1/5", "step 2/5", "step 3/5", "step 4/5", "step 5/5")


@ON_DISK_AND_S3
def test_two_at_once_are_one(world: World) -> None:
    first(world)
    world.add("train", 20, range(3, 8))
    said: list[tuple[int, str]] = []
    inside, over = threading.Event(), threading.Event()

    class Slow(Colors):
        def train(self, config: Any) -> Any:
            inside.set()
            assert over.wait(60)
            return super().train(config)

    one = threading.Thread(target=lambda: said.append(world.call(Slow())))
    one.start()
    assert inside.wait(60)
    work = Colors()
    code, text = world.call(work)
    over.set()
    one.join()
    assert code == 0 and f"held by process {os.getpid()} on " in text and "nothing to do here" in text
    assert not work.trained and "decision  promoted" in said[0][1]
    sound(world, 2)


class Killed(BaseException):
    """In place of kill -9: nothing is given back."""


def writes_of(monkeypatch: pytest.MonkeyPatch, at: int, happen: Any) -> list[str]:
    """Counts this process's writes to retrain/ and to champions; before number `at` something happens."""
    done: list[str] = []
    active = threading.local()

    def counted(original: Any) -> Any:
        def write(self: StoragePath, *arguments: Any) -> Any:
            counts = "/retrain/" in self.uri or "/champion-t" in self.uri
            if counts and threading.current_thread().name != "lease" and not getattr(active, "off", False):
                done.append(self.uri)
                if len(done) == at:
                    active.off = True
                    try:
                        happen()
                    finally:
                        active.off = False
            return original(self, *arguments)

        return write

    for name in ("write_bytes", "write_if", "upload", "delete"):
        monkeypatch.setattr(StoragePath, name, counted(getattr(StoragePath, name)))
    return done


# How many writes a retraining has at least: lease, token, (a bundle's two files), snapshot, record, page, pointer. The
# lease is renewed now and then.
WRITES = {"promoted": 8, "kept": 6}


@pytest.fixture(params=[("disk", "promoted"), ("disk", "kept"), ("s3", "promoted")], ids="-".join)
def ahead(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Iterator[World]]:
    """The verdict to come, and a world with a champion and new data, as often as it is asked for."""
    where, verdict = request.param
    monkeypatch.setattr(retrain_module, "decision_page", lambda *arguments: "a page")  # it takes longer than the rest
    world = World(tmp_path, request.getfixturevalue("s3") if where == "s3" else None)
    world.begin()
    if verdict == "kept":
        world.add("train", 16, range(8))
    first(world)
    world.add("train", 40, range(8) if verdict == "kept" else range(3, 8), wrong=verdict == "kept")
    saved = {name: (world.storage / name).read_bytes() for name in world.storage.list()}

    def worlds() -> Iterator[World]:
        while True:
            world.section["lease_seconds"] = 0.05
            yield world
            for name in world.storage.list().keys() - saved.keys():
                (world.storage / name).delete()
            for name, body in saved.items():
                (world.storage / name).write_bytes(body)

    return verdict, worlds()


def test_killed_before_any_of_its_writes_the_next_call_ends_it(
    ahead: tuple[str, Iterator[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, worlds = ahead

    def die() -> None:
        raise Killed

    for at, world in enumerate(worlds, 1):
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "__exit__", lambda self, *_: self._stop.set())  # the killed give nothing back
            done = writes_of(patch, at, die)
            killed = False
            try:
                world.call()
            except Killed:
                killed = True
        assert world.store.verify() == [], done[-1]
        decided = world.store.read().number == 2
        time.sleep(0.1)
        code, said = world.call()
        assert code == 0 and ("nothing new" if decided else f"decision  {verdict}") in said, said
        sound(world, 2)
        assert not world.store.orphans(), "the next holder removes what the killed left"
        if not killed:
            assert at > WRITES[verdict]
            return


def test_the_late_cannot_write_once_the_lease_has_moved_on(
    ahead: tuple[str, Iterator[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each write of a retraining it sleeps so long that another one does all the work."""
    verdict, worlds = ahead
    monkeypatch.setattr(Lease, "_renew_repeatedly", lambda self: None)
    next(worlds)  # its first write takes the lease: nobody is late yet
    for at, world in enumerate(worlds, 2):
        other: list[tuple[int, str]] = []

        def sleep(world: World = world, other: list[tuple[int, str]] = other) -> None:
            time.sleep(0.1)
            world.section["lease_seconds"] = 30
            other.append(world.call())

        with monkeypatch.context() as patch:
            done = writes_of(patch, at, sleep)
            code, said = world.call()
        sound(world, 2)
        if f"decision  {verdict}" in said:  # it was over, and slept before it gave the lease back, if at all
            assert at > WRITES[verdict] and code == 0 and (not other or "nothing new" in other[0][1])
            return
        assert other[0][0] == 0 and f"decision  {verdict}" in other[0][1]
        assert code == 1 and "nothing was promoted" in said and "decision  " not in said, (done[-1], said)
        assert world.last()["token"] == 3 and world.store.read().token == 3, "the late one's token is 2"
        assert "nothing new" in world.call()[1] and not world.store.orphans()


@ON_DISK_AND_S3
def test_who_sleeps_between_asking_and_writing_is_fenced_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one finds bad data and decides nothing: its token alone keeps the late one from the champion's file."""
    first(world)
    world.add("train", 20, range(3, 8))
    monkeypatch.setattr(Lease, "_renew_repeatedly", lambda self: None)
    world.section["lease_seconds"] = 0.05

    class Late(Colors):
        def caption(self, *arguments: Any) -> dict[int, str]:
            if world.section["lease_seconds"] < 1:
                time.sleep(0.1)
                world.section["lease_seconds"] = 30
                world.add("train", 3, range(3), corrupt=True)
                code, said = world.call()
                assert code == 1 and "bad data" in said
                monkeypatch.setattr(Lease, "check", lambda self: None)  # it asked before it slept
            return super().caption(*arguments)

    code, said = world.call(Late())
    assert code == 1 and "has been written since; nothing was changed" in said, said
    sound(world, 1)


def child(world: World, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.retrain_world", str(world.path()), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_process_killed_at_each_step_and_called_again(world: World) -> None:
    """kill -9 of a process of its own at one step after the other; each call follows one that was killed."""
    first(world)
    world.section["lease_seconds"] = 1
    world.add("train", 20, range(3, 8))
    for step in STEPS:
        process = child(world, "--die", step)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL and step in said, said
        sound(world, 1)
        time.sleep(1.1)  # until then it is said who holds the lease
    code, said = world.call()
    assert code == 0 and "decision  promoted" in said, said
    sound(world, 2)
    assert not world.store.orphans()


@ON_DISK_AND_S3
def test_a_process_that_wakes_up_late_promotes_nothing(world: World) -> None:
    """SIGSTOP in the middle of the comparison, as a machine that is suspended; another one decides meanwhile."""
    first(world)
    world.section["lease_seconds"] = 1
    world.add("train", 20, range(3, 8))
    process = child(world, "--stop", "step 4/5")
    deadline = time.monotonic() + 120
    while "T" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.1)
    assert "decision  promoted" in world.call()[1]
    before = world.files()
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "is too late; nothing was promoted" in said, said
    assert world.files() == before, "it has written nothing"
    sound(world, 2)
