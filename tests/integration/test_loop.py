"""The loop without Ray: a stage that is interrupted anywhere ends with the weights of one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.batches import Batches
from pipeline.config import parse_config
from pipeline.context import LocalContext
from pipeline.features import Extractor, feature_key
from pipeline.journal import Follower, Journal, read_journal
from pipeline.loop import DivergedError, StageJob, StageRun, train_stages
from pipeline.prepare import prepare
from pipeline.run_folder import RunFolder
from pipeline.store import write_shard
from pipeline.trial import trial_steps
from tests.conftest import small_config

NAMES = ("xe_frozen", "xe_finetune", "scst_frozen", "scst_finetune")


def prepared(storage: Path, **changes: Any) -> tuple[RunFolder, Path]:
    """A run's folder and a store with the features of its initial backbone, computed without Ray."""
    from models.backbone import Backbone
    from models.transform import ImageTransform
    from pipeline.images import decode_image
    from pipeline.weights import load_weights

    config = parse_config(small_config(storage, **changes))
    folder = prepare(config, lambda text: None)
    weights = folder.path / "init" / "backbone.safetensors"
    extractor = Extractor(config.backbone, weights, config.features, config.data.max_pixels)
    store = config.storage_path / "features" / feature_key(extractor.describe())
    backbone, transform = Backbone(config.backbone).eval(), ImageTransform(config.backbone.image_size)
    load_weights(backbone, weights)
    dataset = folder.dataset
    pixels = torch.stack([transform(decode_image(Path(uri).read_bytes(), 10**6)) for uri in dataset.column("uri")])
    with torch.inference_mode():
        write_shard(store, dataset.column("key"), backbone(pixels).numpy().astype(np.float16))
    return folder, store


def final(folder: RunFolder, stage: str) -> dict[str, torch.Tensor]:
    (best,) = folder.stage(stage).glob("best-*")
    return {
        f"{path.name}:{key}": value for path in best.glob("*.safetensors") for key, value in load_file(path).items()
    }


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder, store = prepared(tmp_path_factory.mktemp("undisturbed"))
    train_stages(LocalContext("cpu"), StageJob(folder.path, NAMES, store))
    return folder


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_interrupted_anywhere_the_weights_are_bit_identical(
    tmp_path: Path, undisturbed: RunFolder, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage is broken off after `stop` steps and begun again in a new object, in both objectives."""
    folder, store = prepared(tmp_path)
    job = StageJob(folder.path, NAMES, store)
    original, broken = StageRun.step, set()

    def step(self: StageRun, number: int, batches: Any) -> Any:
        if number == stop and self.stage.name not in broken:
            broken.add(self.stage.name)
            raise Killed
        return original(self, number, batches)

    monkeypatch.setattr(StageRun, "step", step)
    for _ in range(len(NAMES) + 1):
        try:
            train_stages(LocalContext("cpu"), job)
        except Killed:
            continue
    assert broken == set(NAMES)
    for stage in NAMES:
        ours, theirs = final(folder, stage), final(undisturbed, stage)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), f"{stage} {key}"
        steps = [
            entry["step"]
            for entry in read_journal(folder.journal)
            if entry["stage"] == stage and entry["kind"] == "train"
        ]
        assert steps == sorted(set(steps)), "a step that was done twice stands in the journal once"


def test_stages_follow_each_other(undisturbed: RunFolder) -> None:
    """The loss falls, end-to-end stages change the backbone, frozen ones do not have one."""
    losses = [
        entry["loss"]
        for entry in read_journal(undisturbed.journal)
        if entry["stage"] == "xe_finetune" and entry["kind"] == "train"
    ]
    assert losses[-1] < losses[0]
    initial = load_file(undisturbed.path / "init" / "backbone.safetensors")
    assert not any(key.startswith("backbone") for key in final(undisturbed, "xe_frozen"))
    tuned = final(undisturbed, "xe_finetune")
    assert any(not torch.equal(value, tuned[f"backbone.safetensors:{key}"]) for key, value in initial.items())
    for stage in NAMES:
        result = undisturbed.result(stage)
        assert result and result["steps"] > 0 and not list(undisturbed.stage(stage).glob("step-*"))
    predictions = json.loads((undisturbed.stage("xe_frozen") / "predictions-val.json").read_text())
    assert len(predictions) == len(undisturbed.dataset.split("val"))


def test_a_stage_that_is_not_better_is_not_kept(undisturbed: RunFolder) -> None:
    last = undisturbed.result("scst_finetune")
    before = undisturbed.result("scst_frozen")
    assert last and before
    source = undisturbed.weights_before(None, "model")
    expected = "scst_finetune" if last["kept"] else "scst_frozen"
    assert source.parent.parent.name == expected
    best_before = max(undisturbed.result(name)["best_score"] for name in NAMES[:3])  # type: ignore[index]
    assert last["kept"] == (last["best_score"] > best_before)


def test_a_finished_run_trains_nothing(undisturbed: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRun, "step", lambda *_: pytest.fail("a step was made"))
    train_stages(LocalContext("cpu"), StageJob(undisturbed.path, NAMES, None))


def test_a_loss_that_is_not_finite_stops_and_says_where(tmp_path: Path) -> None:
    folder, store = prepared(tmp_path, stages=small_config(tmp_path)["stages"][:1])
    run = StageRun(LocalContext("cpu"), folder, folder.config.stages[0], StageJob(folder.path, NAMES[:1], store))
    with torch.no_grad():
        next(iter(run.captioner.model.parameters())).fill_(float("nan"))
    with pytest.raises(DivergedError, match="stage xe_frozen, step 0, rank 0"):
        run.run()


def test_workers_of_an_abandoned_attempt_write_nothing(tmp_path: Path) -> None:
    folder, store = prepared(tmp_path)
    old = folder.begin_attempt()
    folder.begin_attempt()
    with pytest.raises(RuntimeError, match="another attempt"):
        train_stages(LocalContext("cpu"), StageJob(folder.path, NAMES, store, attempt=old))
    assert not folder.stage("xe_frozen").exists()


class OneOf(LocalContext):
    """A rank of two, in one process: its gradients are added to the other's by hand."""

    def __init__(self, rank: int) -> None:
        super().__init__("cpu")
        self.world_rank, self.rank_count = rank, 2


@pytest.mark.parametrize("name", ["xe_frozen", "xe_finetune"])
def test_two_workers_have_one_workers_gradient(tmp_path: Path, name: str) -> None:
    """The sum over two ranks of their part of the globally normalized loss has the whole batch's gradient."""
    stages = small_config(tmp_path)["stages"]
    for stage in stages:
        stage["dropout"] = 0.0
    folder, store = prepared(tmp_path, stages=stages)
    run = StageRun(LocalContext("cpu"), folder, folder.config.stage(name), StageJob(folder.path, NAMES, store))
    run.captioner.double()
    seed, generator = run.batches.seed, torch.Generator()

    def gradient(ranks: int) -> list[torch.Tensor]:
        run.captioner.zero_grad()
        for rank in range(ranks):
            batches = Batches(
                run.batches.images, run.batches.captions, run.stage, seed=seed, rank=rank, world_size=ranks
            )
            (batch,) = batches.at(0)
            doubled = type(batch)(
                batch.inputs.double(), batch.tokens, batch.images, batch.global_targets, batch.global_images
            )
            run.objective(run.captioner, run.captioner, doubled, generator).loss.backward()
        return [p.grad.clone() for p in run.captioner.parameters() if p.grad is not None]

    for one, two in zip(gradient(1), gradient(2), strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)


def test_trial_steps_cover_every_stage(undisturbed: RunFolder) -> None:
    rows = trial_steps(undisturbed.path)
    assert [row["stage"] for row in rows] == list(NAMES)
    assert all(row["memory_mb"] > 0 for row in rows)


def test_a_follower_sees_every_entry_once(tmp_path: Path) -> None:
    path = tmp_path / "log" / "metrics.jsonl"
    follower = Follower(path)
    journal = Journal(path, "a", 0)
    journal.write("train", 1, {"loss": 1.0})
    journal.write("train", 2, {"loss": 0.5})
    assert [entry["step"] for entry in follower.new()] == [1, 2]
    with path.open("a") as file:
        file.write('{"stage": "a", "kind": "tr')  # a writer that was killed in the middle of a line
    again = Journal(path, "a", 1)  # resumed from step 1: what came later will come again
    again.write("train", 2, {"loss": 0.5})
    again.write("train", 3, {"loss": 0.4})
    assert [entry["step"] for entry in follower.new()] == [3]
    assert [entry["step"] for entry in read_journal(path)] == [1, 2, 3]
