"""`raycap bench ray`: a stage's steps on Ray Train beside the same steps in a plain process."""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder

STEPS, SKIPPED = 40, 8


def bench_ray(pairs: int = 4) -> None:
    """Prints seconds a step of both and their ratio: the median of that of neighboring runs, first one, then the other.

    A machine that others use, too, drifts by more than what is measured here: neighbors share its mood, and each of the
    two is as often the first.

    The embedded data set with random features of 144 tokens, an ExpansionNet v2 of width 256, 16 pairs a step, one
    worker, float32. Both run the same loop on the same run, and write the same journal, from which the times are taken.
    """
    from jobs.cluster import start_ray
    from pipeline.config.load import parse_config
    from pipeline.runs.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="raycap-bench-") as scratch:
        root = Path(scratch)
        config = parse_config(embedded_settings(root))
        folder = prepare(config)
        store = random_store(folder, root / "store")
        start_ray(config, None)
        times: dict[str, list[float]] = {"plain process": [], "Ray Train": []}
        waits: list[float] = []
        for pair in range(pairs):
            for name in sorted(times, reverse=pair % 2 == 1):
                steps, waited = _run(folder.path, store, name == "Ray Train")
                times[name].append(steps)
                waits.append(waited)
    print(f"{STEPS - SKIPPED} steps each, {pairs} pairs of runs; median ms a step")
    for name, values in times.items():
        spread = ", ".join(f"{1e3 * value:.1f}" for value in values)
        print(f"{name:<16}{1e3 * statistics.median(values):>9.1f}   ({spread})")
    ratios = [ray / plain for plain, ray in zip(*times.values(), strict=True)]
    spread = ", ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios)
    print(f"Ray adds {100 * (statistics.median(ratios) - 1):+.1f} % ({spread}; asked: at most 3)")
    print(f"data wait {100 * max(waits):.1f} % at most (asked: at most 5)")


def embedded_settings(root: Path) -> dict[str, Any]:
    """The embedded data set, a captioner of width 256, and one stage on frozen features: one epoch of 51 steps."""
    backbone = {
        "name": "swin_tiny_patch4_window7_224",
        "weights": "none",
        "image_size": 32,
        "embed_dim": 48,
        "depths": [1, 1],
    }
    backbone |= {"num_heads": [1, 2], "window_size": 4}
    model = {"d_model": 256, "d_ff": 1024, "num_heads": 8, "static_expansion": [32, 64, 128], "dynamic_expansion": 16}
    stage = {"name": "steps", "objective": "cross_entropy", "batch_size": 16, "lr": 1e-4}
    return {
        "name": "bench",
        "storage": str(root),
        "data": {"synthetic": {"num_images": 200, "image_size": 32}, "min_count": 1, "test_splits": ["test"]},
        "backbone": backbone,
        "model": model,
        "stages": [stage | {"epochs": 1, "checkpoint_every_steps": 10**6, "validate_every_epochs": 10**6}],
        "workers": {"log_every_steps": 1, "threads_per_worker": 1},
        "tracking": {"enabled": False},
    }


def random_store(folder: RunFolder, path: Path) -> Path:
    """A store with random features of 144 tokens for all of a run's images."""
    from pipeline.features.store import mark_complete, write_shard

    keys = sorted(set(folder.dataset.column("key")))
    shape = (len(keys), 144, folder.sizes.feature_width)
    write_shard(path, keys, np.random.default_rng(0).standard_normal(shape).astype(np.float16))
    mark_complete(path, {}, len(keys))
    return path


def _run(run: Path, store: Path, ray: bool) -> tuple[float, float]:
    """(median seconds a step, share of time that data was waited for), from the journal of one fresh stage."""
    from jobs.train import fit
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.journal import read_journal
    from pipeline.training.loop import StageJob

    folder = RunFolder(run)
    shutil.rmtree(run / "stages", ignore_errors=True)
    folder.journal.unlink(missing_ok=True)
    job = StageJob(folder, ("steps",), store, driver_token=folder.new_driver_token())
    if ray:
        fit(job, folder.config)
    else:
        process = multiprocessing.get_context("spawn").Process(target=_plain, args=(job,))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the plain process ended with exit code {process.exitcode}")
    entries = [entry for entry in read_journal(folder.journal) if entry["kind"] == "train"][SKIPPED:STEPS]
    seconds = [after["time"] - before["time"] for before, after in pairwise(entries)]
    return statistics.median(seconds), statistics.mean(entry["data_wait"] for entry in entries)


def _plain(job: Any) -> None:
    from pipeline.runtime.context import LocalContext
    from pipeline.training.loop import train_stages

    train_stages(LocalContext(), job)
