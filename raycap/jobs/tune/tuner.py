"""A search as an experiment of Ray Tune: its tuner, its scheduler, the function of a trial, and the results."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.fs
from pydantic import TypeAdapter
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator

from raycap.jobs.train import StageFailedError, failure_file, fit
from raycap.jobs.tune.searcher import SEED, PointSearcher
from raycap.models.config import Values
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runs.journal import JOURNAL_EVERY_S, Follower
from raycap.pipeline.runtime.context import Context
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.search.records import SearchFolder, SearchPlan, TrialRecord
from raycap.pipeline.search.space import Dimension, point_key
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.search.trial import Handover, TrialTask, hand_over, metrics_of, run_trial, train_here
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import REMOTE, OutageError
from raycap.pipeline.training.loop import StageJob

logger = logging.getLogger(__name__)

STATE = "experiment_state-"  # begins the name of a snapshot's first file
MAX_FAILURES = 3  # of a trial, such as a lost node, after which it continues from its last checkpoint
JOURNAL_INTERVAL_S = 0.5  # the time between two reads of the journal of a trial on several workers
PARSE = TypeAdapter(TrialRecord).validate_python  # makes tuples of the lists in JSON


def make_tuner(
    search: Search, plan: SearchPlan, folder: SearchFolder, concurrent: int | None, retry: bool
) -> tune.Tuner:
    """The tuner of the search's present budget, seeds and resources: that of a killed search, or a new one.

    concurrent: the most trials at a time; None for as many as there are resources. retry: also repeat failed trials.
    """
    path, filesystem = _place(folder.root / "tune")
    name = _experiment(search, concurrent)
    resources = tune.PlacementGroupFactory([_resources(search)])
    trainable: Any = tune.with_resources(tune.with_parameters(train_trial, plan=plan), resources)
    Progress.must_restore = _can_restore(f"{path}/{name}", filesystem)
    if Progress.must_restore:
        return tune.Tuner.restore(
            f"{path}/{name}", trainable, restart_errored=retry, storage_filesystem=filesystem, param_space=None
        )
    variants = _variants(search)
    searcher: Any
    if variants:
        searcher = BasicVariantGenerator(max_concurrent=concurrent or 0, random_state=search.config.seed)
    else:
        searcher = PointSearcher(search, _points(folder.records()))
    hours, scheduler = search.config.budget.hours, _scheduler(search)
    return tune.Tuner(
        trainable,
        param_space=variants,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=1 if search.config.algorithm == "grid" else search.config.budget.trials or -1,
            max_concurrent_trials=None if variants else concurrent,
            time_budget_s=None if hours is None else 3600 * hours,
            # A stopped trial may still store its checkpoint, and Ray Tune fails the trial that would get its process.
            reuse_actors=search.config.scheduler is None,
            trial_name_creator=trial_id_of,
            trial_dirname_creator=trial_id_of,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=path,
            storage_filesystem=filesystem,
            callbacks=[Progress(scheduler)],
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            verbose=0,
        ),
    )


def _can_restore(path: str, filesystem: pyarrow.fs.FileSystem | None) -> bool:
    """Whether the experiment has a whole snapshot of its state.

    Ray Tune writes a snapshot's files in place, so that a kill may cut one. `Tuner.restore` then begins anew with the
    pickled tuner, which has no points of a grid. Without a whole snapshot, a new experiment takes the place of this
    one: it proposes the same points, whose runs continue.
    """
    if not tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        return False
    place = filesystem or pyarrow.fs.LocalFileSystem()
    entries = place.get_file_info(pyarrow.fs.FileSelector(path))
    files = {file.base_name: file.path for file in entries if not file.base_name.startswith(".")}  # no temporary ones
    newest = max((name for name in files if name.startswith(STATE)), default=STATE)
    session = newest.removeprefix(STATE).removesuffix(".json")
    contents = {
        name: place.open_input_stream(files[name]).readall()
        for name in files
        if name == "tuner.pkl" or (session in name and name.endswith((".json", ".pkl")))
    }
    try:
        json.loads(contents.pop(newest, b""))
    except ValueError:
        return False
    # The others are pickles, also those called .json, and end with a full stop: the tuner, its points and callbacks.
    return len(contents) > 1 and all(content.endswith(b".") for content in contents.values())


def _variants(search: Search) -> Values:
    """Ray Tune's own description of a grid or of a population's initial points. {} if Optuna proposes the points."""
    config, dimensions = search.config, search.space.dimensions
    if config.algorithm == "grid":
        grid = {key: tune.grid_search(dimension.listed() or []) for key, dimension in dimensions.items()}
        return grid | {SEED: tune.grid_search(list(config.seeds))}
    if search.is_population:
        return {key: _domain(dimension) for key, dimension in dimensions.items()} | {SEED: config.seeds[0]}
    return {}


def _experiment(search: Search, concurrent: int | None) -> str:
    """The name of the experiment. `Tuner.restore` takes no other budget, seeds or resources, so each has its own.

    Other versions of Ray and Optuna may not read the state that was pickled, so each version has its own, too.
    """
    config = search.config
    parts = [config.budget.model_dump(mode="json"), config.resources.model_dump(mode="json")]
    settings = [*parts, config.seeds, concurrent, version("ray"), version("optuna")]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:10]


def _resources(search: Search) -> dict[str, float]:
    """The resources of a trial's own process. Ray Train reserves those of several workers itself."""
    bundle = search.bundle if search.config.resources.workers == 1 else {"memory": 2.0**20}  # 1 MiB
    return {name: amount for name, amount in bundle.items() if amount}


def _place(folder: StoragePath) -> tuple[str, pyarrow.fs.FileSystem | None]:
    """A folder as Ray Tune takes it: a path and, on S3, its file system. Credentials are those of the environment."""
    if not folder.is_remote:
        return str(folder), None
    scheme, _, server = (folder.options.endpoint_url or "").rpartition("://")
    settings = {"scheme": scheme, "endpoint_override": server, "region": folder.options.region}
    filesystem = pyarrow.fs.S3FileSystem(**{key: value for key, value in settings.items() if value})
    return folder.uri.removeprefix(REMOTE), filesystem


def _points(records: Sequence[TrialRecord]) -> list[Values]:
    """The different points of the trials."""
    return list({point_key(record.point): record.point for record in records}.values())


def _domain(dimension: Dimension) -> Any:
    """Ray Tune's description of a dimension."""
    listed = dimension.listed()
    if listed is not None:
        return tune.choice(listed)
    return (tune.loguniform if dimension.log else tune.uniform)(dimension.low, dimension.high)


def _scheduler(search: Search) -> TrialScheduler:
    """The search's scheduler."""
    settings = search.config.scheduler
    if settings is None:
        return FIFOScheduler()
    if settings.name == "asha":
        return ASHAScheduler(
            time_attr="epoch", metric=SCORE, mode="max", max_t=search.total_epochs(),  # type: ignore[arg-type]
            grace_period=settings.grace_epochs, reduction_factor=settings.reduction,  # type: ignore[arg-type]
        )  # fmt: skip
    if settings.name == "median":
        return MedianStoppingRule(time_attr="epoch", metric=SCORE, mode="max", grace_period=settings.grace_epochs)
    limits = {key: (d.low, d.high) for key, d in search.space.dimensions.items() if d.listed() is None}
    return PopulationBasedTraining(
        time_attr="epoch",
        metric=SCORE,
        mode="max",
        perturbation_interval=settings.every_epochs,
        quantile_fraction=settings.quantile,
        hyperparam_mutations={key: d.listed() or _domain(d) for key, d in search.space.dimensions.items()},
        custom_explore_fn=lambda point: _limited(point, limits),
    )


def _limited(point: Values, limits: Mapping[str, tuple[float, float]]) -> Values:
    """A point with its numbers inside of their ranges, which population based training may leave."""
    return point | {key: min(max(point[key], low), high) for key, (low, high) in limits.items()}


def trial_id_of(trial: Any) -> str:
    """The name of a trial in Ray Tune's files."""
    return str(trial.trial_id)


def train_trial(config: Values, plan: SearchPlan) -> None:
    """The function that Ray Tune calls: trains a trial, and reports it after each validation and at its end.

    A member of a population also reports a copy of its state, from which other members can continue.
    """
    search = plan.search
    if plan.folder and Path(plan.folder).is_dir():  # Ray Tune starts a trial in a folder of its own
        os.chdir(plan.folder)
    point, trial_id = {key: value for key, value in config.items() if key != SEED}, tune.get_context().get_trial_id()

    def report(record: TrialRecord, handover: Handover | None) -> None:
        metrics = metrics_of(record, tuple(search.config.objectives))
        if handover is None:
            tune.report(metrics)
            return
        with tempfile.TemporaryDirectory(prefix="raycap-handover-") as scratch:
            hand_over(handover, Path(scratch))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(scratch))

    checkpoint = tune.get_checkpoint()
    train = train_here if search.config.resources.workers == 1 else train_on_workers
    with nullcontext() if checkpoint is None else checkpoint.as_directory() as state:
        task = TrialTask(plan, trial_id, point, config[SEED], None if state is None else Path(state))
        report(run_trial(task, report, train), None)


def train_on_workers(job: StageJob, context: Context) -> None:
    """Trains on Ray Train's workers and reports the validations that they write to the run's journal."""
    follower, downloaded_at = Follower(job.folder.journal), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(fit, job)
        try:
            while not training.done():
                wait([training], timeout=JOURNAL_INTERVAL_S)
                if time.monotonic() - downloaded_at > JOURNAL_EVERY_S:
                    with suppress(OSError):  # while storage fails, reports are late but the trial continues
                        job.folder.pull(JOURNAL)
                    downloaded_at = time.monotonic()
                for entry in follower.new():
                    if entry["kind"] == "validation":
                        context.report({"stage": entry["stage"], "step": entry["step"]})
        except BaseException:  # The scheduler stopped the trial. Without a valid token its workers cannot write on.
            failure_file(job).write_bytes(b"stopped by the search")
            job.folder.new_driver_token()
            raise
    error = training.exception()
    if error is not None and not isinstance(error, StageFailedError | OutageError):
        raise RuntimeError(" ".join(str(error).split())) from error
    training.result()  # raises the error, if there is one
    for name in ("stages", "predictions", JOURNAL):
        job.folder.pull(name)


class Progress(tune.Callback):
    """Passes a trial to `on_change` when it starts, reports or ends, and calls `on_step` at each step.

    `Tuner.restore` takes no callbacks and brings back those of the killed process, so the class has the listeners. Ray
    Tune stores the state of callbacks, but that of no scheduler, so this callback stores what ASHA has compared.
    """

    on_change: ClassVar[Callable[[TrialRecord], None]]
    on_step: ClassVar[Callable[[], None]]
    ended: ClassVar[list[TrialRecord]]  # all trials, when the experiment has ended
    must_restore: ClassVar[bool]  # until the state of a killed process is there

    def __init__(self, scheduler: TrialScheduler) -> None:
        self.scheduler = scheduler

    def get_state(self) -> Values:
        return {"scheduler": vars(self.scheduler) if isinstance(self.scheduler, ASHAScheduler) else {}}

    def set_state(self, state: Values) -> None:
        type(self).must_restore = False
        vars(self.scheduler).update(state["scheduler"])

    def setup(self, *_: object, **__: object) -> None:
        """Raises RuntimeError if the state could not be read, since Ray Tune would then begin without the points."""
        if self.must_restore:
            raise RuntimeError(
                "Ray Tune cannot read the state of this search; remove its folder tune, and run it again"
            )

    def on_step_begin(self, iteration: int, trials: Any, **_: object) -> None:
        type(self).on_step()

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        self._changed(trial)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Values, **_: object) -> None:
        type(self).on_change(record_of(trial, result))  # the trial gets its result after this call

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        logger.warning(f"trial {trial.trial_id}  is repeated from its last checkpoint: {reason_of(trial)}")

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        self._changed(trial, has_ended=True)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        self._changed(trial, has_ended=True, has_failed=True)

    def on_experiment_end(self, trials: Any, **_: object) -> None:
        """Keeps the trials: a `ResultGrid` has no configuration of a trial that has reported nothing.

        A trial that budget.hours ended before its first report is left out.
        """
        type(self).ended = [
            record_of(trial, trial.last_result, has_ended=trial.is_finished(), has_failed=trial.status == Trial.ERROR)
            for trial in trials
            if trial.status == Trial.ERROR or "record" in (trial.last_result or {})
        ]

    def _changed(self, trial: Any, *, has_ended: bool = False, has_failed: bool = False) -> None:
        type(self).on_change(record_of(trial, trial.last_result, has_ended=has_ended, has_failed=has_failed))


def record_of(trial: Any, result: Values | None, *, has_ended: bool = False, has_failed: bool = False) -> TrialRecord:
    """A trial of Ray Tune as a record. A trial that has ended without being finished was stopped, or failed."""
    point = {key: value for key, value in trial.config.items() if key != SEED}
    record = TrialRecord(trial.trial_id, point, trial.config[SEED])
    if result and "record" in result:
        record = PARSE(result["record"])
    if has_failed and record.state != "finished":
        return replace(record, state="failed", reason=reason_of(trial))
    return replace(record, state="stopped") if has_ended and record.state == "running" else record


def reason_of(trial: Any) -> str:
    """The last line of a trial's last error, which names the cause, without secrets.

    The driver's file has the error before the storage, but not in a search that began on another machine.
    """
    file = trial.error_file
    text = Path(file).read_text() if file and Path(file).is_file() else str(trial.get_error() or "unknown error")
    line = text.strip().splitlines()[-1].strip()
    return without_secrets(re.sub(r"^(\w+\.)+(?=\w+: )", "", line))[:500]  # without the module of the error
