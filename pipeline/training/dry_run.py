"""Trial steps: one step of a stage at its real batch size, before anything long starts.

Memory that does not suffice and sizes that do not fit show in the first minute, not after a day of extraction.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from models.backbone import Backbone
from models.captioner import Captioner
from models.layers import set_dropout
from models.registry import build_model
from pipeline.config.sections import StageSection
from pipeline.runs.folder import RunFolder
from pipeline.runtime.context import device_for
from pipeline.runtime.cpu import memory_mb, prepare_processor
from pipeline.training.batches import Batch, Captions
from pipeline.training.objectives import check_reward, cross_entropy_objective, scst_objective, stage_reward
from pipeline.training.optimizer import make_optimizer


def dry_run(folder: RunFolder) -> list[dict[str, Any]]:
    """One forward, backward and update of every stage on random inputs and the longest captions; keeps nothing.

    Returns for each stage its name, seconds and memory in MiB (resident on the CPU, peak on a GPU), or the error that
    training would meet. The reward of SCST is checked on the ground truth too.
    """
    folder = folder.on_worker()
    prepare_processor(folder.config.workers.threads_per_worker)
    rows = []
    for stage in folder.config.stages:
        try:
            rows.append(_trial(folder, stage))
        except (ValueError, torch.OutOfMemoryError, MemoryError) as error:
            rows.append({"stage": stage.name, "error": " ".join(str(error).split()) or type(error).__name__})
    return rows


def _trial(folder: RunFolder, stage: StageSection) -> dict[str, Any]:
    config, sizes = folder.config, folder.sizes
    device = device_for(config.workers.gpus_per_worker)
    begin = time.monotonic()
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = build_model(config.model, sizes)
    set_dropout(model, config.model.dropout if stage.dropout is None else stage.dropout)
    backbone = Backbone(config.backbone) if stage.train_backbone else None
    captioner = Captioner(model, backbone).to(device).train()
    optimizer = make_optimizer(captioner, stage.optimizer, stage.lr)
    share = stage.batch_size // (config.workers.num_workers * stage.gradient_accumulation_steps)
    shape = (3, config.backbone.image_size, config.backbone.image_size)
    if backbone is None:
        shape = (folder.metadata.num_tokens, sizes.feature_width, -1)[:2]  # type: ignore[assignment]
    regions = _any_regions(share, folder.metadata.num_tokens, device) if config.features.hdf5 is not None else ()
    batch, train = _longest(folder, stage, torch.randn(share, *shape), share)
    if stage.objective == "cross_entropy":
        objective = cross_entropy_objective(stage, sizes.pad)
    else:
        reward = stage_reward(stage, train.references(), folder.vocabulary, device)
        check_reward(stage, reward)
        ids = torch.tensor(train.column("image_id"))
        objective = scst_objective(stage, reward, ids, sizes.pad, folder.vocabulary.words)
    generator = torch.Generator(device).manual_seed(config.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=stage.precision == "bfloat16"):
        inputs, tokens = batch.inputs.to(device), batch.tokens.to(device)
        moved = Batch(inputs, tokens, batch.images, batch.global_targets, share, *regions)
        objective(captioner, captioner, moved, generator).loss.backward()
    optimizer.step()
    return {"stage": stage.name, "seconds": time.monotonic() - begin, "memory_mb": memory_mb(device)}


def _any_regions(images: int, most: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths (images,), the most in each, and boxes (images, most, 4) anywhere."""
    return torch.full((images,), most, device=device), torch.rand(images, most, 4, device=device)


def _longest(folder: RunFolder, stage: StageSection, inputs: torch.Tensor, share: int) -> tuple[Batch, Any]:
    """A batch with the longest captions of the training split, which need the most memory."""
    import numpy as np

    train = folder.dataset.split(*folder.config.data.train_splits)
    captions = Captions(train, folder.vocabulary)
    counts = captions.target_counts(np.arange(len(captions.image_of)))
    rows = np.resize(np.argsort(-counts, kind="stable"), share * stage.captions_per_image)
    images = captions.image_of[rows[:: stage.captions_per_image]]
    return Batch(inputs, captions.rows(rows), images, int(counts[rows].sum()), share), train
