"""A training step on random data of a given size, without Ray, MLflow and boto3."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.dropout import set_dropout
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.sections import OptimizerSection, ScstSection
from raycap.pipeline.data.vocabulary import SPECIALS, Vocabulary
from raycap.pipeline.runtime.processor import float32_products
from raycap.pipeline.training.batches import Batch, target_positions
from raycap.pipeline.training.objectives import Objective, cross_entropy_objective, scst_objective
from raycap.pipeline.training.optimizer import make_optimizer
from raycap.pipeline.training.rewards.reward import CiderDReward, WeightedReward
from raycap.pipeline.training.step_metrics import FiniteCheck

LABEL_SMOOTHING = 0.1
DROP_PATH = 0.1  # as in the stages of the paper's recipe
SAMPLING = ScstSection(max_length=21)  # 20 tokens and SOS


@dataclass(frozen=True)
class Scale:
    """The sizes of models, data and batches. The defaults are the paper's. max_images: images per training step."""

    model: ExpansionNetConfig = field(default_factory=ExpansionNetConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    vit: BackboneConfig = field(default_factory=partial(BackboneConfig, name="vit_base_patch16_384", image_size=384))
    vocabulary: int = 10_000
    feature_width: int = 1536
    tokens: int = 144  # image tokens
    words: int = 13  # of a typical caption, as in the paper's cost table
    reference_images: int = 2000  # images with references in the reward's index
    max_images: int = 48
    extraction_batches: tuple[int, ...] = (32, 128)
    decoding_batches: tuple[int, ...] = (16, 64, 256, 512)

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes(self.feature_width, self.vocabulary, max_positions=74, sos=2, eos=0, pad=1)


@dataclass(frozen=True)
class Case:
    """The settings of one training step on `images` images.

    objective: "cross_entropy" or "scst". captions: per image, for cross entropy. samples: images or pairs that the
    paper's stage processes in all its epochs.
    """

    name: str
    objective: str
    images: int
    captions: int = 1
    dropout: str = "reference"
    precision: str = "float32"
    end_to_end: bool = False
    checkpointing: bool = True
    compiled: bool = False
    samples: int = 0

    @property
    def title(self) -> str:
        """The name of the stage, and how its step is computed."""
        parts = [self.name]
        if self.end_to_end:
            parts.append("checkpointing" if self.checkpointing else "all activations kept")
        if self.compiled:
            parts.append("compiled")
        return ", ".join(parts)


def training_step(case: Case, device: torch.device, scale: Scale = Scale()) -> Callable[[], None]:
    """The function that makes one training step: forward, backward and update. Each call gets the same random batch.

    If the device is a GPU, each call copies the batch to it, and does not wait for the end of the step.
    """
    torch.manual_seed(0)
    sizes = scale.sizes
    model = build_model(replace(scale.model, expansion_dropout=case.dropout), sizes)  # type: ignore[arg-type]
    set_dropout(model, 0.1 if case.objective == "scst" else 0.3)  # the dropout of the paper's stages
    backbone = None
    if case.end_to_end:
        config = replace(scale.backbone, gradient_checkpointing=case.checkpointing, drop_path=DROP_PATH)
        backbone = Backbone(config, with_weights=False).to(memory_format=torch.channels_last)
    captioner = Captioner(model, backbone).to(device).train()
    if case.compiled:
        captioner.compile_layers()
    optimizer = make_optimizer(captioner, OptimizerSection(), 1e-5)
    on_gpu = device.type == "cuda"
    batch = _random_batch(case, scale).pinned() if on_gpu else _random_batch(case, scale)
    objective, generator = _objective(case, device, scale), torch.Generator(device)
    finite, number = FiniteCheck(case.name, 0, defers=on_gpu), 0

    def step() -> None:
        nonlocal number
        optimizer.zero_grad(set_to_none=True)
        with float32_products(case.precision):
            on_device = batch.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bfloat16"):
                output = objective(captioner, captioner, on_device, generator)  # not wrapped by DDP, in one process
            output.loss.backward()
            norm = nn.utils.clip_grad_norm_(captioner.parameters(), math.inf)
            finite.add(number, {"loss": output.metrics["loss"], "gradient norm": norm})
            optimizer.step()
        number += 1
        if number % 20 == 0:
            finite.require()

    return step


def _random_batch(case: Case, scale: Scale) -> Batch:
    """A batch of random pixels, or of float16 features as a store has them, and captions of `scale.words` words."""
    side, sizes = scale.backbone.image_size, scale.sizes
    if case.end_to_end:
        features = Features(torch.randint(256, (case.images, side, side, 3), dtype=torch.uint8))
    else:
        features = Features(torch.randn(case.images, scale.tokens, scale.feature_width).half())
    # The special tokens have the first ids, so random words have ids from len(SPECIALS) on.
    tokens = torch.randint(len(SPECIALS), scale.vocabulary, (case.images * case.captions, scale.words + 2))
    tokens[:, 0], tokens[:, -1] = sizes.sos, sizes.eos
    return Batch(
        features,
        tokens,
        target_positions(tokens, sizes.pad),
        images=torch.arange(case.images),
        global_targets=tokens[:, 1:].numel(),
        global_images=case.images,
        transform=image_transform(scale.backbone),
    )


def _objective(case: Case, device: torch.device, scale: Scale) -> Objective:
    """The objective of a case. For SCST, the reward is CIDEr-D with random references."""
    stage: Any = SimpleNamespace(label_smoothing=LABEL_SMOOTHING, sampling=SAMPLING)
    if case.objective == "cross_entropy":
        return cross_entropy_objective(stage)
    words = [f"w{number:05d}" for number in range(scale.vocabulary - len(SPECIALS))]
    vocabulary = Vocabulary(("EOS", "PAD", "SOS", "UNK", *words))
    rng = np.random.default_rng(0)
    texts = [
        [" ".join(words[number] for number in rng.integers(0, min(2000, len(words)), 12)) for _ in range(5)]
        for _ in range(max(scale.reference_images, case.images))
    ]
    cider_d = CiderDReward(texts, vocabulary, eos=True, device=device)
    reward = WeightedReward(SAMPLING.reward, cider_d, texts.__getitem__, vocabulary, ENGLISH)
    return scst_objective(stage, reward, scale.sizes.pad)
