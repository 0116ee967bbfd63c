"""On a GPU: training steps, beam search and whole stages give what the CPU gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raycap.models.base import Features, map_tensors
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import (
    ClustFormerConfig,
    ExpansionNetConfig,
    MeshedMemoryConfig,
    ModelConfig,
    ModelSizes,
)
from raycap.models.decoding.graphed_search import GraphedSearch
from raycap.models.decoding.search import beam_search
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.evaluation.captioning import search as captioning
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.search import caption_images
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.features.model_inputs import Images, on_device
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.context import LocalContext, any_rank
from raycap.pipeline.runtime.processor import float32_products
from raycap.pipeline.training.loop import StageJob, StageRun, data_parallel, train_stages
from raycap.pipeline.training.step_metrics import DivergedError
from tests.conftest import small_config
from tests.support.bundles import make_bundle, write_images
from tests.support.golden import EXPANSIONNET as GOLDEN
from tests.support.golden import import_expansionnet
from tests.support.runs import STAGES, prepare_run

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
SMALL = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
MODELS = (
    ExpansionNetConfig(static_expansion=(4, 8), dynamic_expansion=2, **SMALL),  # type: ignore[arg-type]
    MeshedMemoryConfig(name="meshed_memory", num_memory_slots=4, **SMALL),  # type: ignore[arg-type]
    ClustFormerConfig(name="clustformer", inputs="regions", sampling=1, region_rows=2, **SMALL),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("name", STAGES)
def test_a_training_step_is_the_cpus(tmp_path: Path, name: str) -> None:
    """Three float64 steps without dropout: the same metrics and weights. SCST samples by beam search.

    Stages that read images are less close, because pixels are normalized in float32: a GPU multiplies by 1 / 255, and
    its pixels differ in the last bit.
    """
    tolerance = 1e-6 if name.endswith("finetune") else 1e-9
    stages = small_config(tmp_path)["stages"]
    for stage in stages:
        stage |= {"precision": "float64", "dropout": 0.0, "drop_path": 0.0}
        stage["optimizer"] = {"name": "adam", "eps": 1e-3}  # RAdam would turn the rounding of zeros into steps
        if stage["objective"] == "scst":
            stage["scst"] |= {"sampler": "beam"}
    folder, store = prepare_run(tmp_path, stages=stages)
    metrics, weights = [], []
    for device in ("cpu", DEVICE):
        run = StageRun(LocalContext(device), folder, folder.config.stage(name), StageJob(folder, STAGES, store))
        run.captioner.train()
        metrics.append([run.step(step, run.batches.at(step)) for step in range(3)])
        weights.append({key: value.cpu() for key, value in run.captioner.state_dict().items()})
    for expected, found in zip(*metrics, strict=True):
        numbers = {key: value.item() for key, value in found.items()}
        assert numbers == pytest.approx(
            {key: value.item() for key, value in expected.items()}, rel=tolerance, abs=tolerance / 1000
        )
    for key, value in weights[0].items():
        assert torch.allclose(weights[1][key], value, rtol=tolerance, atol=tolerance), key


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.name)
@torch.no_grad()
def test_a_captured_search_is_the_plain_one(config: ModelConfig, precision: str) -> None:
    """Captured once, and replayed for two more batches and for changed weights."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = build_model(config, ModelSizes(12, 40, 12, 1, 2, 0)).to(DEVICE, dtype).eval()
    graphed = GraphedSearch([model], beam_size=3, max_length=12, num_results=3)
    for number in range(5):
        features = Features(torch.randn(4, 9, 12), torch.tensor([9, 3, 7, 5]), torch.rand(4, 9, 4))
        features = map_tensors(
            on_device(features, torch.device(DEVICE)), lambda x: x.to(dtype) if x.is_floating_point() else x
        )
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bfloat16"):
            memory = model.encode(features)
            expected = beam_search(model, memory, beam_size=3, max_length=12, num_results=3)
            found = graphed([memory])
        assert len(graphed.graphs) == (number > 0)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
        if number == 3:
            model.lm_head.weight.mul_(0.5)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_every_stage_trains(tmp_path: Path, precision: str) -> None:
    """All stages with sampling, dropout and autocast, checkpoints and validation."""
    stages = small_config(tmp_path)["stages"]
    for stage in stages:
        stage |= {"precision": precision}
    folder, store = prepare_run(tmp_path, stages=stages)
    train_stages(LocalContext(DEVICE), StageJob(folder, STAGES, store))
    for name in STAGES:
        result = folder.result(name)
        assert result is not None and result.steps > 1 and math.isfinite(result.best_score)
    assert all(entry["memory_mb"] > 0 for entry in read_journal(folder.journal) if entry["kind"] == "train")


def test_a_service_captions_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    bundle, names = make_bundle(tmp_path / "bundle"), write_images(tmp_path / "images", 3)
    services = [CaptionService(load_bundle(bundle), max_length=9, device=device) for device in (None, "cpu")]
    assert [service.device.type for service in services] == [DEVICE, "cpu"]
    pixels = torch.stack([services[0].pixels(Path(name).read_bytes()) for name in names])
    ours, expected = (service.caption(pixels) for service in services)
    for found, other in zip(ours, expected, strict=True):
        caption = found.caption
        assert caption is not None and caption == other.caption
        assert found.log_prob == pytest.approx(other.log_prob, abs=1e-3)
        for service in services:
            explanation = service.explain(pixels[0], caption)
            assert explanation.attention.shape[0] == len(caption.split())


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 1e-2), ("bfloat16", 3e-2)])
@torch.no_grad()
def test_the_reference_logits(tmp_path: Path, precision: str, tolerance: float) -> None:
    """ExpansionNet v2's golden values, relative to the largest logit of each row.

    In bfloat16 one row may be far off: where all positive parts of an expansion are near 0, its weights jump with their
    signs. On a CPU, noise of 0.3 % in the weights moves the seventh row by 29 %.
    """
    arrays = {name: torch.from_numpy(value) for name, value in np.load(GOLDEN / "expected.npz").items()}
    pad = json.loads((GOLDEN / "expected.json").read_text())["pad"]
    model = import_expansionnet("checkpoint.pth", tmp_path / "bundle").captioner.model.to(DEVICE).eval()
    lengths = arrays["features"].shape[1] - arrays["feature_padding"]
    features = on_device(Features(arrays["features"], lengths), torch.device(DEVICE))
    with float32_products(precision), torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(features, arrays["tokens"][:, :-1].to(DEVICE)).float().cpu()
    error = (logits - arrays["logits"]).abs().amax(-1) / arrays["logits"].abs().amax(-1)
    ordered = error[arrays["tokens"][:, 1:] != pad].sort().values
    assert ordered[-2 if precision == "bfloat16" else -1] < tolerance


def test_a_loss_that_is_not_finite_is_found_before_weights_are_saved(tmp_path: Path) -> None:
    stages = small_config(tmp_path)["stages"][:1]
    folder, store = prepare_run(tmp_path, stages=stages)
    run = StageRun(LocalContext(DEVICE), folder, folder.config.stages[0], StageJob(folder, STAGES[:1], store))
    assert run.finite.defers and run.batches.pins
    with torch.no_grad():
        next(iter(run.captioner.model.parameters())).fill_(float("nan"))
    with pytest.raises(DivergedError, match="stage xe_frozen, step 0, rank 0"):
        run.run()
    assert not list(folder.stage("xe_frozen").glob("step-*"))


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_a_process_group_of_nccl(tmp_path: Path, gradient_dtype: str) -> None:
    """One process: the exchange runs and changes nothing but the rounding. Small messages go over gloo."""
    stages = small_config(tmp_path)["stages"][:1]
    folder, store = prepare_run(tmp_path, stages=[stages[0] | {"gradient_dtype": gradient_dtype, "dropout": 0.0}])
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        context = LocalContext(DEVICE)
        context.control_group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        job, section = StageJob(folder, STAGES[:1], store), folder.config.stages[0]
        plain, parallel = (StageRun(context, folder, section, job) for _ in range(2))
        parallel.wrapped = data_parallel(parallel.captioner, section)
        for step in range(3):
            losses = [run.step(step, run.batches.at(step))["loss"].item() for run in (plain, parallel)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        context.world_size = 2  # asks the group of one process, as several would ask
        assert any_rank(context, True, False)() == [True, False]
    finally:
        dist.destroy_process_group()


def test_a_search_without_memory_takes_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the memory that torch may take, so that the first batches do not fit."""
    folder, store = prepare_run(tmp_path)
    images = folder.dataset.split("train")
    inputs = Images(images, open_store(store, folder.config.features), 10**6, 1)
    model = build_model(folder.config.model, folder.metadata.sizes)
    sizes: list[int] = []
    original = captioning._caption_batch

    def limited(*arguments: Any) -> Any:
        *_, graphs, rows = arguments
        assert graphs is None  # evaluation.cuda_graph is off
        sizes.append(len(rows))
        if len(rows) > 4:
            torch.empty(2**50, dtype=torch.uint8, device=DEVICE)  # raises OutOfMemoryError
        return original(*arguments)

    monkeypatch.setattr(captioning, "_caption_batch", limited)
    settings = EvaluationSection(beam_size=2, max_length=8, batch_size=16)
    found = caption_images(Captioner(model).to(DEVICE), inputs, folder.vocabulary, settings, LocalContext(DEVICE))
    assert len(found) == len(images) and sizes[0] == 16 and max(sizes[2:]) <= 8 and min(sizes) >= 1
