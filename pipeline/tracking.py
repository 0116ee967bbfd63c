"""MLflow (its only home): the run as a parent, each stage as a child, fed from the run's journal.

`sync` sends what is not sent yet and remembers what was, in log/tracked.json; calling it again repeats nothing. It is
called now and then while training goes on, and at the end. A tracker that is down costs training nothing: what could
not be sent stays in the journal for the next `sync`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.journal import read_journal
from pipeline.run_folder import RunFolder, read_json, write_json

BATCH = 500  # metrics a request; the server takes 1000
TRACKED = "log/tracked.json"
SERVING_PACKAGES = ("mlflow", "numpy", "pillow", "pyyaml", "safetensors", "timm", "torch", "torchvision")


class Tracker:
    """Sends a run's journal in the background once started; the end of a run goes through `close` or `finish`."""

    def __init__(self, folder: RunFolder, config: RunConfig, say: Callable[[str], None], every_s: float = 5.0) -> None:
        self.folder, self.config, self.say, self.every_s = folder, config, say, every_s
        self._stop = threading.Event()
        self._warned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.config.tracking.enabled:
            self._thread = threading.Thread(target=self._follow, name="tracker", daemon=True)
            self._thread.start()

    def close(self, status: str) -> None:
        """Sends what is left and ends the runs with `status` (FAILED, KILLED)."""
        self._join()
        if self.config.tracking.enabled:
            self._try(lambda: sync(self.folder, self.config, status=status))

    def finish(self, scores: dict[str, float], bundle: Path) -> str | None:
        """Sends all there is, with scores, report and model; returns the registered name/version.

        None when tracking is off or the tracker does not take it: nothing is lost, and it may be called again.
        """
        self._join()
        registered: list[str] = []

        def everything() -> None:
            sync(self.folder, self.config)
            log_results(self.folder, self.config, scores)
            registered.append(register_model(self.folder, self.config, bundle, scores))
            sync(self.folder, self.config, status="FINISHED")

        done = self.config.tracking.enabled and self._try(everything)
        return registered[0] if done else None

    def _join(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(self.every_s):
            self._try(lambda: sync(self.folder, self.config))

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # whatever the tracker does, training goes on
            if not self._warned:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                where = public_uri(self.config)
                self.say(f"tracker: {where} does not take everything ({reason}); the journal keeps it")
                self._warned = True
            return False
        return True


def tracking_uri(config: RunConfig) -> str:
    return config.tracking.uri or f"sqlite:///{config.working_path / 'mlflow.db'}"


def public_uri(config: RunConfig) -> str:
    """The tracker's address without the user and password that may stand in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", tracking_uri(config))


class _State:
    """What the tracker at one address has of a run: log/tracked.json, by address."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.folder, self.path, self.key = folder, folder.path / TRACKED, public_uri(config)
        known = read_json(self.path) if self.path.is_file() else {}
        empty: dict[str, Any] = {"parent": None, "stages": {}, "sent": {}, "ended": []}
        self.values: dict[str, Any] = known.get(self.key, empty)
        self.others = known

    def save(self) -> None:
        write_json(self.path, self.others | {self.key: self.values})
        self.folder.push(TRACKED)


def sync(folder: RunFolder, config: RunConfig, *, status: str | None = None) -> None:
    """Creates what runs are missing and sends journal entries not sent before.

    Without `status` the parent is RUNNING, also after an attempt that failed; with it the parent and all stages that
    are not over end. Raises what MLflow raises.
    """
    client, state = tracking_client(config), _State(folder, config)
    values = state.values
    if values["parent"] is None:
        values["parent"] = _create_parent(client, folder, config)
        state.save()
    for stage in dict.fromkeys(entry["stage"] for entry in read_journal(folder.journal)):
        if stage not in values["stages"]:
            values["stages"][stage] = _create_child(client, folder, config, stage, values["parent"])
            state.save()
    for stage, run_id in values["stages"].items():
        _send(client, folder, stage, run_id, values["sent"])
        over = folder.result(stage) is not None
        _set_status(client, values, run_id, "FINISHED" if over else status or "RUNNING")
        state.save()
    _set_status(client, values, values["parent"], status or "RUNNING")
    state.save()


def _set_status(client: Any, values: dict[str, Any], run_id: str, status: str) -> None:
    """Once only: ending a run again would move its end time."""
    known = values.setdefault("status", {})
    if known.get(run_id) == status:
        return
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status)
    known[run_id] = status


def log_results(folder: RunFolder, config: RunConfig, scores: dict[str, float]) -> None:
    """Scores and files (report, scores, facts) with the parent run."""
    client, parent = tracking_client(config), _State(folder, config).values["parent"]
    for name, value in scores.items():
        client.log_metric(parent, name, value)
    for file in ("report.html", "scores.json", "run.json"):
        client.log_artifact(parent, str(folder.path / file))


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
    here = Path(__file__).resolve().parent
    mlflow.set_tracking_uri(tracking_uri(config))
    mlflow.set_registry_uri(tracking_uri(config))
    with _quiet(), mlflow.start_run(run_id=parent):
        logged = mlflow.pyfunc.log_model(
            name="model",
            loader_module="pipeline.serving",  # no pickle: the module reads the bundle
            data_path=str(bundle),
            code_paths=[str(here), str(here.parent / "models")],
            pip_requirements=[f"{package}=={importlib.metadata.version(package)}" for package in SERVING_PACKAGES],
            signature=_signature(),
        )
        version = mlflow.register_model(logged.model_uri, name, tags={k: f"{v:.4f}" for k, v in scores.items()})
    return f"{name}/{version.version}"


def _signature() -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    inputs = Schema([ColSpec(DataType.binary, "image")])
    return ModelSignature(inputs, Schema([ColSpec(DataType.string, "caption"), ColSpec(DataType.double, "log_prob")]))


def tracking_client(config: RunConfig) -> Any:
    """The tracker of a configuration; nothing is asked of it yet."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
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
    location = None
    if config.tracking.uri is None:
        location = (config.working_path / "mlflow").as_uri()
    return client.create_experiment(config.tracking.experiment, artifact_location=location)


def _create_parent(client: Any, folder: RunFolder, config: RunConfig) -> str:
    from mlflow.entities import Param

    facts = folder.facts
    tags = {
        "mlflow.runName": folder.run_id,
        "raycap.run_id": folder.run_id,
        "raycap.commit": facts["commit"],
        "raycap.data_fingerprint": facts["data_fingerprint"],
        "raycap.code": facts["code"],
    }
    run = client.create_run(experiment_of(client, config), tags=tags)
    flat = _flatten(config.model_dump(mode="json", exclude={"tracking": {"uri"}}))
    params = [Param(key, str(value)[:6000]) for key, value in flat.items()]
    for start in range(0, len(params), 100):
        client.log_batch(run.info.run_id, params=params[start : start + 100])
    client.log_artifact(run.info.run_id, str(folder.path / "config.yaml"))
    return run.info.run_id


def _create_child(client: Any, folder: RunFolder, config: RunConfig, stage: str, parent: str) -> str:
    from mlflow.entities import Param

    tags = {"mlflow.runName": stage, "mlflow.parentRunId": parent, "raycap.run_id": folder.run_id}
    experiment = experiment_of(client, config)
    query = f"tags.`mlflow.parentRunId` = '{parent}' and tags.`mlflow.runName` = '{stage}'"
    found = client.search_runs([experiment], query)  # made by a driver that was killed before it could note it
    run = found[0] if found else client.create_run(experiment, tags=tags)
    flat = _flatten(config.stage(stage).model_dump(mode="json"))
    client.log_batch(run.info.run_id, params=[Param(key, str(value)) for key, value in flat.items()])
    return run.info.run_id


def _send(client: Any, folder: RunFolder, stage: str, run_id: str, sent: dict[str, int]) -> None:
    from mlflow.entities import Metric

    metrics = []
    for entry in read_journal(folder.journal):
        kind, step = entry["kind"], entry["step"]
        if entry["stage"] != stage or kind not in ("train", "validation") or step <= sent.get(f"{stage}/{kind}", -1):
            continue
        prefix = "validation_" if kind == "validation" else ""
        for key, value in entry.items():
            if isinstance(value, (int, float)) and key not in ("step", "time", "total"):
                metrics.append(Metric(f"{prefix}{key}", float(value), int(entry["time"] * 1000), step))
        sent[f"{stage}/{kind}"] = step
    for start in range(0, len(metrics), BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + BATCH])


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
