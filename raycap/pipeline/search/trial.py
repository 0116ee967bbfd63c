"""Runs one trial in the current process: an ordinary run that reports its validations and costs."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from raycap.models.captioner import TABLE_6_CAPTION_TOKENS, cost
from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig, total_steps
from raycap.pipeline.data.caption_files import ImageId, read_predictions
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.evaluate import caption_scores
from raycap.pipeline.runs.folder import JOURNAL, RunFolder, StageResult
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import Context, LocalContext
from raycap.pipeline.runtime.processor import device_for
from raycap.pipeline.search.records import Reports, SearchPlan, TrialRecord
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.storage.atomic import atomic_path, read_json, write_json
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path
from raycap.pipeline.storage.weights import weights_file_digest
from raycap.pipeline.training.loop import StageJob, train_stages

HANDOVER_PATIENCE_S = 120  # for a checkpoint that is still being written


@dataclass(frozen=True)
class TrialTask:
    """The input of a trial's process."""

    plan: SearchPlan
    trial_id: str
    point: Values
    seed: int
    handover: Path | None = None  # a folder with the state to continue from; only in a population


# Sends a trial to the search, and in a population a folder with a copy of the run's state. Raises SystemExit to stop
# the trial.
Report = Callable[[TrialRecord, "Handover | None"], None]


@dataclass(frozen=True)
class Handover:
    """The state of a run after a validation."""

    run: RunFolder
    stage: str
    step: int


class TrialContext(LocalContext):
    """The training context of a trial, which sends every validation but the last, whose scores come with the end."""

    def __init__(self, run: RunFolder, send: Callable[[Reports, Handover], None]) -> None:
        super().__init__(trial_device(run.config))
        self.run, self.send = run, send

    def report(self, metrics: Values) -> None:
        stage, step = metrics["stage"], metrics["step"]
        ((_, is_last),) = epochs_of(self.run, [(stage, step)])
        if not is_last:
            self.send(best_scores(self.run), Handover(self.run, stage, step))


def trial_device(config: RunConfig) -> torch.device:
    """The device of the trial's process: the CPU if the trial has several workers, since they use the GPUs."""
    return device_for(config.workers.gpus_per_worker if config.workers.num_workers == 1 else 0)


def train_here(job: StageJob, context: Context) -> None:
    """Trains in this process."""
    train_stages(context, job)


# trains the stages of a job: `train_here`, or on Ray Train's workers
Train = Callable[[StageJob, TrialContext], None]


def run_trial(task: TrialTask, report: Report, train: Train = train_here) -> TrialRecord:
    """Trains a point with a seed, and resumes its run if it exists. Returns the finished trial.

    SystemExit propagates: Ray Tune raises it in `report` to stop the trial.
    """
    plan, search = task.plan, task.plan.search
    options = search.base.storage.options
    start = None if plan.start is None else str(_local_file(storage_path(plan.start, options)))
    config = search.trial_config(task.point, task.seed, start, f"-{task.trial_id}" if search.is_population else "")
    prepared = prepare(config, _cached_data(config))
    if plan.weights is not None and prepared.home is None:
        share_file(prepared.path / "init" / "backbone.safetensors", plan.weights)
    if task.handover is not None:
        take_over(prepared, task.handover)
    token = prepared.new_driver_token()
    # With one worker, this process trains and writes the worker's copy of a run on S3.
    run = prepared.on_worker(token) if config.workers.num_workers == 1 else prepared
    names = tuple(stage.name for stage in config.stages)
    feature_store = storage_path(plan.store, options) if plan.store else None
    # Ray Train's workers are other processes, and each removes its copy itself.
    removes_copies, begin = config.workers.num_workers > 1, time.time()
    split = None if search.reports_validation else search.score_split
    job = StageJob(prepared, names, feature_store, tuple(plan.excluded), token, removes_copies, split)
    try:
        return _train_and_score(task, job, run, report, train)
    finally:  # later trials on this machine need the space
        run.remove_copy()
        if run is not prepared:  # this trial has not used it since `begin`, but another process may have
            prepared.remove_copy(unused_for_s=time.time() - begin)


def _train_and_score(task: TrialTask, job: StageJob, run: RunFolder, report: Report, train: Train) -> TrialRecord:
    """Trains the stages of a trial that are not finished, captions its split, and measures its scores and costs."""
    search, names, excluded = task.plan.search, job.stages, task.plan.excluded
    costs, place = costs_of(run), str(run.root)

    def send(reports: Reports, handover: Handover) -> None:
        record = TrialRecord(task.trial_id, task.point, task.seed, run=place, reports=reports, costs=costs)
        report(record, handover if search.is_population else None)

    is_captioned = job.caption_split is None or split_captions(run, job.caption_split, excluded) is not None
    if not is_captioned or any(run.result(name) is None for name in names):
        train(job, TrialContext(run, send))
    costs["seconds"] = trained_seconds(run)
    scores = scores_of(run, search, excluded)
    for name in search.config.objectives:
        if name in search.config.metrics and name != SCORE and name not in scores:
            raise RuntimeError(f"the objective {name} cannot be computed here; `raycap score` shows the reason")
    results = [result for name in names if (result := run.result(name))]
    reason = "; ".join(result.ended_early for result in results if result.ended_early)
    return TrialRecord(
        task.trial_id, task.point, task.seed, "finished", reason, place, final_scores(run), scores, costs
    )


def metrics_of(record: TrialRecord, objectives: Sequence[str]) -> Values:
    """The metrics of a trial that Ray Tune gets: the record, the epoch, and each objective.

    An objective that is measured at the end of a trial is NaN before. Ray Tune refuses a report without it.
    """
    values = {name: record.value(name) for name in (SCORE, *objectives)}
    numbers = {name: math.nan if value is None else value for name, value in values.items()}
    return {"epoch": record.epoch, **numbers, "record": asdict(record)}


def _local_file(file: StoragePath) -> Path:
    """The file itself, or this machine's copy of a file on S3, whose name is a digest of its content."""
    if not file.is_remote:
        return file.path
    path = cache_folder() / "backbones" / file.name
    if not path.is_file():
        with atomic_path(path, durable=False) as temporary:
            file.download(temporary)
    return path


_CACHED_DATA: dict[str, tuple[Dataset, dict[str, str]]] = {}  # at most one entry, by the settings of the data


def _cached_data(config: RunConfig) -> tuple[Dataset, dict[str, str]]:
    """The result of `find_data`, which is cached for the process's next trial on the same data."""
    key = config.model_dump_json(include={"data", "storage"})
    if key not in _CACHED_DATA:
        _CACHED_DATA.clear()
        _CACHED_DATA[key] = find_data(config)
    return _CACHED_DATA[key]


def hand_over(state: Handover, target: Path) -> None:
    """Copies a run's state into the folder `target`: a step's checkpoint, the best weights and the journal.

    Raises TimeoutError when the checkpoint is not complete within `HANDOVER_PATIENCE_S`.
    """
    run, source, deadline = state.run, state.run.stage(state.stage), time.monotonic() + HANDOVER_PATIENCE_S
    checkpoint = source / f"step-{state.step}"
    while not checkpoint.is_dir():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the checkpoint {checkpoint} was not written within {HANDOVER_PATIENCE_S} s")
        time.sleep(0.02)
    # Training removes older best weights meanwhile, so only those that the checkpoint refers to are copied.
    best_step = read_json(checkpoint / "progress.json")["best_step"]
    for name in (checkpoint.name, f"best-{best_step}"):
        shutil.copytree(source / name, target / name)
    shutil.copyfile(source / "predictions-val.json", target / "predictions-val.json")
    shutil.copytree(run.journal, target / run.journal.name)
    write_json(target / "from.json", {"run": run.run_id, "stage": state.stage})


def take_over(run: RunFolder, copy: Path) -> None:
    """Replaces a run's state by the copy that `hand_over` made of another run; ignores a copy of the same run."""
    origin = read_json(copy / "from.json")
    if origin["run"] == run.run_id:
        return
    stage = run.stage(origin["stage"])
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for path in (*copy.glob("step-*"), *copy.glob("best-*")):
        shutil.copytree(path, stage / path.name)
    # a run refuses a checkpoint with another identity, so the copy gets this run's
    for path in stage.glob("step-*/progress.json"):
        write_json(path, read_json(path) | {"identity": f"{run.run_id}/{origin['stage']}"})
    shutil.copyfile(copy / "predictions-val.json", stage / "predictions-val.json")
    shutil.rmtree(run.journal, ignore_errors=True)
    shutil.copytree(copy / run.journal.name, run.journal)
    if run.home is not None:
        (run.home / JOURNAL).delete_folder()  # parts that this copy has not seen
    run.push("stages", JOURNAL)


def share_file(path: Path, source: Path) -> None:
    """Replaces a file by a hard link to an equal file, which saves space. Without support for links it does nothing."""
    if path.samefile(source) or weights_file_digest(path) != weights_file_digest(source):
        return
    with suppress(OSError), atomic_path(path, durable=False) as temporary:
        os.link(source, temporary)


def epochs_of(run: RunFolder, steps: Sequence[tuple[str, int]]) -> list[tuple[float, bool]]:
    """For each (stage, step): the epochs of all stages that are trained by then, and whether the run ends there."""
    stages = run.config.stages
    totals = {stage.name: total_steps(stage, run.num_samples(stage)) for stage in stages}
    before = dict(zip(totals, itertools.accumulate((stage.epochs for stage in stages), initial=0.0), strict=False))
    return [
        (
            round(before[name] + run.config.stage(name).epochs * step / totals[name], 6),
            step == totals[name] and name == stages[-1].name,
        )
        for name, step in steps
    ]


def best_scores(run: RunFolder) -> Reports:
    """For every validation in the run's journal, its epoch and the best CIDEr-D up to it."""
    validations = [entry for entry in read_journal(run.journal) if entry["kind"] == "validation"]
    epochs = epochs_of(run, [(entry["stage"], entry["step"]) for entry in validations])
    best = itertools.accumulate((entry[SCORE] for entry in validations), max)
    return [(epoch, score) for (epoch, _), score in zip(epochs, best, strict=True)]


def final_scores(run: RunFolder) -> Reports:
    """As `best_scores`, for a run whose stages are finished: the last score is that of the weights that it delivers."""
    reports = best_scores(run)
    return [*reports[:-1], *((epoch, _delivered_result(run)[1].best_score) for epoch, _ in reports[-1:])]


def _delivered_result(run: RunFolder) -> tuple[str, StageResult]:
    """The name and the result of the stage that a trial delivers. The first stage is kept in any case."""
    stage = run.delivered()
    result = None if stage is None else run.result(stage.name)
    if stage is None or result is None:
        raise RuntimeError(f"no stage of {run.run_id} is finished")
    return stage.name, result


def trained_seconds(run: RunFolder) -> float:
    """The seconds that all attempts lasted, each from its first entry in the journal to its last."""
    total, previous = 0.0, 0.0
    # An attempt's first entry is an event. The time before an event is not counted, because no attempt was running.
    for entry in read_journal(run.journal):
        total += 0.0 if entry["kind"] == "event" else entry["time"] - previous
        previous = entry["time"]
    return round(total, 3)


def costs_of(run: RunFolder) -> dict[str, float]:
    """The number of parameters, and the multiply-accumulates per image with a caption of 12.5 tokens (Table VI).

    `macs` is missing for models other than ExpansionNet v2, because it is that paper's count.
    """
    counted = cost(
        run.config.model,
        run.metadata.sizes,
        image_tokens=run.metadata.num_tokens,
        caption_tokens=TABLE_6_CAPTION_TOKENS,
        beams=run.config.evaluation.beam_size,
        steps=run.config.evaluation.max_length - 1,
    )
    costs = {"macs": counted.paper, "macs_executed": counted.executed}
    costs |= {"macs_beam_search": counted.beam_search, "parameters": counted.parameters}
    return {name: float(value) for name, value in costs.items() if value is not None}


def scores_of(run: RunFolder, search: Search, excluded: list[str]) -> dict[str, float]:
    """The scores of the captions of the delivered weights; metrics that cannot be computed here are missing.

    The captions are those of the validation that chose these weights, and those of `score_split`, if it is another one.
    """
    metrics, dataset = search.config.metrics, run.dataset.without(excluded)
    scores = {}
    if metrics:
        validated = read_predictions(run.stage(_delivered_result(run)[0]) / "predictions-val.json")
        scores = _scores(dataset.split(run.config.data.val_split), validated, metrics, run.config)
    if not search.reports_validation:
        captions = split_captions(run, search.score_split, excluded)
        if captions is None:
            raise RuntimeError(f"{run.run_id} has no captions of {search.score_split}")
        names = tuple(dict.fromkeys((SCORE, *metrics)))
        values = _scores(dataset.split(search.score_split), captions, names, run.config)
        scores |= {search.reported(name): value for name, value in values.items()}
    return scores


def _scores(
    images: Dataset, captions: Mapping[ImageId, str], metrics: Sequence[str], config: RunConfig
) -> dict[str, float]:
    """The scores by metric, without those that cannot be computed here."""
    scores = caption_scores(captions, images, metrics, config)
    return {} if scores is None else {name: value for name, value in scores.values.items() if value is not None}


def split_captions(run: RunFolder, split: str, excluded: Sequence[str]) -> dict[ImageId, str] | None:
    """The captions of a split by image id; None unless a finished trial has captioned exactly its images."""
    path = run.path / "predictions" / f"{split}.json"
    if any(run.result(stage.name) is None for stage in run.config.stages) or not path.is_file():
        return None
    try:
        captions = read_predictions(path)
    except UserError:  # the file is damaged
        return None
    return captions if captions.keys() == set(run.dataset.without(excluded).split(split).column("image_id")) else None
