"""The connection to MLflow: the tracker's address, its client, experiments, runs and parameters."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.secrets import split_userinfo, without_secrets
from raycap.pipeline.storage.atomic import atomic_path, file_lock
from raycap.pipeline.storage.s3 import is_remote

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10  # seconds that a request may take. A failed request is repeated once.
SERVER_REMEDY = "set tracking.uri to a server; `raycap sync CONFIG` then also sends it the runs in the storage"
PARAM_LENGTH = 6000  # MLflow's limit for the value of a parameter


def tracking_uri(config: RunConfig) -> str:
    """The address of the tracker, which may contain a password. By default, a SQLite file in the working folder."""
    return config.tracking.uri or _sqlite_uri(config.working_path / "mlflow.db")


def _sqlite_uri(file: Path) -> str:
    """The address of a SQLite file. SQLAlchemy would take ? and % in its path for parts of the address."""
    path = re.sub("[%?#;]", lambda match: quote(match[0]), str(file))
    # With the scheme sqlite, MLflow would create a folder that has the quoted name.
    return f"sqlite:///{path}" if path == str(file) else f"sqlite+pysqlite:///{path}"


def warn_of_local_file(config: RunConfig) -> None:
    """Logs a warning if the storage is on S3, but the tracker is the default file on this machine's disk."""
    if config.tracking.enabled and config.tracking.uri is None and is_remote(config.storage.uri):
        logger.warning(f"MLflow's data are only on this machine, in {public_uri(config)}; {SERVER_REMEDY}")


def public_uri(config: RunConfig) -> str:
    """The tracker's address without user, password, options and fragment."""
    return re.split("[?#;]", split_userinfo(tracking_uri(config))[1])[0]


def reason_of(error: Exception) -> str:
    """The first line of an error of the tracker, without secrets, or the error's type if it has no text."""
    lines = without_secrets(str(error)).splitlines()
    reason = lines[0] if lines else type(error).__name__
    return f"{reason} Restore it or its experiment in MLflow." if reason.endswith("state is deleted.") else reason


def tracking_client(config: RunConfig) -> MlflowClient:
    """An MLflow client for the configured tracker. Creates the SQLite file of the tracker if it is missing.

    The client connects to a server only when it is first used.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(CALL_TIMEOUT_S))
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # MLflow prints the address with its password
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    file = _sqlite_file(config)
    if file is not None and config.tracking.uri is None and file.is_symlink():
        raise UserError(f"{file} is a link, and may lead to another program's database; set tracking.uri")
    if file is not None and not file.exists():
        _create_database(file)
    elif file is not None and not file.is_file():  # MLflow would wait for it
        raise UserError(f"{file} is not a regular file; set tracking.uri to another file")
    if _is_database(config) and is_remote(config.storage.uri):  # MLflow then uploads to S3 from this process
        options = config.storage.options
        if options.endpoint_url is not None:
            os.environ["MLFLOW_S3_ENDPOINT_URL"] = options.endpoint_url
        if options.region is not None:
            os.environ.setdefault("AWS_DEFAULT_REGION", options.region)
    return MlflowClient(tracking_uri(config))


def _create_database(file: Path) -> None:
    """Creates MLflow's SQLite file under a temporary name, and renames it when it is complete.

    MLflow makes dozens of migrations. If the process were killed between two of them, no later process could use the
    file.
    """
    from mlflow import MlflowClient

    with file_lock(file.with_name(f".{file.name}.lock")):
        if not file.exists():
            with atomic_path(file) as temporary:
                MlflowClient(_sqlite_uri(temporary)).search_experiments(max_results=1)


def experiment_of(client: MlflowClient, config: RunConfig) -> str:
    """The id of the configured experiment, which is created if it does not exist. Raises UserError if it is deleted."""
    name = config.tracking.experiment
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, artifact_location=artifact_location(config))
    if experiment.lifecycle_stage == "deleted":
        remedy = f"restore it (mlflow experiments restore -x {experiment.experiment_id})"
        raise UserError(f"its experiment {name} is deleted; {remedy}, or set tracking.experiment to another name")
    return experiment.experiment_id


def artifact_location(config: RunConfig) -> str | None:
    """The folder for the files of a new experiment. None (MLflow's default) if the tracker is a server or a folder.

    For a database without a server, MLflow's default would be `./mlruns` in the current directory. The files of a
    SQLite database are therefore in a folder beside it (`mlflow` for mlflow.db), and those of any other database in a
    folder of the run's storage, which may be on S3.
    """
    file = _sqlite_file(config)
    if file is not None:
        return file.with_name(file.stem if file.suffix else f"{file.name}-artifacts").as_uri()
    if not _is_database(config):
        return None
    folder = config.storage_place / "mlflow"
    return folder.uri if folder.is_remote else (config.working_path / "mlflow").as_uri()


def _is_database(config: RunConfig) -> bool:
    """True if the tracker is a database other than SQLite, which this process opens without a server."""
    return tracking_uri(config).startswith(("postgresql", "mysql", "mssql"))


def _sqlite_file(config: RunConfig) -> Path | None:
    """The file of the tracker's SQLite database. None if the tracker is not a SQLite file."""
    scheme, _, path = tracking_uri(config).partition(":///")
    file = unquote(path.partition("?")[0])
    if not scheme.startswith("sqlite") or file in ("", ":memory:"):
        return None
    return Path(file).absolute()


def get_or_create_run(
    client: MlflowClient, experiment: str, match: dict[str, str], tags: dict[str, str], start_time: int | None = None
) -> str:
    """The id of the run whose tags include `match`. If there is no such run, creates one with `match` and `tags`.

    A run may exist although its id was not stored, because the answer to its creation was lost or the process was
    killed. The search prevents a second run in this case. start_time: of a new run, in milliseconds since 1970.
    """
    query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in match.items())
    runs = client.search_runs([experiment], query)
    run = runs[0] if runs else client.create_run(experiment, start_time=start_time, tags=match | tags)
    return str(run.info.run_id)


def log_params(client: MlflowClient, run_id: str, values: Values) -> None:
    """Logs the parameters that the run does not have yet, because MLflow refuses to change a parameter."""
    from mlflow.entities import Param

    logged = client.get_run(run_id).data.params
    params = [Param(key, str(value)[:PARAM_LENGTH]) for key, value in flatten(values).items() if key not in logged]
    client.log_batch(run_id, params=params)


def log_metrics(
    client: MlflowClient, run_id: str, metrics: Iterable[tuple[str, float, int]], tags: Mapping[str, str]
) -> None:
    """Logs metrics (name, value, step) and tags in one request."""
    from mlflow.entities import Metric, RunTag

    now = int(time.time() * 1000)
    entities = [Metric(name, value, now, step) for name, value, step in metrics]
    client.log_batch(run_id, entities, tags=[RunTag(name, value) for name, value in tags.items()])


def flatten(values: Values, prefix: str = "") -> Values:
    """{dotted key: value} of nested values. An item in a list of mappings has its `name`, or else its index, as key."""
    flat: Values = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            by_name = {item.get("name", str(number)): item for number, item in enumerate(value)}
            flat |= flatten(by_name, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
