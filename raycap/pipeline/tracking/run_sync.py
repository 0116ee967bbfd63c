"""Sends a run to MLflow: the run is a parent, each stage is a child with the metrics of the run's journal.

`sync` sends what was not sent before and stores what was sent in log/tracked.json, so it may be called any number of
times: regularly during training, and at the end. A tracker that is down or slow does not affect training, because the
next `sync` sends the same entries of the journal. A request without an answer may have arrived; the next `sync` then
reads from the tracker which steps it has. Pictures of the training curves, one PNG per metric, go to the parent.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from pathlib import Path
from typing import Any

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.journal import Entry, read_journal
from raycap.pipeline.storage.atomic import read_json, write_json
from raycap.pipeline.tracking.mlflow_client import experiment_of, get_or_create_run, log_params, public_uri

logger = logging.getLogger(__name__)

METRICS_PER_REQUEST = 500  # the server accepts 1000
SENT_FILE = "log/tracked.json"
FIRST_METRIC = {"train": "loss", "validation": "validation_CIDEr-D"}  # a metric that every entry of this kind has
NOT_METRICS = ("step", "time", "total")
# {(kind of journal entry, key): title of the picture}
CURVES = {
    ("train", "loss"): "loss",
    ("train", "reward"): "reward",
    ("train", "lr"): "learning rate",
    ("train", "images_per_s"): "images/s",
    ("validation", "CIDEr-D"): "validation CIDEr-D",
}


class SentRecord:
    """The record of what a tracker has received of a run. log/tracked.json stores one record per tracker address.

    Values: "parent" is the run id in MLflow, "stages" has those of the stages. "sent" is the last step that was sent,
    by STAGE/KIND of the journal's entries. "status" is the last status by run id. "described" tells whether the parent
    has its parameters. "ending" is the status with which the run ended, for a later `raycap sync`; None while it runs.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder, self._address = folder, public_uri(config)
        self._by_address = stored_records(folder)
        empty: dict[str, Any] = {"parent": None, "stages": {}, "sent": {}}
        self.values: dict[str, Any] = self._by_address.get(self._address, empty)
        if self._address not in self._by_address:
            self.save()  # `raycap sync` finds the address here even when nothing was ever sent

    def save(self) -> None:
        write_json(self._folder.path / SENT_FILE, self._by_address | {self._address: self.values})
        self._folder.push(SENT_FILE)

    def set(self, key: str, value: Any) -> None:
        """Sets a value and saves when it changes."""
        if self.values.get(key) != value:
            self.values[key] = value
            self.save()


def stored_records(folder: RunFolder) -> dict[str, Any]:
    """The stored records of a run: {address of a tracker, without user and password: values of SentRecord}.

    A damaged file is named in the log and counts as empty, so that the tracker gets the run again under a new id.
    """
    path = folder.path / SENT_FILE
    try:
        records = read_json(path) if path.is_file() else {}
        if not isinstance(records, dict) or not all(isinstance(record, dict) for record in records.values()):
            raise DamagedError(f"{path} is damaged: it holds no records")
        return records
    except DamagedError as error:
        logger.warning(f"damaged   {error}; the tracker gets the run again")
        return {}


def sync(folder: RunFolder, config: RunConfig, client: Any, *, status: str | None = None, unsure: bool = False) -> None:
    """Creates the MLflow runs that are missing and sends journal entries not sent before. Raises what MLflow raises.

    Without `status` the parent is RUNNING, also after a failed attempt; with it the parent and all unfinished stages
    end with that status. With `unsure` the tracker may have more steps than the record, so they are read from it.
    """
    record = SentRecord(folder, config)
    values = record.values
    stages: dict[str, list[Entry]] = {}
    for entry in read_journal(folder.journal):
        stages.setdefault(entry["stage"], []).append(entry)
    if values["parent"] is None:
        record.set("parent", _get_or_create_parent(client, folder, config))
    if not values.get("described"):
        log_params(client, values["parent"], config.stored_values())
        client.log_artifact(values["parent"], str(folder.path / "config.yaml"))
        record.set("described", True)
    for stage, entries in stages.items():
        if stage not in values["stages"]:
            values["stages"][stage] = _get_or_create_child(client, folder, config, entries[0], values["parent"])
            record.save()
        run_id = values["stages"][stage]
        if unsure and values.get("status", {}).get(run_id) != "FINISHED":
            _read_sent_steps(client, stage, run_id, values["sent"])
        _send_entries(client, record, stage, entries)
        is_finished = folder.result(stage) is not None
        _set_status(client, record, run_id, "FINISHED" if is_finished else status or "RUNNING", entries[-1]["time"])
    _set_status(client, record, values["parent"], status or "RUNNING")


def log_results(folder: RunFolder, config: RunConfig, scores: dict[str, float], client: Any) -> None:
    """Logs scores, their signature and the files (report, captions, scores, metadata) to the parent run."""
    from mlflow.entities import Metric, RunTag

    parent, entries = SentRecord(folder, config).values["parent"], read_journal(folder.journal)
    # a repeated call uses the same time, the last one in the journal, so that no metric gets a second value
    time_ms = int(max((entry["time"] for entry in entries), default=0.0) * 1000)
    splits = read_json(folder.path / "scores.json")["splits"]
    first_split = next(iter(splits.values()))
    tags = [RunTag("raycap.signature", first_split["signature"])]
    client.log_batch(parent, metrics=[Metric(name, value, time_ms, 0) for name, value in scores.items()], tags=tags)
    for file in ("report.html", "scores.json", "run.json", "config.yaml"):
        if (folder.path / file).is_file():  # the report may have failed
            client.log_artifact(parent, str(folder.path / file))
    client.log_artifacts(parent, str(folder.path / "predictions"), "predictions")


def log_plots(folder: RunFolder, config: RunConfig, client: Any) -> None:
    """Logs pictures of the training curves to the parent run."""
    with tempfile.TemporaryDirectory() as plots:
        write_curves(read_journal(folder.journal), Path(plots))
        client.log_artifacts(SentRecord(folder, config).values["parent"], plots, "plots")


def tag_run(folder: RunFolder, config: RunConfig, client: Any, name: str, value: str) -> None:
    """Gives the parent run a tag, if the tracker has the run."""
    parent = SentRecord(folder, config).values["parent"]
    if parent is not None:
        client.set_tag(parent, name, value)


def _get_or_create_parent(client: Any, folder: RunFolder, config: RunConfig) -> str:
    """The id of MLflow's run for a raycap run, which is created if it does not exist."""
    metadata = folder.metadata
    match = {"raycap.run_id": folder.run_id, "raycap.created": metadata.created}
    tags = {"mlflow.runName": folder.run_id, "raycap.commit": metadata.commit}
    tags["raycap.data_fingerprint"] = metadata.data_fingerprint
    return get_or_create_run(client, experiment_of(client, config), match, tags)


def _get_or_create_child(client: Any, folder: RunFolder, config: RunConfig, first_entry: Entry, parent: str) -> str:
    """The id of MLflow's run for the stage of a journal entry, which is created with the stage's parameters."""
    section = config.stage(first_entry["stage"])
    tags = {"raycap.run_id": folder.run_id}
    if section.objective == "scst":
        from raycap.pipeline.training.objectives import scst_signature

        tags["raycap.signature"] = scst_signature(section.sampling)
    match = {"mlflow.parentRunId": parent, "mlflow.runName": section.name}
    run_id = get_or_create_run(client, experiment_of(client, config), match, tags, int(first_entry["time"] * 1000))
    log_params(client, run_id, config.stored_values()["stages"][config.stages.index(section)])
    return run_id


def _set_status(client: Any, record: SentRecord, run_id: str, status: str, end: float | None = None) -> None:
    """Sets a status once, because ending a run again would move its end time (`end` in seconds; None: now)."""
    statuses = record.values.setdefault("status", {})
    if statuses.get(run_id) == status:
        return
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status, None if end is None else int(end * 1000))
    statuses[run_id] = status
    record.save()


def _read_sent_steps(client: Any, stage: str, run_id: str, sent: dict[str, int]) -> None:
    """Sets `sent` to the last step of each kind that the tracker has.

    One metric per kind is enough, because entries arrive in order, each with all of its metrics or not at all.
    """
    for kind, key in FIRST_METRIC.items():
        steps = [metric.step for metric in client.get_metric_history(run_id, key)]
        sent[f"{stage}/{kind}"] = max(steps, default=-1)


def _send_entries(client: Any, record: SentRecord, stage: str, entries: list[Entry]) -> None:
    """Sends the metrics of the entries after the recorded steps. No entry is divided between two requests."""
    from mlflow.entities import Metric

    run_id, sent = record.values["stages"][stage], record.values["sent"]
    metrics: list[Metric] = []
    steps: dict[str, int] = {}

    def send() -> None:
        """Sends the collected metrics and records their steps."""
        client.log_batch(run_id, metrics=metrics)
        sent.update(steps)
        record.save()
        metrics.clear()

    for entry in entries:
        kind, step = entry["kind"], entry["step"]
        if kind not in FIRST_METRIC or step <= sent.get(f"{stage}/{kind}", -1):
            continue
        prefix = "validation_" if kind == "validation" else ""
        new = [
            Metric(f"{prefix}{key}", float(value), int(entry["time"] * 1000), step)
            for key, value in entry.items()
            if isinstance(value, (int, float)) and key not in NOT_METRICS
        ]
        if len(metrics) + len(new) > METRICS_PER_REQUEST:
            send()
        metrics += new
        steps[f"{stage}/{kind}"] = step
    if metrics:
        send()


def write_curves(entries: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes a picture of each metric in a run's journal to `folder`, and returns the pictures' paths."""
    from matplotlib.figure import Figure

    lengths: dict[str, int] = {}  # steps of each stage
    for entry in entries:
        lengths[entry["stage"]] = max(lengths.get(entry["stage"], 0), entry["step"])
    first_steps = itertools.accumulate(lengths.values(), initial=0)
    offsets = dict(zip(lengths, first_steps, strict=False))  # the last sum belongs to no stage
    written = []
    for (kind, key), title in CURVES.items():
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        of_kind = [entry for entry in entries if entry["kind"] == kind and key in entry]
        for stage, offset in offsets.items():
            points = [(offset + entry["step"], entry[key]) for entry in of_kind if entry["stage"] == stage]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=stage)
        if axes.lines:
            axes.set(xlabel="step, all stages", title=title)
            axes.grid(color="#dddddd")
            axes.legend()
            written.append(folder / f"{kind}_{key}.png")
            figure.savefig(written[-1], dpi=110)
    return written
