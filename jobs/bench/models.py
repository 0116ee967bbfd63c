"""`raycap bench models`: the factorized, cached model beside the materialized, prefix-recomputing one; what rows cost.

It imports torch and the models and nothing else heavy, so that it runs wherever a GPU is at hand.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from jobs.bench.reference_expansionnet import MaterializedModel, dynamic_expansion, static_expansion
from jobs.options import Threads
from models.base import CaptionModel, Features, ModelSizes
from models.config import ExpansionNetConfig
from models.decoding import Captions, beam_search, sample
from models.expansion import DynamicExpansion, StaticExpansion
from models.expansionnet import ExpansionNet
from models.macs import TABLE_6_CAPTION_TOKENS, TABLE_6_IMAGE_TOKENS, TABLE_6_IMAGES, TABLE_6_SIZES, cost
from pipeline.runtime.cpu import prepare_processor
from pipeline.scoring.published import ablation

IMAGE_TOKENS, FEATURE_WIDTH, CAPTION_TOKENS = 144, 1536, 20
SAMPLE_TOKENS = CAPTION_TOKENS + 1  # the reference's sampler does not count SOS
BEAMS = SAMPLES = 5
BFLOAT16_LIMIT = 3e-2
SIZES = ModelSizes(FEATURE_WIDTH, 10_000, 74, sos=0, eos=1, pad=2)


@dataclass
class Row:
    """Median seconds of both forms, and the ratio that is required (`target`).

    `materialized` and `factorized` are measured with Python's default allocator, as the reference runs. The values
    ending in `kept` are measured after `prepare_processor`, as raycap runs: freed memory is kept for reuse.
    """

    name: str
    target: float
    materialized: float
    factorized: float
    materialized_kept: float = math.nan
    factorized_kept: float = math.nan

    @property
    def ratio(self) -> float:
        return self.materialized / self.factorized

    @property
    def ratio_kept(self) -> float:
        return self.materialized_kept / self.factorized_kept


@dataclass
class ModelsReport:
    """What `bench_models` measured."""

    rows: list[Row] = field(default_factory=list)
    bfloat16_errors: Tensor = field(default_factory=lambda: torch.empty(0))  # of each row, over its largest logit
    seconds: float = 0.0


def bench_models(
    *,
    images: int = 16,
    repeats: int = 5,
    threads: int | None = None,
    device: str = "auto",
    write: Callable[[str], Any] = print,
) -> ModelsReport:
    """Prints and returns the table. `device` auto, cpu or cuda; `threads` of torch on the CPU (None: its choice).

    Both forms run in turn in one process, `repeats` times each after a warm-up; medians. Random weights and features at
    the paper's size; no caption ends before its 20th token. Raises ValueError for a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if images < 1 or repeats < 1:
        raise ValueError(f"images = {images} and repeats = {repeats}; both must be 1 or more")
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    started = time.perf_counter()
    try:
        report = ModelsReport()
        write(_header(images, repeats, device))
        _costs(write)
        with torch.no_grad():
            measure(report, paper_model(torch.device(device)), images, repeats, write)
        report.seconds = time.perf_counter() - started
        write(f"\n{report.seconds:.0f} s in all")
    finally:
        torch.set_num_threads(before)
    return report


def paper_model(device: torch.device) -> ExpansionNet:
    """The paper's configuration with random weights, in evaluation; it never ends a caption by itself."""
    torch.manual_seed(0)
    model = ExpansionNet(ExpansionNetConfig(), SIZES)
    model.init_weights()
    with torch.no_grad():
        model.lm_head.bias[SIZES.eos] = -1e4
    return model.to(device).eval()


def search(model: CaptionModel, features: Features) -> Captions:
    return beam_search(model, model.encode(features), beam_size=BEAMS, max_length=CAPTION_TOKENS)


def draw(model: CaptionModel, features: Features) -> Captions:
    generator = torch.Generator(features.tokens.device).manual_seed(0)
    return sample(model, model.encode(features), num_samples=SAMPLES, max_length=SAMPLE_TOKENS, generator=generator)


def measure(report: ModelsReport, model: ExpansionNet, images: int, repeats: int, write: Callable[[str], Any]) -> None:
    """Both forms in both ways to keep memory, then how exact bfloat16 is, into `report` and through `write`."""
    report.rows = compare_forms(model, images, repeats)
    prepare_processor()
    for row, kept in zip(report.rows, compare_forms(model, images, repeats), strict=True):
        row.materialized_kept, row.factorized_kept = kept.materialized, kept.factorized
    _ratios(report, write)
    features = Features(
        torch.randn(images, IMAGE_TOKENS, model.sizes.feature_width, device=model.lm_head.weight.device)
    )
    _bfloat16(report, model, features, write)


def compare_forms(model: ExpansionNet, images: int, repeats: int) -> list[Row]:
    """Times both forms of a model with both expansions; one row per measurement."""
    device = model.lm_head.weight.device
    slow = MaterializedModel(model)
    features = Features(torch.randn(images, IMAGE_TOKENS, model.sizes.feature_width, device=device))
    width = model.config.d_model
    words = torch.randn(images, CAPTION_TOKENS, width, device=device)
    patches = torch.randn(images, IMAGE_TOKENS, width, device=device)
    causal = torch.ones(CAPTION_TOKENS, CAPTION_TOKENS, dtype=torch.bool, device=device).tril().expand(images, -1, -1)
    dynamic, static = model.decoder[0].mixer, model.encoder[0].mixer
    assert isinstance(dynamic, DynamicExpansion) and isinstance(static, StaticExpansion)
    rows = []

    def add(
        name: str, materialized: Callable[[], Any], fast: dict[str, Callable[[], Any]], targets: list[float]
    ) -> None:
        medians = _medians([materialized, *fast.values()], repeats, device)
        for (precision, seconds), target in zip(zip(fast, medians[1:], strict=True), targets, strict=True):
            rows.append(Row(f"{name}, {precision}", target, medians[0], seconds))

    add(
        "dynamic expansion, forward",
        lambda: dynamic_expansion(dynamic, words, causal),
        {"float32": lambda: dynamic(words)},
        [4.0],
    )
    add(
        "static expansion, forward",
        lambda: static_expansion(static, patches, None),
        {"float32": lambda: static(patches, None)},
        [1.7],
    )
    for name, run in (
        (f"beam {BEAMS} to {CAPTION_TOKENS} tokens", search),
        (f"{SAMPLES} samples to {CAPTION_TOKENS} tokens", draw),
    ):
        exact_run = partial(run, model, features)
        fast: dict[str, Callable[[], Any]] = {"float32": exact_run, "bfloat16": _autocast(device, exact_run)}
        add(f"{name}, with encoder", partial(run, slow, features), fast, [9.0, 20.0])
    return rows


def _ratios(report: ModelsReport, write: Callable[[str], Any]) -> None:
    write("\nmedian ms in a plain process, as the reference runs; kept: it keeps freed memory, as raycap's own do")
    write("targets are for 16 images on 2 cores with bfloat16 units")
    write(
        f"| {'':<48} | materialized | factorized | {'ratio':>7} | {'target':>8} "
        f"| materialized, kept | factorized, kept | {'ratio':>7} |\n"
        f"|{'-' * 50}|{'-' * 13}:|{'-' * 11}:|{'-' * 8}:|{'-' * 9}:|{'-' * 19}:|{'-' * 17}:|{'-' * 8}:|"
    )
    for row in report.rows:
        write(
            f"| {row.name:<48} | {1e3 * row.materialized:>12.1f} | {1e3 * row.factorized:>10.1f} "
            f"| {row.ratio:>6.1f}x | {f'>= {row.target:g}x':>8} "
            f"| {1e3 * row.materialized_kept:>18.1f} | {1e3 * row.factorized_kept:>16.1f} | {row.ratio_kept:>6.1f}x |"
        )


def _bfloat16(report: ModelsReport, model: ExpansionNet, features: Features, write: Callable[[str], Any]) -> None:
    """How far bfloat16 autocast moves the logits, in units of each row's largest absolute float32 logit."""
    sizes = model.sizes
    tokens = torch.randint(sizes.vocabulary_size, (len(features), CAPTION_TOKENS), device=features.tokens.device)
    tokens[:, 0] = sizes.sos
    eos_bias = model.lm_head.bias[sizes.eos].clone()
    model.lm_head.bias[sizes.eos] = 0.0  # the bias that keeps captions going would be the largest logit by far
    exact = model(features, tokens)
    rounded = _autocast(tokens.device, partial(model, features, tokens))().float()
    model.lm_head.bias[sizes.eos] = eos_bias
    report.bfloat16_errors = ((rounded - exact).abs().amax(-1) / exact.abs().amax(-1)).flatten()
    middle, late = report.bfloat16_errors.quantile(torch.tensor([0.5, 0.99], device=tokens.device)).tolist()
    inside = int((report.bfloat16_errors <= BFLOAT16_LIMIT).sum())
    write(
        f"\nbfloat16 autocast, random weights and words: logits off by {middle:.1e} (median), {late:.1e} (99 %), "
        f"{float(report.bfloat16_errors.max()):.1e} (greatest) of the row's largest float32 logit; "
        f"{inside} of {len(report.bfloat16_errors)} rows within {BFLOAT16_LIMIT:g}"
    )


def _autocast(device: torch.device, run: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return run()

    return inside


def _medians(runs: list[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """Median seconds of each, run in turn so that a busy moment of the machine meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    for repeat in range(repeats + 1):
        for run, seconds in zip(runs, times, strict=True):
            wait()
            start = time.perf_counter()
            run()
            wait()
            if repeat:  # the first round warms up
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def _costs(write: Callable[[str], Any]) -> None:
    write("")
    write(
        f"Cost of {TABLE_6_IMAGES:,} images in 1e12 multiply-accumulates, {TABLE_6_CAPTION_TOKENS} tokens "
        f"teacher-forced; beam {BEAMS} to {CAPTION_TOKENS} tokens as executed"
    )
    write("")
    write("| G | N_E | Table VI | same accounting | as executed | beam search | parameters |")
    write("|---|---:|---:|---:|---:|---:|---:|")
    for row in ablation():
        groups, vectors, printed = row.static_expansion, row.dynamic_expansion, row.macs
        config = ExpansionNetConfig(static_expansion=groups, dynamic_expansion=vectors)
        counted = cost(
            config, TABLE_6_SIZES, image_tokens=TABLE_6_IMAGE_TOKENS, caption_tokens=TABLE_6_CAPTION_TOKENS,
            beams=BEAMS, steps=CAPTION_TOKENS - 1,
        )  # fmt: skip
        assert counted.paper is not None
        paper, executed, searched = (
            macs * TABLE_6_IMAGES / 1e12 for macs in (counted.paper, counted.executed, counted.beam_search)
        )
        write(
            f"| {_groups(groups)} | {vectors or 'attention'} | {printed / 1e12:.2f} | {paper:.3f} "
            f"({1e14 * paper / printed - 100:+.2f} %) | {executed:.2f} | {searched:.2f} | {counted.parameters:,} |"
        )


def _groups(groups: tuple[int, ...] | None) -> str:
    """The group sizes as a table cell, such as "64 x 5"; without groups the encoder has attention instead."""
    if groups is None:
        return "attention"
    if len(groups) > 1 and len(set(groups)) == 1:
        return f"{groups[0]} x {len(groups)}"
    return ", ".join(map(str, groups))


def _header(images: int, repeats: int, device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {torch.get_num_threads()} threads"
    return (
        f"ExpansionNet v2 at the paper's size: L = {IMAGE_TOKENS}, G = {{32,64,128,256,512}}, N_E = 16, d = 512, "
        f"{images} images; median of {repeats}\n{where}; torch {torch.__version__}, Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def command(
    images: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each form; medians are printed.")] = 5,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Speed of the model's forms and cost of Table VI's rows.

    The factorized, cached model is compared with the materialized, prefix-recomputing one.

    Example: raycap bench models --images 16
    """
    bench_models(images=images, repeats=repeats, threads=threads, device=device)
