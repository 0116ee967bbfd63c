"""Retraining without Ray: whatever happens, the champion is whole and the decisions lead to it, on disk and on S3."""

from __future__ import annotations

import html
import json
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

from jobs.cli import main
from pipeline import retrain as retrain_module
from pipeline.errors import UserError
from pipeline.lease import Lease
from pipeline.retrain import rollback
from pipeline.storage import Place
from tests.conftest import ROOT
from tests.retrain_world import Colors, World
from tests.s3_server import s3_server

STEPS = ("step 1/5", "step 2/5", "step 3/5", "step 4/5", "step 5/5")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["disk", "s3"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    world = World(tmp_path, request.getfixturevalue("url") if request.param == "s3" else None)
    world.begin()
    return world


def sound(world: World, number: int) -> None:
    """The champion's file, all bundles and decisions are as they should be, and nothing else lies about."""
    assert world.ledger.verify() == []
    assert world.ledger.read().number == number


def first(world: World) -> None:
    code, said = world.call()
    assert code == 0 and "decision  first: there was no champion" in said, said
    sound(world, 1)


def test_without_new_data_nothing_is_done_and_no_image_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first(world)
    before, reads, work = world.files(), [], Colors()
    original = Place.read_bytes
    monkeypatch.setattr(Place, "read_bytes", lambda self: (reads.append(self.name), original(self))[1])
    code, said = world.call(work)
    assert code == 0 and "nothing new since decision 1 (files: 0 new, 0 changed, 0 gone)" in said
    assert not work.trained and not [name for name in reads if name.endswith((".png", "dataset.json"))]
    after = world.files()
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"retrain/world/lease.json", "retrain/world/champion.json"}, "only who may write was written"
    sound(world, 1)


def test_files_that_no_annotation_names_are_nothing_new(world: World) -> None:
    first(world)
    (world.data / "images/README.txt").write_bytes(b"not in the data set")
    work = Colors()
    code, said = world.call(work)
    assert code == 0 and "nothing new since decision 1 (files: 1 new, 0 changed, 0 gone)" in said and not work.trained
    sound(world, 1)


def test_new_data_that_helps_is_promoted(world: World) -> None:
    first(world)
    champion = world.ledger.read().champion
    assert champion is not None
    world.add("train", 20, range(3, 8))
    work = Colors()
    code, said = world.call(work)
    assert code == 0 and "decision  promoted: CIDEr-D" in said and "20 images are new" in said, said
    assert work.trained == [f"{world.storage}/{champion.bundle}"], "from the champion's weights"
    sound(world, 2)
    state, record = world.ledger.read(), world.last()
    assert state.before == (champion,) and state.champion is not None and state.champion != champion
    assert record["difference"]["low"] > 0 and record["scores"]["challenger"] > record["scores"]["champion"]
    assert record["data"]["new_images"] == 20 and record["data"]["files"] == {"added": 20, "changed": 1, "gone": 0}
    page = (world.ledger.folder / "decisions/000002-t000002.html").read_bytes().decode()
    assert "promoted" in page and record["reason"] in html.unescape(page) and "data:image" in page
    code, said = world.call(work)
    assert code == 0 and "nothing new" in said and len(work.trained) == 1


def test_new_data_that_harms_is_kept_out_and_why_is_written(world: World) -> None:
    world.add("train", 16, range(8))
    first(world)
    champion = world.ledger.read().champion
    world.add("train", 60, range(8), wrong=True)
    code, said = world.call()
    assert code == 0 and "decision  kept: CIDEr-D" in said and "does not lie above the margin 0" in said, said
    sound(world, 2)
    state, record = world.ledger.read(), world.last()
    assert state.champion == champion and not state.before and state.challenger == record["run"]
    assert record["difference"]["high"] < 0 and "the champion stays" in record["reason"]
    code, said = world.call()
    assert code == 0 and "nothing new since decision 2" in said, "the same data is not tried again"


def test_a_gain_below_the_margin_is_kept_out(world: World) -> None:
    first(world)
    world.section["margin"] = 50.0
    world.add("train", 20, range(3, 8))
    assert "decision  kept" in world.call()[1]
    sound(world, 2)


def test_corrupt_new_images_stop_it_and_everything_stays(world: World) -> None:
    first(world)
    before, entries = world.files(), list(world.entries)
    world.add("train", 3, range(3), corrupt=True)
    for _ in range(2):
        work = Colors()
        code, said = world.call(work)
        assert code == 1 and "bad data  3 of 3 images cannot be used" in said and not work.trained, said
        assert "nothing was changed" in said
        sound(world, 1)
    after = world.files()
    touched = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    assert touched == {"retrain/world/lease.json", "retrain/world/champion.json"}
    world.entries = entries
    world.add("train", 20, range(3, 8))  # in the same places, whole
    assert "decision  promoted" in world.call()[1]
    sound(world, 2)


def test_annotations_that_are_broken_are_bad_data_where_they_once_were_not(world: World) -> None:
    (world.data / "dataset.json").write_bytes(b"{")
    with pytest.raises(UserError, match="not valid JSON"):
        world.call()
    world.annotate()
    first(world)
    (world.data / "dataset.json").write_bytes(b"{")
    code, said = world.call()
    assert code == 1 and "bad data" in said and "not valid JSON" in said
    sound(world, 1)


def test_the_held_out_split_is_fixed_at_its_first_use(world: World) -> None:
    first(world)
    ids = [entry["cocoid"] for entry in world.entries if entry["split"] == "test"]
    record = world.ledger.read().held_out
    world.add("test", 10, range(8), wrong=True)
    world.add("train", 20, range(3, 8))
    for entry in world.entries:
        if entry["cocoid"] == ids[0]:
            entry["sentences"] = [{"raw": "Somebody has changed this."}]
    world.annotate()
    seen: list[Any] = []

    class Watched(Colors):
        def caption(self, bundle: Any, files: Any, part: Any, config: Any) -> dict[int, str]:
            seen.append(part)
            return super().caption(bundle, files, part, config)

    assert "decision  promoted" in world.call(Watched())[1]
    assert len(seen) == 2 and all(part.column("image_id") == ids for part in seen)
    assert seen[0].column("captions")[0][0] != "Somebody has changed this."
    assert world.ledger.read().held_out == record
    sound(world, 2)


def test_held_out_images_that_come_into_training_are_refused(world: World) -> None:
    first(world)
    for entry in world.entries:
        if entry["split"] == "test" and entry["cocoid"] % 8 == 0:
            entry["split"] = "train"
    world.add("train", 20, range(3, 8))
    work = Colors()
    code, said = world.call(work)
    assert code == 1 and "images of the fixed held-out split are now in training" in said and not work.trained
    sound(world, 1)


def test_data_that_changes_meanwhile_waits_for_the_next_call(world: World) -> None:
    first(world)
    world.add("train", 20, range(3, 8))

    class Meanwhile(Colors):
        def train(self, config: Any) -> Any:
            world.add("train", 1, range(1))
            return super().train(config)

    code, said = world.call(Meanwhile())
    assert code == 1 and "has changed during the retraining" in said
    sound(world, 1)
    assert "decision  promoted" in world.call()[1]
    sound(world, 2)


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
        def write(self: Place, *arguments: Any) -> Any:
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

    for name in ("write_bytes", "write_if", "delete"):
        monkeypatch.setattr(Place, name, counted(getattr(Place, name)))
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
    world = World(tmp_path, request.getfixturevalue("url") if where == "s3" else None)
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
        assert world.ledger.verify() == [], done[-1]
        decided = world.ledger.read().number == 2
        time.sleep(0.1)
        code, said = world.call()
        assert code == 0 and ("nothing new" if decided else f"decision  {verdict}") in said, said
        sound(world, 2)
        assert not world.ledger.leftovers(), "the next holder removes what the killed left"
        if not killed:
            assert at > WRITES[verdict]
            return


def test_the_late_cannot_write_once_the_lease_has_moved_on(
    ahead: tuple[str, Iterator[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each write of a retraining it sleeps so long that another one does all the work."""
    verdict, worlds = ahead
    monkeypatch.setattr(Lease, "_renew_on", lambda self: None)
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
        assert world.last()["token"] == 3 and world.ledger.read().token == 3, "the late one's token is 2"
        assert "nothing new" in world.call()[1] and not world.ledger.leftovers()


def test_who_sleeps_between_asking_and_writing_is_fenced_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one finds bad data and decides nothing: its token alone keeps the late one from the champion's file."""
    first(world)
    world.add("train", 20, range(3, 8))
    monkeypatch.setattr(Lease, "_renew_on", lambda self: None)
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
    command = [sys.executable, "-m", "tests.retrain_world", str(world.path()), *options]
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
    assert not world.ledger.leftovers()


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


def test_a_rollback_gives_the_place_back(world: World) -> None:
    first(world)
    with pytest.raises(UserError, match="no champion before the present one"):
        rollback(world.config, lambda text: None)
    champion = world.ledger.read().champion
    world.add("train", 20, range(3, 8))
    world.call()
    promoted = world.ledger.read().champion
    assert promoted is not None and rollback(world.config, lambda text: None) == 0
    state = world.ledger.read()
    assert state.champion == champion and state.before == () and state.challenger == promoted.run_id
    assert world.last()["decision"] == "rolled back" and world.last()["champion_before"] == promoted.model_dump()
    sound(world, 3)
    assert not world.ledger.leftovers(), "what was champion stays"
    assert "nothing new since decision 3" in world.call()[1], "it is not trained and promoted again at once"
    world.add("train", 20, range(3, 8))
    work = Colors()
    assert "decision  promoted" in world.call(work)[1] and work.trained[0] == f"{world.storage}/{champion.bundle}"
    sound(world, 4)


def test_a_rollback_goes_before_a_retraining_under_way(world: World) -> None:
    first(world)
    world.add("train", 20, range(3, 8))
    world.call()
    world.add("train", 3, range(3))

    class Rolled(Colors):
        def caption(self, *arguments: Any) -> dict[int, str]:
            if world.ledger.read().number == 2:
                assert rollback(world.config, lambda text: None) == 0
            return super().caption(*arguments)

    code, said = world.call(Rolled())
    assert code == 1 and "nothing was promoted" in said
    assert world.last()["decision"] == "rolled back"
    sound(world, 3)


def test_a_damaged_champion_is_neither_trained_from_nor_rolled_back_to(world: World) -> None:
    first(world)
    state = world.ledger.read()
    assert state.champion is not None
    (world.storage / state.champion.bundle / "model.safetensors").write_bytes(b"{}")
    (sentence,) = world.ledger.verify()
    assert "model.safetensors does not have the digest" in sentence
    world.add("train", 20, range(3, 8))
    with pytest.raises(OSError, match=r"a champion's bundle is damaged: .*model\.safetensors"):
        world.call()
    assert world.ledger.read().number == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body.update(number=7),
        lambda body: body.update(before=[body["champion"]]),
        lambda body: body["decision"].update(sha256="0" * 64),
        lambda body: body["snapshot"].update(name="snapshots/t000009.parquet"),
        lambda body: body.update(token=0),
        lambda body: body.update(decided=[]),
    ],
)
def test_what_does_not_fit_together_is_found(tmp_path: Path, spoil: Any) -> None:
    world = World(tmp_path)
    world.begin()
    first(world)
    pointer = world.ledger.folder / "champion.json"
    body = json.loads(pointer.read_bytes())
    spoil(body)
    pointer.write_bytes(json.dumps(body).encode())
    assert world.ledger.verify()


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path)
    world.begin()

    def refused(*options: str) -> str:
        assert main(["retrain", str(world.path()), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no champion before the present one" in refused("--rollback")
    assert "is one of data.train_splits" in refused("--set", "retrain.split=train")
    assert "retrain.split = gone has 0 images" in refused("--set", "retrain.split=gone")
    assert "retrain.confidence = 1.0" in refused("--set", "retrain.confidence=1.0")
    assert "unknown key retrain.marjin" in refused("--set", "retrain.marjin=1")
    (world.ledger.folder / "champion.json").write_bytes(b'{"format": 2}')
    assert "champion.json is not a champion's file" in refused()
    assert not list(world.ledger.folder.path.glob("decisions/*"))
