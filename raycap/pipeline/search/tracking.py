"""Sends a search to the tracker: a parent run for the search and a child run for every trial.

Each result is sent once; log/tracked.json in the search's folder records what was sent. A tracker that is down neither
delays a search nor makes it fail.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.search.records import ENDED, TrialRecord
from raycap.pipeline.search.results import trial_name
from raycap.pipeline.search.spec import SCORE, Search
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
    """Sends results in a background thread, unless tracking is off."""

    def __init__(self, search: Search, folder: Path) -> None:
        """folder: the search's local folder."""
        self.search, self.folder = search, folder
        self._has_warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search tracker")
        if search.base.tracking.enabled:
            warn_of_local_file(search.base)

    def send(self, records: Sequence[TrialRecord]) -> None:
        """Sends what is new in the background."""
        if self.search.base.tracking.enabled:
            self._thread.submit(self._try_to_send, "RUNNING", records)

    def close(self, status: str, records: Sequence[TrialRecord] = (), files: bool = False) -> bool:
        """Sends the remaining results, with `files` also the search's files, and ends the parent run with `status`.

        Returns False when tracking is off or fails.
        """
        if not self.search.base.tracking.enabled:
            return False
        self._thread.shutdown(cancel_futures=True)
        return self._try_to_send(status, records, files)

    def _try_to_send(self, status: str, records: Sequence[TrialRecord], files: bool = False) -> bool:
        """Sends what is new; False, after one log line per search, when the tracker fails."""
        try:
            sync_search(self.search, self.folder, records, status, files)
        except Exception as error:  # a failing tracker must not fail the search
            if not self._has_warned:
                logger.info(
                    f"tracker: {public_uri(self.search.base)} cannot be reached ({reason_of(error)}); results stay in "
                    "the search's folder and are sent later"
                )
            self._has_warned = True
            return False
        return True


def sync_search(search: Search, folder: Path, records: Sequence[TrialRecord], status: str, files: bool = False) -> None:
    """Creates the runs that do not exist yet and sends the results that were not sent before.

    With `files` it also sends the search's files. Errors of the tracker are raised.
    """
    config = search.base
    client = tracking_client(config)
    path = folder / "log" / "tracked.json"
    sent_by_tracker: Values = read_json(path) if path.is_file() else {}
    # parent: a run id. trials: run ids by the trials' names. ended: the names of trials whose results were sent.
    sent: Values = sent_by_tracker.setdefault(public_uri(config), {"parent": None, "trials": {}, "ended": []})
    experiment = experiment_of(client, config)
    if sent["parent"] is None:
        tags = {"mlflow.runName": folder.name, "raycap.search": folder.name}
        parent = str(client.create_run(experiment, tags=tags).info.run_id)
        sent["parent"] = parent
        write_json(path, sent_by_tracker)
        settings = search.config.model_dump(mode="json", exclude=PRIVATE_SETTINGS)
        log_params(client, parent, {key: str(value) for key, value in settings.items()})
    for record in records:
        name = trial_name(search, record)
        if name in sent["ended"]:
            continue
        if name not in sent["trials"]:
            match = {"mlflow.parentRunId": sent["parent"], "mlflow.runName": name}
            sent["trials"][name] = get_or_create_run(client, experiment, match, {"raycap.search": folder.name})
            values = search.space.changes(record.point) | {"seed": record.seed}
            log_params(client, sent["trials"][name], {key: str(value) for key, value in values.items()})
            write_json(path, sent_by_tracker)
        if record.state in ENDED:
            _send_trial(client, record, sent["trials"][name])
            sent["ended"].append(name)
            write_json(path, sent_by_tracker)
    if files:
        for file in [*PUBLISHED_FILES, *(path.name for path in sorted(folder.glob("front-*.yaml")))]:
            if (folder / file).is_file():
                client.log_artifact(sent["parent"], str(folder / file))
    if status == "RUNNING":
        client.update_run(sent["parent"], status=status)
    else:
        client.set_terminated(sent["parent"], status)


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
