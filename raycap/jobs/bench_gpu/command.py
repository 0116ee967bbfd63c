"""The command `raycap bench gpu`."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from raycap.jobs.bench_gpu.parts import BEAM, PAPER, PARTS, REHEARSAL, STAGES, Row
from raycap.jobs.bench_gpu.training_step import Scale
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.processor import prepare_processor

A100_HOURS = 60  # the paper's time for its recipe on one A100 (Table VII)
BY_NAME = {part.__name__: part for part in PARTS}
COLUMNS = "{:<12}{:<46}{:<10}{:>9}{:>10}{:>7}{:>7}"


def bench_gpu(
    out: Annotated[Path, typer.Option(help="The JSON file of the results.")] = Path("bench-gpu.json"),
    minutes: Annotated[float, typer.Option(min=0.01, help="No measurement starts after this time.")] = 25,
    parts: Annotated[str, typer.Option(help="Parts to measure, separated by commas.")] = ",".join(BY_NAME),
    rehearse: Annotated[bool, typer.Option(help="Run every part on the CPU at a small size, to test it.")] = False,
) -> None:
    """Speed of training, extraction and decoding on one GPU.

    It needs neither data nor a network; weights and data are random. The column `hours` has those of the stage on COCO.
    Cases that fail, and those for which no time remains, are named and left out.

    Example: raycap bench gpu --out results/gpu.json --minutes 15
    """
    prepare_processor(1 if rehearse else None)
    if unknown := set(parts.split(",")) - BY_NAME.keys():
        names = ", ".join(sorted(unknown)).strip() or "an empty part"
        raise UserError(f"--parts names {names}; there are {', '.join(BY_NAME)}")
    if not rehearse and not torch.cuda.is_available():
        raise UserError("torch sees no GPU; run this on a machine with one, or give --rehearse to test it on the CPU")
    device = torch.device("cpu" if rehearse else "cuda")
    scale, begin = REHEARSAL if rehearse else PAPER, time.monotonic()
    rows: list[Row] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("[]")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another file") from error
    print(describe(device))
    print(COLUMNS.format("part", "case", "precision", "s/call", "images/s", "GiB", "hours"))
    for part in parts.split(","):
        for name, measure_row in BY_NAME[part](scale, device):
            if time.monotonic() - begin > 60 * minutes:
                print(f"{part:<12}{name}: left out, {minutes:g} minutes have passed")
                continue
            try:
                rows.append(measure_row())
                print(line_of(rows[-1]), flush=True)
            except Exception as error:  # the other cases are still worth their time
                print(f"{part:<12}{name}: failed: {type(error).__name__}: {one_line(error)}", flush=True)
            gc.collect()  # frees the models of this row before the next ones are made
            torch._dynamo.reset()  # frees what this row has compiled
            if device.type == "cuda":
                torch.cuda.empty_cache()
            out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(recipe_line(rows, scale))
    print(f"finished in {time.monotonic() - begin:.0f} s; results in {out}")


def describe(device: torch.device) -> str:
    """The device and the versions."""
    versions = f"torch {torch.__version__}, {os.cpu_count()} processor cores"
    if device.type != "cuda":
        return f"rehearsal on the CPU at a small size: its numbers mean nothing; {versions}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, {versions}"


def line_of(row: Row) -> str:
    """A row of the table."""
    hours = f"{row.hours:.2f}" if row.samples else ""
    numbers = (f"{row.seconds:.4f}", f"{row.per_second:.1f}", f"{row.memory_gib:.1f}", hours)
    return COLUMNS.format(row.part, row.case, row.precision, *numbers)


def recipe_line(rows: Iterable[Row], scale: Scale) -> str:
    """A sentence with the hours of the whole recipe, from the fastest row of each stage, extraction and decoding."""
    fastest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.per_second):
        fastest[row.case.split(",")[0]] = row
    if missing := [stage.name for stage in STAGES if stage.name not in fastest]:
        return f"the whole recipe cannot be estimated without {', '.join(missing)}"
    stages = [fastest[stage.name] for stage in STAGES]
    hours = {f"{row.case} {row.precision}": row.hours for row in stages}
    # Features of all 123,287 images are computed twice, and 5,000 images are captioned after each of the 20 epochs.
    for name, images in ((scale.backbone.name, 2 * 123_287), (BEAM, 20 * 5000)):
        if name in fastest:
            hours[name] = images / fastest[name].per_second / 3600
    parts = " + ".join(f"{name} {each:.2f} h" for name, each in hours.items())
    return f"the whole recipe on COCO: {parts} = {sum(hours.values()):.2f} h; the paper: {A100_HOURS} hours of an A100"
