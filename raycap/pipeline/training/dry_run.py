"""The dry run: one step of every stage at its real batch size, before any long computation starts.

If memory is too small, or sizes do not fit together, a run then fails in its first minute instead of after a day of
extraction.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from raycap.models.base import Features
from raycap.models.encoders.backbone import image_transform
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.processor import device_for, float32_products, memory_mb, prepare_processor
from raycap.pipeline.training.batches import Batch, CaptionTokens, captions_by_stage, target_positions
from raycap.pipeline.training.loop import feature_computer, feature_dtype, stage_captioner, with_features
from raycap.pipeline.training.objectives import make_objective
from raycap.pipeline.training.optimizer import WeightAverage, make_optimizer

NUM_STEPS = 2  # on a GPU, because the second step needs more memory: the optimizer then has its moments


@dataclass(frozen=True)
class DryRunResult:
    """The result of a stage's dry run. error: the message of the error that training would raise, if any."""

    stage: str
    seconds: float
    memory_mb: float  # MiB of resident memory on the CPU, or of peak memory on a GPU
    error: str | None = None


def dry_run(folder: RunFolder) -> Iterator[DryRunResult]:
    """Tries each stage for a step or two, on random features and the longest captions, and yields the results.

    Writes no file.
    """
    folder = folder.on_worker()
    workers = folder.config.workers
    prepare_processor(workers.threads)
    device = device_for(workers.gpus_per_worker)
    captions = captions_by_stage(folder, folder.config.stages)
    for stage in folder.config.stages:
        begin, error = time.monotonic(), None
        try:
            _try_steps(folder, stage, captions[stage.name], device)
        except (ValueError, torch.OutOfMemoryError, MemoryError) as raised:
            error = one_line(raised)
            if not isinstance(raised, ValueError):
                error += f"; raise stages.{stage.name}.gradient_accumulation_steps"
                error += ", or set backbone.gradient_checkpointing to true" if stage.train_backbone else ""
        yield DryRunResult(stage.name, time.monotonic() - begin, memory_mb(device), error)


def _try_steps(folder: RunFolder, stage: StageSection, captions: CaptionTokens, device: torch.device) -> None:
    """Trains a stage for one step, or on a GPU for NUM_STEPS."""
    torch.manual_seed(folder.config.seed)
    if device.type == "cuda":
        gc.collect()  # frees tensors that an earlier stage has left by failing
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train = folder.training_images(stage)
    captioner = stage_captioner(folder, stage, device).train()
    optimizer = make_optimizer(captioner, stage.optimizer, stage.lr)
    average = None if stage.ema is None else WeightAverage(captioner, stage.ema)
    objective = make_objective(stage, captioner, train, folder.vocabulary, folder.config.data.language)
    computer = feature_computer(folder, stage, device, undecided="float32")  # needs more memory than bfloat16
    batch = with_features(_longest_batch(folder, stage, captions), computer).to(device, feature_dtype(stage))
    generator = torch.Generator(device).manual_seed(folder.config.seed)
    for step in range(NUM_STEPS if device.type == "cuda" else 1):
        optimizer.zero_grad(set_to_none=True)
        with float32_products(stage.precision):
            with torch.autocast(device.type, torch.bfloat16, enabled=stage.precision == "bfloat16"):
                loss = objective(captioner, captioner, batch, generator).loss
            loss.backward()
        optimizer.step()
        if average is not None:
            average.update(step)


def _longest_batch(folder: RunFolder, stage: StageSection, captions: CaptionTokens) -> Batch:
    """The micro-batch that needs the most memory: the largest, with random features and the longest captions."""
    config, num_tokens = folder.config, folder.metadata.num_tokens
    _, size = config.micro_batch_sizes(stage)
    count = size * stage.captions_per_image
    rows = np.resize(captions.longest(count), count)  # np.resize repeats rows if there are too few
    # Captions need not belong to the images of the batch, because only the lengths of captions matter here.
    images = captions.images_of(rows[:: stage.captions_per_image])
    side, width, transform = config.backbone.image_size, folder.metadata.sizes.feature_width, None
    if stage.train_backbone or config.features.store == "never":
        transform = image_transform(config.backbone)
        features = Features(torch.randint(256, (size, side, side, 3), dtype=torch.uint8))
    else:
        features = Features(torch.randn(size, num_tokens, width))
    if not config.has_backbone:  # every image has the largest number of regions
        features = Features(features.tokens, torch.full((size,), num_tokens), torch.rand(size, num_tokens, 4))
    tokens, targets = captions.padded(rows), int(captions.target_counts(rows).sum())
    positions = target_positions(tokens, captions.pad)
    return Batch(features, tokens, positions, torch.from_numpy(images), targets, size, transform)
