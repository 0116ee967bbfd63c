"""Small runs for tests: prepared with stored features, trained in this process, or started as `raycap run`."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from raycap.models.config import seed_of_key
from raycap.models.encoders.backbone import Backbone
from raycap.models.encoders.transform import augmented
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.images import decode_image, read_image_file
from raycap.pipeline.features.extraction import Extractor, with_views
from raycap.pipeline.features.regions import import_regions
from raycap.pipeline.features.store import feature_key, write_shard
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import load_weights
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.loop import StageRun
from tests.conftest import ROOT, small_config

STAGES = ("xe_frozen", "xe_finetune", "scst_frozen", "scst_finetune")
FROZEN_STAGES = ("xe_frozen", "scst_frozen")
SMALL_MODEL: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
MESHED_MEMORY = {"name": "meshed_memory", "num_memory_slots": 4}


def run_ranks(function: Callable[..., None], count: int, *arguments: Any) -> None:
    """Calls `function(rank, *arguments)` in `count` processes, which are forks of one that has imported torch."""
    multiprocessing.set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
        function, arguments, count, start_method="forkserver"
    )


class Killed(Exception):
    """Raised by a test in place of a kill -9."""


def break_each_stage_once(monkeypatch: pytest.MonkeyPatch, at: int) -> set[str]:
    """Kills each stage once, before its step `at`, when its checkpoints are written. Returns those killed so far."""
    original, broken = StageRun.step, set[str]()

    def step(self: StageRun, number: int, batches: list[Batch]) -> dict[str, torch.Tensor]:
        if number == at and self.stage.name not in broken:
            broken.add(self.stage.name)
            self.output.wait()
            raise Killed
        return original(self, number, batches)

    monkeypatch.setattr(StageRun, "step", step)
    return broken


def empty_run(path: Path, home: StoragePath | None = None) -> RunFolder:
    """The folder of a small run, without any file."""
    return RunFolder(path, parse_config(small_config(path)), home)


def prepare_run(storage: Path | dict[str, Any], **changes: Any) -> tuple[RunFolder, StoragePath]:
    """A small run's folder and a store with the features of its initial backbone, computed without Ray."""
    return with_features(parse_config(small_config(storage, **changes)))


def with_features(config: RunConfig) -> tuple[RunFolder, StoragePath]:
    """A run's folder, and a store with the features of its initial backbone or of regions, made without Ray."""
    folder = prepare(config)
    if not config.has_backbone:
        store, unreadable = import_regions(folder.dataset, config)
        assert not unreadable
        return folder, store
    weights = folder.path / "init" / "backbone.safetensors"
    extractor = Extractor(config.backbone, weights, config.features, config.data.max_pixels)
    store, options = config.storage_place / "features" / feature_key(extractor.describe()), config.storage.options
    backbone, transform = Backbone(config.backbone).eval(), extractor.transform
    load_weights(backbone, weights)
    dataset, images = with_views(folder.dataset, config), []
    for uri, key in zip(dataset.column("uri"), dataset.column("key"), strict=True):
        image, seed = decode_image(read_image_file(StoragePath(uri, options)), 10**6), seed_of_key(key)
        augmentation, resize = config.features.augmentation, transform.resize
        images.append(resize(image) if seed is None else augmented(image, augmentation, seed, resize))
    pixels = transform.normalize(torch.from_numpy(np.stack(images)))
    with torch.inference_mode():
        write_shard(store, dataset.column("key"), backbone(pixels).numpy().astype(np.float16))
    return folder, store


def prepare_region_run(storage: Path, model: dict[str, Any], **changes: Any) -> tuple[RunFolder, StoragePath]:
    """A run of the frozen stages, without dropout, on the synthetic data set's regions, and the store of these."""
    values = small_config(storage, model=SMALL_MODEL | model, **changes)
    values["features"] = {"hdf5": "synthetic", "max_regions": 4}
    del values["backbone"]
    values["stages"] = [stage | {"dropout": 0.0} for stage in values["stages"] if not stage.get("train_backbone")]
    return with_features(parse_config(values))


def best_weights(stage: Path) -> dict[str, torch.Tensor]:
    """The tensors of a finished stage's best validation, by file and name."""
    (best,) = stage.glob("best-*")
    return {
        f"{path.name}:{key}": value for path in best.glob("*.safetensors") for key, value in load_file(path).items()
    }


def weights_of_stages(storage: Path, stages: Sequence[str]) -> dict[str, torch.Tensor]:
    """`best_weights` of several stages, by stage, file and name. The storage has one run."""
    (run,) = storage.glob("runs/*")
    return {
        f"{stage}/{name}": value for stage in stages for name, value in best_weights(run / "stages" / stage).items()
    }


def assert_same_weights(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fails unless both have the same names, at least one, with bit-identical tensors."""
    assert ours and ours.keys() == expected.keys()
    for name in ours:
        assert torch.equal(ours[name], expected[name]), name


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def start_raycap(*arguments: str) -> subprocess.Popen[str]:
    """`raycap` with these arguments in a process of its own, its output unbuffered and in one stream."""
    command = [sys.executable, "-u", "-m", "raycap", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    """Everything that the process printed until its end."""
    try:
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    return output


def run_with_own_cache(config: Path, cache: Path) -> str:
    """What `raycap run` prints in a process with its own cache, as on a machine of its own."""
    environment = {**os.environ, "RAYCAP_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raycap", "run", str(config)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
