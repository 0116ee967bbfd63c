"""Shows a decision about the champion: on an HTML page, and at the tracker.

The page has the reason, and both models' scores and captions. The tracker gets the aliases of the model registry, and
the decision at its run. Every call compares champion.json with the tracker and sends what is missing. So the first call
after an outage of the tracker catches up, without a record of earlier calls.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, report_html
from raycap.pipeline.evaluation.reports.report import report_images
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.champion import ChampionState, ChampionStore, Decision, FileRecord
from raycap.pipeline.runs.folder import open_folder, stored_config
from raycap.pipeline.tracking.mlflow_client import experiment_of, public_uri, reason_of, tracking_client
from raycap.pipeline.tracking.run_tracker import register_run

logger = logging.getLogger(__name__)

DECISION_TAG = "raycap.decision"  # its value is the number of the last decision that a run has received completely


def decision_page(
    config: RunConfig,
    decision: Decision,
    part: Dataset | None = None,
    challenger: SplitScores | None = None,
    champion: SplitScores | None = None,
) -> str:
    """The HTML of a decision.

    part: the held-out images, of which the page shows as many as a report does. challenger, champion: their captions
    and scores on these images. A rollback has none of the three.
    """
    settings, images = config.evaluation, list[ReportImage]()
    if part is not None and challenger is not None:
        images = report_images(challenger, part, config.storage.options, champion, "champion")
    return report_html(
        Report(
            title=f"{config.name}: {decision.decision}",
            run_id=f"decision {decision.number} of {decision.time}",
            protocol=f"{decision.reason}. Beam {settings.beam_size}, at most {settings.max_length} tokens",
            score_columns=["CIDEr-D"],
            score_rows=_score_rows(decision),
            stages=[],
            images=images,
            metadata=_metadata(decision),
            language=config.data.language,
        )
    )


def _score_rows(decision: Decision) -> list[tuple[str, list[str]]]:
    """The rows (label, cells) with both scores and their difference; none for a rollback."""
    scores = decision.scores.model_dump() if decision.scores else {}
    rows = [(name, [f"{score:.4f}"]) for name, score in scores.items() if score is not None]
    if decision.difference is not None:
        rows.append(("difference\npaired bootstrap", [str(decision.difference)]))
    return rows


def _metadata(decision: Decision) -> dict[str, str]:
    """The facts that the page lists below the images."""
    metadata = {"decision": decision.decision, "run": decision.run, "champion": decision.champion.bundle}
    if decision.champion_before is not None:
        metadata["champion before"] = decision.champion_before.bundle
    if (data := decision.data) is not None:
        metadata["data"] = f"{data.images} images, {data.new_images} of them new; files: {data.files}"
        metadata["data fingerprint"] = (data.fingerprint or "")[:16]
    if decision.held_out is not None:
        metadata["held out"] = f"{decision.held_out.images} images, {decision.held_out.name}"
    if decision.asked is not None:
        margin, confidence = decision.asked["margin"], decision.asked["confidence"]
        metadata["required"] = f"margin {margin:g}, confidence {100 * confidence:g} %"
    return metadata | {"snapshot": decision.snapshot.name}


def update_tracker(config: RunConfig, store: ChampionStore, state: ChampionState) -> bool:
    """Sends what the tracker lacks of `state`; False, after one log line, when the tracker fails."""
    if not config.tracking.enabled or state.champion is None:
        return True
    try:
        client = tracking_client(config)
        experiment = experiment_of(client, config)
        name = config.tracking.registered_name or config.name
        for alias, run_id in (("champion", state.champion.run_id), ("challenger", state.challenger)):
            version = None if run_id is None else _find_or_register_version(client, config, experiment, run_id)
            _set_alias(client, name, alias, version)
        if state.decision is not None:
            _log_decision(client, experiment, store, state.decision)
    except Exception as error:  # a failing tracker must not fail the decision
        address, reason = public_uri(config), reason_of(error)
        logger.info(f"tracker   {address} could not be updated ({reason}); the next call tries again")
        return False
    return True


def _find_or_register_version(client: Any, config: RunConfig, experiment: str, run_id: str) -> str | None:
    """The registered model version of a raycap run. A run without one is sent first; None if that fails."""
    versions = _versions_of(client, experiment, run_id)
    if not versions and _send_run(config, run_id):
        versions = _versions_of(client, experiment, run_id)
    return str(versions[0].version) if versions else None


def _versions_of(client: Any, experiment: str, run_id: str) -> list[Any]:
    """The registered model versions of a raycap run."""
    run = _run_of(client, experiment, run_id)
    return [] if run is None else client.search_model_versions(f"run_id = '{run.info.run_id}'")


def _run_of(client: Any, experiment: str, run_id: str) -> Any:
    """MLflow's parent run of a raycap run, or None. The child runs of its stages have the same tag."""
    runs = client.search_runs([experiment], f"tags.`raycap.run_id` = '{run_id}'")
    return next((run for run in runs if "mlflow.parentRunId" not in run.data.tags), None)


def _send_run(config: RunConfig, run_id: str) -> bool:
    """Sends a complete run to the tracker; False when the run is not in the storage or sending fails."""
    name = f"runs/{run_id}"
    folder = open_folder(config.working_path / name, config.home(name), config)
    if not (folder.path / "COMPLETE.json").is_file():
        return False
    # the present tracker and storage, which may differ from those in the run's stored configuration
    update = {"tracking": config.tracking, "storage": config.storage}
    folder = replace(folder, config=stored_config(folder.path).model_copy(update=update))
    return register_run(folder, folder.config) is not None


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
