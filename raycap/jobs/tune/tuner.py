"""A search as an experiment of Ray Tune: its tuner, its scheduler, the function of a trial, and the results."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.fs
import ray
from pydantic import TypeAdapter
from ray import tune
from ray.tune.callback import CallbackList
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, SearchGenerator

from raycap.jobs.train import failure_file, fit
from raycap.jobs.tune.searcher import SEED, PointSearcher
from raycap.models.config import Values
from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runs.journal import JOURNAL_EVERY_S, Follower
from raycap.pipeline.runtime.context import Context
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.search.records import SearchFolder, SearchPlan, TrialRecord
from raycap.pipeline.search.results import trial_line
from raycap.pipeline.search.space import Dimension, point_key
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.search.trial import TrialTask, run_trial, split_captions
from raycap.pipeline.storage.lease import Lease
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import REMOTE
from raycap.pipeline.training.loop import StageJob

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # of a trial, such as a lost node, after which it continues from its last checkpoint
STOP_WAIT_S = "7200"  # longer than a storage is tried, because a stopped trial may still store a checkpoint
JOURNAL_INTERVAL_S = 0.5  # the time between two reads of the journal of a trial on several workers
PARSE = TypeAdapter(TrialRecord).validate_python  # makes tuples of the lists in JSON


def run_trials(
    search: Search, plan: SearchPlan, folder: SearchFolder, lease: Lease | None, *, retry: bool
) -> list[TrialRecord]:
    """Runs the trials that have not ended, writes trials.json, and returns all trials.

    A trial that `budget.hours` ended before its first report is left out. retry: also repeat failed trials. Raises
    LostLeaseError if another process has taken the lease, and KeyboardInterrupt if Ctrl-C has ended the experiment.
    """
    random.seed(search.config.seed)  # population based training draws from this generator and from NumPy's
    np.random.seed(search.config.seed)
    Progress.session = session = Session(search, lease)
    tuner = _tuner(search, plan, folder, retry)
    handler = signal.getsignal(signal.SIGINT)
    tuner.fit()
    # Ray Tune replaces the handler of Ctrl-C, and restores it only when Ctrl-C has ended the experiment.
    is_interrupted = signal.getsignal(signal.SIGINT) == handler
    signal.signal(signal.SIGINT, handler)
    if lease is not None:
        lease.check()
    records = [record for record in session.records.values() if record.run or record.state == "failed"]
    folder.write(records)
    if is_interrupted:
        raise KeyboardInterrupt
    return records


def _tuner(search: Search, plan: SearchPlan, folder: SearchFolder, retry: bool) -> tune.Tuner:
    """The tuner of the search's present budget, seeds and resources: that of a killed search, or a new one."""
    path, filesystem = _place(folder.root / "tune")
    concurrent = _concurrent(search)
    name = _experiment(search, concurrent)
    resources = tune.PlacementGroupFactory([_resources(search)])
    trainable: Any = tune.with_resources(tune.with_parameters(train_trial, plan=plan), resources)
    variants = _variants(search)
    Progress.session.must_restore = _can_restore(f"{path}/{name}", filesystem, uses_optuna=not variants)
    if Progress.session.must_restore:
        tuner = tune.Tuner.restore(
            f"{path}/{name}", trainable, restart_errored=retry, storage_filesystem=filesystem, param_space=None
        )
        results = tuner.get_results()
        logger.info(f"continues with {results.num_terminated + results.num_errors} of {len(results)} trials done")
        return tuner
    searcher: Any
    if variants:
        searcher = BasicVariantGenerator(max_concurrent=concurrent or 0, random_state=search.config.seed)
    else:
        earlier = {point_key(record.point): record.point for record in folder.records()}
        searcher = PointSearcher(search, list(earlier.values()))
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
            reuse_actors=search.config.resources.workers == 1,
            trial_name_creator=attrgetter("trial_id"),
            trial_dirname_creator=attrgetter("trial_id"),
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


def _concurrent(search: Search) -> int | None:
    """The most trials at a time. None lets Ray Tune run as many as there are resources.

    A trial on several workers waits in a process of its own for these workers, so that only as many trials may start as
    the present nodes can hold.
    """
    limit, num_workers = search.config.budget.concurrent, search.config.resources.workers
    if num_workers == 1:
        return limit
    present = ray.cluster_resources()
    fitting = min(present.get(name, 0) // (amount * num_workers) for name, amount in search.bundle.items() if amount)
    return max(1, int(min(fitting, limit or fitting)))


def _can_restore(path: str, filesystem: pyarrow.fs.FileSystem | None, *, uses_optuna: bool) -> bool:
    """Whether the experiment has a whole snapshot of its state.

    Ray Tune writes a snapshot's files in place and one after the other, so that a kill may cut or leave out some.
    `Tuner.restore` then begins anew without the points of a grid, or with a searcher that proposes points again.
    Without a whole snapshot, a new experiment takes the place of this one. It proposes the same points, whose runs
    continue.
    """
    if not tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        return False
    place = filesystem or pyarrow.fs.LocalFileSystem()
    session = _newest_session(path, place)

    def content(name: str) -> bytes:
        return place.open_input_stream(f"{path}/{name.format(session)}").readall()

    searchers = (SearchGenerator, PointSearcher) if uses_optuna else (BasicVariantGenerator,)
    names = ["tuner.pkl", *(each.CKPT_FILE_TMPL for each in (CallbackList, *searchers))]
    try:
        has_trials = bool(json.loads(content(TuneController.CKPT_FILE_TMPL))["trial_data"])
        return has_trials and all(content(name).endswith(b".") for name in names)  # pickles end with a full stop
    except (FileNotFoundError, ValueError):
        return False


def _newest_session(path: str, place: pyarrow.fs.FileSystem) -> str:
    """The time of the newest process that has written a snapshot, as it is in the files' names. "" without any."""
    names = [file.base_name for file in place.get_file_info(pyarrow.fs.FileSelector(path))]
    found = [re.fullmatch(TuneController.CKPT_FILE_TMPL.format("(.+)"), name) for name in names]
    return max((match[1] for match in found if match), default="")


def _variants(search: Search) -> Values:
    """Ray Tune's own description of a grid or of a population's initial points. {} if Optuna proposes the points."""
    config, dimensions = search.config, search.space.dimensions
    if config.algorithm == "grid":
        grid = {key: tune.grid_search(dimension.listed() or []) for key, dimension in dimensions.items()}
        return grid | {SEED: tune.grid_search(list(config.seeds))}
    if search.is_population:
        domains = {key: _domain(dimension) for key, dimension in dimensions.items()}
        choices = {key: tune.choice(domain) for key, domain in domains.items() if isinstance(domain, list)}
        return domains | choices | {SEED: config.seeds[0]}
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
    """A folder as Ray Tune takes it: a path and, on S3, its file system.

    Credentials are those of the environment, and so is the address of the server without `storage.endpoint_url`.
    """
    if not folder.is_remote:
        return str(folder), None
    endpoint = folder.options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL", "")
    scheme, _, server = endpoint.rstrip("/").rpartition("://")
    settings = {"scheme": scheme, "endpoint_override": server, "region": folder.options.region}
    filesystem = pyarrow.fs.S3FileSystem(**{key: value for key, value in settings.items() if value})
    return folder.uri.removeprefix(REMOTE), filesystem


def _domain(dimension: Dimension) -> Any:
    """The choices of a dimension, or Ray Tune's description of a range that is continuous or logarithmic."""
    if dimension.log and dimension.is_integer:
        return tune.lograndint(int(dimension.low), int(dimension.high) + 1)
    if dimension.log:
        return tune.loguniform(dimension.low, dimension.high)
    return dimension.listed() or tune.uniform(dimension.low, dimension.high)


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
    mutations = {key: _domain(dimension) for key, dimension in search.space.dimensions.items()}
    limits = {
        key: (d.low, d.high) for key, d in search.space.dimensions.items() if not isinstance(mutations[key], list)
    }
    return PopulationBasedTraining(
        time_attr="epoch",
        metric=SCORE,
        mode="max",
        perturbation_interval=settings.every_epochs,
        quantile_fraction=settings.quantile,
        hyperparam_mutations=mutations,
        # a changed number may be outside of its range
        custom_explore_fn=lambda point: (
            point | {key: min(max(point[key], low), high) for key, (low, high) in limits.items()}
        ),
    )


def train_trial(config: Values, plan: SearchPlan) -> None:
    """The function that Ray Tune calls: trains a trial, and reports it after each validation and at its end.

    A member of a population also reports a copy of its state, from which other members can continue. After an error,
    raises RuntimeError with its traceback without secrets, because Ray Tune writes that to error.txt.
    """
    search = plan.search
    # Ray Tune waits this many seconds for a stopped trial to end. Then it fails the trial that would get the process.
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", STOP_WAIT_S)
    if plan.folder and Path(plan.folder).is_dir():  # Ray Tune starts a trial in a folder of its own
        os.chdir(plan.folder)
    point, trial_id = {key: value for key, value in config.items() if key != SEED}, tune.get_context().get_trial_id()

    def report(record: TrialRecord, hand_over: Callable[[Path], None] | None) -> None:
        values = {name: record.value(name) for name in (SCORE, *search.config.objectives)}
        # Ray Tune refuses a report without an objective, and some are measured at the end of a trial.
        numbers = {name: math.nan if value is None else value for name, value in values.items()}
        metrics = {"epoch": record.epoch, **numbers, "record": asdict(record)}
        if hand_over is None:
            tune.report(metrics)
            return
        with tempfile.TemporaryDirectory(prefix="raycap-handover-") as scratch:
            hand_over(Path(scratch))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(scratch))

    checkpoint = tune.get_checkpoint()
    on_workers = (train_on_workers, caption_on_worker) if search.config.resources.workers > 1 else ()
    with nullcontext() if checkpoint is None else checkpoint.as_directory() as state:
        task = TrialTask(plan, trial_id, point, config[SEED], None if state is None else Path(state))
        try:
            report(run_trial(task, report, *on_workers), None)
        except Exception as error:
            text = f"{traceback.format_exc()}{type(error).__name__}: {' '.join(str(error).split())}"
            raise RuntimeError(without_secrets(text)) from None


def train_on_workers(context: Context, job: StageJob) -> None:
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
            job.folder.new_token("driver_token")
            raise
    training.result()  # raises the error, if there is one
    for name in ("stages", JOURNAL):
        job.folder.pull(name)


def caption_on_worker(job: StageJob, split: str) -> dict[ImageId, str]:
    """As `split_captions`, in a task in the place of one of the trial's workers, because this process has no GPU."""
    options = {"scheduling_strategy": "DEFAULT"} | job.folder.config.workers.task_options  # not in the trial's bundle
    captions: dict[ImageId, str] = ray.get(ray.remote(split_captions).options(**options).remote(job, split))
    return captions


@dataclass
class Session:
    """The present process's part in an experiment, which no file of Ray Tune has."""

    search: Search
    lease: Lease | None
    must_restore: bool = False  # until the state of a killed process is there
    records: dict[str, TrialRecord] = field(default_factory=dict)  # by the trial's id

    def note(self, record: TrialRecord) -> None:
        """Keeps a trial's record. Logs a line if it has changed."""
        if self.records.get(record.trial_id) != record:
            self.records[record.trial_id] = record
            logger.info(trial_line(self.search, record))


class Progress(tune.Callback):
    """Logs each change of a trial, keeps the trials' records, and ends the experiment if the lease is lost.

    `Tuner.restore` takes no callbacks, but brings back those of the killed process from tuner.pkl. Therefore the class
    has the present process's session. Ray Tune stores the state of callbacks, but that of no scheduler, so this
    callback stores what ASHA has compared.
    """

    session: ClassVar[Session]

    def __init__(self, scheduler: TrialScheduler) -> None:
        self.scheduler = scheduler

    def get_state(self) -> Values:
        return {"scheduler": vars(self.scheduler) if isinstance(self.scheduler, ASHAScheduler) else {}}

    def set_state(self, state: Values) -> None:
        self.session.must_restore = False
        vars(self.scheduler).update(state["scheduler"])

    def setup(self, *_: object, **__: object) -> None:
        """Raises RuntimeError if the state could not be read, since Ray Tune would then begin without the points."""
        if self.session.must_restore:
            raise RuntimeError(
                "Ray Tune cannot read the state of this search; remove its folder tune, and run it again"
            )

    def on_step_begin(self, iteration: int, trials: Any, **_: object) -> None:
        if self.session.lease is not None:
            self.session.lease.check_last_renewal()

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        self.session.note(record_of(trial, trial.last_result))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Values, **_: object) -> None:
        self.session.note(record_of(trial, result))  # the trial gets its result after this call

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        logger.warning(f"trial {trial.trial_id}  is repeated from its last checkpoint: {reason_of(trial)}")

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
        self.session.note(record_of(trial, trial.last_result, has_ended=True))

    on_trial_error = on_trial_complete

    def on_experiment_end(self, trials: Any, **_: object) -> None:
        """Adds the trials that had ended before this process began."""
        for trial in trials:
            if trial.trial_id not in self.session.records:
                record = record_of(trial, trial.last_result, has_ended=trial.is_finished())
                self.session.records[trial.trial_id] = record


def record_of(trial: Any, result: Values | None, *, has_ended: bool = False) -> TrialRecord:
    """A trial of Ray Tune as a record. A trial that has ended without being finished has failed, or was stopped."""
    point = {key: value for key, value in trial.config.items() if key != SEED}
    record = TrialRecord(trial.trial_id, point, trial.config[SEED])
    if result and "record" in result:
        record = PARSE(result["record"])
    if not has_ended or record.state == "finished":
        return record
    if trial.status == Trial.ERROR:
        return replace(record, state="failed", reason=reason_of(trial))
    return replace(record, state="stopped")


def reason_of(trial: Any) -> str:
    """The last line of a trial's last error, which names the cause, without secrets.

    The driver's file has the error before the storage, but not in a search that began on another machine.
    """
    file = trial.error_file
    text = Path(file).read_text() if file and Path(file).is_file() else str(trial.get_error() or "unknown error")
    line = text.strip().splitlines()[-1].strip()
    return without_secrets(re.sub(r"^(\w+\.)+(?=\w+: )", "", line))[:500]  # without the module of the error
