"""Sends the results of a search to the tracker: a parent run for the search and a child run for every trial."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.search.records import TrialRecord
from raycap.pipeline.search.results import public_settings, result_files, trial_name
from raycap.pipeline.search.spec import SCORE, Search
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


def track_search(search: Search, folder: Path, records: Sequence[TrialRecord]) -> None:
    """Sends the trials and the files of a search's local folder, unless tracking is off.

    Runs that exist are replaced. A tracker that is down does not make the search fail: the same command sends again.
    """
    config = search.base
    if not config.tracking.enabled:
        return
    warn_of_local_file(config)
    try:
        _send(search, folder, records)
    except Exception as error:
        logger.warning(
            f"tracker: {public_uri(config)} cannot be reached ({reason_of(error)}); the results are in {folder}, and "
            "the same command sends them"
        )
    else:
        logger.info(f"tracking     {public_uri(config)}")


def _send(search: Search, folder: Path, records: Sequence[TrialRecord]) -> None:
    """Like `track_search`, but raises the tracker's errors."""
    client = tracking_client(search.base)
    experiment, tags = experiment_of(client, search.base), {"raycap.search": folder.name}
    parent = get_or_create_run(client, experiment, {"mlflow.runName": folder.name}, tags)
    log_params(client, parent, {key: str(value) for key, value in public_settings(search).items()})
    for record in records:
        match = {"mlflow.parentRunId": parent, "mlflow.runName": trial_name(search, record)}
        run_id = get_or_create_run(client, experiment, match, tags)
        values = search.space.changes(record.point) | {"seed": record.seed}
        log_params(client, run_id, {key: str(value) for key, value in values.items()})
        _send_trial(client, record, run_id)
    for file in result_files(folder):
        client.log_artifact(parent, str(file))
    client.set_terminated(parent, "FINISHED" if any(record.state != "failed" for record in records) else "FAILED")


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
