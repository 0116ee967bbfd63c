"""On a GPU: training steps, beam search and whole stages give what the CPU gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from models.base import Features
from models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from models.decoding import beam_search
from models.registry import build_model
from pipeline.captioning.bundle import load_bundle
from pipeline.captioning.service import CaptionService
from pipeline.features.model_inputs import on_device
from pipeline.runs.journal import read_journal
from pipeline.runtime.context import LocalContext
from pipeline.training.loop import StageJob, StageRun, train_stages
from tests.conftest import small_config
from tests.support.bundles import make_bundle, write_images
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
    """Three float64 steps without dropout: the same metrics and weights. SCST samples by beam search."""
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
        assert numbers == pytest.approx({key: value.item() for key, value in expected.items()}, rel=1e-9, abs=1e-12)
    for key, value in weights[0].items():
        assert torch.allclose(weights[1][key], value, rtol=1e-9, atol=1e-9), key


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.name)
@torch.no_grad()
def test_beam_search_is_the_cpus(config: ModelConfig) -> None:
    """In float64 the same captions and log-probabilities, for images with different numbers of tokens."""
    torch.manual_seed(0)
    model = build_model(config, ModelSizes(12, 40, 12, 1, 2, 0)).double().eval()
    boxes = torch.rand(4, 9, 4, dtype=torch.float64)
    features = Features(torch.randn(4, 9, 12, dtype=torch.float64), torch.tensor([9, 3, 7, 5]), boxes)
    results = []
    for device in (torch.device("cpu"), torch.device(DEVICE)):
        memory = model.to(device).encode(on_device(features, device))
        results.append(beam_search(model, memory, beam_size=3, max_length=12, num_results=3))
    expected, found = results
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.allclose(found.log_probs.cpu(), expected.log_probs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
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
    for (caption, log_prob), (text, value) in zip((row[0] for row in ours), (row[0] for row in expected), strict=True):
        assert caption == text and log_prob == pytest.approx(value, abs=1e-3)
        for service in services:
            assert service.attention(pixels[0], caption).shape[0] == len(caption.split())
            assert service.attribution(pixels[0], caption).gap.isfinite().all()
