"""A trial of several workers: Ray Train in a side thread, its validations followed in the run's journal."""

from __future__ import annotations

import threading

from jobs.train import StageFailedError, failure_file, fit
from pipeline.config.run import RunConfig
from pipeline.runs.journal import Follower
from pipeline.runtime.context import Context
from pipeline.training.loop import StageJob

FOLLOW_S = 0.5


def train_on_workers(job: StageJob, config: RunConfig, context: Context) -> None:
    """On Ray Train's workers; validations are taken from the run's journal and told from here."""
    run = job.folder
    follower = Follower(run.journal)
    errors: list[BaseException] = []

    def fit_and_keep_the_error() -> None:
        try:
            fit(job, config)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit_and_keep_the_error, name="fit", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(FOLLOW_S)
            for entry in follower.new():
                if entry["kind"] == "validation":
                    context.report({"stage": entry["stage"], "step": entry["step"]})
    except BaseException:  # the scheduler has ended the trial: its workers stop at their next line in the journal
        failure_file(job).write_bytes(b"stopped by the search")
        run.new_driver_token()
        thread.join()
        raise
    if errors and not isinstance(errors[0], StageFailedError):
        raise RuntimeError(" ".join(str(errors[0]).split())) from errors[0]
    if errors:
        raise errors[0]
