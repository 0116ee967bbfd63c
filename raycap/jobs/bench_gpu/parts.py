"""The parts of the benchmark: training steps, extraction and decoding.

Each part yields pairs of a row of the table, still without results, and the function that measures the row.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TypeVar

import torch

from raycap.jobs.bench_gpu.training_step import Case, Scale, training_step
from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig
from raycap.models.decoding.graphed_search import GraphedSearch
from raycap.models.decoding.search import beam_search, sample
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.runtime.processor import float32_products, memory_mb

COCO_IMAGES, COCO_PAIRS = 113_287, 566_747  # training images, and pairs of an image and a caption
BEAMS, SAMPLES, TOKENS = 5, 5, 20
BEAM, GRAPHED_BEAM = "beam 5", "beam 5 as a CUDA graph"
PRECISIONS = ("float32", "tf32", "bfloat16")
GROUPS = 3  # groups of calls that are timed
GROUP_S = 0.5  # approximate seconds of a group
STAGES = (
    Case("xe_frozen", "cross_entropy", 48, samples=8 * COCO_PAIRS),
    Case("xe_finetune", "cross_entropy", 48, end_to_end=True, samples=2 * COCO_PAIRS),
    Case("scst_frozen", "scst", 48, samples=9 * COCO_IMAGES),
    Case("scst_finetune", "scst", 20, end_to_end=True, samples=COCO_IMAGES),
)
PAPER = Scale()
_SMALL_SWIN = BackboneConfig(
    name="swin_tiny_patch4_window7_224", image_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4
)
_SMALL_MODEL = ExpansionNetConfig(
    d_model=32, d_ff=64, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, static_expansion=(4, 8),
    dynamic_expansion=2,
)  # fmt: skip
REHEARSAL = Scale(  # sizes for a quick test on a CPU
    _SMALL_MODEL, _SMALL_SWIN, BackboneConfig(name="vit_tiny_patch16_224", image_size=32), vocabulary=60,
    feature_width=32, tokens=16, words=5, reference_images=8, max_images=4, extraction_batches=(2,),
    decoding_batches=(2,),
)  # fmt: skip


@dataclass
class Row:
    """One row of the table. seconds, memory_gib: of one call. count: images, or pairs, per call.

    samples: how many images, or pairs of image and caption, the paper's whole recipe on COCO processes with this kind
    of call. 0 if the recipe has no such call.
    """

    part: str
    case: str
    precision: str
    count: int
    samples: int = 0
    seconds: float = math.nan
    memory_gib: float = math.nan

    @property
    def per_second(self) -> float:
        return self.count / self.seconds

    @property
    def hours(self) -> float:
        """The hours that this part of the recipe would take at this speed."""
        return self.samples / self.per_second / 3600


Measured = Callable[[], tuple[float, float]]  # measures the case of a row; returns seconds per call and GiB
Rows = Iterator[tuple[Row, Measured]]
Result = TypeVar("Result")


def measure(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The seconds per call, and the peak of allocated memory in GiB.

    After two calls to warm up, GROUPS groups of calls are timed. The result is the median of their seconds per call.
    The time of a group includes its work on a GPU. With --rehearse, on the CPU, a group is one call.
    """
    for _ in range(2):
        timed(call, device)
    size = 1
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _, single = timed(call, device)
        size = max(1, min(50, round(GROUP_S / single)))

    def group() -> None:
        for _ in range(size):
            call()

    seconds = statistics.median(timed(group, device)[1] for _ in range(GROUPS)) / size
    return seconds, memory_mb(device) / 1024


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[Result, float]:
    """The result of a call, and its seconds. On a GPU, the seconds include the work that the call has queued."""
    begin = time.perf_counter()
    result = call()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def training(scale: Scale, device: torch.device) -> Rows:
    """Steps of the recipe's four stages in each precision. End-to-end stages also run without checkpointing."""
    for stage in STAGES:
        cases = [replace(stage, precision=precision) for precision in PRECISIONS]
        if stage.end_to_end:
            cases.append(replace(cases[-1], checkpointing=False))
        for case in cases:
            yield training_row("training", case, scale, device)


def compiled(scale: Scale, device: torch.device) -> Rows:
    """Steps of the four stages in bfloat16 with compiled layers. Runs as the last part, because compiling is slow."""
    if device.type != "cuda":
        return
    for stage in STAGES:
        case = replace(stage, precision="bfloat16", checkpointing=False, compiled=True)
        yield training_row("compiled", case, scale, device)


def training_row(part: str, case: Case, scale: Scale, device: torch.device) -> tuple[Row, Measured]:
    """The row of a training step, and the function that measures it."""
    case = replace(case, images=min(case.images, scale.max_images))
    row = Row(part, case.title, case.precision, case.images, case.samples)
    return row, lambda: measure(training_step(case, device, scale), device)


def extraction(scale: Scale, device: torch.device) -> Rows:
    """Extraction of features by Swin and ViT-B. Each call also copies the pixels to the device."""
    configs = (scale.backbone, scale.vit)
    for config, batch, precision in product(configs, scale.extraction_batches, PRECISIONS):
        samples = 2 * 123_287 if config is scale.backbone else 0  # because the recipe extracts all images twice
        row = Row("extraction", f"{config.name}, {batch} images", precision, batch, samples)
        yield row, partial(measure_extraction, config, row, device)


@torch.no_grad()
def measure_extraction(config: BackboneConfig, row: Row, device: torch.device) -> tuple[float, float]:
    """Measures the extraction of features from a batch of images."""
    backbone = Backbone(config, with_weights=False).eval().to(device)
    transform, side = image_transform(config), config.image_size
    pixels = torch.randint(256, (row.count, side, side, 3), dtype=torch.uint8)
    pixels = pixels.pin_memory() if device.type == "cuda" else pixels

    def run() -> torch.Tensor:
        images = transform.normalize(pixels.to(device, non_blocking=True)).contiguous()
        features: torch.Tensor = backbone(images)
        return features.half()

    with products(row.precision, device):
        return measure(run, device)


def decoding(scale: Scale, device: torch.device) -> Rows:
    """Beam search and sampling from features, to 20 tokens. Only a GPU can run the search as a graph."""
    kinds = (BEAM, GRAPHED_BEAM, "5 samples") if device.type == "cuda" else (BEAM, "5 samples")
    for batch, kind, precision in product(scale.decoding_batches, kinds, PRECISIONS):
        samples = 20 * 5000 if kind in (BEAM, GRAPHED_BEAM) else 0  # 20 validations on 5,000 images
        row = Row("decoding", f"{kind}, {batch} images", precision, batch, samples)
        yield row, partial(measure_decoding, kind, row, scale, device)


@torch.no_grad()
def measure_decoding(kind: str, row: Row, scale: Scale, device: torch.device) -> tuple[float, float]:
    """Measures the encoder and a search for a batch of images."""
    torch.manual_seed(0)
    model = build_model(scale.model, scale.sizes)
    model.lm_head.bias[scale.sizes.eos] = -1e4  # type: ignore[union-attr, operator]  # so that no caption ends early
    model = model.to(device).eval()
    features = Features(torch.randn(row.count, scale.tokens, scale.feature_width, device=device))
    graphed = GraphedSearch([model], beam_size=BEAMS, max_length=TOKENS)

    def run() -> object:
        memory = model.encode(features)
        if kind == BEAM:
            return beam_search(model, memory, beam_size=BEAMS, max_length=TOKENS)
        if kind == GRAPHED_BEAM:
            return graphed([memory])
        return sample(model, memory, num_samples=SAMPLES, max_length=TOKENS)

    with products(row.precision, device):
        seconds, memory = measure(run, device)
    if kind == GRAPHED_BEAM:  # reserved memory, because torch does not count a graph's as allocated
        memory = torch.cuda.max_memory_reserved() / 2**30
    return seconds, memory


PARTS = (training, extraction, decoding, compiled)


def products(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products and convolutions are computed in the given precision."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else float32_products(precision)
