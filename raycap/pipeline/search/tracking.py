"""Sends a search to the tracker: a parent run for the search and a child run for every trial.

Each result is sent once; log/tracked.json in the search's folder records what was sent. A tracker that is down neither
delays a search nor makes it fail.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.search.spec import SCORE
from raycap.pipeline.search.trials import ENDED, TrialLog, TrialRecord
from raycap.pipeline.storage.atomic import read_json, write_json
from raycap.pipeline.tracking.mlflow_client import (
    experiment_of,
    get_or_create_run,
    log_params,
    public_uri,
    reason_of,
    tracking_client,
    warn_of_local_file,
)

logger = logging.getLogger(__name__)

PUBLISHED_FILES = ("search.html", "pareto.png", "trials.csv", "trials.parquet", "best.yaml")
PRIVATE_SETTINGS = {"set", "storage", "base", "backbone"}  # not sent, because they may hold passwords or local paths


class SearchTracker:
    """Sends new results in a background thread, unless tracking is off."""

    def __init__(self, log: TrialLog) -> None:
        self.log, self.config = log, log.search.base
        self._wake, self._stop = threading.Event(), threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_repeatedly, name="search tracker", daemon=True)
        if self.config.tracking.enabled:
            warn_of_local_file(self.config)
            self._thread.start()

    def wake(self) -> None:
        """Makes the background thread send what is new."""
        self._wake.set()

    def close(self, status: str, files: bool = False) -> bool:
        """Sends the remaining results, with `files` also the search's files, and ends the parent run with `status`.

        Returns False when tracking is off or fails.
        """
        if not self.config.tracking.enabled:
            return False
        self._stop.set()
        self._wake.set()
        self._thread.join()
        return self._try_to_send(status, files)

    def _send_repeatedly(self) -> None:
        """Sends what is new after each call of `wake`, until `close` is called."""
        while self._wake.wait() and not self._stop.is_set():
            self._wake.clear()
            self._try_to_send("RUNNING")

    def _try_to_send(self, status: str, files: bool = False) -> bool:
        """Sends what is new; False, after one log line per search, when the tracker fails."""
        try:
            sync_search(self.log, status, files)
        except Exception as error:  # a failing tracker must not fail the search
            if not self._has_warned:
                logger.info(
                    f"tracker: {public_uri(self.config)} cannot be reached ({reason_of(error)}); results stay in the "
                    "search's folder and are sent later"
                )
            self._has_warned = True
            return False
        return True


def sync_search(log: TrialLog, status: str, files: bool = False) -> None:
    """Creates the runs that do not exist yet and sends the results that were not sent before.

    With `files` it also sends the search's files. Errors of the tracker are raised.
    """
    config, folder = log.search.base, log.folder.path
    client = tracking_client(config)
    path = folder / "log" / "tracked.json"
    sent_by_tracker: Values = read_json(path) if path.is_file() else {}
    # parent: a run id. trials: run ids by trial number. ended: the numbers of trials whose results were sent.
    sent: Values = sent_by_tracker.setdefault(public_uri(config), {"parent": None, "trials": {}, "ended": []})
    experiment = experiment_of(client, config)
    if sent["parent"] is None:
        tags = {"mlflow.runName": folder.name, "raycap.search": folder.name}
        parent = str(client.create_run(experiment, tags=tags).info.run_id)
        sent["parent"] = parent
        write_json(path, sent_by_tracker)
        settings = log.search.config.model_dump(mode="json", exclude=PRIVATE_SETTINGS)
        log_params(client, parent, {key: str(value) for key, value in settings.items()})
    for record in list(log.records):
        number = str(record.number)  # a string, because JSON's keys are strings
        if number in sent["ended"]:
            continue
        if number not in sent["trials"]:
            sent["trials"][number] = _get_or_create_trial(client, experiment, log, record, sent["parent"])
            write_json(path, sent_by_tracker)
        if record.state in ENDED:
            _send_trial(client, record, sent["trials"][number])
            sent["ended"].append(number)
            write_json(path, sent_by_tracker)
    if files:
        for file in [*PUBLISHED_FILES, *(path.name for path in sorted(folder.glob("front-*.yaml")))]:
            if (folder / file).is_file():
                client.log_artifact(sent["parent"], str(folder / file))
    if status == "RUNNING":
        client.update_run(sent["parent"], status=status)
    else:
        client.set_terminated(sent["parent"], status)


def _get_or_create_trial(client: Any, experiment: str, log: TrialLog, record: TrialRecord, parent: str) -> str:
    """The id of MLflow's run for a trial, which is created if it does not exist."""
    match = {"mlflow.parentRunId": parent, "mlflow.runName": f"trial-{record.number}"}
    run_id = get_or_create_run(client, experiment, match, {"raycap.search": log.folder.path.name})
    values = log.search.space.changes(record.point) | {"seed": record.seed}
    log_params(client, run_id, {key: str(value) for key, value in values.items()})
    return run_id


def _send_trial(client: Any, record: TrialRecord, run_id: str) -> None:
    """Sends the results of an ended trial and ends its run."""
    for step, (_, score) in enumerate(record.reports):
        client.log_metric(run_id, "validation_CIDEr-D", score, step=step)
    for name in dict.fromkeys([SCORE, *record.scores, *record.costs]):
        value = record.value(name)
        if value is not None:
            client.log_metric(run_id, name.replace(" ", "_"), value)  # as runs are tracked: test_CIDEr-D
    client.set_tag(run_id, "raycap.state", record.state)
    client.set_tag(run_id, "raycap.run_id", Path(record.run).name)
    if record.reason:
        client.set_tag(run_id, "raycap.reason", record.reason[:500])
    status = {"finished": "FINISHED", "stopped": "KILLED"}.get(record.state, "FAILED")
    client.set_terminated(run_id, status)
