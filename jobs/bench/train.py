"""`raycap bench train`: training steps at the paper's size on random features; needs neither Ray nor data.

On a CUDA machine it also measures the four stages with Swin-L at the paper's batch sizes, and estimates the time of the
whole recipe.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from jobs.bench.measuring import median_seconds
from jobs.options import Threads
from models.backbone import Backbone
from models.base import Features
from models.captioner import Captioner
from models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from models.layers import set_dropout
from models.registry import build_model
from pipeline.config.sections import OptimizerSection, StageSection
from pipeline.data.vocabulary import SPECIALS, Vocabulary
from pipeline.runtime.cpu import memory_mb, prepare_processor
from pipeline.training.batches import Batch, target_positions
from pipeline.training.objectives import Objective, cross_entropy_objective, scst_objective
from pipeline.training.optimizer import make_optimizer
from pipeline.training.reward import CaptionReward

SIZES = ModelSizes(feature_width=1536, vocabulary_size=10_000, max_positions=74, sos=2, eos=0, pad=1)
TOKENS, WORDS = 144, 13  # image tokens; words of a typical caption, as in the paper's cost table
SCST_SAMPLES = 5  # captions that are sampled per image
COCO_IMAGES, COCO_PAIRS = 113_287, 566_747  # training images, and pairs of an image and a caption
A100_HOURS = 60  # the paper's own recipe on one A100, Table VII


@dataclass(frozen=True)
class Case:
    """One row of the table: a training step on `images` images.

    reference: the reference's time and memory for it. captions: their number per image in cross entropy. samples: the
    number of samples in all epochs of the paper's stage.
    """

    name: str
    objective: str
    images: int
    captions: int = 1
    dropout: str = "reference"
    bfloat16: bool = False
    end_to_end: bool = False
    reference: str = ""
    samples: int = 0


CPU_CASES = (
    Case("SCST, 8 images x 5 samples x 20 tokens", "scst", 8, reference="27 to 38 s, 15 GB"),
    Case("SCST, the same in bfloat16", "scst", 8, bfloat16=True),
    Case("cross entropy, 16 pairs, the paper's dropout", "cross_entropy", 16, reference="2.7 s"),
    Case("cross entropy, 16 pairs, factorized dropout", "cross_entropy", 16, dropout="factorized"),
    Case("cross entropy, 16 pairs, factorized, bfloat16", "cross_entropy", 16, dropout="factorized", bfloat16=True),
    Case("cross entropy, 16 images x 5 captions", "cross_entropy", 16, captions=5, dropout="factorized"),
)
CUDA_CASES = (
    Case("xe_frozen", "cross_entropy", 48, samples=8 * COCO_PAIRS),
    Case("xe_finetune", "cross_entropy", 48, bfloat16=True, end_to_end=True, samples=2 * COCO_PAIRS),
    Case("scst_frozen", "scst", 48, samples=9 * COCO_IMAGES),
    Case("scst_finetune", "scst", 20, bfloat16=True, end_to_end=True, samples=COCO_IMAGES),
)


def bench_train(
    repeats: Annotated[int, typer.Option(min=1, help="Steps measured per case; medians are printed.")] = 5,
    threads: Threads = None,
) -> None:
    """Time and memory of a training step at the paper's size.

    The features are random. On CUDA the four stages of the paper's recipe are measured too.

    Example: raycap bench train --repeats 5
    """
    prepare_processor(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, ExpansionNet v2 at the paper's size")
    print(f"{'case':<48}{'s/step':>9}{'s/caption':>11}{'peak MiB':>10}  reference")
    per_caption = {}
    for case in CPU_CASES:
        seconds, memory = _measure(case, torch.device("cpu"), repeats)
        per_caption[case] = seconds / (
            case.images * (case.captions if case.objective == "cross_entropy" else SCST_SAMPLES)
        )
        print(f"{case.name:<48}{seconds:>9.2f}{per_caption[case]:>11.4f}{memory:>10.0f}  {case.reference}", flush=True)
    pairs, five_captions = CPU_CASES[3], CPU_CASES[5]  # both with factorized dropout
    ratio = per_caption[five_captions] / per_caption[pairs]
    print(f"time per caption, 5 captions per image over pairs: {ratio:.2f}")
    if torch.cuda.is_available():
        _print_cuda_cases(repeats)
    else:
        print("CUDA: no GPU here, the paper's batch sizes were not run")


def _print_cuda_cases(repeats: int) -> None:
    """Measures the stages of the paper's recipe on the GPU, and prints the estimated hours of the whole recipe."""
    print(f"\n{torch.cuda.get_device_name()}: the paper's batch sizes, synthetic data")
    print(f"{'stage':<16}{'s/step':>9}{'images/s':>10}{'peak GiB':>10}{'hours':>8}")
    total = 0.0
    for case in CUDA_CASES:
        seconds, memory = _measure(case, torch.device("cuda"), repeats)
        hours = case.samples / case.images * seconds / 3600
        total += hours
        print(
            f"{case.name:<16}{seconds:>9.3f}{case.images / seconds:>10.1f}{memory / 1024:>10.1f}{hours:>8.1f}",
            flush=True,
        )
    print(f"the whole recipe on COCO: {total:.1f} hours on this GPU; the paper reports {A100_HOURS} hours of an A100")


def _measure(case: Case, device: torch.device, repeats: int) -> tuple[float, float]:
    """The median seconds and the peak memory in MiB of a training step: forward, backward and update."""
    torch.manual_seed(0)
    step = _training_step(case, device)
    for _ in range(2):  # torch's RAdam and the allocator settle
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux measures the peak of the resident set from now on
    _, seconds = median_seconds(step, repeats, device=device)
    if device.type == "cuda":
        return seconds, memory_mb(device)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return seconds, int(peak[1]) / 1024 if peak else float("nan")


def _training_step(case: Case, device: torch.device) -> Callable[[], None]:
    """A function that trains on the same random batch in each call."""
    config = replace(ExpansionNetConfig(), expansion_dropout=case.dropout)  # type: ignore[arg-type]
    model = build_model(config, SIZES)
    # the dropout of the paper's stages
    set_dropout(model, 0.1 if case.objective == "scst" else 0.3)
    backbone = Backbone(BackboneConfig(gradient_checkpointing=True)) if case.end_to_end else None
    captioner = Captioner(model, backbone).to(device).train()
    optimizer = make_optimizer(captioner, OptimizerSection(), 1e-5)
    shape = (3, 384, 384) if case.end_to_end else (TOKENS, SIZES.feature_width)
    inputs = torch.randn(case.images, *shape, device=device)
    tokens = torch.randint(
        len(SPECIALS), SIZES.vocabulary_size, (case.images * case.captions, WORDS + 2), device=device
    )  # the special tokens come first in the vocabulary
    tokens[:, 0], tokens[:, -1] = SIZES.sos, SIZES.eos
    batch = Batch(
        Features(inputs),
        tokens,
        target_positions(tokens, SIZES.pad),
        images=torch.arange(case.images, device=device),
        global_targets=tokens[:, 1:].numel(),
        global_images=case.images,
    )
    objective, generator = _objective(case, device), torch.Generator(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=case.bfloat16):
            # one process: the module for the gradient is the captioner itself, without a wrapper
            objective(captioner, captioner, batch, generator).loss.backward()
        optimizer.step()

    return step


def _objective(case: Case, device: torch.device) -> Objective:
    """The objective of a case; that of SCST has a CIDEr-D reward over random references of 2,000 images."""
    values = {"name": "bench", "objective": case.objective, "epochs": 1, "batch_size": case.images, "lr": 1e-5}
    if case.objective == "cross_entropy":
        return cross_entropy_objective(StageSection.model_validate(values))
    stage = StageSection.model_validate(values | {"scst": {"max_length": 21}})  # 20 tokens and SOS
    words = [f"w{number:05d}" for number in range(SIZES.vocabulary_size - len(SPECIALS))]
    vocabulary = Vocabulary(("EOS", "PAD", "SOS", "UNK", *words))
    rng = np.random.default_rng(0)
    references = {
        image: [" ".join(words[number] for number in rng.integers(0, 2000, 12)) for _ in range(5)]
        for image in range(2000)
    }
    reward = CaptionReward(references, vocabulary, eos=True, device=device)
    return scst_objective(stage, reward, reward.indices_of(range(case.images)), SIZES.pad, vocabulary.words)
