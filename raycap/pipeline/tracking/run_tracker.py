"""Sends a run's journal and model to MLflow, and sets the run's final status FINISHED, FAILED or KILLED there.

In MLflow, the run is a parent, and each of its stages is a child with the metrics of the journal. `sync` sends what was
not sent before, and records in log/tracked.json what was sent. `Tracker` calls `sync` regularly during training and at
the end. If the answer to a request is lost, a metric is sent twice, but MLflow counts the metric once, because both
copies have the same time and value.

A tracker that is down or slow does not affect training, because a background thread sends the journal. At the end of a
run, requests have a timeout, and an attempt ends at its first failed request. `raycap sync`, or starting the same run
again, sends what the tracker has not received.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.journal import Entry, journal_bytes, read_journal
from raycap.pipeline.storage.atomic import read_json, write_json
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.tracking.mlflow_client import (
    experiment_of,
    get_or_create_run,
    log_params,
    public_uri,
    reason_of,
    tracking_client,
    tracking_uri,
    warn_of_local_file,
)
from raycap.pipeline.version import package_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

logger = logging.getLogger(__name__)

JOIN_S = 30  # seconds to wait for the background thread at the end of a run, longer than a request may take
LONGEST_PAUSE_S = 60.0  # seconds between two attempts, when a tracker is down for long
ENTRIES_PER_REQUEST = 20  # of the journal. MLflow's server accepts at most 1000 metrics in a request.
SENT_FILE = "log/tracked.json"
SENT_KINDS = ("train", "validation")  # the kinds of journal entries with metrics
NOT_METRICS = ("step", "time", "total")  # numbers in journal entries that are not sent as metrics
SERVING_PACKAGES = ("mlflow", "numpy", "pillow", "pydantic", "pyyaml", "safetensors", "timm", "torch", "torchvision")
TOKENIZER_PACKAGES = {"unicode": ("regex",), "characters": ("regex",), "subword": ("regex", "tokenizers")}


class Tracker:
    """Sends the journal of a run in the background: every `every_s` seconds from `start` until `close` or `finish`."""

    def __init__(self, folder: RunFolder, every_s: float = 5.0) -> None:
        self.folder, self.every_s = folder, every_s
        self._stop = threading.Event()
        self._failing = False  # whether the last attempt failed
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the background thread, unless tracking is off."""
        if self.folder.config.tracking.enabled:
            warn_of_local_file(self.folder.config)
            with contextlib.suppress(OSError):  # the run itself will raise a storage error
                SentRecord(self.folder).set("ending", None)
            self._thread = threading.Thread(target=self._follow, name="tracker", daemon=True)
            self._thread.start()

    def close(self, status: str | None) -> bool:
        """Sends the rest of the journal and ends the run and its open stages in MLflow with `status`.

        status: FAILED or KILLED. If it is None, the status remains RUNNING.

        Returns False if the tracker does not accept everything.
        """
        if not self.folder.config.tracking.enabled:
            return True
        with self._attempt():
            SentRecord(self.folder).set("ending", status)
            self._join()
            sync(self.folder, tracking_client(self.folder.config), status=status)
            return True
        return False

    def finish(self, scores: dict[str, float], bundle: Path) -> str | None:
        """Sends the rest of the journal, the scores, the report and the model. Returns the model's NAME/VERSION.

        Returns None if tracking is off or the tracker does not accept everything. `finish` may then be called again.
        """
        if not self.folder.config.tracking.enabled:
            return None
        with self._attempt():
            self._join()
            client = tracking_client(self.folder.config)
            sync(self.folder, client)
            log_results(self.folder, scores, client)
            registered = register_model(self.folder, bundle, scores, client)
            sync(self.folder, client, status="FINISHED")
            return registered
        return None

    def _join(self) -> None:
        """Ends the background thread. Raises TimeoutError if a request has no answer within JOIN_S seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                raise TimeoutError(f"no answer for {JOIN_S} s")

    def _follow(self) -> None:
        """The background thread: sends new entries. After each failure, the pause is twice as long."""
        journal, pause = self.folder.journal, self.every_s
        sent_bytes = 0  # the size of the journal when it was sent last
        while not self._stop.wait(pause):
            size = journal_bytes(journal)
            if size == sent_bytes and not self._failing:
                continue
            pause = min(2 * pause, max(LONGEST_PAUSE_S, self.every_s))
            with self._attempt():
                sync(self.folder, tracking_client(self.folder.config))
                pause, sent_bytes = self.every_s, size

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Within the context, errors of the tracker are suppressed. Only the first of consecutive errors is logged."""
        address = public_uri(self.folder.config)
        try:
            yield
        except Exception as error:
            if not self._failing:
                self._failing = True
                logger.info(
                    f"tracker   {address} does not accept everything ({reason_of(error)[:600]}); the journal keeps it, "
                    "and `raycap sync CONFIG` sends it"
                )
        else:
            self._failing = False


class SentRecord:
    """The record of what a tracker has received of a run. log/tracked.json has one record per address of a tracker.

    values: "parent" is the id of the run in MLflow. "stages" is {stage: id in MLflow}. "sent" is {STAGE/KIND of journal
    entries: last step that was sent}. "status" is {id: last status that was sent}. "described" is true if the parent
    has its parameters. "ending" is the status with which the run has ended, or None while the run continues. A later
    `raycap sync` sends "ending".
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._address = folder, public_uri(folder.config)
        self._by_address = stored_records(folder)
        self.values: Values = self._by_address.get(self._address, {"parent": None, "stages": {}, "sent": {}})

    def save(self) -> None:
        write_json(self._folder.path / SENT_FILE, self._by_address | {self._address: self.values})
        self._folder.push(SENT_FILE)

    def set(self, key: str, value: object) -> None:
        """Sets a value. Saves the record if the value has changed."""
        if self.values.get(key) != value:
            self.values[key] = value
            self.save()


def stored_records(folder: RunFolder) -> Values:
    """The stored records of a run: {address of a tracker, without user and password: values of a `SentRecord`}.

    If the file is damaged, logs a warning and returns no records. Everything is then sent again to the same runs in
    MLflow.
    """
    path = folder.path / SENT_FILE
    if not path.is_file():
        return {}
    with contextlib.suppress(DamagedError):
        records, keys = read_json(path), {"parent", "stages", "sent"}
        values = records.values() if isinstance(records, dict) else [None]
        if all(isinstance(each, dict) and keys <= each.keys() for each in values):
            return dict(records)
    logger.warning(f"{path} is damaged; the tracker gets everything of this run again")
    return {}


def sync(folder: RunFolder, client: MlflowClient, *, status: str | None = None) -> None:
    """Creates missing runs in MLflow, and sends the journal entries that were not sent before.

    status: the status with which the parent and all unfinished stages end. If it is None, they are RUNNING, also if an
    earlier attempt has failed. Raises what MLflow raises.
    """
    record = SentRecord(folder)
    values = record.values
    stages: dict[str, list[Entry]] = {}
    for entry in read_journal(folder.journal):
        stages.setdefault(entry["stage"], []).append(entry)
    if values["parent"] is None:
        metadata = folder.metadata
        match = {"raycap.run_id": folder.run_id, "raycap.created": metadata.created}
        tags = {"mlflow.runName": folder.run_id, "raycap.commit": metadata.commit}
        tags["raycap.data_fingerprint"] = metadata.data_fingerprint
        record.set("parent", get_or_create_run(client, experiment_of(client, folder.config), match, tags))
    if not values.get("described"):
        log_params(client, values["parent"], folder.config.stored_values())
        client.log_artifact(values["parent"], str(folder.path / "config.yaml"))
        record.set("described", True)
    for stage, entries in stages.items():
        if stage not in values["stages"]:
            values["stages"][stage] = _get_or_create_child(client, folder, entries[0], values["parent"])
            record.save()
        run_id = values["stages"][stage]
        _send_entries(client, record, stage, entries)
        is_finished = folder.result(stage) is not None
        stage_status = "FINISHED" if is_finished else status
        _set_status(client, record, run_id, stage_status, entries[-1]["time"])
    _set_status(client, record, values["parent"], status)


def log_results(folder: RunFolder, scores: dict[str, float], client: MlflowClient) -> None:
    """Logs the scores, their signature and the files of the results to the parent run."""
    from mlflow.entities import Metric, RunTag

    parent, entries = SentRecord(folder).values["parent"], read_journal(folder.journal)
    # The last time in the journal is the same in a repeated call, so that MLflow does not count a score twice.
    time_ms = int(max((entry["time"] for entry in entries), default=0.0) * 1000)
    splits = read_json(folder.path / "scores.json")["splits"]
    first_split = next(iter(splits.values()))
    tags = [RunTag("raycap.signature", first_split["signature"])]
    client.log_batch(parent, metrics=[Metric(name, value, time_ms, 0) for name, value in scores.items()], tags=tags)
    for file in ("report.html", "scores.json", "run.json", "config.yaml"):
        if (folder.path / file).is_file():  # the report is missing if it could not be made
            client.log_artifact(parent, str(folder.path / file))
    client.log_artifacts(parent, str(folder.path / "predictions"), "predictions")


def _get_or_create_child(client: MlflowClient, folder: RunFolder, first_entry: Entry, parent: str) -> str:
    """The id of the stage's run in MLflow. Creates the run with its parameters if there is none."""
    section = folder.config.stage(first_entry["stage"])
    tags = {"raycap.run_id": folder.run_id}
    if section.objective == "scst":
        tags["raycap.signature"] = section.sampling.signature
    match = {"mlflow.parentRunId": parent, "mlflow.runName": section.name}
    run_id = get_or_create_run(
        client, experiment_of(client, folder.config), match, tags, int(first_entry["time"] * 1000)
    )
    log_params(client, run_id, folder.config.stored_values()["stages"][folder.config.stages.index(section)])
    return run_id


def _set_status(
    client: MlflowClient, record: SentRecord, run_id: str, status: str | None, end: float | None = None
) -> None:
    """Sets the status of a run unless it was set before, because ending a run again would change its end time.

    status: RUNNING if it is None. end: the end time in seconds since 1970, or None for the present time.
    """
    statuses = record.values.setdefault("status", {})
    new_status = status or "RUNNING"
    if statuses.get(run_id) == new_status:
        return
    if status not in (None, "FINISHED") and client.get_run(run_id).info.status == "FINISHED":
        return  # this folder is a copy that was made before the run had finished
    if status is None:
        client.update_run(run_id, status=new_status)
    else:
        client.set_terminated(run_id, status, None if end is None else int(end * 1000))
    statuses[run_id] = new_status
    record.save()


def _send_entries(client: MlflowClient, record: SentRecord, stage: str, entries: list[Entry]) -> None:
    """Sends the metrics of entries after the last step that was sent, and records the steps after each request."""
    sent = record.values["sent"]
    new = [
        entry
        for entry in entries
        if entry["kind"] in SENT_KINDS and entry["step"] > sent.get(f"{stage}/{entry['kind']}", -1)
    ]
    for start in range(0, len(new), ENTRIES_PER_REQUEST):
        part = new[start : start + ENTRIES_PER_REQUEST]
        client.log_batch(record.values["stages"][stage], metrics=[each for entry in part for each in _metrics(entry)])
        sent |= {f"{stage}/{entry['kind']}": entry["step"] for entry in part}
        record.save()


def _metrics(entry: Entry) -> list[Metric]:
    """MLflow's metrics of a journal entry."""
    from mlflow.entities import Metric

    prefix = "validation_" if entry["kind"] == "validation" else ""
    return [
        Metric(f"{prefix}{key}", float(value), int(entry["time"] * 1000), entry["step"])
        for key, value in entry.items()
        if isinstance(value, (int, float)) and key not in NOT_METRICS
    ]


def register_model(folder: RunFolder, bundle: Path, scores: dict[str, float], client: MlflowClient) -> str:
    """Logs the bundle as a pyfunc model of the parent run, and registers it with its scores. Returns NAME/VERSION.

    If the run has registered a version before, nothing is logged and that version is returned.
    """
    config, parent = folder.config, SentRecord(folder).values["parent"]
    registered = client.search_model_versions(f"run_id = '{parent}'")
    if registered:
        return f"{registered[0].name}/{registered[0].version}"
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    search = {key: getattr(config.evaluation, key) for key in ("beam_size", "max_length", "precision")}
    # stderr and warnings are hidden, because MLflow reports its success there and warns of a missing input example.
    with (
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
        _current_run(config, parent),
    ):
        logged = mlflow.pyfunc.log_model(
            name="model",
            loader_module="raycap.pipeline.tracking.pyfunc",  # this module reads the bundle, so that nothing is pickled
            data_path=str(bundle),
            code_paths=[str(package_folder())],
            pip_requirements=_requirements(config),
            signature=ModelSignature(Schema([ColSpec("binary", "image")])),  # the bytes of image files
            model_config=search,  # the only settings that a server may change
        )
        tags = {metric: f"{score:.4f}" for metric, score in scores.items()}
        version = mlflow.register_model(logged.model_uri, config.name, tags=tags)
    return f"{config.name}/{version.version}"


def _requirements(config: RunConfig) -> list[str]:
    """The packages that a served model needs, such as torch==2.9.1, without a build's suffix such as +cpu."""
    packages = [*SERVING_PACKAGES, *TOKENIZER_PACKAGES.get(config.data.tokenizer, ())]
    if is_remote(config.storage.uri):
        packages.append("boto3")
    return [f"{package}=={importlib.metadata.version(package).partition('+')[0]}" for package in packages]


@contextlib.contextmanager
def _current_run(config: RunConfig, run_id: str) -> Iterator[None]:
    """Within the context, the run `run_id` is MLflow's current run.

    MLflow puts the address of the tracker into an environment variable. The variable is restored at the end, because
    the address may contain a password.
    """
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(tracking_uri(config))
    try:
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None removes the variable
