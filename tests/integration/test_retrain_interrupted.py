"""Killed, suspended and concurrent retrainings: only the lease holder decides, and every decision is complete."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.storage.lease import Lease
from raycap.pipeline.storage.path import StoragePath
from tests.support.champion_check import errors_of
from tests.support.retrain_world import ON_DISK_AND_S3, Colors, World, first, sound


@ON_DISK_AND_S3
def test_of_two_concurrent_calls_one_does_nothing(world: World) -> None:
    first(world)
    world.add("train", 20, range(3, 8))
    world.section["lease_seconds"] = 3  # the second call waits half of it
    said: list[tuple[int, str]] = []
    inside, over = threading.Event(), threading.Event()

    class Slow(Colors):
        def train(self, config: Any, data: Any) -> Any:
            inside.set()
            assert over.wait(60)
            return super().train(config, data)

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
    """Stands for kill -9, after which the lease is not released."""


def writes_of(monkeypatch: pytest.MonkeyPatch, at: int, happen: Any) -> list[str]:
    """Records this process's writes to retrain/ and champions; calls `happen` before write number `at`."""
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


# The smallest number of writes: lease, token, two files of a bundle if it is promoted, snapshot, record and
# champion.json. Renewals of the lease add to it.
WRITES = {"promoted": 7, "kept": 5}


def cases(quick: tuple[str, str]) -> pytest.MarkDecorator:
    """Where the storage is and the expected verdict. `make test` runs `quick` only."""
    every = (("disk", "promoted"), ("disk", "kept"), ("s3", "promoted"))
    params = [pytest.param(each, id="-".join(each), marks=[pytest.mark.proof] * (each != quick)) for each in every]
    return pytest.mark.parametrize("ahead", params, indirect=True)


@pytest.fixture
def ahead(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Iterator[World]]:
    """The expected verdict, and an iterator over equal worlds with a champion and new data."""
    monkeypatch.setattr("raycap.pipeline.retrain.retraining.try_rights", lambda folder: None)  # its writes do not count
    where, verdict = request.param
    world = World(tmp_path, request.getfixturevalue("s3") if where == "s3" else None)
    world.begin(size=1)
    if verdict == "kept":
        world.add("train", 16, range(8))
    first(world)
    if verdict == "kept":
        world.add("train", 40, range(8), wrong=True)
    else:
        world.add("train", 10, range(3, 8))
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


@cases(("disk", "promoted"))
def test_killed_before_each_write(ahead: tuple[str, Iterator[World]], monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, worlds = ahead

    def die() -> None:
        raise Killed

    for at, world in enumerate(worlds, 1):
        with monkeypatch.context() as patch:
            patch.setattr(
                Lease, "__exit__", lambda self, *_: self._stop.set()
            )  # a killed process does not release the lease
            done = writes_of(patch, at, die)
            killed = False
            try:
                world.call()
            except Killed:
                killed = True
        assert errors_of(world.store) == [], done[-1]
        decided = world.store.read().number == 2
        time.sleep(0.1)
        code, said = world.call()
        assert code == 0 and ("nothing new" if decided else f"decision  {verdict}") in said, said
        sound(world, 2)
        assert not world.store.orphans(world.store.read()), "the next holder removes the killed process's files"
        if not killed:
            assert at > WRITES[verdict]
            return


@cases(("s3", "promoted"))
def test_suspended_before_each_write(ahead: tuple[str, Iterator[World]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each write in turn, a retraining is suspended while another one runs to its end."""
    verdict, worlds = ahead
    monkeypatch.setattr(Lease, "_renew_repeatedly", lambda self: None)
    next(worlds)  # write 1 takes the lease, and cannot come too late
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
        if f"decision  {verdict}" in said:  # suspended after its last write, if at all
            assert at > WRITES[verdict] and code == 0 and (not other or "nothing new" in other[0][1])
            return
        assert other[0][0] == 0 and f"decision  {verdict}" in other[0][1]
        assert code == 1 and "nothing was promoted" in said and "decision  " not in said, (done[-1], said)
        assert world.last()["token"] == 3 and world.store.read().token == 3, "the suspended one has token 2"
        assert "nothing new" in world.call()[1] and not world.store.orphans(world.store.read())


def test_a_process_suspended_between_check_and_write_is_fenced_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finds bad data and decides nothing. Its token is enough to fence out the suspended process."""
    first(world)
    world.add("train", 20, range(3, 8))
    monkeypatch.setattr(Lease, "_renew_repeatedly", lambda self: None)
    world.section["lease_seconds"] = 0.05

    class Late(Colors):
        def evaluate(self, *arguments: Any) -> SplitScores:
            if world.section["lease_seconds"] < 1:
                time.sleep(0.1)
                world.section["lease_seconds"] = 30
                world.add("train", 3, range(3), corrupt=True)
                code, said = world.call()
                assert code == 1 and "bad data" in said
                monkeypatch.setattr(Lease, "check", lambda self: None)  # it was checked before the suspension
            return super().evaluate(*arguments)

    code, said = world.call(Late())
    assert code == 1 and "has been written since; nothing was changed" in said, said
    sound(world, 1)
