"""`raycap bench gpu`: speed and memory of training, extraction and decoding on one GPU, without data or network.

Each part of the benchmark yields pairs of a row of the table, still without results, and the function that measures the
row. Neither Ray nor MLflow and boto3 are needed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import typer
from torch import nn

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.decoding.graphed_search import GraphedSearch
from raycap.models.decoding.search import beam_search, sample
from raycap.models.dropout import set_dropout
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.sections import OptimizerSection, ScstSection
from raycap.pipeline.data.vocabulary import SPECIALS, Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.processor import float32_products, memory_mb, prepare_processor
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
        backbone = Backbone(config, with_weights=False)
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
        images = transform.normalize(pixels.to(device, non_blocking=True))
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


COLUMNS = "{:<12}{:<46}{:<10}{:>9}{:>10}{:>7}{:>7}"


def bench_gpu(
    out: Annotated[Path, typer.Option(help="The JSON file of the results.")] = Path("bench-gpu.json"),
    minutes: Annotated[float, typer.Option(min=0.01, help="No measurement starts after this time.")] = 25,
    rehearse: Annotated[bool, typer.Option(help="Run every part on the CPU at a small size, to test it.")] = False,
) -> None:
    """Speed of training, extraction and decoding on one GPU.

    It needs neither data nor a network; weights and data are random. The column `hours` has the hours of this part of
    the paper's recipe on COCO. The whole recipe took 60 hours of an A100 (Table VII). Cases that fail, and those for
    which no time remains, are named and left out.

    Example: raycap bench gpu --out results/gpu.json --minutes 15
    """
    prepare_processor(1 if rehearse else None)
    if not rehearse and not torch.cuda.is_available():
        raise UserError("torch sees no GPU; run this on a machine with one, or give --rehearse to test it on the CPU")
    device = torch.device("cpu" if rehearse else "cuda")
    scale = REHEARSAL if rehearse else PAPER
    begin = time.monotonic()
    rows: list[Row] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("[]")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another file") from error
    print(describe(device))
    print(COLUMNS.format("part", "case", "precision", "s/call", "images/s", "GiB", "hours"))
    for part in PARTS:
        for row, measure_row in part(scale, device):
            name = f"{row.part:<12}{row.case}, {row.precision}"
            if time.monotonic() - begin > 60 * minutes:
                print(f"{name}: left out, {minutes:g} minutes have passed")
                continue
            try:
                row.seconds, row.memory_gib = measure_row()
                rows.append(row)
                hours = f"{row.hours:.2f}" if row.samples else ""
                numbers = (f"{row.seconds:.4f}", f"{row.per_second:.1f}", f"{row.memory_gib:.1f}", hours)
                print(COLUMNS.format(row.part, row.case, row.precision, *numbers), flush=True)
            except Exception as error:  # a case that fails must not end the others
                print(f"{name}: failed: {type(error).__name__}: {one_line(error)}", flush=True)
            gc.collect()  # frees the models of this row before the next ones are made
            torch._dynamo.reset()  # frees what this row has compiled
            if device.type == "cuda":
                torch.cuda.empty_cache()
            out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"finished in {time.monotonic() - begin:.0f} s; results in {out}")


def describe(device: torch.device) -> str:
    """A line that names the device and the versions of CUDA and torch."""
    versions = f"torch {torch.__version__}, {os.cpu_count()} processor cores"
    if device.type != "cuda":
        return f"rehearsal on the CPU at a small size: its numbers mean nothing; {versions}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, {versions}"
