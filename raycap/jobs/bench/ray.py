"""`raycap bench ray`: the steps of a stage on Ray Train, and with a slow storage, beside those in a plain process."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from raycap.jobs.bench.measuring import in_new_process, percent_changes, print_times
from raycap.jobs.cluster import start_ray
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.features.store.store import mark_complete, write_shard
from raycap.pipeline.runs.folder import JOURNAL, RunFolder, open_folder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.storage.path import Entry, StoragePath, join

if TYPE_CHECKING:
    from raycap.pipeline.training.loop import StageJob

CASES = PLAIN, RAY, SLOW = "plain process", "Ray Train", "slow storage"
REQUEST_S = 0.1  # the time of a request in the case SLOW
STEPS, SKIPPED = 40, 8  # the first 40 steps of each run are read; their first 8, a warm-up, are not measured


def bench_ray(
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each of the three cases.")] = 4,
) -> None:
    """Time that Ray Train and a slow storage add to a training step.

    The cases are a plain process, Ray Train, and a plain process whose run is in a storage where each request takes
    100 ms. They take turns in an order that is reversed every round, because the load of a shared machine drifts by
    more than the difference. The median ratios over the rounds are printed, of median times per step with Ray Train and
    of mean times with the slow storage, which disturbs single steps. All run the same loop on the synthetic data set
    with random features of 144 tokens: an ExpansionNet v2 of width 256, 16 pairs per step, one worker, float32, and a
    journal entry after every step. The time that a step waits for data is printed too.

    Example: raycap bench ray --rounds 6
    """
    from raycap.pipeline.runs.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="raycap-bench-") as scratch:
        root = Path(scratch)
        config = parse_config(synthetic_settings(root))
        folder = prepare(config)
        store = random_store(folder, root / "store")
        start_ray(config, address=None)
        medians: dict[str, list[float]] = {case: [] for case in CASES}
        means: dict[str, list[float]] = {case: [] for case in CASES}
        waits: list[float] = []
        for turn in range(rounds):
            for case in CASES if turn % 2 == 0 else CASES[::-1]:
                seconds, wait = _run(folder.path, store, case)
                medians[case].append(statistics.median(seconds))
                means[case].append(statistics.mean(seconds))
                waits.append(wait)
    print(f"{STEPS - SKIPPED} steps each, {rounds} rounds; median ms per step")
    print_times(medians)
    print("mean ms per step")
    print_times(means)
    for case, times, limit in ((RAY, medians, 3), (SLOW, means, 2)):
        median, values = percent_changes([one / plain for one, plain in zip(times[case], times[PLAIN], strict=True)])
        print(f"{case} adds {median} ({values}; required: at most {limit})")
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


@dataclass(frozen=True)
class SlowFolder(StoragePath):
    """A local folder in place of one on S3. Each request takes REQUEST_S."""

    def __truediv__(self, name: str) -> SlowFolder:
        return SlowFolder(join(self.uri, name))

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        time.sleep(REQUEST_S)
        return super().read_bytes(max_bytes)

    def write_bytes(self, data: bytes | memoryview) -> str:
        time.sleep(REQUEST_S)
        return super().write_bytes(data)

    def upload(self, source: Path) -> str:
        return self.write_bytes(source.read_bytes())

    def download(self, target: Path) -> Entry:
        target.write_bytes(self.read_bytes())
        return super().stat()

    def stat(self) -> Entry:
        time.sleep(REQUEST_S)
        return super().stat()

    def walk(self) -> Iterator[tuple[str, Entry]]:
        time.sleep(REQUEST_S)
        yield from super().walk()

    def delete(self) -> None:
        time.sleep(REQUEST_S)
        super().delete()


def _run(run: Path, store: Path, case: str) -> tuple[list[float], float]:
    """Trains one stage from its beginning. Returns the seconds of each step and the share of waiting for data."""
    from raycap.jobs.train import fit
    from raycap.pipeline.training.loop import StageJob

    folder, home = open_folder(run), run.with_name("home")
    for path in (run / "stages", folder.journal, home):
        shutil.rmtree(path, ignore_errors=True)
    if case == SLOW:
        shutil.copytree(run, home)
        folder = replace(folder, home=SlowFolder(str(home)))
    job = StageJob(folder, ("steps",), store, driver_token=folder.new_driver_token())
    if case == RAY:
        fit(job, folder.config)
    else:
        in_new_process(_train_without_ray, job, run.with_name("cache"))
    entries = [entry for entry in read_journal(folder.root.path / JOURNAL) if entry["kind"] == "train"][SKIPPED:STEPS]
    seconds = [after["time"] - before["time"] for before, after in pairwise(entries)]
    return seconds, statistics.mean(entry["data_wait"] for entry in entries)


def _train_without_ray(job: StageJob, cache: Path) -> None:
    """cache: the folder for local copies of a run whose storage is slow."""
    from raycap.pipeline.runtime.context import LocalContext
    from raycap.pipeline.training.loop import train_stages

    os.environ["RAYCAP_CACHE"] = str(cache)
    train_stages(LocalContext(), job)
