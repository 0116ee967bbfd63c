"""The training loop: runs the stages of a run one after another, from batches to checkpoints, without Ray.

A stage starts from the first of the following that exists:
1. its newest checkpoint (weights, optimizer, position, best score);
2. the best weights of the stages before it (weights only, with a fresh optimizer);
3. the run's initial weights.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_captioner
from raycap.models.config import BackboneConfig
from raycap.models.dropout import set_dropout
from raycap.models.encoders.backbone import set_drop_path
from raycap.pipeline.config.run import total_steps
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.evaluation.captioning.search import caption_images
from raycap.pipeline.evaluation.results import RankedCaption
from raycap.pipeline.features.model_inputs import FeatureComputer, model_inputs
from raycap.pipeline.features.precision import known_precision
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runs.folder import RunFolder, StageResult
from raycap.pipeline.runtime.context import Context, any_rank, gather_objects
from raycap.pipeline.runtime.processor import float32_products, prepare_processor, slow_bfloat16
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import load_weights
from raycap.pipeline.training.batches import Batch, Batches, CaptionTokens, captions_by_stage, seed_of
from raycap.pipeline.training.objectives import make_objective
from raycap.pipeline.training.optimizer import WeightAverage, learning_rate, make_optimizer, set_rate
from raycap.pipeline.training.rewards.reward import CiderDReward
from raycap.pipeline.training.stage_output import AbandonedError, Progress, StageOutput, require_driver
from raycap.pipeline.training.step_metrics import FiniteCheck, StepMetrics, summed

NOTICE = "a worker will soon be ended; a checkpoint is saved now"
STOPPING = "the command is being stopped; a checkpoint is saved now"
NO_CIDER = 5e-5  # CIDEr-D below this value is printed as 0.0000
CANNOT_CLIMB = (
    "SCST cannot climb: validation CIDEr-D is 0.0000, and where every sampled caption has the reward 0, none is "
    "preferred. Train cross entropy longer; if the score stays 0, `raycap check` the data"
)
REPORT_VALIDATION_EVERY_S = 30.0  # so that the driver sees progress during a long validation


@dataclass(frozen=True)
class StageJob:
    """The task of the workers: consecutive stages of a run, and the feature store of stages with a frozen backbone.

    If `features.store` is never, the store has only the features of validation images.
    """

    folder: RunFolder
    stages: tuple[str, ...]
    store: StoragePath | Path | None
    excluded: tuple[str, ...] = ()  # content keys of images without features
    driver_token: str = ""  # Workers stop if the run has another token. If it is "", the token is not checked.
    removes_copies: bool = False  # If true, a worker that ends removes its copy of a run on S3.


def train_stages(context: Context, job: StageJob) -> None:
    """Runs the unfinished stages of a job one after the other. Ends early if `context.must_stop()` is true."""
    require_driver(job.folder, job.driver_token)  # checked first, because `on_worker` removes copies of other drivers
    folder = job.folder.on_worker(job.driver_token)
    try:
        _train_stages(context, job, folder)
    except AbandonedError:
        if job.removes_copies and folder.home is not None:  # its unsent files must not be sent any more
            shutil.rmtree(folder.path.parent, ignore_errors=True)
        raise
    finally:
        if job.removes_copies:
            folder.remove_copy()


def _train_stages(context: Context, job: StageJob, folder: RunFolder) -> None:
    """Runs the stages of a job. folder: this worker's copy of the run, or the run itself on local storage."""
    token = ""
    if job.driver_token and context.world_rank == 0:
        token = folder.new_token("worker_group_token")  # from now on, an earlier group of workers cannot write
    # On a machine without rank 0, no file of the copy changes during a stage, so it would look unused without the lock.
    with folder.in_use():
        unfinished = [folder.config.stage(name) for name in job.stages if folder.result(name) is None]
        captions = captions_by_stage(folder, unfinished, job.excluded)
        for name in job.stages:
            if name in captions:
                run = StageRun(context, folder, folder.config.stage(name), job, token, captions[name])
                with contextlib.closing(run.output):
                    is_finished = run.run()
                del run  # the next stage needs its memory
                if not is_finished:
                    return
            if context.world_rank:
                # The next stage starts from files that rank 0 has written, perhaps on another machine.
                folder.pull(f"stages/{name}")


def stage_captioner(folder: RunFolder, stage: StageSection, device: torch.device) -> Captioner:
    """The captioner with which a stage begins: initial weights, frozen parts, dropout, drop path and precision."""
    config = folder.config
    backbone = config.backbone if stage.train_backbone else None
    captioner = stored_captioner(folder, backbone, lambda part: folder.weights_before(stage, part)).to(device)
    set_dropout(captioner.model, config.model.dropout if stage.dropout is None else stage.dropout)
    if captioner.backbone is not None and stage.drop_path is not None:
        set_drop_path(captioner.backbone, stage.drop_path)
    for parameter in captioner.frozen_by(stage.freeze):
        parameter.requires_grad_(False)
    return captioner.double() if stage.precision == "float64" else captioner


def stored_captioner(
    folder: RunFolder, backbone: BackboneConfig | None, weights_of: Callable[[str], Path]
) -> Captioner:
    """A captioner with stored weights. weights_of: returns the file for "model" or "backbone"."""
    captioner = build_captioner(folder.config.model, folder.metadata.sizes, backbone)
    for part, module in captioner.named_children():  # "model" and, if there is one, "backbone"
        load_weights(module, weights_of(part))
    return captioner


def feature_computer(
    folder: RunFolder, stage: StageSection, device: torch.device, undecided: str | None = None
) -> FeatureComputer | None:
    """The computer of training features, or None if the stage trains the backbone or reads stored features.

    undecided: the precision to use if `features.compute_dtype` is auto and the storage has no decision yet. If
    `undecided` is None, that case raises ValueError.
    """
    config = folder.config
    if stage.train_backbone or config.features.store == "always":
        return None
    dtype = known_precision(config.backbone, config.features, config.storage_place / "precision") or undecided
    if dtype is None:
        raise ValueError(f"stage {stage.name} computes features, and the storage has no decision on their precision")
    settings = config.features.model_copy(update={"compute_dtype": dtype})
    return FeatureComputer(config.backbone, folder.weights_before(stage, "backbone"), settings, device)


def with_features(batch: Batch, computer: FeatureComputer | None) -> Batch:
    """The batch with features in place of pixels, equal to those of a store. If `computer` is None, the same batch."""
    if computer is None:
        return batch
    return replace(batch, features=Features(computer.features(batch.features.tokens)))


def feature_dtype(stage: StageSection) -> torch.dtype:
    """The type of a batch's features. With precision bfloat16 it is float32, because autocast converts the features."""
    return torch.float64 if stage.precision == "float64" else torch.float32


def data_parallel(captioner: Captioner, stage: StageSection) -> DistributedDataParallel:
    """The captioner wrapped in DDP, which averages gradients over the workers in the stage's `gradient_dtype`."""
    # Buffers need no broadcast, because they are constants.
    wrapped = DistributedDataParallel(captioner, gradient_as_bucket_view=True, broadcast_buffers=False)
    if stage.gradient_dtype == "bfloat16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


class StageRun:
    """Trains one stage on one worker. Raises ValueError if the stage needs features and the job has no store."""

    def __init__(
        self,
        context: Context,
        folder: RunFolder,
        stage: StageSection,
        job: StageJob,
        worker_group_token: str = "",
        captions: CaptionTokens | None = None,
    ) -> None:
        """captions: of the stage's training images, from `captions_by_stage`. If it is None, they are encoded here."""
        config = folder.config
        self.context, self.folder, self.stage, self.vocabulary = context, folder, stage, folder.vocabulary
        self.number = list(config.stages).index(stage)
        prepare_processor(config.workers.threads)
        train = folder.training_images(stage).without(job.excluded)
        validation = folder.dataset.split(config.data.val_split).without(job.excluded)
        self.captioner = stage_captioner(folder, stage, context.device)
        store = None
        if not stage.train_backbone:
            if job.store is None:
                raise ValueError(f"stage {stage.name} reads features, and the job names no store")
            store = open_store(job.store, config.features)
        seed = seed_of(config.seed, self.number)
        if captions is None:
            captions = CaptionTokens.of(train, folder.vocabulary)
        rank, world_size = context.world_rank, context.world_size
        self.computer = feature_computer(folder, stage, context.device)
        views = config.features.training_views
        if self.computer is None:
            images = model_inputs(config, train, store, views)
        else:
            images = model_inputs(config, train, None, views and replace(views, as_stored=True))
        on_gpu = context.device.type == "cuda"
        self.batches = Batches(images, captions, stage, seed=seed, rank=rank, world_size=world_size, pins=on_gpu)
        self.finite = FiniteCheck(stage.name, rank, defers=on_gpu)
        self.validation = model_inputs(config, validation, store)
        references, language = validation.texts_by_image(self.vocabulary.tokenizer), config.data.language
        self.validation_reward = CiderDReward(references, self.vocabulary, eos=False, language=language)
        self.validation_rows = {image: row for row, image in enumerate(validation.column("image_id"))}
        self.validation_ids = dict(zip(validation.column("image_id"), validation.source_ids(), strict=True))
        self.total = total_steps(stage, self.batches.num_samples)
        self.objective = make_objective(stage, self.captioner, train, self.vocabulary, language)
        self.optimizer = make_optimizer(self.captioner, stage.optimizer, stage.lr)
        self.average = None if stage.ema is None else WeightAverage(self.captioner, stage.ema)
        if config.workers.compile:
            self.captioner.compile_layers()
        self.wrapped: nn.Module = self.captioner
        if world_size > 1:
            self.wrapped = data_parallel(self.captioner, stage)
        self.output = StageOutput(folder, stage.name, rank == 0, job.driver_token, worker_group_token)
        self.progress, self.had_notice = Progress(), False

    def run(self) -> bool:
        """Trains the stage to its end and marks it as finished. Returns False if the context stops training before."""
        stage, output = self.stage, self.output
        progress = self.progress = self._resume()
        text = f"{'continues from' if progress.step else 'starts at'} step {progress.step} of {self.total}"
        workers = f" with {self.context.world_size} workers" if self.context.world_size > 1 else ""
        output.log("event", progress.step, {"text": text + workers, "total": self.total})
        asks_for_bfloat16 = stage.precision == "bfloat16" and self.context.device.type == "cpu"
        if asks_for_bfloat16 and (warning := slow_bfloat16(f"stages.{stage.name}.precision")):
            output.log("event", progress.step, {"text": warning, "total": self.total})
        # A stage that had ended early makes no more steps, because it is resumed only to write its result.
        stop = progress.step if progress.ended_early else self.total
        if stage.objective == "scst" and progress.step < stop:
            output.log("reward", progress.step, {"text": f"SCST {stage.sampling.signature}"})
        self.captioner.train()
        metrics, saved_at = StepMetrics(self.context), time.monotonic()
        for step, batches in enumerate(self.batches.stream(progress.step, stop), progress.step):
            metrics.batch_arrived()
            # The step is computed while the workers exchange these flags, so it does not wait for them.
            notices = any_rank(self.context, self.context.has_notice(), self.context.must_stop())
            metrics.add(self.step(step, batches))
            progress.step = step + 1
            has_notice, must_stop = notices()
            must_save = must_stop or (has_notice and not self.had_notice)
            if must_save:
                self.had_notice = True
                text = STOPPING if must_stop else NOTICE
                output.log("notice", progress.step, {"text": text, "total": self.total})
            if progress.step % self.folder.config.workers.log_every_steps == 0 or progress.step == self.total:
                values, metrics = metrics.summary(stage.batch_size), StepMetrics(self.context)
                self.finite.require()
                output.log("train", progress.step, {"total": self.total, "lr": self._rate(step), **values})
            # A step with a validation saves only the checkpoint of `_validate`, because a stage that resumed from an
            # earlier checkpoint of this step would skip the validation.
            if self._validates_after(step):
                self._validate()
                # Both clocks start again: validation has saved a checkpoint, and its time must not count as training.
                metrics, saved_at = StepMetrics(self.context), time.monotonic()
                if progress.ended_early:
                    break
            elif must_save or self._checkpoint_is_due(saved_at):
                self.finite.require()
                output.save_checkpoint(self.captioner, self.optimizer, progress, self.average)
                saved_at = time.monotonic()
            if must_stop and progress.step < stop:
                output.wait()
                return False
        output.wait()
        self._finish()
        # A barrier: no rank starts the next stage before rank 0 has written the result of this one.
        gather_objects(self.context, value=None)
        return True

    def step(self, step: int, batches: list[Batch]) -> dict[str, Tensor]:
        """Makes one optimizer step over this worker's micro-batches. Returns this worker's share of the metrics.

        Except for the objective, no operation here waits for a GPU.
        """
        set_rate(self.optimizer, self._rate(step))
        self.optimizer.zero_grad(set_to_none=True)
        device, bfloat16 = self.context.device, self.stage.precision == "bfloat16"
        metrics: dict[str, Tensor] = {}
        for part, batch in enumerate(batches):
            # Outside autocast, because extraction has its own precision.
            inputs = with_features(batch, self.computer).to(device, feature_dtype(self.stage))
            seed = seed_of(self.folder.config.seed, self.number, step, part, self.context.world_rank)
            torch.manual_seed(seed)
            generator = torch.Generator(device).manual_seed(seed ^ 1)  # a seed other than dropout's
            # DDP exchanges gradients in each backward pass, but one exchange per step is enough: the last one.
            skips_exchange = isinstance(self.wrapped, DistributedDataParallel) and part < len(batches) - 1
            exchange = self.wrapped.no_sync() if skips_exchange else contextlib.nullcontext()  # type: ignore[operator]
            with float32_products(self.stage.precision), exchange:
                with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                    output = self.objective(self.wrapped, self.captioner, inputs, generator)
                # The global loss is the sum over the workers, but DDP averages gradients, hence the factor.
                (output.loss * self.context.world_size).backward()
            metrics = summed(metrics, output.metrics)
        norm = nn.utils.clip_grad_norm_(self.captioner.parameters(), self.stage.max_grad_norm or math.inf)
        if self.stage.max_grad_value is not None:
            nn.utils.clip_grad_value_(self.captioner.parameters(), self.stage.max_grad_value)
        self.finite.add(step, {"loss": metrics["loss"], "gradient norm": norm})
        self.optimizer.step()
        if self.average is not None:
            self.average.update(step)
        # `StepMetrics` sums metrics over the ranks, so each rank gives its share of the norm, which is equal on all.
        return metrics | {"gradient_norm": norm.double() / self.context.world_size}

    def _resume(self) -> Progress:
        """Restores the newest checkpoint, if any. Raises RuntimeError if the workers find different checkpoints."""
        output, step = self.output, self.output.newest_step()
        steps = set(gather_objects(self.context, step))
        if len(steps) > 1:
            raise RuntimeError(
                f"workers see different checkpoints of {output.path} (steps {sorted(steps)}); it must be shared"
            )
        progress = output.restore(step, self.captioner, self.optimizer, self.average)
        output.open_journal(progress.step)
        return progress

    def _rate(self, step: int) -> float:
        """The learning rate of a step, with the reductions on plateaus but without the factors of parameter groups."""
        stage, steps_per_epoch = self.stage, max(1, self.batches.num_samples // self.stage.batch_size)
        rate = learning_rate(stage.schedule, stage.lr, step, steps_per_epoch=steps_per_epoch, total_steps=self.total)
        return rate * stage.plateau.factor**self.progress.reductions if stage.plateau else rate

    def _validates_after(self, step: int) -> bool:
        """True if a step passes a multiple of `validate_every_epochs` or is the last one."""
        every = self.stage.validate_every_epochs * self.batches.num_samples / self.stage.batch_size
        return step + 1 == self.total or math.floor((step + 1) / every) > math.floor(step / every)

    def _checkpoint_is_due(self, saved_at: float) -> bool:
        """True if the steps or the minutes since the last checkpoint are those that the stage allows.

        saved_at: the time of the last checkpoint, by the monotonic clock.
        """
        stage, minutes = self.stage, (time.monotonic() - saved_at) / 60
        return self.progress.step % stage.checkpoint_every_steps == 0 or minutes > stage.checkpoint_every_minutes

    def _validate(self) -> None:
        """Scores the validation split, updates the progress, and saves a checkpoint."""
        self.finite.require()
        begin, progress, output = time.monotonic(), self.progress, self.output
        settings = self.folder.config.evaluation
        report = _reporter(output, progress.step)
        averaged = contextlib.nullcontext() if self.average is None else self.average.in_use()
        with averaged:
            best = caption_images(self.captioner, self.validation, self.vocabulary, settings, self.context, report)
            score = self._score(best)
            if score > progress.best_score:
                progress.best_score, progress.best_step, progress.since_best = score, progress.step, 0
                captions = {self.validation_ids[image]: hypothesis.caption for image, hypothesis in best.items()}
                output.save_best(self.captioner, progress.step, captions)
                if self.stage.objective == "scst" and score < NO_CIDER:
                    output.log("warning", progress.step, {"text": CANNOT_CLIMB})
            else:
                progress.since_best += 1
        self._apply_stopping_rules(score)
        seconds = round(time.monotonic() - begin, 2)
        output.log("validation", progress.step, {"CIDEr-D": score, "best": progress.best_score, "seconds": seconds})
        output.save_checkpoint(self.captioner, self.optimizer, progress, self.average)
        if self.context.reads_checkpoints:
            output.wait()
        self.context.report({"stage": self.stage.name, "step": progress.step, "validation_CIDEr-D": score})

    def _score(self, best: dict[int, RankedCaption]) -> float:
        """The mean CIDEr-D of the best captions, equal on all ranks. Papers print 1.404 as 140.4."""
        rows = [torch.tensor(hypothesis.ids) for hypothesis in best.values()]
        if self.folder.config.evaluation.collapse_repeats:
            rows = [torch.unique_consecutive(row) for row in rows]
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.vocabulary.pad)
        images = torch.tensor([self.validation_rows[image] for image in best])
        return float(self.validation_reward(tokens, images).mean())

    def _apply_stopping_rules(self, score: float) -> None:
        """Lowers the learning rate on a plateau. Ends the stage if it stops improving, or if SCST makes captions worse.

        All ranks come to the same decision, because they have the same score.
        """
        stage, progress = self.stage, self.progress
        if stage.plateau and progress.since_best and progress.since_best % stage.plateau.patience == 0:
            progress.reductions += 1
        if stage.patience and progress.since_best >= stage.patience:
            progress.ended_early = f"no better validation {progress.since_best} times in a row"
        if stage.objective == "scst":
            reference = max(self._initial_score(), progress.best_score)
            if score < (1 - stage.sampling.max_cider_drop) * reference:
                progress.ended_early = f"validation CIDEr-D fell to {score:.4f} from {reference:.4f}"

    def _initial_score(self) -> float:
        """Validation CIDEr-D of the weights that this stage started from, or -inf if no earlier stage was kept."""
        earlier = [self.folder.result(stage.name) for stage in self.folder.before(self.stage)]
        return next((result.best_score for result in reversed(earlier) if result and result.kept), -math.inf)

    def _finish(self) -> None:
        """Rank 0 writes the stage's result and decides whether later stages use its weights."""
        progress, initial_score = self.progress, self._initial_score()
        # If SCST ended early, the stage is kept only if its best score is higher than the score before the stage.
        must_be_better = self.stage.keep_if_better or (self.stage.objective == "scst" and bool(progress.ended_early))
        kept = not must_be_better or progress.best_score > initial_score
        verdict = "kept" if kept else f"not kept: the stage before has {initial_score:.4f}"
        early = f" (ended early: {progress.ended_early})" if progress.ended_early else ""
        score = f"best validation CIDEr-D {progress.best_score:.4f} at step {progress.best_step}"
        result = StageResult(progress.step, progress.best_step, progress.best_score, kept, progress.ended_early)
        self.output.finish(result, f"done: {score}, {verdict}{early}")


def _reporter(output: StageOutput, step: int) -> Callable[[float], None]:
    """A function that logs the finished fraction of a validation, at most every REPORT_VALIDATION_EVERY_S seconds."""
    reported_at = time.monotonic()

    def report(fraction: float) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at > REPORT_VALIDATION_EVERY_S:
            reported_at = time.monotonic()
            output.log("validating", step, {"text": f"step {step}: validation, {100 * fraction:.0f} % done"})

    return report
