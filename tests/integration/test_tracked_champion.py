"""The alias in MLflow follows the champion; a tracker that is down does not affect a decision."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.retrain.retraining import FoundData, rollback
from raycap.pipeline.tracking.mlflow_client import experiment_of, tracking_client
from tests.support.champion_check import errors_of
from tests.support.retrain_world import Colors, World


class Registered(Colors):
    """Also registers the run and its model version on the tracker, as `raycap run` does."""

    def train(self, config: RunConfig, data: FoundData) -> Path:
        trained = super().train(config, data)
        client = tracking_client(config)
        experiment = experiment_of(client, config)
        parent = client.create_run(experiment, tags={"raycap.run_id": trained.name})
        tags = {"raycap.run_id": trained.name, "mlflow.parentRunId": parent.info.run_id}
        client.create_run(experiment, tags=tags)
        if not client.search_registered_models():
            client.create_registered_model(config.name)
        client.create_model_version(config.name, str(trained), run_id=parent.info.run_id)
        return trained


class Tracked(World):
    uri: str | None = None

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"tracking": {"enabled": True, "uri": self.uri}}

    def aliases(self) -> dict[str, str]:
        client = tracking_client(self.config)
        return {name: str(at) for name, at in client.get_registered_model("world").aliases.items()}


@pytest.fixture
def world(tmp_path: Path) -> Tracked:
    world = Tracked(tmp_path)
    world.begin()
    return world


def test_the_alias_follows_every_decision(world: Tracked) -> None:
    assert world.call(Registered())[0] == 0
    assert world.aliases() == {"champion": "1"}
    world.add("train", 20, range(3, 8))
    said = world.call(Registered())[1]
    assert "decision  promoted" in said and world.aliases() == {"champion": "2"}, said
    world.add("train", 60, range(8), wrong=True)
    assert "decision  kept" in world.call(Registered())[1]
    assert world.aliases() == {"champion": "2"}
    assert rollback(world.config) == 0
    assert world.aliases() == {"champion": "1"}
    assert errors_of(world.store) == []


def test_a_tracker_that_was_down_is_updated_later(world: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    reachable = f"sqlite:///{world.storage.path / 'mlflow.db'}"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        unreachable = f"http://user:secret@127.0.0.1:{unused.getsockname()[1]}"

    class Later(Registered):
        """The run is sent during training; then the tracker goes down."""

        def train(self, config: RunConfig, data: FoundData) -> Path:
            tracking = config.tracking.model_copy(update={"uri": reachable})
            return super().train(config.model_copy(update={"tracking": tracking}), data)

    world.uri = unreachable
    code, said = world.call(Later())
    assert code == 0 and "decision  first" in said and "could not be updated" in said and "secret" not in said, said
    assert errors_of(world.store) == [] and world.store.read().number == 1
    world.uri = reachable
    assert "nothing new" in world.call(Later())[1]
    assert world.aliases() == {"champion": "1"}
