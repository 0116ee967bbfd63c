"""Decisions of a retraining, and what it asks of the bucket with the data. The champion is never damaged."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.cli import main
from raycap.jobs.retrain import RayWork
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.retraining import rollback
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import S3Object, StorageError
from tests.support.retrain_world import ON_DISK_AND_S3, Colors, World, first, sound
from tests.support.s3_server import reads


@ON_DISK_AND_S3
def test_without_new_data_nothing_is_done_and_no_image_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first(world)
    before, reads, work = world.files(), [], Colors()
    original = StoragePath.read_bytes
    monkeypatch.setattr(StoragePath, "read_bytes", lambda self, *limit: (reads.append(self.name), original(self))[1])
    code, said = world.call(work)
    assert code == 0 and "nothing new since decision 1 (files: 0 new, 0 changed, 0 gone)" in said
    assert not work.trained and not [name for name in reads if name.endswith((".png", "dataset.json"))]
    after = world.files()
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"retrain/world/lease.json", "retrain/world/champion.json"}, (
        "only the lease and its token were written"
    )
    sound(world, 1)
    world.entries[0]["sentences"][0]["raw"] += " again"
    world.annotate()
    code, said = world.call(work)
    assert code == 0 and "0 new, 1 changed, 0 gone" in said and len(work.trained) == 1, said


def test_a_storage_without_conditional_writes_is_refused(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such a storage two processes would get the lease."""
    world = World(tmp_path, s3)
    world.begin()
    monkeypatch.setattr(S3Object, "put_if", lambda self, data, tag: self.put(io.BytesIO(data), len(data)))
    work = Colors()
    with pytest.raises(StorageError, match="conditional writes are ignored"):
        world.call(work)
    assert not work.trained and not world.files()


@ON_DISK_AND_S3
def test_new_data_that_helps_is_promoted(world: World) -> None:
    first(world)
    champion = world.store.read().champion
    assert champion is not None
    world.add("train", 20, range(3, 8))
    work = Colors()
    code, said = world.call(work)
    assert code == 0 and "decision  promoted: CIDEr-D" in said and "20 images are new" in said, said
    assert work.trained == [f"{world.storage}/{champion.bundle}"], "from the champion's weights"
    sound(world, 2)
    state, record = world.store.read(), world.last()
    assert state.before == (champion,) and state.champion is not None and state.champion != champion
    assert record["difference"]["low"] > 0 and record["scores"]["challenger"] > record["scores"]["champion"]
    assert record["data"]["new_images"] == 20 and record["data"]["files"] == {"added": 20, "changed": 1, "gone": 0}
    code, said = world.call(work)
    assert code == 0 and "nothing new" in said and len(work.trained) == 1


def test_the_whole_interval_must_be_above_the_margin(tmp_path: Path) -> None:
    def decided(name: str, **section: float) -> dict[str, Any]:
        world = World(tmp_path / name, **section)
        world.begin()
        first(world)
        world.add("train", 20, range(3, 8))
        world.call()
        return world.last()

    free = decided("free")
    low, mean = free["difference"]["low"], free["difference"]["mean"]
    assert low < mean and free["decision"] == "promoted"
    assert decided("margin", margin=(low + mean) / 2)["decision"] == "kept"


def test_a_worse_model_is_not_promoted_and_the_reason_is_recorded(world: World) -> None:
    world.add("train", 16, range(8))
    first(world)
    champion = world.store.read().champion
    world.add("train", 60, range(8), wrong=True)
    code, said = world.call()
    assert code == 0 and "decision  kept: CIDEr-D" in said and "is not above the margin 0" in said, said
    sound(world, 2)
    state, record = world.store.read(), world.last()
    assert state.champion == champion and not state.before
    assert record["difference"]["high"] < 0 and "the champion stays" in record["reason"]
    code, said = world.call()
    assert code == 0 and "nothing new since decision 2" in said, "the same data was tried again"


def test_corrupt_new_images_change_nothing(world: World) -> None:
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
    world.add("train", 20, range(3, 8))  # valid files at the same paths
    assert "decision  promoted" in world.call()[1]
    sound(world, 2)


def test_the_held_out_split_is_fixed_at_its_first_use(world: World) -> None:
    first(world)
    ids = [entry["cocoid"] for entry in world.entries if entry["split"] == "test"]
    record = world.store.read().held_out
    world.add("test", 10, range(8), wrong=True)
    world.add("train", 20, range(3, 8))
    for entry in world.entries:
        if entry["cocoid"] == ids[0]:
            entry["sentences"] = [{"raw": "Somebody has changed this."}]
    world.annotate()
    parts: list[Any] = []

    class Watched(Colors):
        def evaluate(self, bundle: Any, files: Any, part: Any, config: Any) -> Any:
            parts.append(part)
            return super().evaluate(bundle, files, part, config)

    assert "decision  promoted" in world.call(Watched())[1]
    assert len(parts) == 2 and all(part.column("image_id") == ids for part in parts)
    assert parts[0].column("captions")[0][0] != "Somebody has changed this."
    assert world.store.read().held_out == record
    sound(world, 2)


def test_held_out_images_in_training_are_refused(world: World) -> None:
    first(world)
    for entry in world.entries:
        if entry["split"] == "test" and entry["cocoid"] % 8 == 0:
            entry["split"] = "train"
    world.add("train", 20, range(3, 8))
    work = Colors()
    code, said = world.call(work)
    assert code == 1 and "images of the fixed held-out split are now in training" in said and not work.trained
    sound(world, 1)


def test_data_that_is_added_during_training_waits_for_the_next_call(world: World) -> None:
    first(world)
    world.add("train", 20, range(3, 8))

    class Meanwhile(Colors):
        def train(self, config: Any, data: Any) -> Any:
            world.add("train", 1, range(1))
            return super().train(config, data)

    assert "decision  promoted" in world.call(Meanwhile())[1]
    sound(world, 2)
    assert world.last()["data"]["images"] == len(world.entries) - 1
    assert "1 images are new" in world.call()[1]
    sound(world, 3)


def test_invalid_input_is_one_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path)
    world.begin()

    def refused(*options: str) -> str:
        assert main(["retrain", str(world.path()), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no earlier champion" in refused("--rollback")
    assert "retrain.split = gone has 0 images" in refused("--set", "retrain.split=gone")
    (world.store.folder / "champion.json").write_bytes(b'{"format": 2}')
    assert "champion.json is not a champion's file" in refused()
    assert not list(world.store.folder.path.glob("decisions/*"))


def test_a_rollback_restores_the_previous_champion(world: World) -> None:
    first(world)
    with pytest.raises(UserError, match="no earlier champion"):
        rollback(world.config)
    champion = world.store.read().champion
    world.add("train", 20, range(3, 8))
    world.call()
    promoted = world.store.read().champion
    assert promoted is not None and rollback(world.config) == 0
    state = world.store.read()
    assert state.champion == champion and state.before == ()
    assert world.last()["decision"] == "rolled back" and world.last()["champion_before"] == promoted.model_dump()
    sound(world, 3)
    assert not world.store.orphans(world.store.read()), "former champions are kept"
    assert "nothing new since decision 3" in world.call()[1], "the rolled-back model was promoted again"
    world.add("train", 20, range(3, 8))
    work = Colors()
    assert "decision  promoted" in world.call(work)[1] and work.trained[0] == f"{world.storage}/{champion.bundle}"
    sound(world, 4)


@ON_DISK_AND_S3
def test_a_rollback_to_a_damaged_bundle_changes_nothing(world: World) -> None:
    first(world)
    former = world.store.read().champion
    world.add("train", 20, range(3, 8))
    world.call()
    promoted = world.store.read()
    assert former is not None and promoted.number == 2
    model = world.storage / former.bundle / "model.safetensors"
    for damage in (lambda: model.write_bytes(b"{}"), model.delete):
        damage()
        with pytest.raises(OSError, match=r"model.safetensors is missing or has changed; restore"):
            rollback(world.config)
        assert world.store.read().champion == promoted.champion and world.store.read().number == 2


@ON_DISK_AND_S3
def test_a_rollback_fences_out_a_running_retraining(world: World) -> None:
    first(world)
    world.add("train", 20, range(3, 8))
    world.call()
    world.add("train", 3, range(3))

    class Rolled(Colors):
        def evaluate(self, *arguments: Any) -> SplitScores:
            if world.store.read().number == 2:
                assert rollback(world.config) == 0
            return super().evaluate(*arguments)

    code, said = world.call(Rolled())
    assert code == 1 and "nothing was promoted" in said
    assert world.last()["decision"] == "rolled back"
    sound(world, 3)


def test_without_champion_json_nothing_is_deleted_or_overwritten(world: World) -> None:
    """lease.json is gone as well, and the command is called three times."""
    first(world)
    world.add("train", 20, range(3, 8))
    world.call()
    for file in ("champion.json", "lease.json"):
        (world.store.folder / file).delete()
    before = world.files()
    for _ in range(3):
        assert world.call()[0] == 0
        assert before.items() <= world.files().items()
    sound(world, 1)
    assert world.last()["token"] == 3, "larger than the tokens of all files"


def test_a_bundle_that_has_changed_is_not_scored(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    bundle, digests = StoragePath(str(tmp_path)), {"model.safetensors": "0"}
    with pytest.raises(OSError, match="is missing or has changed; restore the bundle from a copy"):
        RayWork(None).evaluate(bundle, digests, None, world.config)  # type: ignore[arg-type]


class Small(World):
    """A world for the real `raycap retrain`, with a frozen and an end-to-end stage of two steps."""

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        workers = settings["workers"] | {"dry_run": False}
        return settings | {"stages": settings["stages"][:2], "workers": workers}


@pytest.mark.proof
@pytest.mark.ray
def test_a_retraining_lists_the_data_once_and_reads_each_new_image_once(
    tmp_path: Path, s3: str, ray_session: None
) -> None:
    """A retraining checks images, extracts features, trains, compares, and shows images on two pages."""
    world = Small(tmp_path, s3)
    prefix = world.data.uri.removeprefix("s3://data/")

    def requests() -> tuple[int, Counter[str]]:
        """The listings of the data folder or of a folder in it, and the reads of each image, by one retraining."""
        before = len(reads(s3))
        assert main(["retrain", str(world.path())]) == 0
        asked = [request for request in reads(s3)[before:] if prefix in request]
        # a command first asks for one name, to see whether the server answers
        listings = sum("list-type=2" in request and "max-keys=1&" not in f"{request}&" for request in asked)
        return listings, Counter(request.partition("?")[0][-8:] for request in asked if "/images/" in request)

    world.begin()
    names = [f"{number:04}.png" for number in range(44)]
    assert requests() == (1, Counter(names[:32]))
    world.add("train", 12, range(8))
    assert requests() == (1, Counter(names[32:]))
    assert requests() == (1, Counter())
    assert world.store.read().number == 2
