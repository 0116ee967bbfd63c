"""`raycap bench ray`: the steps of a stage on Ray Train beside the same steps in a plain process."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from jobs.bench.measuring import in_new_process, percent_changes, print_times
from jobs.cluster import start_ray
from pipeline.config.load import parse_config
from pipeline.features.store import mark_complete, write_shard
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import read_journal

if TYPE_CHECKING:
    from pipeline.training.loop import StageJob

STEPS, SKIPPED = 40, 8  # the first 40 steps of each run are read; their first 8, a warm-up, are not measured


def bench_ray(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs, one with Ray Train and one without.")] = 4,
) -> None:
    """Time that Ray Train adds to a training step.

    Both sides of a pair run one after the other and take turns to be first, because the load of a shared machine
    drifts by more than the difference; the median of the pairs' ratios is printed. Both run the same loop on the
    synthetic data set with random features of 144 tokens: an ExpansionNet v2 of width 256, 16 pairs per step, one
    worker, float32. The time that a step waits for data is printed too.

    Example: raycap bench ray --pairs 6
    """
    from pipeline.runs.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="raycap-bench-") as scratch:
        root = Path(scratch)
        config = parse_config(synthetic_settings(root))
        folder = prepare(config)
        store = random_store(folder, root / "store")
        start_ray(config, address=None)
        times: dict[str, list[float]] = {"plain process": [], "Ray Train": []}
        waits: list[float] = []
        for pair in range(pairs):
            for name in sorted(times, reverse=pair % 2 == 1):
                seconds, wait = _run(folder.path, store, on_ray=name == "Ray Train")
                times[name].append(seconds)
                waits.append(wait)
    print(f"{STEPS - SKIPPED} steps each, {pairs} pairs of runs; median ms per step")
    print_times(times)
    median, values = percent_changes([ray / plain for plain, ray in zip(*times.values(), strict=True)])
    print(f"Ray adds {median} ({values}; required: at most 3)")
    print(f"data wait {100 * max(waits):.1f} % at most (required: at most 5)")


def synthetic_settings(root: Path) -> dict[str, Any]:
    """A run on the synthetic data set: a captioner of width 256, and one stage on frozen features of 51 steps."""
    backbone = {"name": "swin_tiny_patch4_window7_224", "weights": "none", "image_size": 32, "embed_dim": 48}
    backbone |= {"depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    model = {"d_model": 256, "d_ff": 1024, "num_heads": 8, "static_expansion": [32, 64, 128], "dynamic_expansion": 16}
    stage = {"name": "steps", "objective": "cross_entropy", "batch_size": 16, "lr": 1e-4, "epochs": 1}
    return {
        "name": "bench",
        "storage": str(root),
        "data": {"synthetic": {"num_images": 200, "image_size": 32}, "min_count": 1, "test_splits": ["test"]},
        "backbone": backbone,
        "model": model,
        "stages": [stage | {"checkpoint_every_steps": 10**6, "validate_every_epochs": 10**6}],
        "workers": {"log_every_steps": 1, "threads_per_worker": 1},
        "tracking": {"enabled": False},
    }


def random_store(folder: RunFolder, path: Path) -> Path:
    """A store with random features of 144 tokens for all images of a run."""
    keys = sorted(set(folder.dataset.column("key")))
    shape = (len(keys), 144, folder.sizes.feature_width)
    write_shard(path, keys, np.random.default_rng(0).standard_normal(shape).astype(np.float16))
    mark_complete(path, description={}, rows=len(keys))
    return path


def _run(run: Path, store: Path, *, on_ray: bool) -> tuple[float, float]:
    """Trains one stage from its beginning. Returns the median seconds per step and the share of waiting for data."""
    from jobs.train import fit
    from pipeline.training.loop import StageJob

    folder = RunFolder(run)
    shutil.rmtree(run / "stages", ignore_errors=True)
    shutil.rmtree(folder.journal, ignore_errors=True)
    job = StageJob(folder, ("steps",), store, driver_token=folder.new_driver_token())
    if on_ray:
        fit(job, folder.config)
    else:
        in_new_process(_train_without_ray, job)
    entries = [entry for entry in read_journal(folder.journal) if entry["kind"] == "train"][SKIPPED:STEPS]
    seconds = [after["time"] - before["time"] for before, after in pairwise(entries)]
    return statistics.median(seconds), statistics.mean(entry["data_wait"] for entry in entries)


def _train_without_ray(job: StageJob) -> None:
    from pipeline.runtime.context import LocalContext
    from pipeline.training.loop import train_stages

    train_stages(LocalContext(), job)
