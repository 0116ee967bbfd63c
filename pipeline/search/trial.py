"""What a trial does in its process: the ordinary run of its point, its validations told, its costs counted.

A failure is an outcome with its reason, so that the process stays for the next trial.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from models.base import Features
from models.decoding import beam_search
from models.macs import TABLE_6_CAPTION_TOKENS, cost
from models.registry import build_model
from pipeline.config.run import RunConfig, needs_boxes, total_steps
from pipeline.data.dataset import Dataset
from pipeline.data.loading import find_data
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import read_journal
from pipeline.runs.prepare import prepare
from pipeline.runtime.context import Context, LocalContext, device_for
from pipeline.runtime.weights import load_weights, weights_file_digest
from pipeline.scoring.metrics import score_captions
from pipeline.scoring.result_files import read_predictions
from pipeline.search.spec import SCORE, Search
from pipeline.search.trials import SearchFolder
from pipeline.storage.atomic import atomic_path, read_json, write_json
from pipeline.storage.path import storage_path
from pipeline.training.batches import num_samples
from pipeline.training.loop import StageJob, train_stages

Report = Callable[[dict[str, Any]], None]
Train = Callable[[StageJob, RunConfig, "TrialContext"], None]
LATENCY_REPEATS = 5


class TrialContext(LocalContext):
    """One process whose validations are told to the search; `tell` may end the trial by an exception of its own."""

    def __init__(self, run: RunFolder, report: Report, costs: dict[str, float]) -> None:
        super().__init__(own_device(run.config))
        self.run, self.tell, self.costs = run, report, costs

    def report(self, metrics: dict[str, Any]) -> None:
        """Every validation but the trial's last, which is told with its outcome, when all of it is written."""
        epoch, last = epoch_of(self.run, metrics["stage"], metrics["step"])
        if not last:
            self.tell(
                {
                    "epoch": epoch,
                    SCORE: best_scores(self.run)[-1][1],
                    "run": str(self.run.path),
                    "costs": self.costs,
                    "stage": metrics["stage"],
                    "step": metrics["step"],
                }
            )


def own_device(config: RunConfig) -> torch.device:
    """Where this process computes; with several workers the GPUs are theirs."""
    return device_for(config.workers.gpus_per_worker if config.workers.num_workers == 1 else 0)


def train_here(job: StageJob, config: RunConfig, context: Context) -> None:
    """In this process."""
    train_stages(context, job)


def run_trial(
    folder: SearchFolder,
    point: Mapping[str, Any],
    seed: int,
    report: Report,
    train: Train = train_here,
    *,
    member: int | None = None,
    parent: Path | None = None,
) -> dict[str, Any]:
    """Trains the point with the seed from where it was; returns the trial's outcome, as `Book.over` takes it.

    `member` is the number of a population's member, `parent` what `hand_over` wrote of the one whose weights it takes.

    What `report` raises ends the trial and is passed on when it is no Exception (Ray Tune raises SystemExit).
    """
    begin = time.monotonic()
    try:
        return _run_trial(folder, point, seed, report, train, begin, member, parent)
    except Exception as error:
        outcome = {"state": "failed", "reason": reason_of(error), "seconds": time.monotonic() - begin}
        del error
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return outcome


def reason_of(error: BaseException) -> str:
    """One line; memory that did not suffice is said first."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    short_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
    if short_of_memory:
        return f"out of memory: {text}"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _run_trial(
    folder: SearchFolder,
    point: Mapping[str, Any],
    seed: int,
    report: Report,
    train: Train,
    begin: float,
    member: int | None,
    parent: Path | None,
) -> dict[str, Any]:
    plan, search = _opened(folder.path, (folder.path / "plan.json").stat().st_mtime_ns)
    config = search.trial_config(point, seed, plan["start"], member)
    run = prepare(config, _data(config.model_dump_json(include={"data", "storage"}), config))
    if plan["weights"] is not None:
        share_file(run.path / "init" / "backbone.safetensors", Path(plan["weights"]))
    if parent is not None:
        take_over(run, parent)
    costs = costs_of(run)
    names = tuple(stage.name for stage in config.stages)
    store = storage_path(plan["store"]) if plan["store"] else None
    if any(run.result(name) is None for name in names):
        job = StageJob(run, names, store, tuple(plan["excluded"]), run.new_driver_token())
        train(job, config, TrialContext(run, report, costs))
    costs["seconds"] = trained_seconds(run)
    wanted = {*search.config.objectives, *search.config.metrics}
    if "latency_ms" in wanted:
        costs["latency_ms"] = latency_ms(run)
    scores = scores_of(run, search, plan["excluded"])
    for name in search.config.objectives:
        if name in search.config.metrics and name != SCORE and name not in scores:
            raise RuntimeError(f"the objective {name} cannot be computed here; `raycap score` says why")
    return {
        "state": "finished",
        "reason": "; ".join(
            result.ended_early for name in names if (result := run.result(name)) and result.ended_early
        ),
        "run": str(run.path),
        "reports": best_scores(run),
        "scores": scores,
        "costs": costs,
        "seconds": time.monotonic() - begin,
    }


@lru_cache(maxsize=2)
def _opened(path: Path, changed: int) -> tuple[dict[str, Any], Search]:
    folder = SearchFolder(path)
    return folder.plan, folder.search()


_DATA: dict[str, tuple[Dataset, dict[str, str]]] = {}


def _data(name: str, config: RunConfig) -> tuple[Dataset, dict[str, str]]:
    """The data set, read once a process: a trial's process lives on for the next."""
    if name not in _DATA:
        _DATA.clear()
        _DATA[name] = find_data(config)
    return _DATA[name]


def hand_over(run: RunFolder, stage: str, step: int, target: Path, patience_s: float = 120.0) -> None:
    """Copies what a stage goes on from (its checkpoint of a step, its best weights, its journal) into a folder."""
    source, until = run.stage(stage), time.monotonic() + patience_s
    while not (source / f"step-{step}").is_dir():  # it is written in the background
        if time.monotonic() > until:
            raise TimeoutError(f"the checkpoint {source / f'step-{step}'} was not written within {patience_s:.0f} s")
        time.sleep(0.02)
    parts = target / uuid.uuid4().hex  # Ray may put a later checkpoint into the same folder
    parts.mkdir(parents=True)
    for path in (source / f"step-{step}", *source.glob("best-*")):
        shutil.copytree(path, parts / path.name)
    for path in (source / "predictions-val.json", run.journal):
        shutil.copyfile(path, parts / path.name)
    write_json(target / "from.json", {"run": run.run_id, "stage": stage, "parts": parts.name})


def take_over(run: RunFolder, parent: Path) -> None:
    """Puts what `hand_over` wrote in place of a run's own state; nothing happens when it is the run's own."""
    origin = read_json(parent / "from.json")
    if origin["run"] == run.run_id:
        return
    parts, stage = parent / origin["parts"], run.stage(origin["stage"])
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for path in (*parts.glob("step-*"), *parts.glob("best-*")):
        shutil.copytree(path, stage / path.name)
    for path in stage.glob("step-*/progress.json"):
        write_json(path, read_json(path) | {"identity": f"{run.run_id}/{origin['stage']}"})
    shutil.copyfile(parts / "predictions-val.json", stage / "predictions-val.json")
    run.journal.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(parts / run.journal.name, run.journal)


def share_file(path: Path, source: Path) -> None:
    """One file on disk in place of two with the same content; where the file system has no links, they stay two."""
    if path.samefile(source) or weights_file_digest(path) != weights_file_digest(source):
        return
    with suppress(OSError), atomic_path(path, durable=False) as temporary:
        os.link(source, temporary)


def epoch_of(run: RunFolder, name: str, step: int) -> tuple[float, bool]:
    """Epochs over all of a run's stages after a step of one, and whether it is the run's last step."""
    before, train = 0.0, run.dataset.split(*run.config.data.train_splits)
    for stage in run.config.stages:
        total = total_steps(stage, num_samples(stage, train))
        if stage.name == name:
            last = step == total and stage == run.config.stages[-1]
            return round(before + stage.epochs * step / total, 6), last
        before += stage.epochs
    raise ValueError(f"{run.run_id} has no stage {name}")


def best_scores(run: RunFolder) -> list[tuple[float, float]]:
    """(epoch, best validation CIDEr-D so far) of every validation in the run's journal."""
    found: list[tuple[float, float]] = []
    for entry in read_journal(run.journal):
        if entry["kind"] == "validation":
            best = max(entry[SCORE], found[-1][1] if found else float("-inf"))
            found.append((epoch_of(run, entry["stage"], entry["step"])[0], best))
    return found


def trained_seconds(run: RunFolder) -> float:
    """Seconds that its stages trained, by the journal: each attempt from its start to its last entry that counts."""
    total, at = 0.0, 0.0
    for entry in read_journal(run.journal):  # an attempt's first entry is an event
        total += 0.0 if entry["kind"] == "event" else entry["time"] - at
        at = entry["time"]
    return round(total, 3)


def costs_of(run: RunFolder) -> dict[str, float]:
    """Multiply-accumulates of an image (with a caption of 12.5 tokens, as the paper's Table VI) and parameters.

    The paper's accounting is of its own systems only.
    """
    config = run.config
    counted = cost(
        config.model,
        run.sizes,
        image_tokens=run.metadata.num_tokens,
        caption_tokens=TABLE_6_CAPTION_TOKENS,
        beams=config.evaluation.beam_size,
        steps=config.evaluation.max_length - 1,
    )
    values = asdict(counted)
    names = {
        "macs": "paper",
        "macs_executed": "executed",
        "macs_beam_search": "beam_search",
        "parameters": "parameters",
    }
    return {name: float(values[key]) for name, key in names.items() if values[key] is not None}


def latency_ms(run: RunFolder) -> float:
    """Milliseconds of encoding an image and its beam search with the trained model, one image at a time; a median."""
    settings, device = run.config.evaluation, own_device(run.config)
    model = build_model(run.config.model, run.sizes)
    load_weights(model, run.weights_before(None, "model"))
    model = model.eval().to(device)
    tokens = run.metadata.num_tokens
    boxes = torch.rand(1, tokens, 4, device=device) if needs_boxes(run.config.model) else None
    features = Features(torch.randn(1, tokens, run.sizes.feature_width, device=device), boxes=boxes)
    times = []
    for _ in range(LATENCY_REPEATS + 1):
        begin = time.perf_counter()
        with torch.inference_mode():
            memory = model.encode(features)
            beam_search(model, memory, beam_size=settings.beam_size, max_length=settings.max_length).tokens.tolist()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def scores_of(run: RunFolder, search: Search, excluded: list[str]) -> dict[str, float]:
    """The search's metrics of the last stage's best validation captions; what is unavailable is not there."""
    if not search.config.metrics:
        return {}
    stage = run.config.stages[-1]
    references = run.dataset.without(excluded).split(run.config.data.val_split).references()
    predictions = read_predictions(run.stage(stage.name) / "predictions-val.json")
    scores = score_captions(references, predictions, metrics=search.config.metrics).by_name
    return {name: score.value for name, score in scores.items() if score.value is not None}
