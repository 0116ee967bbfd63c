"""Runs the trials of a search on Ray Tune, which places them, reuses their processes and stops them early.

The state of the search is in its log, not in Ray Tune: the adapter takes trials from the log and writes results to it.

A trial of Ray Tune asks for a process. Only when it has one does it get a trial of the log. So the requests that wait
make the cluster's autoscaler start nodes, while the sampler chooses every point as late as possible, with all results
so far, and the members of a population take turns on the processes that are there.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycap.jobs.tune.schedulers import NotPickled, Population, Turn, make_scheduler
from raycap.models.config import Values
from raycap.pipeline.cluster.capacity import MESSAGE_EVERY_S, WaitedTooLongError, cluster_status
from raycap.pipeline.cluster.stalls import QUIET_S, StalledError, situation
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.search.results import live_table, trial_line, trial_name
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.search.trials import ENDED, MEMORY_REASON, SearchPlan, TrialLog, TrialOutcome, TrialRecord
from raycap.pipeline.storage.lease import LostLeaseError
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import OutageError

logger = logging.getLogger(__name__)

MAX_LOST_NODES = 10  # per trial; outages of the storage count as well
MAX_FAILURES = 5  # before a validation of any trial; a broken node would use up all points in a short time
MAX_WAITING = 100  # requests for a process that wait at a time
# A trial with several workers waits in a process of its own, so only this many may wait for nodes at a time.
MAX_WAITING_FITS = 4
# Parts of Ray's error texts (ray.exceptions), and the line above each of them in Ray Tune's error file.
FAILURE_HEADER = re.compile(r"^Failure # \d+ \(occurred at [^)\n]*\)$", re.MULTILINE)
ACTOR_DIED, OUT_OF_MEMORY = "The actor died", "killed due to the node running low on memory"
ACTOR_UNAVAILABLE = re.compile(r"The actor \w+ is unavailable: ")
OUTAGE = re.compile(rf"^{OutageError.__module__}\.{OutageError.__name__}: ", re.MULTILINE)
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
    """The number of trials that Ray can place at a time: at most budget.concurrent, at least one.

    resources: the amounts that Ray has now, under its names CPU and GPU.
    """
    per_trial, most = search.config.resources, search.config.budget.concurrent or math.inf
    for kind, per_worker in (("CPU", per_trial.cpus), ("GPU", per_trial.gpus)):
        if per_worker:
            num_trials = resources.get(kind, 0) / (per_worker * per_trial.workers)
            most = min(most, math.floor(num_trials + 1e-9))  # 1e-9: rounding must not lose a trial
    return max(1, int(most))


def run_trials(log: TrialLog, plan: SearchPlan, on_end: Callable[[], None], *, on_cluster: bool) -> None:
    """Runs Ray Tune until no trial is left or budget.hours is over. Calls `on_end` after the end of each trial.

    on_cluster: Ray may get more nodes. Raises WaitedTooLongError when no node can run a trial for
    `workers.max_wait_minutes`, StalledError when the running trials make no progress for `workers.max_stall_minutes`,
    JobFailedError when trials fail and none validates (`TuneAdapter._count_failure`), and LostLeaseError when another
    process works on the search.
    """
    for key, value in (RAY_TUNE_SETTINGS | {"TUNE_MAX_PENDING_TRIALS_PG": str(MAX_WAITING)}).items():
        os.environ.setdefault(key, value)
    import ray

    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    search, scratch = log.search, log.folder.path / "log" / "ray"
    per_trial, fitting = search.config.resources, concurrency(search, ray.cluster_resources())
    logger.info(
        f"resources {fitting} trials at a time{' on the present nodes' if on_cluster else ''}, "
        f"{per_trial.workers} x {per_trial.cpus:g} CPU, {per_trial.gpus:g} GPU each"
    )
    log.folder.clear_exchange()  # a killed search may have left files
    adapter = TuneAdapter(log, on_end, on_cluster=on_cluster)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _tuner(adapter, plan, scratch).fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not isinstance(adapter.error, LostLeaseError):  # the files are those of the other process now
            log.folder.clear_exchange()
        if adapter.error is not None:
            raise adapter.error


def _tuner(adapter: TuneAdapter, plan: SearchPlan, scratch: Path) -> Any:
    """Ray Tune's tuner, which gets its trials from the adapter."""
    from ray import tune

    from raycap.jobs.tune.workers import train_trial

    search = adapter.log.search
    hours, per_trial = search.config.budget.hours, search.config.resources
    bundle = search.bundle
    if per_trial.workers > 1:
        bundle = {"memory": 2.0**20}  # only 1 MiB, because Ray Train reserves the CPUs and GPUs for the workers
    resources = tune.PlacementGroupFactory([{key: value for key, value in bundle.items() if value}])
    trainable = tune.with_parameters(train_trial, plan=plan, folder=adapter.log.folder)
    return tune.Tuner(
        tune.with_resources(trainable, resources),
        tune_config=tune.TuneConfig(
            search_alg=_searcher(adapter),
            scheduler=make_scheduler(search, adapter.log.records, adapter.turns, adapter.population),
            num_samples=-1,  # no limit: the adapter decides when the search ends
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

    def __init__(self, log: TrialLog, on_end: Callable[[], None], *, on_cluster: bool) -> None:
        self.log, self.on_end, self.on_cluster = log, on_end, on_cluster
        self.deadline = time.monotonic() + 3600 * (log.search.config.budget.hours or math.inf)
        self.error: BaseException | None = None
        self.waiting: set[str] = set()  # Ray Tune's ids of the trials that wait for a process
        self.turns: dict[str, Turn] = {}  # the trials that have one, by Ray Tune's id
        self._last_table = self._last_message = self._last_running = self._last_progress = time.monotonic()
        self._validated: set[int] = set()  # the numbers of the trials that this process got a validation from
        self._num_failures = 0  # of trials that are not in `_validated`, since the last validation of any trial
        self._journal_bytes: dict[str, int] = {}  # the size of each run's journal when it was looked at
        self.population: Population | None = None
        if log.is_population:  # the population needs all of its members from the start
            while (record := log.start_next()) is not None:
                self._log_start(record)
            self.population = Population(log.search.without_tracker(), log.records, log.folder.handovers)

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
    def num_left(self) -> float:
        """The number of trials, or members of the population, that have no process."""
        if self.time_is_over:
            return 0
        return self.log.num_left if self.population is None else len(self.population.waiting)

    @property
    def limit(self) -> float:
        """The number of trials that may have a process or wait for one, at most budget.concurrent.

        On a cluster it does not depend on the present nodes, because each request that waits makes the autoscaler start
        a node.
        """
        budget, per_trial = self.log.search.config.budget, self.log.search.config.resources
        most = budget.concurrent or math.inf
        if self.on_cluster and per_trial.workers == 1:
            return most
        return min(most, self._num_fitting + (MAX_WAITING_FITS if self.on_cluster else 0))

    @property
    def _num_fitting(self) -> int:
        """The number of trials that the present nodes can hold."""
        import ray

        return concurrency(self.log.search, ray.cluster_resources())

    @property
    def num_waiting(self) -> int:
        """The number of trials that wait for nodes."""
        if not self.on_cluster:
            return 0
        if self.log.search.config.resources.workers == 1:
            return len(self.waiting)
        return max(0, len(self.turns) - self._num_fitting)

    def request(self, trial_id: str) -> bool | None:
        """Whether Ray Tune shall ask for a process for the trial of this id; None when the search is over."""
        if len(self.waiting) < min(self.num_left, self.limit - len(self.turns), MAX_WAITING):
            self.waiting.add(trial_id)
            return True
        return False if self.waiting or self.turns else None

    def on_start(self, trial_id: str) -> None:
        """Gives a process its trial: writes the file that `train_trial` reads."""
        self.waiting.discard(trial_id)
        self._last_progress = time.monotonic()
        turn, content = self._next_turn(), None
        if turn is not None:
            self.turns[trial_id] = turn
            handover = None if turn.take_over is None else turn.take_over.handover
            content = {"number": turn.record.number, "point": turn.point, "seed": turn.record.seed}
            content |= {"handover": handover}
        (self.log.folder.assignments / trial_id).write_bytes(json.dumps(content).encode())

    def _next_turn(self) -> Turn | None:
        """The trial that starts next; None when no trial is left or the time is over."""
        if self.time_is_over:
            return None
        if self.population is None:
            record = self.log.start_next()
            if record is None:
                return None
            self._log_start(record)
            return Turn(record)
        turn = self.population.next()
        if turn is None:
            return None
        number, take_over = turn
        return Turn(next(record for record in self.log.records if record.number == number), take_over)

    def on_step(self) -> None:
        """Logs that all trials wait for nodes, or make no progress.

        Raises WaitedTooLongError after `workers.max_wait_minutes`, StalledError after `workers.max_stall_minutes`, and
        LostLeaseError when another process works on the search.
        """
        if self.log.lease is not None:
            self.log.lease.check_last_renewal()
        now, limit_s = time.monotonic(), 60 * self.log.search.base.workers.max_wait_minutes
        if self.turns:
            self._watch_trials(now)
        if self.turns or not self.waiting:
            self._last_running = now
            return
        if now - max(self._last_message, self._last_running) > MESSAGE_EVERY_S:
            self._last_message = now
            logger.info(f"waiting   no trial runs, {len(self.waiting)} wait for nodes; {cluster_status().text}")
        if now - self._last_running > limit_s:
            raise WaitedTooLongError(
                f"no node could run a trial within workers.max_wait_minutes ({limit_s / 60:g} min); "
                f"{cluster_status().text}; the same command continues the search"
            )

    def _watch_trials(self, now: float) -> None:
        """Logs that the running trials make no progress. Raises StalledError after `workers.max_stall_minutes`.

        A trial reports only its validations, which may be hours apart. So before a message the driver looks at the
        journals of the trials' runs, whose entries count as progress in `raycap run` as well.
        """
        limit_s, idle_s = 60 * self.log.search.base.workers.max_stall_minutes, now - self._last_progress
        if idle_s < min(QUIET_S, limit_s / 2) or now - self._last_message < MESSAGE_EVERY_S:
            return
        if any(self._journal_grew(turn.run) for turn in self.turns.values() if turn.run):
            self._last_progress = now
            return
        self._last_message = now
        if idle_s > limit_s:
            raise StalledError(
                f"no running trial made progress within workers.max_stall_minutes "
                f"({limit_s / 60:g} min); {situation()}; the same command continues the search"
            )
        logger.info(f"waiting   no running trial has made progress for {idle_s:.0f} s; {situation()}")

    def _journal_grew(self, run: str) -> bool:
        """Whether a run's journal has grown since the last look; False when the storage does not answer at once."""
        before = self._journal_bytes.get(run, 0)
        with suppress(OSError):
            journal = storage_path(run, self.log.search.base.storage.options.hasty) / JOURNAL
            self._journal_bytes[run] = sum(entry.size for _, entry in journal.walk())
        return self._journal_bytes.get(run, 0) != before

    def on_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Records a validation or the outcome of a trial."""
        self._last_progress = time.monotonic()
        turn = self.turns[trial_id]
        turn.run = result.get("run", turn.run)
        record, take_over = turn.record, turn.take_over
        if take_over is not None:  # the first result shows that the member has taken over the weights
            record.point, turn.take_over = take_over.point, None
            record.took_over.append((take_over.epoch, take_over.donor))
            logger.info(f"trial {record.number}  continues with the weights of trial {take_over.donor}")
        if "outcome" in result:
            outcome: TrialOutcome = result["outcome"]
            self._end(record, replace(outcome, seconds=(outcome.seconds or 0.0) + record.seconds))
        elif SCORE in result:
            self._validated.add(record.number)
            self._num_failures = 0
            self.log.report(record, result)
            self._log_progress(record)

    def on_stop(self, trial_id: str, seconds: float) -> None:
        """Records that a trial's process is free after `seconds`. A trial that has already ended does not change.

        When budget.hours is used up, running trials stay unfinished in the log, so that a later process resumes them.
        """
        self._last_progress = time.monotonic()
        turn = self.turns.pop(trial_id, None)
        if turn is None or turn.record.state in ENDED or self.time_is_over:
            return
        record = turn.record
        if self.population is None:
            self._end(record, TrialOutcome("stopped", seconds=record.seconds + seconds))
        else:
            record.seconds += seconds
            self.population.pause(record.number)

    def on_error(self, trial_id: str, error: str) -> None:
        """Records a failed trial. A trial that has lost its node or its storage has not failed: it resumes later.

        A spot node that the cloud takes back is lost in this way. error: the text of `_error_of`.
        """
        self._last_progress = time.monotonic()
        is_node_lost, has_outage = _is_node_lost(error), OUTAGE.search(error) is not None
        if trial_id in self.waiting:
            self.waiting.remove(trial_id)
            if is_node_lost:  # with its node, a process was lost that had no trial yet
                return
            turn = self._next_turn()  # a process that cannot start costs a trial, so that the search ends
        else:
            turn = self.turns.pop(trial_id, None)
        if turn is None or turn.record.state in ENDED:
            return
        record = turn.record
        if record.attempts > MAX_LOST_NODES or not (is_node_lost or has_outage):
            self._end(record, TrialOutcome("failed", _failure_reason(error)))
            return
        is_disk_full = os.strerror(errno.ENOSPC) in error
        problem = "found its machine's disk full" if is_disk_full else "could not reach its storage"
        what = "lost its node; it resumes on another" if is_node_lost else f"{problem}; it resumes"
        logger.warning(f"trial {record.number}  {what}")
        if self.population is None:
            self.log.unfinished.append(record)
        else:
            self.population.pause(record.number)

    def _end(self, record: TrialRecord, outcome: TrialOutcome) -> None:
        """Records and logs the outcome of a trial, then calls `on_end`. Raises JobFailedError (`_count_failure`)."""
        self.log.end(record, outcome)
        if self.population is not None:
            self.population.end(record.number)
        self._log_progress(record)
        self.on_end()
        if outcome.state == "failed" and record.number not in self._validated:
            self._count_failure(record)
        else:
            self._num_failures = 0

    def _count_failure(self, record: TrialRecord) -> None:
        """Counts a trial that failed before its first validation, unless only its point needs too much memory.

        Raises JobFailedError if trials are left, MAX_FAILURES have failed since the last validation of any trial, and
        no more trials are running than have failed. The running ones may be healthy and before their first validation.
        """
        if record.reason.startswith(MEMORY_REASON) and any(each.reports for each in self.log.records):
            return
        self._num_failures += 1
        num_running = sum(turn.record.state not in ENDED for turn in self.turns.values())
        if self._num_failures >= max(MAX_FAILURES, num_running) and self.num_left:
            raise JobFailedError(
                f"{self._num_failures} trials failed before their first validation, and no other trial validated "
                f"meanwhile; the last for this reason: {record.reason}; "
                "correct the cause, such as a broken node, and continue with --retry-failed, which runs the failed "
                "trials again; without it the search continues with other points"
            )

    def _log_start(self, record: TrialRecord) -> None:
        verb = f"resumes from epoch {record.epoch:g}" if record.attempts > 1 else "starts"
        name, label = trial_name(self.log.search, record, self.log.num_trials)
        logger.info(f"{name}  {verb}  ({label})")

    def _log_progress(self, record: TrialRecord) -> None:
        logger.info(trial_line(self.log.search, record, self.log.num_trials))
        if time.monotonic() - self._last_table > TABLE_EVERY_S:
            self._last_table = time.monotonic()
            logger.info("\n" + live_table(self.log, self.num_waiting) + "\n")


def _searcher(adapter: TuneAdapter) -> Any:
    """The object that Ray Tune asks for its next trial."""
    from ray.tune.search import Searcher

    class LogSearcher(NotPickled, Searcher):
        """Creates Ray Tune's trials; the callback gives them their trials of the log and records the results."""

        @adapter.keeping_errors()
        def suggest(self, trial_id: str) -> Any:
            is_wanted = adapter.request(trial_id)
            if is_wanted is None:
                return Searcher.FINISHED
            return {"assignment": trial_id} if is_wanted else None  # after None Ray Tune asks again later

        def on_trial_complete(self, trial_id: str, result: object = None, error: bool = False) -> None:
            """Does nothing, because the callback records results."""

    return LogSearcher()


def _callback(adapter: TuneAdapter) -> Any:
    """The object that Ray Tune calls when a trial starts, reports, ends or fails."""
    from ray.tune import Callback

    class LogCallback(NotPickled, Callback):
        """Passes the events of Ray Tune's trials to the adapter."""

        @adapter.keeping_errors()
        def on_step_begin(self, iteration: int, trials: Any, **_: object) -> None:
            adapter.waiting &= {trial.trial_id for trial in trials if not trial.is_finished()}
            adapter.on_step()

        @adapter.keeping_errors()
        def on_trial_start(self, iteration: int, trials: object, trial: Any, **_: object) -> None:
            adapter.on_start(trial.trial_id)

        @adapter.keeping_errors()
        def on_trial_result(self, iteration: int, trials: object, trial: Any, result: Values, **_: object) -> None:
            adapter.on_result(trial.trial_id, result)

        @adapter.keeping_errors()
        def on_trial_complete(self, iteration: int, trials: object, trial: Any, **_: object) -> None:
            adapter.on_stop(trial.trial_id, (trial.last_result or {}).get("time_total_s", 0.0))

        @adapter.keeping_errors()
        def on_trial_error(self, iteration: int, trials: object, trial: Any, **_: object) -> None:
            adapter.on_error(trial.trial_id, _error_of(trial))

    return LogCallback()


def _error_of(trial: Any) -> str:
    """The text of the error for which Ray Tune counts a trial as failed; "" if it gives none.

    It reads the file that the driver writes, because the file that Ray's getter reads arrives later. The pickled error
    beside it is not read, because unpickling runs code and others may write to the storage. At the end of the search
    Ray Tune would read it, unless it forgets the name.
    """
    trial.run_metadata.pickled_error_filename = None
    if not trial.error_file or not Path(trial.error_file).is_file():
        return ""
    text = Path(trial.error_file).read_text(errors="replace")
    return FAILURE_HEADER.split(text)[-1].strip()


def _is_node_lost(error: str) -> bool:
    """Whether a trial ended because its node was lost, not because its own process died."""
    # Ray reports the end of a process on a live node as ActorDiedError. ActorUnavailableError means that the node does
    # not answer, which Ray has not declared dead yet.
    return ACTOR_UNAVAILABLE.match(error) is not None or (error.startswith(ACTOR_DIED) and "node has died" in error)


def _failure_reason(error: str) -> str:
    """The reason in one line."""
    text = printable(" ".join(without_secrets(error or "Ray Tune gives no reason").split()))
    if OUT_OF_MEMORY in error:
        return f"{MEMORY_REASON}: Ray ended its process because the node's memory was full"
    if error.startswith(ACTOR_DIED) or ACTOR_UNAVAILABLE.match(error):
        return "its process died (killed, or out of memory): " + text[:300]
    return text[-500:]  # a traceback ends with the error
