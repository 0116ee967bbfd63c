"""Runs one trial in the current process: an ordinary run that reports its validations, scores and costs."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from raycap.models.captioner import TABLE_6_CAPTION_TOKENS, cost
from raycap.models.config import Values
from raycap.pipeline.config.run import total_steps
from raycap.pipeline.data.caption_files import read_predictions
from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.evaluation.captioning.search import caption_images
from raycap.pipeline.evaluation.evaluate import caption_scores
from raycap.pipeline.features.model_inputs import model_inputs
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runs.folder import JOURNAL, RunFolder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import Context, LocalContext
from raycap.pipeline.runtime.processor import device_for, prepare_processor
from raycap.pipeline.search.records import Reports, SearchPlan, TrialRecord
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.storage.atomic import atomic_path, read_json, write_json
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path
from raycap.pipeline.storage.weights import weights_file_digest
from raycap.pipeline.training.loop import StageJob, stored_captioner, train_stages

NEWEST = "newest.txt"  # in a checkpoint of Ray Tune: the name of the folder with the state


@dataclass(frozen=True)
class TrialTask:
    """The input of a trial's process."""

    plan: SearchPlan
    trial_id: str
    point: Values
    seed: int
    handover: Path | None = None  # a folder with the state to continue from; only in a population


# Sends a trial to the search, with a function that copies the run's state into a folder where a population needs it.
# Raises SystemExit to stop the trial.
Report = Callable[[TrialRecord, Callable[[Path], None] | None], None]
Train = Callable[[Context, StageJob], None]  # `train_stages`, or on Ray Train's workers
Caption = Callable[[StageJob, str], dict[ImageId, str]]  # `split_captions`, or in a task of Ray


class TrialContext(LocalContext):
    """The training context of a trial, which sends every validation but the last, whose scores come with the end.

    send: gets the validations so far, and the step of the last one. A trial of several workers trains on their devices.
    """

    def __init__(self, run: RunFolder, send: Callable[[Reports, int], None], *, reads_checkpoints: bool) -> None:
        workers = run.config.workers
        super().__init__(device_for(workers.gpus_per_worker if workers.num_workers == 1 else 0))
        self.run, self.send, self.reads_checkpoints = run, send, reads_checkpoints

    def report(self, metrics: Values) -> None:
        reports = reports_of(self.run)
        if reports[-1][0] < round(sum(stage.epochs for stage in self.run.config.stages), 6):
            self.send(reports, metrics["step"])


def split_captions(job: StageJob, split: str) -> dict[ImageId, str]:
    """The captions of a split by image id, with the weights that a finished run delivers and its `evaluation`.

    They are made from the features of the initial backbone. If a stage has trained the delivered backbone, they are
    made from the images.
    """
    folder = job.folder.on_worker(job.driver_token)
    config, workers = folder.config, folder.config.workers
    prepare_processor(workers.threads)
    context = LocalContext(device_for(workers.gpus_per_worker))
    reads_images = config.has_backbone and folder.delivered_weights("backbone").parent != folder.path / "init"
    captioner = stored_captioner(folder, config.backbone if reads_images else None, folder.delivered_weights)
    assert reads_images or job.store is not None  # else the stages have read the store
    store = None if reads_images or job.store is None else open_store(job.store, config.features)
    part = folder.dataset.without(job.excluded).split(split)
    images = model_inputs(config, part, store)
    best = caption_images(captioner.to(context.device), images, folder.vocabulary, config.evaluation, context)
    if job.removes_copies:
        folder.remove_copy()
    return {image: hypothesis.caption for image, hypothesis in zip(part.source_ids(), best.values(), strict=True)}


def run_trial(
    task: TrialTask, report: Report, train: Train = train_stages, caption: Caption = split_captions
) -> TrialRecord:
    """Trains a point with a seed, and resumes its run if it exists. Returns the finished trial.

    SystemExit propagates: Ray Tune raises it in `report` to stop the trial.
    """
    plan, search = task.plan, task.plan.search
    options = search.base.storage.options
    weights = None if plan.weights is None else _local_file(storage_path(plan.weights, options))
    config = search.trial_config(task.point, task.seed, weights, f"-{task.trial_id}" if search.is_population else "")
    if config.workers.compile:
        torch._dynamo.reset()  # frees what an earlier trial of this process has compiled
    prepared = prepare(config)
    if weights is not None and prepared.home is None:
        share_file(prepared.path / "init" / "backbone.safetensors", weights)
    if task.handover is not None:
        take_over(prepared, task.handover)
    token = prepared.new_token("driver_token")
    # With one worker, this process trains and writes the worker's copy of a run on S3.
    run = prepared.on_worker(token) if config.workers.num_workers == 1 else prepared
    names = tuple(stage.name for stage in config.stages)
    feature_store = storage_path(plan.store, options) if plan.store else None
    # Ray Train's workers are other processes, and each removes its copy itself.
    removes_copies, begin = config.workers.num_workers > 1, time.time()
    job = StageJob(prepared, names, feature_store, tuple(plan.excluded), token, removes_copies)
    try:
        return _train_and_score(task, job, run, report, train, caption)
    finally:  # later trials on this machine need the space
        run.remove_copy()
        if run is not prepared:  # this trial has not used it since `begin`, but another process may have
            prepared.remove_copy(unused_for_s=time.time() - begin)


def _train_and_score(
    task: TrialTask, job: StageJob, run: RunFolder, report: Report, train: Train, caption: Caption
) -> TrialRecord:
    """Trains the stages of a trial that are not finished, and measures its scores and costs.

    The finished trial is kept beside its run for a later experiment of the search, unless a metric is missing, because
    another machine may compute it.
    """
    search, scheduler = task.plan.search, task.plan.search.config.scheduler
    kept = f"trial-{search.identity(*job.excluded)}.json"
    if (run.path / kept).is_file():
        record = TypeAdapter(TrialRecord).validate_python(read_json(run.path / kept))
        return replace(record, trial_id=task.trial_id, run=str(run.root))
    begun = TrialRecord(task.trial_id, task.point, task.seed, run=str(run.root), costs=costs_of(run))
    every = scheduler.every_epochs if scheduler and search.is_population else math.inf

    def send(reports: Reports, step: int) -> None:
        is_copied = decides([epoch for epoch, _ in reports], every)
        report(replace(begun, reports=reports), partial(hand_over, run, step) if is_copied else None)

    if any(run.result(name) is None for name in job.stages):
        train(TrialContext(run, send, reads_checkpoints=search.is_population), job)
    delivered = run.delivered()
    assert delivered is not None  # the first stage is kept in any case
    scores = scores_of(job, run, delivered.name, search, caption)
    missing = [name for name, value in scores.items() if value is None]
    for name in missing:
        if name in search.config.objectives:
            raise RuntimeError(f"the objective {name} cannot be computed here; `raycap score` shows the reason")
    results = {name: result for name in job.stages if (result := run.result(name))}
    reports = reports_of(run)
    reports[-1] = (reports[-1][0], results[delivered.name].best_score)
    reason = "; ".join(result.ended_early for result in results.values() if result.ended_early)
    measured = {name: value for name, value in scores.items() if value is not None}
    record = replace(begun, state="finished", reason=reason, reports=reports, scores=measured)
    if not missing:
        write_json(run.path / kept, asdict(record))
        run.push(kept)
    return record


def _local_file(file: StoragePath) -> Path:
    """The file itself, or this machine's copy of a file on S3, whose name is a digest of its content."""
    if not file.is_remote:
        return file.path
    path = cache_folder() / "backbones" / file.name
    if not path.is_file():
        with atomic_path(path, durable=False) as temporary:
            file.download(temporary)
    return path


def decides(epochs: Sequence[float], every: float) -> bool:
    """Whether population based training decides at the last of a trial's reports, so that others may copy its state.

    Ray Tune decides at the first report that is at least `every` epochs after the one of its last decision.
    """
    last, is_due = 0.0, False
    for epoch in epochs:
        is_due = epoch - last >= every
        last = epoch if is_due else last
    return is_due


def hand_over(run: RunFolder, step: int, target: Path) -> None:
    """Copies the state of a run after a step with a validation into `target`, with the layout of a run's folder.

    The state is the step's checkpoint, the best weights and the journal. The run has one stage. Ray Tune may add
    `target` to the files of an earlier checkpoint, because a trial that took over another one counts anew. Therefore
    the state has a folder of its own, which the file NEWEST names.
    """
    stage = run.config.stages[0].name
    state = target / f"{run.run_id}-{step}"
    source, copy = run.stage(stage), state / "stages" / stage
    best_step = read_json(source / f"step-{step}" / "progress.json")["best_step"]
    for name in (f"step-{step}", f"best-{best_step}"):
        shutil.copytree(source / name, copy / name)
    shutil.copyfile(source / "predictions-val.json", copy / "predictions-val.json")
    shutil.copytree(run.journal, state / JOURNAL)
    (target / NEWEST).write_text(state.name)


def take_over(run: RunFolder, copy: Path) -> None:
    """Replaces a run's state by the copy that `hand_over` made of another run; ignores a copy of the same run."""
    state = copy / (copy / NEWEST).read_text()
    (progress,) = state.glob("stages/*/step-*/progress.json")
    values, stage = read_json(progress), run.config.stages[0].name
    identity = f"{run.run_id}/{stage}"  # a run refuses a checkpoint with another identity
    if values["identity"] == identity:
        return
    shutil.rmtree(run.stage(stage), ignore_errors=True)
    shutil.rmtree(run.journal, ignore_errors=True)
    shutil.copytree(state, run.path, dirs_exist_ok=True)
    write_json(run.path / progress.relative_to(state), values | {"identity": identity})
    if run.home is not None:
        (run.home / JOURNAL).delete_folder()  # parts that this copy has not seen
    run.push("stages", JOURNAL)


def share_file(path: Path, source: Path) -> None:
    """Replaces a file by a hard link to an equal file, which saves space. Without support for links it does nothing."""
    if path.samefile(source) or weights_file_digest(path) != weights_file_digest(source):
        return
    with suppress(OSError), atomic_path(path, durable=False) as temporary:
        os.link(source, temporary)


def reports_of(run: RunFolder) -> Reports:
    """For every validation in the run's journal, the epochs of all stages up to it, and the best CIDEr-D so far."""
    before, reports, best = 0.0, Reports(), -math.inf
    validations = [entry for entry in read_journal(run.journal) if entry["kind"] == "validation"]
    for stage in run.config.stages:
        total = total_steps(stage, run.num_samples(stage))
        for entry in validations:
            if entry["stage"] == stage.name:
                best = max(best, entry[SCORE])
                reports.append((round(before + stage.epochs * entry["step"] / total, 6), best))
        before += stage.epochs
    return reports


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


def scores_of(job: StageJob, run: RunFolder, stage: str, search: Search, caption: Caption) -> dict[str, float | None]:
    """The scores of the captions of a stage, which the run delivers. They are None if they cannot be computed here.

    The captions are those of the validation that chose these weights, and those of `score_split`, if it is another one.
    """
    config, images, scores = run.config, run.dataset.without(job.excluded), dict[str, float | None]()
    val_split, metrics = config.data.val_split, search.config.metrics
    captions: dict[str, Mapping[Any, str]] = {val_split: read_predictions(run.stage(stage) / "predictions-val.json")}
    if not search.reports_validation:
        captions[search.score_split] = caption(job, search.score_split)
    for split, each in captions.items():
        names = metrics if split == val_split else tuple(dict.fromkeys((SCORE, *metrics)))
        found = caption_scores(each, images.split(split), names, config)
        for name in names:
            label = search.reported(name) if split == search.score_split else name
            scores[label] = None if found is None else found.values[name]
    return scores
