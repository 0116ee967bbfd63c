"""The code of a trial's process: it trains itself, or runs Ray Train in a thread if the trial has several workers."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.train import StageFailedError, failure_file, fit
from pipeline.config.run import RunConfig
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import Follower
from pipeline.runtime.context import Context
from pipeline.search.spec import SCORE
from pipeline.search.trial import TrialTask, hand_over, run_trial, train_here
from pipeline.search.trials import SearchFolder
from pipeline.training.loop import StageJob

JOURNAL_INTERVAL_S = 0.5


def train_trial(config: dict[str, Any]) -> None:
    """The function that Ray Tune calls: trains a trial and reports its validations, then its outcome.

    With each validation a population's member also reports a copy of its state, from which other members can continue.
    """
    from ray import tune

    folder = SearchFolder(Path(config["folder"]))
    settings = folder.plan.search
    member = config["number"] if settings["algorithm"] == "pbt" else None
    handover = Path(config["handover"]) if config["handover"] is not None else None

    def report(metrics: dict[str, Any]) -> None:
        if member is not None:
            run = RunFolder(Path(metrics["run"]))
            copy = hand_over(run, metrics["stage"], metrics["step"], folder.handovers / str(member))
            metrics = {**metrics, "handover": str(copy)}
        tune.report(metrics)

    train = train_here if settings["resources"]["workers"] == 1 else train_on_workers
    outcome = run_trial(TrialTask(folder, config["point"], config["seed"], member, handover), report, train)
    last = {"epoch": outcome.reports[-1][0], SCORE: outcome.reports[-1][1]} if outcome.reports else {}
    tune.report({**last, "outcome": asdict(outcome)})


def train_on_workers(job: StageJob, config: RunConfig, context: Context) -> None:
    """Trains on Ray Train's workers and reports the validations that they write to the run's journal."""
    run = job.folder
    follower = Follower(run.journal)
    errors: list[BaseException] = []

    def fit_and_store_error() -> None:
        try:
            fit(job, config)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit_and_store_error, name="fit", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(JOURNAL_INTERVAL_S)
            for entry in follower.new():
                if entry["kind"] == "validation":
                    context.report({"stage": entry["stage"], "step": entry["step"]})
    except BaseException:  # The scheduler stopped the trial. Without a valid token its workers cannot write on.
        failure_file(job).write_bytes(b"stopped by the search")
        run.new_driver_token()
        thread.join()
        raise
    if errors and not isinstance(errors[0], StageFailedError):
        raise RuntimeError(" ".join(str(errors[0]).split())) from errors[0]
    if errors:
        raise errors[0]
