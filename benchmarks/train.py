"""Training steps at the paper's size on the CPU, on random features."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated

import torch
import typer

from raycap.jobs.bench_gpu import SAMPLING, Case, training_step
from raycap.pipeline.runtime.processor import prepare_processor

from measuring import Threads, median_seconds

CPU_CASES = (
    Case("SCST, 8 images x 5 samples x 20 tokens", "scst", 8),
    Case("SCST, the same in bfloat16", "scst", 8, precision="bfloat16"),
    Case("cross entropy, 16 pairs, the paper's dropout", "cross_entropy", 16),
    Case("cross entropy, 16 pairs, factorized dropout", "cross_entropy", 16, dropout="factorized"),
    Case(
        "cross entropy, 16 pairs, factorized, bfloat16", "cross_entropy", 16, dropout="factorized", precision="bfloat16"
    ),
    Case("cross entropy, 16 images x 5 captions", "cross_entropy", 16, captions=5, dropout="factorized"),
)
# The time and memory of the reference's code.
REFERENCE = {CPU_CASES[0]: "27 to 38 s, 15 GB", CPU_CASES[2]: "2.7 s"}


def bench_train(
    repeats: Annotated[int, typer.Option(min=1, help="Steps measured per case; medians are printed.")] = 5,
    threads: Threads = None,
) -> None:
    """Time and memory of a training step at the paper's size.

    The features are random. `raycap bench gpu` measures the stages of the paper's recipe.

    Example: python benchmarks/train.py --repeats 5
    """
    prepare_processor(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, ExpansionNet v2 at the paper's size")
    print(f"{'case':<48}{'s/step':>9}{'s/caption':>11}{'peak MiB':>10}  reference")
    per_caption = {}
    for case in CPU_CASES:
        seconds, memory = _measure(case, repeats)
        captions = case.captions if case.objective == "cross_entropy" else SAMPLING.num_samples
        per_caption[case] = seconds / (case.images * captions)
        print(
            f"{case.name:<48}{seconds:>9.2f}{per_caption[case]:>11.4f}{memory:>10.0f}  {REFERENCE.get(case, '')}",
            flush=True,
        )
    pairs, five_captions = CPU_CASES[3], CPU_CASES[5]  # both with factorized dropout
    ratio = per_caption[five_captions] / per_caption[pairs]
    print(f"time per caption, 5 captions per image over pairs: {ratio:.2f}")


def _measure(case: Case, repeats: int) -> tuple[float, float]:
    """The median seconds and the peak memory in MiB of a training step: forward, backward and update."""
    step = training_step(case, torch.device("cpu"))
    for _ in range(2):  # torch's RAdam and the allocator settle
        step()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux measures the peak of the resident set from now on
    _, seconds = median_seconds(step, repeats)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return seconds, int(peak[1]) / 1024 if peak else float("nan")


if __name__ == "__main__":
    typer.run(bench_train)
