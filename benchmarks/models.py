"""Compares two forms of the model, and prints what the rows of the paper's Table VI cost.

It imports neither Ray nor MLflow, boto3, pydantic and timm, so that it runs on any machine with torch and a GPU.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer

from raycap.jobs.bench_gpu import timed
from raycap.models.base import CaptionModel, Features
from raycap.models.captioner import TABLE_6_CAPTION_TOKENS, TABLE_6_IMAGE_TOKENS, TABLE_6_IMAGES, TABLE_6_SIZES, cost
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.models.decoding.search import Captions, beam_search, sample
from raycap.models.expansionnet import DynamicExpansion, ExpansionNet, StaticExpansion
from raycap.pipeline.evaluation.comparison.published import published_tables
from raycap.pipeline.runtime.processor import prepare_processor

from measuring import Threads
from reference_expansionnet import MaterializedModel, dynamic_expansion, static_expansion

IMAGE_TOKENS, FEATURE_WIDTH, CAPTION_TOKENS = 144, 1536, 20
SAMPLE_TOKENS = CAPTION_TOKENS + 1  # with SOS, which the reference's sampler does not count
BEAMS = SAMPLES = 5
BFLOAT16_LIMIT = 3e-2  # relative error of logits; the rows within it are counted
SIZES = ModelSizes(FEATURE_WIDTH, vocabulary_size=10_000, max_positions=74, sos=0, eos=1, pad=2)


class Row(NamedTuple):
    """Median seconds of the materialized form and of the factorized form in one measurement.

    `target` is the speedup (`ratio`) that is required.
    """

    name: str
    target: float
    materialized: float
    factorized: float

    @property
    def ratio(self) -> float:
        return self.materialized / self.factorized


def bench_models(
    images: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each form; medians are printed.")] = 5,
    threads: Threads = None,
) -> None:
    """Speed of the model's forms and cost of Table VI's rows.

    The factorized, cached model is compared with the materialized, prefix-recomputing one. Both forms run first with
    Python's default allocator, as the reference runs. Then they run after `prepare_processor`, as raycap runs: freed
    memory is kept for reuse.

    Example: python benchmarks/models.py --images 16
    """
    begin = time.monotonic()
    on_cuda = torch.cuda.is_available()
    if threads is not None:
        torch.set_num_threads(threads)
    hardware = torch.cuda.get_device_name() if on_cuda else f"{torch.get_num_threads()} threads"
    print(
        f"ExpansionNet v2 at the paper's size: L = {IMAGE_TOKENS}, G = {{32,64,128,256,512}}, N_E = 16, d = 512, "
        f"{images} images; median of {repeats}\n"
        f"{hardware}; torch {torch.__version__}, Python {platform.python_version()}"
    )
    _print_costs()
    model = paper_model(torch.device("cuda" if on_cuda else "cpu"))
    rows = compare_forms(model, images, repeats)
    prepare_processor()
    _print_ratios(rows, compare_forms(model, images, repeats))
    _print_bfloat16_errors(model, images)
    print(f"\n{time.monotonic() - begin:.0f} s in all")


def paper_model(device: torch.device) -> ExpansionNet:
    """The paper's configuration with random weights, in evaluation; its captions never end before the limit."""
    torch.manual_seed(0)
    model = ExpansionNet(ExpansionNetConfig(), SIZES)
    model.init_weights()
    with torch.no_grad():
        model.lm_head.bias[SIZES.eos] = -1e4  # EOS is never chosen
    return model.to(device).eval()


def search(model: CaptionModel, features: Features) -> Captions:
    """Encodes features and captions them by beam search."""
    return beam_search(model, model.encode(features), beam_size=BEAMS, max_length=CAPTION_TOKENS)


def draw_samples(model: CaptionModel, features: Features) -> Captions:
    """Encodes features and draws five captions per image."""
    generator = torch.Generator(features.tokens.device).manual_seed(0)
    return sample(model, model.encode(features), num_samples=SAMPLES, max_length=SAMPLE_TOKENS, generator=generator)


@torch.no_grad()
def compare_forms(model: ExpansionNet, images: int, repeats: int) -> list[Row]:
    """Times the materialized form (`MaterializedModel`, as the reference) and the factorized form (raycap's own).

    There is a row for each expansion, for beam search and for sampling, and for each measured precision.
    """
    device = model.lm_head.weight.device
    slow = MaterializedModel(model)
    features = Features(torch.randn(images, IMAGE_TOKENS, model.sizes.feature_width, device=device))
    width = model.config.d_model
    words = torch.randn(images, CAPTION_TOKENS, width, device=device)
    patches = torch.randn(images, IMAGE_TOKENS, width, device=device)
    causal = torch.ones(CAPTION_TOKENS, CAPTION_TOKENS, dtype=torch.bool, device=device).tril().expand(images, -1, -1)
    dynamic, static = model.decoder[0].mixer, model.encoder[0].mixer
    assert isinstance(dynamic, DynamicExpansion) and isinstance(static, StaticExpansion)
    in_bfloat16 = torch.autocast(device.type, torch.bfloat16)  # used as a decorator
    rows = []

    def compare(
        name: str, materialized: Callable[[], Any], factorized: Callable[[], Any], targets: dict[str, float]
    ) -> None:
        """Adds a row for each precision of the factorized form. targets: {precision: the required speedup}."""
        runs = {"materialized": materialized, "float32": factorized, "bfloat16": in_bfloat16(factorized)}
        # The runs take turns, so that a busy moment of the machine affects all of them. The first round warms up.
        rounds = [{key: timed(run, device)[1] for key, run in runs.items()} for _ in range(repeats + 1)]
        seconds = {key: statistics.median(times[key] for times in rounds[1:]) for key in runs}
        for precision, target in targets.items():
            rows.append(Row(f"{name}, {precision}", target, seconds["materialized"], seconds[precision]))

    slow_dynamic = partial(dynamic_expansion, dynamic, words, causal)
    compare("dynamic expansion, forward", slow_dynamic, partial(dynamic, words), {"float32": 4.0})
    slow_static = partial(static_expansion, static, patches, None)
    compare("static expansion, forward", slow_static, partial(static, patches, None), {"float32": 1.7})
    targets = {"float32": 9.0, "bfloat16": 20.0}
    for name, decode in (
        (f"beam {BEAMS} to {CAPTION_TOKENS} tokens", search),
        (f"{SAMPLES} samples to {CAPTION_TOKENS} tokens", draw_samples),
    ):
        compare(f"{name}, with encoder", partial(decode, slow, features), partial(decode, model, features), targets)
    return rows


def _print_ratios(rows: list[Row], rows_kept: list[Row]) -> None:
    """Prints a table of the times: `rows` from a plain process, `rows_kept` from one that keeps freed memory."""
    print("\nmedian ms in a plain process, as the reference runs; kept: in one that keeps freed memory, as raycap does")
    print("targets are for 16 images on 2 cores with bfloat16 units")
    print(
        f"| {'':<48} | materialized | factorized | {'ratio':>7} | {'target':>8} "
        f"| materialized, kept | factorized, kept | {'ratio':>7} |\n"
        f"|{'-' * 50}|{'-' * 13}:|{'-' * 11}:|{'-' * 8}:|{'-' * 9}:|{'-' * 19}:|{'-' * 17}:|{'-' * 8}:|"
    )
    for row, kept in zip(rows, rows_kept, strict=True):
        print(
            f"| {row.name:<48} | {1e3 * row.materialized:>12.1f} | {1e3 * row.factorized:>10.1f} "
            f"| {row.ratio:>6.1f}x | {f'>= {row.target:g}x':>8} "
            f"| {1e3 * kept.materialized:>18.1f} | {1e3 * kept.factorized:>16.1f} | {kept.ratio:>6.1f}x |"
        )


@torch.no_grad()
def _print_bfloat16_errors(model: ExpansionNet, images: int) -> None:
    """Prints how much logits differ under bfloat16.

    Each row of logits has an error: the largest difference, relative to the row's largest absolute float32 logit.
    """
    sizes, device = model.sizes, model.lm_head.weight.device
    features = Features(torch.randn(images, IMAGE_TOKENS, sizes.feature_width, device=device))
    tokens = torch.randint(sizes.vocabulary_size, (images, CAPTION_TOKENS), device=device)
    tokens[:, 0] = sizes.sos
    eos_bias = model.lm_head.bias[sizes.eos].clone()
    model.lm_head.bias[sizes.eos] = 0.0  # the bias of `paper_model` would be the largest logit by far
    exact = model(features, tokens)
    with torch.autocast(device.type, torch.bfloat16):
        rounded = model(features, tokens).float()
    model.lm_head.bias[sizes.eos] = eos_bias
    errors = ((rounded - exact).abs().amax(-1) / exact.abs().amax(-1)).flatten()
    middle, high = errors.quantile(torch.tensor([0.5, 0.99], device=device)).tolist()
    print(
        f"\nbfloat16 autocast, random weights and words: logits off by {middle:.1e} (median), {high:.1e} (99 %), "
        f"{float(errors.max()):.1e} (greatest) of the row's largest float32 logit; "
        f"{int((errors <= BFLOAT16_LIMIT).sum())} of {len(errors)} rows within {BFLOAT16_LIMIT:g}"
    )


def _print_costs() -> None:
    """Prints the multiply-accumulates of Table VI's rows, as published there and as counted here."""
    print(
        f"\nCost of {TABLE_6_IMAGES:,} images in 1e12 multiply-accumulates, {TABLE_6_CAPTION_TOKENS} tokens "
        f"teacher-forced; beam {BEAMS} to {CAPTION_TOKENS} tokens as executed\n\n"
        "| G | N_E | Table VI | same accounting | as executed | beam search | parameters |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    for row in published_tables("expansionnet_v2")[0].rows:
        groups, vectors, published = row.settings["static_expansion"], row.settings["dynamic_expansion"], row.macs
        counted = cost(
            ExpansionNetConfig(static_expansion=groups, dynamic_expansion=vectors), TABLE_6_SIZES,
            image_tokens=TABLE_6_IMAGE_TOKENS, caption_tokens=TABLE_6_CAPTION_TOKENS, beams=BEAMS,
            steps=CAPTION_TOKENS - 1,
        )  # fmt: skip
        assert counted.paper is not None and published is not None
        paper, executed, searched = (
            macs * TABLE_6_IMAGES / 1e12 for macs in (counted.paper, counted.executed, counted.beam_search)
        )
        deviation = 1e14 * paper / published - 100  # in percent; `paper` is in 1e12, `published` is not
        print(
            f"| {_group_cell(groups)} | {vectors or 'attention'} | {published / 1e12:.2f} | {paper:.3f} "
            f"({deviation:+.2f} %) | {executed:.2f} | {searched:.2f} | {counted.parameters:,} |"
        )


def _group_cell(groups: tuple[int, ...] | None) -> str:
    """The group sizes as a table cell, such as "64 x 5"; without groups the encoder has attention instead."""
    if groups is None:
        return "attention"
    is_repeated = len(groups) > 1 and len(set(groups)) == 1
    return f"{groups[0]} x {len(groups)}" if is_repeated else ", ".join(map(str, groups))


if __name__ == "__main__":
    typer.run(bench_models)
