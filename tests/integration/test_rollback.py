"""Rollback to the previous champion, also during a retraining."""

from __future__ import annotations

from typing import Any

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.retraining import rollback
from tests.support.champion_check import errors_of
from tests.support.retrain_world import ON_DISK_AND_S3, Colors, World, first, sound


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
    assert state.champion == champion and state.before == () and state.challenger == promoted.run_id
    assert world.last()["decision"] == "rolled back" and world.last()["champion_before"] == promoted.model_dump()
    sound(world, 3)
    assert not world.store.orphans(world.store.read()), "former champions are kept"
    assert "nothing new since decision 3" in world.call()[1], "the rolled-back model was promoted again"
    world.add("train", 20, range(3, 8))
    work = Colors()
    assert "decision  promoted" in world.call(work)[1] and work.trained[0] == f"{world.storage}/{champion.bundle}"
    sound(world, 4)


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


def test_a_damaged_champion_is_refused(world: World) -> None:
    first(world)
    state = world.store.read()
    assert state.champion is not None
    (world.storage / state.champion.bundle / "model.safetensors").write_bytes(b"{}")
    (sentence,) = errors_of(world.store)
    assert "model.safetensors does not have the digest" in sentence
    world.add("train", 20, range(3, 8))
    with pytest.raises(OSError, match=r"a champion's bundle is damaged: .*model\.safetensors"):
        world.call()
    assert world.store.read().number == 1
