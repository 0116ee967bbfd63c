"""The training loop: one stage after another over a context, from batches to checkpoints; knows nothing of Ray.

What a stage starts from, in this order:
1. its own newest checkpoint (`resume`: weights, optimizer, position, best score);
2. the best weights of the stages before it (`init_from`: weights only, fresh optimizer);
3. the run's initial weights.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models.backbone import Backbone, set_drop_path
from models.captioner import Captioner
from models.layers import set_dropout
from models.registry import build_model
from models.transform import ImageTransform
from pipeline.captioning.captioning import caption_images
from pipeline.config.run import total_steps
from pipeline.config.sections import StageSection
from pipeline.features.model_inputs import Images
from pipeline.features.store import open_store
from pipeline.runs.checkpoints import CheckpointWriter, Progress, finish_stage, load_checkpoint, save_best
from pipeline.runs.folder import JOURNAL, RunFolder
from pipeline.runs.journal import JOURNAL_EVERY_S, Journal
from pipeline.runtime.context import Context, gather_objects, sum_over_ranks
from pipeline.runtime.cpu import memory_mb, prepare_processor
from pipeline.runtime.system_metrics import system_metrics
from pipeline.runtime.weights import load_weights
from pipeline.storage.atomic import write_json
from pipeline.storage.cache import image_cache
from pipeline.storage.path import StoragePath
from pipeline.training.batches import Batch, Batches, Captions
from pipeline.training.objectives import Objective, check_reward, cross_entropy_objective, scst_objective, stage_reward
from pipeline.training.optimizer import learning_rate, make_optimizer
from pipeline.training.reward import CaptionReward
from pipeline.training.sample_order import seed_of


class AbandonedError(RuntimeError):
    """Another attempt at the run has begun: this one's driver died, or lost its storage, and its workers live on."""


class ReplacedError(RuntimeError):
    """The driver has started other workers in place of these, which it could not reach any more."""


class DivergedError(RuntimeError):
    """The loss is not finite; says at which stage, step and rank."""


@dataclass(frozen=True)
class StageJob:
    """A stage to run: where the run lies, and the stores that hold features for frozen stages."""

    run: Path
    stages: tuple[str, ...]
    store: StoragePath | Path | None
    excluded: tuple[str, ...] = ()  # content keys in quarantine
    attempt: str = ""  # the driver's token: a worker of an attempt that was given up writes nothing more
    home: StoragePath | None = None  # of the run, when that is on S3

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run, self.home)


def train_stages(context: Context, job: StageJob) -> None:
    """Runs the stages of a job that are not over yet, one after the other."""
    folder = job.folder.on_worker(job.attempt)
    group = folder.begin_group() if job.attempt and not context.world_rank else ""
    for name in job.stages:
        if folder.result(name) is None:
            StageRun(context, folder, folder.config.stage(name), job, group).run()
        if context.world_rank:
            folder.pull(f"stages/{name}")  # what the next stage starts from; rank 0 may be on another machine


class StageRun:
    """One stage on one worker."""

    def __init__(
        self, context: Context, folder: RunFolder, stage: StageSection, job: StageJob, group: str = ""
    ) -> None:
        config = folder.config
        self.context, self.folder, self.stage, self.job, self.group = context, folder, stage, job, group
        self.number = list(config.stages).index(stage)
        prepare_processor(config.workers.threads_per_worker)
        dataset = folder.dataset.without(job.excluded)
        train, validation = dataset.split(*config.data.train_splits), dataset.split(config.data.val_split)
        self.vocabulary = folder.vocabulary
        self.captioner = self._captioner()
        store = None if stage.train_backbone else open_store(_store(job, stage), config.features)
        transform, options = ImageTransform(config.backbone.image_size), config.storage.options
        threads, cache = config.workers.num_decode_threads, image_cache(config.features.cache_gib)

        def images_of(part: Any) -> Images:
            return Images(part, store, transform, config.data.max_pixels, threads, options, cache)

        self.batches = Batches(
            images_of(train),
            Captions(train, self.vocabulary),
            stage,
            seed=seed_of(config.seed, self.number),
            rank=context.world_rank,
            world_size=context.world_size,
        )
        self.validation = images_of(validation)
        self.validation_score = CaptionReward(validation.references(), self.vocabulary, eos=False)
        self.objective = self._objective(train)
        self.optimizer = make_optimizer(self.captioner, stage.optimizer, stage.lr)
        self.wrapped: nn.Module = self.captioner
        if config.workers.compile:
            self.wrapped = torch.compile(self.captioner)  # type: ignore[assignment]
        if context.world_size > 1:
            self.wrapped = DistributedDataParallel(
                self.wrapped,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # they are constants
            )
        self.total = total_steps(stage, self.batches.num_samples)
        self.steps_per_epoch = max(1, self.batches.num_samples // stage.batch_size)
        self.identity = f"{folder.run_id}/{stage.name}"
        self.path = folder.stage(stage.name)
        self.writer = CheckpointWriter(self.path, self.identity, self._fence, self._send)
        self.progress = Progress()
        self._sent = -math.inf

    def run(self) -> None:
        """Trains to the end of the stage and marks it as over."""
        progress = load_checkpoint(self.path, self.captioner, self.optimizer, self.identity) or Progress()
        steps = gather_objects(self.context, progress.step)
        if len(set(steps)) > 1:
            raise RuntimeError(f"workers see different checkpoints of {self.path} (steps {steps}); it must be shared")
        if self._leads:
            self._fence()
            self.journal = Journal(self.folder.journal, self.stage.name, progress.step)
        text = f"continues from step {progress.step}" if progress.step else "starts"
        self._note("event", progress.step, {"text": f"{text} of {self.total}", "total": self.total})
        if self.stage.objective == "scst":
            self._note("reward", progress.step, {"text": check_reward(self.stage, self.reward)})
        self.captioner.train()
        self.progress, saved = progress, time.monotonic()
        window = _Window(self.context)
        every = self.folder.config.workers.log_every_steps
        stop = progress.step if progress.ended_early else self.total
        for step, batches in enumerate(self.batches.stream(progress.step, stop), progress.step):
            window.waited()
            window.add(self.step(step, batches))
            progress.step = step + 1
            if progress.step % every == 0 or progress.step == self.total:
                values = window.summary(self.stage.batch_size)
                self._note("train", progress.step, {"total": self.total, "lr": self._rate(step), **values})
            if self._validates_after(step):
                self._validate()
                window = _Window(self.context)
                saved = time.monotonic()
                if progress.ended_early:
                    break
            elif progress.step % self.stage.checkpoint_every_steps == 0 or (
                time.monotonic() - saved > 60 * self.stage.checkpoint_every_minutes
            ):
                self._save()
                saved = time.monotonic()
        self.writer.close()
        self._finish()
        gather_objects(self.context, None)  # nobody begins the next stage before this one's result is written

    def step(self, step: int, batches: list[Batch]) -> dict[str, float]:
        """One optimizer step over this worker's micro-batches; returns this worker's numbers."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        self.optimizer.zero_grad(set_to_none=True)
        numbers: dict[str, float] = {}
        for part, batch in enumerate(batches):
            seed = seed_of(self.folder.config.seed, self.number, step, part, self.context.world_rank)
            torch.manual_seed(seed)
            generator = torch.Generator(self.context.device).manual_seed(seed ^ 1)
            moved = self._moved(batch)
            last = part == len(batches) - 1
            local = isinstance(self.wrapped, DistributedDataParallel) and not last
            with self.wrapped.no_sync() if local else contextlib.nullcontext():  # type: ignore[operator]
                with torch.autocast(
                    self.context.device.type, torch.bfloat16, enabled=self.stage.precision == "bfloat16"
                ):
                    output = self.objective(self.wrapped, self.captioner, moved, generator)
                if not math.isfinite(output.numbers["loss"]):
                    raise DivergedError(self._diverged("loss", output.numbers["loss"], step))
                (output.loss * self.context.world_size).backward()  # DDP averages; the loss is a share of a global sum
            for key, value in output.numbers.items():
                numbers[key] = numbers.get(key, 0.0) + value
        norm = nn.utils.clip_grad_norm_(self.captioner.parameters(), self.stage.max_grad_norm or math.inf)
        if not math.isfinite(norm):
            raise DivergedError(self._diverged("gradient norm", float(norm), step))
        numbers["gradient_norm"] = float(norm) / self.context.world_size  # summed over ranks, on each the same
        self.optimizer.step()
        return numbers

    def _diverged(self, what: str, value: float, step: int) -> str:
        return (
            f"the {what} is {value} in stage {self.stage.name}, step {step}, rank {self.context.world_rank}; "
            "the last good checkpoint stays: lower lr or add max_grad_norm"
        )

    def _captioner(self) -> Captioner:
        config, folder, stage = self.folder.config, self.folder, self.stage
        model = build_model(config.model, folder.sizes)
        load_weights(model, folder.weights_before(stage, "model"))
        set_dropout(model, config.model.dropout if stage.dropout is None else stage.dropout)
        backbone = None
        if stage.train_backbone:
            backbone = Backbone(config.backbone)
            if stage.drop_path is not None:
                set_drop_path(backbone, stage.drop_path)
            load_weights(backbone, folder.weights_before(stage, "backbone"))
        if backbone is not None:
            backbone = backbone.to(memory_format=torch.channels_last)
        captioner = Captioner(model, backbone).to(self.context.device)
        return captioner.double() if stage.precision == "float64" else captioner

    def _objective(self, train: Any) -> Objective:
        pad = self.vocabulary.pad
        if self.stage.objective == "cross_entropy":
            return cross_entropy_objective(self.stage, pad)
        self.reward = stage_reward(self.stage, train.references(), self.vocabulary, self.context.device)
        ids = torch.tensor(train.column("image_id"))
        return scst_objective(self.stage, self.reward, ids, pad, self.vocabulary.words)

    def _moved(self, batch: Batch) -> Batch:
        device = self.context.device
        dtype = torch.float64 if self.stage.precision == "float64" else torch.float32
        inputs = batch.inputs.to(device, dtype)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return Batch(
            inputs,
            batch.tokens.to(device),
            batch.images,
            batch.global_targets,
            batch.global_images,
            None if batch.lengths is None else batch.lengths.to(device),
            None if batch.boxes is None else batch.boxes.to(device),
        )

    def _rate(self, step: int) -> float:
        rate = learning_rate(self.stage.schedule, self.stage.lr, step, steps_per_epoch=self.steps_per_epoch)
        plateau = self.stage.plateau
        return rate * plateau.factor**self.progress.reductions if plateau else rate

    def _validates_after(self, step: int) -> bool:
        """True when a multiple of `validate_every_epochs` has just been passed, and at the stage's end."""
        every = self.stage.validate_every_epochs * self.batches.num_samples / self.stage.batch_size
        return step + 1 == self.total or math.floor((step + 1) / every) > math.floor(step / every)

    def _validate(self) -> None:
        begin, progress = time.monotonic(), self.progress
        settings = self.folder.config.evaluation
        captions = caption_images(self.captioner, self.validation, self.vocabulary, settings, self.context)
        score = self._score(captions)
        if score > progress.best_score:
            progress.best_score, progress.best_step, progress.since_best = score, progress.step, 0
            if self._leads:
                self._fence()
                self.writer.wait()  # a checkpoint that names the best before this one clears away what it does not name
                save_best(self.path, self.captioner, progress.step)
                write_json(self.path / "predictions-val.json", _result_file(captions))
        else:
            progress.since_best += 1
        self._consider_stopping(score)
        seconds = round(time.monotonic() - begin, 2)
        self._note("validation", progress.step, {"CIDEr-D": score, "best": progress.best_score, "seconds": seconds})
        self._save()
        self.context.report({"stage": self.stage.name, "step": progress.step, "validation_CIDEr-D": score})

    def _consider_stopping(self, score: float) -> None:
        """Lowers the rate on a plateau, ends the stage when patience is out or SCST has gone wrong; all ranks alike."""
        stage, progress = self.stage, self.progress
        if stage.plateau and progress.since_best and progress.since_best % stage.plateau.patience == 0:
            progress.reductions += 1
        if stage.patience and progress.since_best >= stage.patience:
            progress.ended_early = f"no better validation {progress.since_best} times in a row"
        if stage.objective == "scst":
            reference = max(self._best_before(), progress.best_score)
            if score < (1 - stage.sampling.max_cider_drop) * reference:
                progress.ended_early = f"validation CIDEr-D fell to {score:.4f} from {reference:.4f}"

    def _best_before(self) -> float:
        """Validation CIDEr-D of what this stage started from, the newest stage that was kept; -inf without any."""
        before = [self.folder.result(stage.name) for stage in self.folder.before(self.stage)]
        return next((result["best_score"] for result in reversed(before) if result and result["kept"]), -math.inf)

    def _score(self, captions: dict[int, str]) -> float:
        """Mean CIDEr-D over the validation images, in the field's scale (1.404 for 140.4); on every rank alike."""
        rows = [self.vocabulary.encode(caption.split()) for caption in captions.values()]
        width = max(len(row) for row in rows)
        tokens = torch.tensor([row + [self.vocabulary.pad] * (width - len(row)) for row in rows])
        return float(self.validation_score(tokens, list(captions)).mean())

    def _save(self) -> None:
        if self._leads:
            self.writer.save(self.captioner, self.optimizer, self.progress)

    def _finish(self) -> None:
        if not self._leads:
            return
        self._fence()
        progress, rival = self.progress, self._best_before()
        # A stage that was stopped because its score fell is no step forward unless it rose first.
        demanding = self.stage.keep_if_better or (self.stage.objective == "scst" and bool(progress.ended_early))
        kept = not demanding or progress.best_score > rival
        result = {
            "steps": progress.step,
            "best_step": progress.best_step,
            "best_score": progress.best_score,
            "kept": kept,
            "ended_early": progress.ended_early,
        }
        finish_stage(self.path, result)
        self._send()
        verdict = "kept" if kept else f"not kept: the stage before has {rival:.4f}"
        early = f" (ended early: {progress.ended_early})" if progress.ended_early else ""
        text = f"done: best validation CIDEr-D {progress.best_score:.4f} at step {progress.best_step}, {verdict}{early}"
        self._note("done", progress.step, {"text": text})
        self._send_journal()

    @property
    def _leads(self) -> bool:
        return self.context.world_rank == 0

    def _fence(self) -> None:
        """Raises AbandonedError when another attempt at this run has begun, ReplacedError when other workers have."""
        if self.job.attempt and self.folder.attempt != self.job.attempt:
            raise AbandonedError(f"another attempt at {self.folder.run_id} has taken over; this worker stops")
        if self.group and self.folder.group != self.group:
            raise ReplacedError(f"other workers train {self.folder.run_id} now; this one stops")

    def _note(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._leads:
            self._fence()
            self.journal.write(kind, step, values)
            if time.monotonic() - self._sent > JOURNAL_EVERY_S:
                with contextlib.suppress(OSError):  # what is printed later costs training nothing
                    self._send_journal()

    def _send_journal(self) -> None:
        """By itself, not as the stages go: it never waits for a checkpoint that is on its way."""
        if self.folder.home is not None:
            (self.folder.home / JOURNAL).write_bytes(self.folder.journal.read_bytes())
        self._sent = time.monotonic()

    def _send(self) -> None:
        """Rank 0's part of a run on S3 goes home: the journal, then the stage that it tells of."""
        self._send_journal()
        self.folder.push(f"stages/{self.stage.name}", allowed=self._fence)


class _Window:
    """Numbers since the last log line: means over steps and ranks, speed, and how long data was waited for."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, float] = {}
        self.steps, self.waiting = 0, 0.0
        self.begin = self.mark = time.monotonic()

    def waited(self) -> None:
        self.waiting += time.monotonic() - self.mark

    def add(self, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        self.steps += 1
        self.mark = time.monotonic()

    def summary(self, batch_size: int) -> dict[str, float]:
        """A collective: every rank calls it at the same step."""
        elapsed = time.monotonic() - self.begin
        keys = sorted(self.sums)
        device = self.context.device if self.context.device.type == "cuda" else torch.device("cpu")
        values = torch.tensor([*(self.sums[key] for key in keys), self.waiting], dtype=torch.float64, device=device)
        summed = sum_over_ranks(self.context, values).tolist()
        means = {key: value / self.steps for key, value in zip(keys, summed, strict=False)}
        square = means.pop("reward_square", None)
        if square is not None:
            means["reward_deviation"] = math.sqrt(max(0.0, square - means["reward"] ** 2))
        result = {
            **means,
            "images_per_s": batch_size * self.steps / elapsed,
            "data_wait": summed[-1] / self.context.world_size / elapsed,
            "memory_mb": memory_mb(self.context.device),
            **system_metrics(self.context.device),
        }
        self._clear()
        return result


def _result_file(captions: dict[int, str]) -> list[dict[str, Any]]:
    """COCO's result format."""
    return [{"image_id": image, "caption": caption} for image, caption in captions.items()]


def _store(job: StageJob, stage: StageSection) -> StoragePath | Path:
    if job.store is None:
        raise ValueError(f"stage {stage.name} reads features, and the job names no store")
    return job.store
