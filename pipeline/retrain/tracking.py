"""The tracker follows the champion's file: registry aliases, and each decision with its run. It may be down.

Nothing is remembered here of what was sent: every call makes the registry what champion.json says and adds what the
last decision's run lacks, so that a call after an outage tells what the outage swallowed.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.retrain.champion import Ledger, State
from pipeline.runs.folder import RunFolder
from pipeline.tracking.mlflow_client import experiment_of, public_uri, tracking_client, without_secrets
from pipeline.tracking.run_tracker import register_run

logger = logging.getLogger(__name__)


DECISION_TAG = "raycap.decision"


def follow(config: RunConfig, ledger: Ledger, state: State) -> bool:
    """Brings the tracker up to date with `state`; False, said in one line, when it does not take it now."""
    if not config.tracking.enabled or state.champion is None:
        return True
    try:
        client = tracking_client(config)
        experiment = experiment_of(client, config)
        name = config.tracking.registered_name or config.name
        wanted = {"champion": state.champion.run_id, "challenger": state.challenger}
        for alias, run_id in wanted.items():
            version = None if run_id is None else _version(client, config, experiment, run_id)
            _point(client, name, alias, version)
        if state.decision is not None:
            _log_decision(client, experiment, ledger, state)
    except Exception as error:  # whatever the tracker does, the champion is decided
        reason = without_secrets(str(error)).splitlines()[0] if str(error) else type(error).__name__
        logger.info(f"tracker   {public_uri(config)} does not follow now ({reason}); the next call tells it again")
        return False
    return True


def _version(client: Any, config: RunConfig, experiment: str, run_id: str) -> str | None:
    """The registered version of a raycap run, which is sent now when it was not then; None when there is none."""
    for attempt in range(2):
        run = _run_of(client, experiment, run_id)
        found = client.search_model_versions(f"run_id = '{run.info.run_id}'") if run is not None else []
        if found:
            return str(found[0].version)
        if attempt or not _send_run(config, run_id):
            return None
    return None


def _run_of(client: Any, experiment: str, run_id: str) -> Any:
    """The parent run; its stages have the same tag, and a parent."""
    found = client.search_runs([experiment], f"tags.`raycap.run_id` = '{run_id}'")
    return next((run for run in found if "mlflow.parentRunId" not in run.data.tags), None)


def _send_run(config: RunConfig, run_id: str) -> bool:
    """Sends a complete run that the tracker has missed; False when it is not here or still not taken."""
    name = f"runs/{run_id}"
    folder = RunFolder(config.working_path / name, config.home(name))
    folder.pull()
    if not (folder.path / "COMPLETE.json").is_file():
        return False
    update = {"tracking": config.tracking, "storage": config.storage}
    return register_run(folder, folder.config.model_copy(update=update)) is not None


def _point(client: Any, name: str, alias: str, version: str | None) -> None:
    try:
        now = client.get_registered_model(name).aliases.get(alias)
    except Exception:  # MLflow's own: no such model yet
        if version is None:
            return
        now = None
    if version is None:
        if now is not None:
            client.delete_registered_model_alias(name, alias)
    elif str(now) != version:
        client.set_registered_model_alias(name, alias, version)


def _log_decision(client: Any, experiment: str, ledger: Ledger, state: State) -> None:
    """The last decision's record and page with its run, once."""
    assert state.decision is not None
    body = ledger.decision(state.decision)
    run = _run_of(client, experiment, body["run"])
    if run is None or run.data.tags.get(DECISION_TAG) == str(body["number"]):
        return
    with tempfile.TemporaryDirectory(prefix="raycap-") as scratch:
        for name in (state.decision.name, state.decision.name.replace(".json", ".html")):
            path = Path(scratch) / name.rsplit("/", 1)[-1]
            path.write_bytes((ledger.folder / name).read_bytes())
            client.log_artifact(run.info.run_id, str(path), "decisions")
    gap = body.get("difference") or {}
    for key, value in {**body.get("scores", {}), **{f"difference_{name}": each for name, each in gap.items()}}.items():
        if value is not None:
            client.log_metric(run.info.run_id, f"held_out_{key}", value)
    client.set_tag(run.info.run_id, "raycap.verdict", f"{body['decision']}: {body['reason']}"[:5000])
    client.set_tag(run.info.run_id, DECISION_TAG, str(body["number"]))  # last: it says that all is there
