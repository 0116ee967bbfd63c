"""Runs the trials of a search on Ray Tune, which places them, reuses their processes and stops them early.

The state of the search is in its log, not in Ray Tune: the adapter takes trials from the log and writes results to it.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.tune.schedulers import Population, TakeOver, make_scheduler
from pipeline.search.results import live_table, trial_line, trial_name
from pipeline.search.spec import SCORE, Search
from pipeline.search.trials import ENDED, TrialLog, TrialOutcome, TrialRecord

logger = logging.getLogger(__name__)

MAX_LOST_NODES = 10  # per trial
TABLE_EVERY_S = 30.0  # the shortest time between two tables of the running trials
RAY_TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # practically never, because a search resumes from its log
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "20",
    "TUNE_WARN_THRESHOLD_S": "60",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def concurrency(search: Search, resources: Mapping[str, float]) -> int:
    """The number of concurrent trials: as many as the cluster can place, at most budget.concurrent, at least one.

    resources: the amounts that the cluster has, under Ray's names CPU and GPU.
    """
    per_trial, most = search.config.resources, search.config.budget.concurrent or math.inf
    for kind, per_worker in (("CPU", per_trial.cpus), ("GPU", per_trial.gpus)):
        if per_worker:
            num_trials = resources.get(kind, 0) / (per_worker * per_trial.workers)
            most = min(most, math.floor(num_trials + 1e-9))  # 1e-9: rounding must not lose a trial
    return max(1, int(most))


def run_trials(log: TrialLog, on_end: Callable[[], None]) -> None:
    """Runs Ray Tune until no trial is left or budget.hours is over. Calls `on_end` after the end of each trial."""
    for key, value in RAY_TUNE_SETTINGS.items():
        os.environ.setdefault(key, value)
    import ray

    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    search, scratch = log.search, log.folder.path / "log" / "ray"
    per_trial, concurrent = search.config.resources, concurrency(search, ray.cluster_resources())
    logger.info(
        f"resources {concurrent} trials at a time, {per_trial.workers} x {per_trial.cpus:g} CPU, "
        f"{per_trial.gpus:g} GPU each"
    )
    log.folder.handovers.delete_folder()  # a killed search may have left copies
    adapter = TuneAdapter(log, on_end)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _tuner(adapter, concurrent, scratch).fit()
            while adapter.has_lost_trials and log.unfinished and not adapter.time_is_over:
                adapter.has_lost_trials = False  # Ray Tune asks for no trial after the last one has started
                _tuner(adapter, concurrent, scratch).fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        log.folder.handovers.delete_folder()
        if adapter.error is not None:
            raise adapter.error


def _tuner(adapter: TuneAdapter, concurrent: int, scratch: Path) -> Any:
    """Ray Tune's tuner, which gets its trials from the adapter."""
    from ray import tune

    from jobs.tune.workers import train_trial

    search = adapter.log.search
    hours, per_trial = search.config.budget.hours, search.config.resources
    bundle = {"CPU": per_trial.cpus, "GPU": per_trial.gpus}
    if per_trial.workers > 1:
        bundle = {"memory": 2.0**20}  # only 1 MiB, because Ray Train reserves the CPUs and GPUs for the workers
    resources = tune.PlacementGroupFactory([{key: value for key, value in bundle.items() if value}])
    return tune.Tuner(
        tune.with_resources(train_trial, resources),
        tune_config=tune.TuneConfig(
            search_alg=_searcher(adapter),
            scheduler=make_scheduler(search, adapter.log.records, adapter.population),
            num_samples=-1,  # no limit: the adapter decides when the search ends
            max_concurrent_trials=concurrent,
            time_budget_s=None if hours is None else 3600 * hours,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=f"search-{uuid.uuid4().hex[:8]}",
            storage_path=str(scratch),
            callbacks=[_callback(adapter)],
            failure_config=tune.FailureConfig(max_failures=0),
            verbose=0,
        ),
    )


class TuneAdapter:
    """Connects Ray Tune with the log: gives it trials, records their results and logs their progress.

    A population's member is one trial of the search, and each of its turns is a new trial of Ray Tune.
    """

    def __init__(self, log: TrialLog, on_end: Callable[[], None]) -> None:
        self.log, self.on_end = log, on_end
        self.deadline = time.monotonic() + 3600 * (log.search.config.budget.hours or math.inf)
        self.error: BaseException | None = None
        self._records: dict[str, TrialRecord] = {}  # by Ray Tune's trial id
        self._take_overs: dict[str, TakeOver] = {}  # by Ray Tune's trial id, until its first report
        self._last_table = time.monotonic()
        self.has_lost_trials = False  # since the last start of Ray Tune
        self.population: Population | None = None
        if log.is_population:  # the population needs all of its members from the start
            while (record := log.start_next()) is not None:
                self._log_start(record)
            self.population = Population(log.search, log.records, log.folder.handovers)

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Stores an error in `self.error` and raises it. Ray Tune wraps errors; `run_trials` raises the stored one."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise

    @property
    def time_is_over(self) -> bool:
        """Whether budget.hours is used up."""
        return time.monotonic() >= self.deadline

    @property
    def may_continue(self) -> bool:
        """Whether a running member of a population may have another turn."""
        return self.population is not None and self.population.running > 0 and not self.time_is_over

    def next_trial(self, trial_id: str) -> dict[str, Any] | None:
        """The configuration for `train_trial` of the trial that starts next; None when no trial can start now."""
        if self.time_is_over:
            return None
        changes: dict[str, Any] = {"handover": None}
        if self.population is None:
            record = self.log.start_next()
            if record is None:
                return None
            self._log_start(record)
        else:
            turn = self.population.next()
            if turn is None:
                return None
            number, take_over = turn
            record = next(record for record in self.log.records if record.number == number)
            if take_over is not None:
                self._take_overs[trial_id] = take_over
                changes = {"point": take_over.point, "handover": take_over.handover}
        self._records[trial_id] = record
        config = {"folder": self.log.folder, "number": record.number, "seed": record.seed}
        return config | {"point": record.point} | changes

    def on_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Records a validation or the outcome of a trial."""
        record = self._records[trial_id]
        take_over = self._take_overs.pop(trial_id, None)
        if take_over is not None:  # the first result shows that the member has taken over the weights
            record.point = take_over.point
            record.took_over.append((take_over.epoch, take_over.donor))
            logger.info(f"trial {record.number}  continues with the weights of trial {take_over.donor}")
        if "outcome" in result:
            outcome: TrialOutcome = result["outcome"]
            self._end(record, replace(outcome, seconds=(outcome.seconds or 0.0) + record.seconds))
        elif SCORE in result:
            self.log.report(record, result)
            self._log_progress(record)

    def on_stop(self, trial_id: str, seconds: float) -> None:
        """Records that Ray Tune stopped a trial after `seconds`. A trial that has already ended does not change.

        When budget.hours is used up, running trials stay unfinished in the log, so that a later process resumes them.
        """
        record = self._records[trial_id]
        if record.state in ENDED or self.time_is_over:
            return
        if self.population is None:
            self._end(record, TrialOutcome("stopped", seconds=record.seconds + seconds))
        else:
            record.seconds += seconds
            self.population.pause(record.number)

    def on_error(self, trial_id: str, error: Any) -> None:
        """Records a failed trial. A trial that has lost its node has not failed: it is queued again and resumes.

        A spot node that the cloud takes back is lost in this way. error: an exception, its text, or None.
        """
        record = self._records[trial_id]
        if record.state in ENDED:
            return
        if record.attempts > MAX_LOST_NODES or not _is_node_lost(error):
            self._end(record, TrialOutcome("failed", _failure_reason(error)))
            return
        logger.warning(f"trial {record.number}  lost its node; it resumes on another")
        if self.population is None:
            self.log.unfinished.append(record)
            self.has_lost_trials = True
        else:
            self.population.pause(record.number)

    def _end(self, record: TrialRecord, outcome: TrialOutcome) -> None:
        """Records and logs the outcome of a trial, then calls `on_end`."""
        self.log.end(record, outcome)
        if self.population is not None:
            self.population.end(record.number)
        self._log_progress(record)
        self.on_end()

    def _log_start(self, record: TrialRecord) -> None:
        verb = f"resumes from epoch {record.epoch:g}" if record.attempts > 1 else "starts"
        name, label = trial_name(self.log.search, record, self.log.num_trials)
        logger.info(f"{name}  {verb}  ({label})")

    def _log_progress(self, record: TrialRecord) -> None:
        logger.info(trial_line(self.log.search, record, self.log.num_trials))
        if time.monotonic() - self._last_table > TABLE_EVERY_S:
            self._last_table = time.monotonic()
            logger.info("\n" + live_table(self.log) + "\n")


class _NotPickled:
    """A base class for objects that are pickled as an empty object.

    Ray Tune pickles its searcher and callbacks in order to restore a search. Ours resumes from its log instead.
    """

    def __reduce__(self) -> Any:
        return (object, ())


def _searcher(adapter: TuneAdapter) -> Any:
    """The object that Ray Tune asks for the configuration of the next trial."""
    from ray.tune.search import Searcher

    class LogSearcher(_NotPickled, Searcher):
        """Gives Ray Tune the trials of the log; the callback records their results."""

        @adapter.keeping_errors()
        def suggest(self, trial_id: str) -> Any:
            config = adapter.next_trial(trial_id)
            if config is None and not adapter.may_continue:
                return Searcher.FINISHED
            return config  # after None Ray Tune asks again later

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            """Does nothing, because the callback records results."""

    return LogSearcher()


def _callback(adapter: TuneAdapter) -> Any:
    """The object that Ray Tune calls when a trial reports, ends or fails."""
    from ray.tune import Callback

    class LogCallback(_NotPickled, Callback):
        """Passes the events of Ray Tune's trials to the adapter."""

        @adapter.keeping_errors()
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
            adapter.on_result(trial.trial_id, result)

        @adapter.keeping_errors()
        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            adapter.on_stop(trial.trial_id, (trial.last_result or {}).get("time_total_s", 0.0))

        @adapter.keeping_errors()
        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            adapter.on_error(trial.trial_id, _error_of(trial))

    return LogCallback()


def _error_of(trial: Any) -> Any:
    """The error, or its text, for which Ray Tune counts a trial as failed; None if it gives none.

    It reads the error files that the driver writes, because the files that Ray's getters read arrive later.
    """
    import ray

    if trial.pickled_error_file and Path(trial.pickled_error_file).is_file():
        return ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    if trial.error_file and Path(trial.error_file).is_file():
        return Path(trial.error_file).read_text()
    return None


def _is_node_lost(error: Any) -> bool:
    """Whether a trial ended because its node was lost, not because its own process died."""
    import ray

    # Ray reports the end of a process on a live node as ActorDiedError. ActorUnavailableError means that the node does
    # not answer, which Ray has not declared dead yet.
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return True
    return isinstance(error, ray.exceptions.ActorDiedError) and "node has died" in str(error)


def _failure_reason(error: Any) -> str:
    """The reason in one line."""
    import ray

    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "out of memory: Ray ended its process because the node's memory was full"
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died (killed, or out of memory): " + " ".join(str(error).split())[:300]
    text = " ".join(str(error or "Ray Tune gives no reason").split())
    return text[-500:]  # a traceback ends with the error
