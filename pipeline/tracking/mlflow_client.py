"""MLflow (its only home): the run as a parent, each stage as a child, fed from the run's journal.

`sync` sends what is not sent yet and remembers what was, in log/tracked.json; calling it again repeats nothing. It is
called now and then while training goes on, and at the end. A tracker that is down or slow costs training nothing: what
could not be sent stays in the journal for the next `sync`. A request without an answer may have arrived all the same:
after one the tracker is asked which steps it has.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import read_journal
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.path import is_remote
from pipeline.version import project_root

BATCH = 500  # metrics a request; the server takes 1000
CALL_S = 10  # an answer is waited for so long, and once more
PATIENCE_S = 30.0  # so much longer than a second each may the answers of one `sync` take in all
TRACKED = "log/tracked.json"
SERVING_PACKAGES = ("mlflow", "numpy", "pillow", "pydantic", "pyyaml", "safetensors", "timm", "torch", "torchvision")
FIRST_KEY = {"train": "loss", "validation": "validation_CIDEr-D"}  # a metric that every entry of a kind has


class Stopped(Exception):
    """The run is at its end: what the background still had to send is sent by `finish` or `close`."""


class PatientClient:
    """A tracker's client whose calls are stopped when the run ends, and when answers have taken too long in all."""

    def __init__(self, client: Any, stop: threading.Event | None = None) -> None:
        self._client, self._stop, self._late = client, stop or threading.Event(), 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*values: Any, **named: Any) -> Any:
            if self._stop.is_set():
                raise Stopped
            if self._late > PATIENCE_S:
                raise TimeoutError(f"its answers took {self._late:.0f} s longer than a second each")
            begin = time.monotonic()
            try:
                return method(*values, **named)
            finally:
                if not name.startswith("log_artifact"):  # a large file on its way is no slow answer
                    self._late += max(0.0, time.monotonic() - begin - 1)

        return call


def tracking_uri(config: RunConfig) -> str:
    return config.tracking.uri or f"sqlite:///{config.working_path / 'mlflow.db'}"


def public_uri(config: RunConfig) -> str:
    """The tracker's address without the user, password and options that may stand in it."""
    return without_secrets(tracking_uri(config)).partition("?")[0]


def without_secrets(text: str) -> str:
    """A text without what stands before the @ of the addresses in it."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


class _State:
    """What the tracker at one address has of a run: log/tracked.json, by address."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.folder, self.path, self.key = folder, folder.path / TRACKED, public_uri(config)
        known = read_json(self.path) if self.path.is_file() else {}
        empty: dict[str, Any] = {"parent": None, "stages": {}, "sent": {}, "ended": []}
        self.values: dict[str, Any] = known.get(self.key, empty)
        self.others = known
        if self.key not in known:
            self.save()  # `raycap sync` finds the address here, also when nothing was ever sent

    def save(self) -> None:
        write_json(self.path, self.others | {self.key: self.values})
        self.folder.push(TRACKED)


def note_ending(folder: RunFolder, config: RunConfig, status: str | None) -> None:
    """How a run ended, for who tells the tracker later; None: it goes on."""
    state = _State(folder, config)
    if state.values.get("ending") != status:
        state.values["ending"] = status
        state.save()


def ending(folder: RunFolder, config: RunConfig) -> str | None:
    """What `note_ending` noted."""
    return _State(folder, config).values.get("ending")


def known_trackers(folder: RunFolder) -> list[str]:
    """The addresses, without users and passwords, of the trackers that a run was to be sent to."""
    path = folder.path / TRACKED
    return list(read_json(path)) if path.is_file() else []


def sync(
    folder: RunFolder, config: RunConfig, *, status: str | None = None, unsure: bool = False, client: Any = None
) -> None:
    """Creates what runs are missing and sends journal entries not sent before.

    Without `status` the parent is RUNNING, also after an attempt that failed; with it the parent and all stages that
    are not over end. `unsure`: the tracker may have more than was noted, so it is asked. Raises what MLflow raises.
    """
    client, state = client or PatientClient(tracking_client(config)), _State(folder, config)
    values = state.values
    stages: dict[str, list[dict[str, Any]]] = {}
    for entry in read_journal(folder.journal):
        stages.setdefault(entry["stage"], []).append(entry)
    if values["parent"] is None:
        values["parent"] = _create_parent(client, folder, config)
        state.save()
    if not values.get("described"):
        _describe_parent(client, folder, config, values["parent"])
        values["described"] = True
        state.save()
    for stage, entries in stages.items():
        if stage not in values["stages"]:
            values["stages"][stage] = _create_child(client, folder, config, stage, entries, values["parent"])
            state.save()
        run_id = values["stages"][stage]
        if unsure and values.get("status", {}).get(run_id) != "FINISHED":
            _ask(client, stage, run_id, values["sent"])
        _send(client, state, stage, entries)
        over = folder.result(stage) is not None
        _set_status(client, state, run_id, "FINISHED" if over else status or "RUNNING", entries[-1]["time"])
    _set_status(client, state, values["parent"], status or "RUNNING")


def _set_status(client: Any, state: _State, run_id: str, status: str, when: float | None = None) -> None:
    """Once only: ending a run again would move its end time (`when`, in seconds; None: now)."""
    known = state.values.setdefault("status", {})
    if known.get(run_id) == status:
        return
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status, None if when is None else int(when * 1000))
    known[run_id] = status
    state.save()


def log_results(folder: RunFolder, config: RunConfig, scores: dict[str, float], *, client: Any = None) -> None:
    """Scores, their signature and files (report, plots, captions, scores, facts) with the parent run."""
    from mlflow.entities import Metric, RunTag

    from pipeline.reports.curves import write_curves

    client, parent = client or PatientClient(tracking_client(config)), _State(folder, config).values["parent"]
    entries = read_journal(folder.journal)
    when = int(max((entry["time"] for entry in entries), default=0.0) * 1000)  # told again it is the same value
    splits = read_json(folder.path / "scores.json")["splits"]
    tags = [RunTag("raycap.signature", next(iter(splits.values()))["signature"])]
    client.log_batch(parent, metrics=[Metric(name, value, when, 0) for name, value in scores.items()], tags=tags)
    for file in ("report.html", "scores.json", "run.json", "config.yaml"):
        client.log_artifact(parent, str(folder.path / file))
    client.log_artifacts(parent, str(folder.path / "predictions"), "predictions")
    with tempfile.TemporaryDirectory() as plots:
        write_curves(entries, Path(plots))
        client.log_artifacts(parent, plots, "plots")


def register_model(folder: RunFolder, config: RunConfig, bundle: Path, scores: dict[str, float]) -> str:
    """Logs the bundle as a pyfunc model of the parent run and registers it with its scores; returns name/version.

    A version that this run registered before is returned as it is.
    """
    client, parent = tracking_client(config), _State(folder, config).values["parent"]
    found = client.search_model_versions(f"run_id = '{parent}'")
    if found:
        return f"{found[0].name}/{found[0].version}"
    import mlflow

    name = config.tracking.registered_name or config.name
    packages = [*SERVING_PACKAGES, *(["boto3"] if is_remote(config.storage.uri) else [])]
    with _quiet(), _serving_code() as code, _current(config, parent):
        logged = mlflow.pyfunc.log_model(
            name="model",
            loader_module="pipeline.captioning.service",  # no pickle: the module reads the bundle
            data_path=str(bundle),
            code_paths=code,
            pip_requirements=[f"{package}=={_version(package)}" for package in packages],
            signature=_signature(),
            input_example=_example(),
            model_config={name: getattr(config.evaluation, name) for name in ("beam_size", "max_length", "precision")},
        )
        version = mlflow.register_model(logged.model_uri, name, tags={k: f"{v:.4f}" for k, v in scores.items()})
    return f"{name}/{version.version}"


@contextlib.contextmanager
def _current(config: RunConfig, run_id: str) -> Iterator[None]:
    """MLflow's current run; it puts the address, which may hold a password, into the environment: not for long."""
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(tracking_uri(config))
    try:
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None unsets it


def _version(package: str) -> str:
    """The installed version as a registry knows it, without a build's own suffix (+cpu)."""
    return importlib.metadata.version(package).partition("+")[0]


@contextlib.contextmanager
def _serving_code() -> Iterator[list[str]]:
    """Folders with the sources that travel with a model; no more of raycap is needed to serve it."""
    from pipeline.captioning.service import serving_sources

    with tempfile.TemporaryDirectory() as temporary:
        for source in serving_sources():
            target = Path(temporary) / source.relative_to(project_root())
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        yield [str(folder) for folder in sorted(Path(temporary).iterdir())]


def _signature() -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    inputs: list[Any] = [
        ColSpec(DataType.binary, "image", required=False),
        ColSpec(DataType.string, "uri", required=False),
    ]
    outputs: list[Any] = [ColSpec(DataType.string, "caption"), ColSpec(DataType.double, "log_prob")]
    return ModelSignature(Schema(inputs), Schema(outputs))


def _example() -> Any:
    """A small picture's file bytes, as the column `image` takes them."""
    import pandas
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).save(file, "PNG")
    return pandas.DataFrame({"image": [file.getvalue()]})


def tracking_client(config: RunConfig) -> Any:
    """The tracker of a configuration; nothing is asked of it yet."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(CALL_S))
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # it prints the address with its password
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri(config))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """MLflow tells of each success on stderr and warns of the input example that a bundle does not need."""
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def experiment_of(client: Any, config: RunConfig) -> str:
    """The id of the configured experiment, made when it is not there."""
    found = client.get_experiment_by_name(config.tracking.experiment)
    if found is not None:
        return found.experiment_id
    return client.create_experiment(config.tracking.experiment, artifact_location=artifact_location(config))


def artifact_location(config: RunConfig) -> str | None:
    """The folder for a new experiment's files; None: the server's own, or that of a store of plain files.

    Opened without a server, a database would take `./mlruns`, wherever the process happens to run: a SQLite file gets
    a folder beside it, mlflow.db one named mlflow; a database without a file has them in the run's storage.
    """
    scheme, _, path = tracking_uri(config).partition(":///")
    if scheme.startswith("sqlite") and path:
        file = Path(path.partition("?")[0]).absolute()
        return file.with_name(file.stem if file.suffix else f"{file.name}-artifacts").as_uri()
    direct = scheme.startswith(("postgresql", "mysql", "mssql"))
    return (config.working_path / "mlflow").as_uri() if direct else None


def _create_parent(client: Any, folder: RunFolder, config: RunConfig) -> str:
    metadata, experiment = folder.metadata, experiment_of(client, config)
    tags = {
        "mlflow.runName": folder.run_id,
        "raycap.run_id": folder.run_id,
        "raycap.created": metadata.created,
        "raycap.commit": metadata.commit,
        "raycap.data_fingerprint": metadata.data_fingerprint,
        "raycap.code": metadata.code,
    }
    query = f"tags.`raycap.run_id` = '{folder.run_id}' and tags.`raycap.created` = '{metadata.created}'"
    found = client.search_runs([experiment], query)  # made by a request whose answer did not come
    return str((found[0] if found else client.create_run(experiment, tags=tags)).info.run_id)


def _describe_parent(client: Any, folder: RunFolder, config: RunConfig, run_id: str) -> None:
    _log_params(client, run_id, config.model_dump(mode="json", exclude={"tracking": {"uri"}}))
    client.log_artifact(run_id, str(folder.path / "config.yaml"))


def _create_child(
    client: Any, folder: RunFolder, config: RunConfig, stage: str, entries: list[dict[str, Any]], parent: str
) -> str:
    section, experiment = config.stage(stage), experiment_of(client, config)
    tags = {"mlflow.runName": stage, "mlflow.parentRunId": parent, "raycap.run_id": folder.run_id}
    if section.objective == "scst":
        from pipeline.training.objectives import scst_signature

        tags["raycap.signature"] = scst_signature(section.sampling)
    query = f"tags.`mlflow.parentRunId` = '{parent}' and tags.`mlflow.runName` = '{stage}'"
    found = client.search_runs([experiment], query)  # made by a driver that was killed before it could note it
    begin = int(entries[0]["time"] * 1000)
    run = found[0] if found else client.create_run(experiment, start_time=begin, tags=tags)
    _log_params(client, run.info.run_id, section.model_dump(mode="json"))
    return str(run.info.run_id)


def _log_params(client: Any, run_id: str, values: dict[str, Any]) -> None:
    """What the run does not have yet; MLflow refuses to change a parameter."""
    from mlflow.entities import Param

    there = client.get_run(run_id).data.params
    params = [Param(key, str(value)[:6000]) for key, value in _flatten(values).items() if key not in there]
    for start in range(0, len(params), 100):
        client.log_batch(run_id, params=params[start : start + 100])


def _ask(client: Any, stage: str, run_id: str, sent: dict[str, int]) -> None:
    """Brings `sent` up to what the tracker has: entries arrive in order, each with all its metrics or not at all."""
    for kind, key in FIRST_KEY.items():
        steps = [metric.step for metric in client.get_metric_history(run_id, key)]
        sent[f"{stage}/{kind}"] = max(steps, default=-1)


def _send(client: Any, state: _State, stage: str, entries: list[dict[str, Any]]) -> None:
    from mlflow.entities import Metric

    run_id, sent = state.values["stages"][stage], state.values["sent"]
    metrics: list[Metric] = []
    steps: dict[str, int] = {}

    def send() -> None:
        client.log_batch(run_id, metrics=metrics)
        sent.update(steps)
        state.save()
        metrics.clear()

    for entry in entries:
        kind, step = entry["kind"], entry["step"]
        if kind not in FIRST_KEY or step <= sent.get(f"{stage}/{kind}", -1):
            continue
        prefix = "validation_" if kind == "validation" else ""
        new = [
            Metric(f"{prefix}{key}", float(value), int(entry["time"] * 1000), step)
            for key, value in entry.items()
            if isinstance(value, (int, float)) and key not in ("step", "time", "total")
        ]
        if len(metrics) + len(new) > BATCH:
            send()
        metrics += new
        steps[f"{stage}/{kind}"] = step
    if metrics:
        send()


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {item.get("name", str(number)): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
