"""The code of a trial's process: it trains itself, or runs Ray Train in a thread if the trial has several workers."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from raycap.jobs.train import StageFailedError, failure_file, fit
from raycap.models.config import Values
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runs.journal import JOURNAL_EVERY_S, Follower
from raycap.pipeline.runtime.context import Context
from raycap.pipeline.search.spec import SCORE
from raycap.pipeline.search.trial import TrialTask, hand_over, run_trial, train_here
from raycap.pipeline.search.trials import SearchFolder, SearchPlan
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import OutageError
from raycap.pipeline.training.loop import StageJob

JOURNAL_INTERVAL_S = 0.5  # the time between two reads of the journal


def train_trial(config: Values, plan: SearchPlan, folder: SearchFolder) -> None:
    """The function that Ray Tune calls: trains a trial and reports its validations, then its outcome.

    With each validation a population's member also reports a copy of its state, from which other members can continue.
    config: the file `assignment` names the trial (see `TuneAdapter.on_start`), or contains null if none is left.
    Raises an error after it has reported a failed outcome, so that Ray Tune does not reuse this process. Raises
    OutageError when the storage is out of order.
    """
    from ray import tune

    assignment = json.loads((folder.assignments / config["assignment"]).read_bytes())
    if assignment is None:
        return
    settings, options = plan.search.config, folder.root.options
    member = assignment["number"] if settings.algorithm == "pbt" else None
    handover = None if assignment["handover"] is None else storage_path(assignment["handover"], options)

    def report(metrics: Values) -> None:
        if member is not None and SCORE in metrics:
            run = metrics["folder"]
            copy = hand_over(run, metrics["stage"], metrics["step"], folder.handovers / str(member))
            metrics |= {"handover": str(copy)}
        tune.report({key: value for key, value in metrics.items() if key != "folder"})

    train = train_here if settings.resources.workers == 1 else train_on_workers
    outcome = run_trial(TrialTask(plan, assignment["point"], assignment["seed"], member, handover), report, train)
    # the last validation, because a scheduler ignores results without an epoch and a score
    last = dict(zip(("epoch", SCORE), outcome.reports[-1], strict=True)) if outcome.reports else {}
    tune.report({**last, "outcome": outcome})
    if outcome.state == "failed":
        # A CUDA error, such as a failed assertion on the device, makes every later operation of its process fail.
        raise RuntimeError("the process of a failed trial ends")


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
