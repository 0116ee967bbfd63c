"""Shows the champion at the tracker: the aliases of the model registry, and the last decision at its run.

Every call compares champion.json with the tracker and sends what is missing. So the first call after an outage of the
tracker catches up, without a record of earlier calls.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.retrain.champion import ChampionState, ChampionStore, FileRecord
from raycap.pipeline.tracking.mlflow_client import experiment_of, public_uri, reason_of, tracking_client

logger = logging.getLogger(__name__)

DECISION_TAG = "raycap.decision"  # its value is the number of the last decision that a run has received completely


def update_tracker(config: RunConfig, store: ChampionStore, state: ChampionState) -> bool:
    """Sends what the tracker lacks of `state`; False, after one log line, when the tracker fails."""
    if not config.tracking.enabled or state.champion is None:
        return True
    try:
        client = tracking_client(config)
        experiment = experiment_of(client, config)
        name = config.tracking.registered_name or config.name
        for alias, run_id in (("champion", state.champion.run_id), ("challenger", state.challenger)):
            _set_alias(client, name, alias, None if run_id is None else _version_of(client, experiment, run_id))
        if state.decision is not None:
            _log_decision(client, experiment, store, state.decision)
    except Exception as error:  # a failing tracker must not fail the decision
        address, reason = public_uri(config), reason_of(error)
        logger.info(f"tracker   {address} could not be updated ({reason}); the next call tries again")
        return False
    return True


def _version_of(client: Any, experiment: str, run_id: str) -> str | None:
    """The registered model version of a raycap run; None while the tracker lacks the run (`raycap sync` sends it)."""
    run = _run_of(client, experiment, run_id)
    versions = [] if run is None else client.search_model_versions(f"run_id = '{run.info.run_id}'")
    return str(versions[0].version) if versions else None


def _run_of(client: Any, experiment: str, run_id: str) -> Any:
    """MLflow's parent run of a raycap run, or None. The child runs of its stages have the same tag."""
    runs = client.search_runs([experiment], f"tags.`raycap.run_id` = '{run_id}'")
    return next((run for run in runs if "mlflow.parentRunId" not in run.data.tags), None)


def _set_alias(client: Any, name: str, alias: str, version: str | None) -> None:
    """Points an alias of a registered model at a version; None removes the alias."""
    models = client.search_registered_models(f"name = '{name}'")
    current = next((model.aliases.get(alias) for model in models), None)
    if version is None and current is not None:
        client.delete_registered_model_alias(name, alias)
    elif version is not None and str(current) != version:
        client.set_registered_model_alias(name, alias, version)


def _log_decision(client: Any, experiment: str, store: ChampionStore, record: FileRecord) -> None:
    """Attaches the last decision's record, page and scores to its run, once."""
    decision = store.decision(record)
    run = _run_of(client, experiment, decision.run)
    if run is None or run.data.tags.get(DECISION_TAG) == str(decision.number):
        return
    run_id = run.info.run_id
    for name in (record.name, record.name.replace(".json", ".html")):  # the record and its page
        client.log_text(run_id, (store.folder / name).read_bytes().decode(), name)
    values = decision.scores.model_dump() if decision.scores else {}
    if decision.difference:
        values |= {f"difference_{name}": number for name, number in asdict(decision.difference).items()}
    for key, value in values.items():
        if value is not None:
            client.log_metric(run_id, f"held_out_{key}", value)
    client.set_tag(run_id, "raycap.verdict", f"{decision.decision}: {decision.reason}"[:5000])
    client.set_tag(run_id, DECISION_TAG, str(decision.number))  # set last, because it marks everything before as sent
