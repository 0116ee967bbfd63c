"""Sends the results of a search to the tracker: a parent run for the search and a child run for every trial."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from raycap.pipeline.search.records import TrialRecord
from raycap.pipeline.search.results import public_settings, result_files, trial_name
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.tracking.mlflow_client import (
    experiment_of,
    get_or_create_run,
    log_metrics,
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
        client = tracking_client(config)
        experiment, tags = experiment_of(client, config), {"raycap.search": folder.name}
        parent = get_or_create_run(client, experiment, {"mlflow.runName": folder.name}, tags)
        log_params(client, parent, public_settings(search))
        for record in records:
            match = {"mlflow.parentRunId": parent, "mlflow.runName": trial_name(search, record)}
            run_id = get_or_create_run(client, experiment, match, tags)
            log_params(client, run_id, search.space.changes(record.point) | {"seed": record.seed})
            metrics = [("validation_CIDEr-D", score, step) for step, (_, score) in enumerate(record.reports)]
            for name in dict.fromkeys([SCORE, *record.scores, *record.costs]):
                if (value := record.value(name)) is not None:
                    metrics.append((name.replace(" ", "_"), value, 0))  # as runs are tracked: test_CIDEr-D
            facts = {"state": record.state, "run_id": Path(record.run).name, "reason": record.reason[:500]}
            log_metrics(client, run_id, metrics, {f"raycap.{name}": text for name, text in facts.items() if text})
            client.set_terminated(run_id, {"finished": "FINISHED", "stopped": "KILLED"}.get(record.state, "FAILED"))
        for file in result_files(folder):
            client.log_artifact(parent, str(file))
        client.set_terminated(parent, "FINISHED" if any(record.state != "failed" for record in records) else "FAILED")
    except Exception as error:
        logger.warning(
            f"tracker: {public_uri(config)} cannot be reached ({reason_of(error)}); the results are in {folder}, and "
            "the same command sends them"
        )
    else:
        logger.info(f"tracking     {public_uri(config)}")
