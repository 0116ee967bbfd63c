"""The command `raycap bench gpu`."""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from raycap.jobs.bench_gpu.parts import PAPER, PARTS, REHEARSAL, Row
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.processor import prepare_processor

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
