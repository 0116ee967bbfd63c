"""One step of every stage at its real batch size, before anything long starts.

Too little memory and sizes that do not fit together show in the first minute, not after a day of extraction.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from models.base import Features
from pipeline.config.sections import StageSection
from pipeline.data.dataset import Dataset
from pipeline.runs.folder import RunFolder
from pipeline.runtime.context import device_for
from pipeline.runtime.cpu import memory_mb, prepare_processor
from pipeline.training.batches import Batch, CaptionTokens
from pipeline.training.loop import feature_dtype, stage_captioner
from pipeline.training.objectives import check_reward, make_objective
from pipeline.training.optimizer import make_optimizer


@dataclass(frozen=True)
class DryRunResult:
    """A stage's dry run; `error` is None, or the error that training would meet."""

    stage: str
    seconds: float
    memory_mb: float  # resident on the CPU, peak on a GPU
    error: str | None = None


def dry_run(folder: RunFolder) -> list[DryRunResult]:
    """One forward, backward and update of every stage on random features and the longest captions; writes nothing.

    Also checks the reward of SCST on the ground truth.
    """
    folder = folder.on_worker()
    prepare_processor(folder.config.workers.threads_per_worker)
    train = folder.dataset.split(*folder.config.data.train_splits)
    device = device_for(folder.config.workers.gpus_per_worker)
    results = []
    for stage in folder.config.stages:
        begin, error = time.monotonic(), None
        try:
            _one_step(folder, stage, train, device)
        except (ValueError, torch.OutOfMemoryError, MemoryError) as raised:
            error = " ".join(str(raised).split()) or type(raised).__name__
        results.append(DryRunResult(stage.name, time.monotonic() - begin, memory_mb(device), error))
    return results


def _one_step(folder: RunFolder, stage: StageSection, train: Dataset, device: torch.device) -> None:
    torch.manual_seed(folder.config.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    captioner = stage_captioner(folder, stage, device).train()
    optimizer = make_optimizer(captioner, stage.optimizer, stage.lr)
    objective, reward = make_objective(stage, train, folder.vocabulary, device)
    if reward is not None:
        check_reward(stage, reward)
    batch = _longest_batch(folder, stage, train).to(device, feature_dtype(stage))
    generator = torch.Generator(device).manual_seed(folder.config.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=stage.precision == "bfloat16"):
        objective(captioner, captioner, batch, generator).loss.backward()
    optimizer.step()


def _longest_batch(folder: RunFolder, stage: StageSection, train: Dataset) -> Batch:
    """A worker's micro-batch with the longest captions of the training split, which need the most memory."""
    size = stage.batch_size // (folder.config.workers.num_workers * stage.gradient_accumulation_steps)
    captions = CaptionTokens(train, folder.vocabulary)
    counts = captions.target_counts(np.arange(len(captions.image_of)))
    rows = np.resize(np.argsort(-counts, kind="stable"), size * stage.captions_per_image)
    images = captions.image_of[rows[:: stage.captions_per_image]]
    features = _random_features(folder, stage, size)
    return Batch(features, captions.padded(rows), images, int(counts[rows].sum()), size)


def _random_features(folder: RunFolder, stage: StageSection, images: int) -> Features:
    """Pixels for a stage that trains the backbone, else features; regions have full length and random boxes."""
    config, num_tokens = folder.config, folder.metadata.num_tokens
    if stage.train_backbone:
        return Features(torch.randn(images, 3, config.backbone.image_size, config.backbone.image_size))
    tokens = torch.randn(images, num_tokens, folder.sizes.feature_width)
    if config.has_backbone:
        return Features(tokens)
    return Features(tokens, torch.full((images,), num_tokens), torch.rand(images, num_tokens, 4))
