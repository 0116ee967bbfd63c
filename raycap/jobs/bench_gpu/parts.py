"""The parts of the benchmark: training steps, extraction and decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from raycap.jobs.bench_gpu.measuring import Measured, measure
from raycap.jobs.bench_gpu.training_step import Case, Scale, training_step
from raycap.models.base import CaptionModel, Features
from raycap.models.captioner import build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig
from raycap.models.decoding.graphed_search import GraphedSearch
from raycap.models.decoding.search import beam_search, sample
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.runtime.processor import float32_products

COCO_IMAGES, COCO_PAIRS = 113_287, 566_747  # training images, and pairs of an image and a caption
BEAMS, SAMPLES, TOKENS = 5, 5, 20
BEAM, GRAPHED_BEAM = "beam 5", "beam 5 as a CUDA graph"
PRECISIONS = ("float32", "tf32", "bfloat16")
STAGES = (
    Case("xe_frozen", "cross_entropy", 48, samples=8 * COCO_PAIRS),
    Case("xe_finetune", "cross_entropy", 48, end_to_end=True, samples=2 * COCO_PAIRS),
    Case("scst_frozen", "scst", 48, samples=9 * COCO_IMAGES),
    Case("scst_finetune", "scst", 20, end_to_end=True, samples=COCO_IMAGES),
)


@dataclass(frozen=True)
class Plan:
    """How large everything is; the defaults are the paper's sizes. max_images: per training step."""

    scale: Scale = field(default_factory=Scale)
    max_images: int = 48
    extraction_batches: tuple[int, ...] = (32, 128)
    decoding_batches: tuple[int, ...] = (16, 64, 256, 512)
    vit: BackboneConfig = field(default_factory=partial(BackboneConfig, name="vit_base_patch16_384", image_size=384))
    compiles: bool = True


PAPER = Plan()
_SMALL_SWIN = BackboneConfig(
    name="swin_tiny_patch4_window7_224", image_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4
)
_SMALL_MODEL = ExpansionNetConfig(
    d_model=32, d_ff=64, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, static_expansion=(4, 8),
    dynamic_expansion=2,
)  # fmt: skip
_SMALL = Scale(_SMALL_MODEL, _SMALL_SWIN, vocabulary=60, feature_width=32, tokens=16, words=5, reference_images=8)
_SMALL_VIT = BackboneConfig(name="vit_tiny_patch16_224", image_size=32)
REHEARSAL = Plan(_SMALL, 4, (2,), (2,), _SMALL_VIT, compiles=False)  # on a CPU


@dataclass(frozen=True)
class Row:
    """One line of the table. count: images (or pairs) per call. samples: those of the paper's stage, or 0."""

    part: str
    case: str
    precision: str
    measured: Measured
    count: int
    samples: int = 0

    @property
    def per_second(self) -> float:
        return self.count / self.measured.seconds

    @property
    def hours(self) -> float:
        return self.samples / self.per_second / 3600


Rows = Iterator[tuple[str, Callable[[], Row]]]  # the name of each row, and a function that measures it


def training(plan: Plan, device: torch.device) -> Rows:
    """Steps of the recipe's four stages: each precision, and without checkpointing of activations."""
    for stage in STAGES:
        cases = [replace(stage, precision=precision) for precision in PRECISIONS]
        if stage.end_to_end:
            cases.append(replace(cases[-1], checkpointing=False))
        for case in cases:
            yield step_row("training", case, plan, device)


def compiled(plan: Plan, device: torch.device) -> Rows:
    """Steps of the four stages in bfloat16 with compiled layers. The last part, because compiling takes minutes."""
    if plan.compiles:
        for stage in STAGES:
            case = replace(stage, precision="bfloat16", checkpointing=False, compiled=True)
            yield step_row("compiled", case, plan, device)


def step_row(part: str, case: Case, plan: Plan, device: torch.device) -> tuple[str, Callable[[], Row]]:
    """The name of a training step and the function that measures it."""
    case = replace(case, images=min(case.images, plan.max_images))
    name = case.name
    if case.end_to_end:
        name += ", checkpointing" if case.checkpointing else ", all activations kept"
    if case.compiled:
        name += ", compiled"

    def row() -> Row:
        measured = measure(training_step(case, device, plan.scale), device, counts=not case.compiled)
        return Row(part, name, case.precision, measured, case.images, case.samples)

    return f"{name} {case.precision}", row


def extraction(plan: Plan, device: torch.device) -> Rows:
    """Features of Swin and ViT-B from pixels on the processor's side."""
    for config in (plan.scale.backbone, plan.vit):
        for batch in plan.extraction_batches:
            for precision in PRECISIONS:

                def row(config: BackboneConfig = config, batch: int = batch, precision: str = precision) -> Row:
                    backbone = Backbone(config, with_weights=False).eval().to(device)
                    transform, side = image_transform(config), config.image_size
                    pixels = torch.randint(256, (batch, side, side, 3), dtype=torch.uint8)
                    pixels = pixels.pin_memory() if device.type == "cuda" else pixels

                    def run() -> torch.Tensor:
                        images = transform.normalize(pixels.to(device, non_blocking=True)).contiguous()
                        features: torch.Tensor = backbone(images)
                        return features.half()

                    with torch.no_grad(), products(precision, device):
                        case = f"{config.name}, {batch} images"
                        return Row("extraction", case, precision, measure(run, device), batch)

                yield f"{config.name} {batch} {precision}", row


def decoding(plan: Plan, device: torch.device) -> Rows:
    """Beam search and sampling from features, to 20 tokens. A CPU cannot capture a graph."""
    kinds = (BEAM, GRAPHED_BEAM, "5 samples") if device.type == "cuda" else (BEAM, "5 samples")
    for batch in plan.decoding_batches:
        for kind in kinds:
            for precision in PRECISIONS:

                def row(batch: int = batch, kind: str = kind, precision: str = precision) -> Row:
                    model = endless_model(plan.scale, device)
                    features = Features(torch.randn(batch, plan.scale.tokens, plan.scale.feature_width, device=device))
                    graphed = GraphedSearch([model], beam_size=BEAMS, max_length=TOKENS)

                    def run() -> object:
                        memory = model.encode(features)
                        if kind == BEAM:
                            return beam_search(model, memory, beam_size=BEAMS, max_length=TOKENS)
                        if kind == GRAPHED_BEAM:
                            return graphed([memory])
                        return sample(model, memory, num_samples=SAMPLES, max_length=TOKENS)

                    with torch.no_grad(), products(precision, device):
                        measured = measure(run, device)
                    if kind == GRAPHED_BEAM:  # whose memory torch does not count as allocated
                        measured = replace(measured, memory_gib=torch.cuda.max_memory_reserved() / 2**30)
                    return Row("decoding", f"{kind}, {batch} images", precision, measured, batch)

                yield f"{kind} {batch} {precision}", row


PARTS = (training, extraction, decoding, compiled)


def endless_model(scale: Scale, device: torch.device) -> CaptionModel:
    """A model with random weights whose captions never end before the limit, so that every search takes all steps."""
    torch.manual_seed(0)
    model = build_model(scale.model, scale.sizes)
    with torch.no_grad():
        model.lm_head.bias[scale.sizes.eos] = -1e4  # type: ignore[union-attr, operator]
    return model.to(device).eval()


def products(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which products have this precision."""
    if precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return float32_products(precision) if device.type == "cuda" else nullcontext()
