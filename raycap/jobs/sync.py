"""`raycap sync`: sends a tracker the data of runs that it missed while it was down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from raycap.jobs.options import Config, Set
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.delivery import local_bundle
from raycap.pipeline.runs.folder import RunFolder, open_folder, stored_config, try_lock
from raycap.pipeline.runs.preflight import check_storage
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.tracking.mlflow_client import public_uri
from raycap.pipeline.tracking.run_tracker import SentRecord, Tracker, stored_records

logger = logging.getLogger(__name__)


def sync(config: Config, set_: Set = None) -> int:
    """Send the tracker what it missed while it was down.

    The runs are those in the configuration's storage that have its name. The exit code is 1 when the tracker does not
    accept everything.

    Example: raycap sync demo --set tracking.uri=http://127.0.0.1:5000
    """
    run_config = load_config(config, set_ or ())
    check_storage(run_config)
    names = _run_names(run_config)
    if not names:
        raise UserError(f"{run_config.storage.uri} contains no run of {run_config.name}; give the configuration of one")
    # After a failure the other runs are not tried, because each attempt would wait until its timeout.
    return 0 if all(send(folder) for folder in _open_runs(run_config, names)) else 1


def send(folder: RunFolder) -> bool:
    """Sends the tracker the data of a run that it lacks. Returns False if the tracker does not accept everything."""
    if not folder.config.tracking.enabled:
        logger.info(f"{folder.run_id}: tracking.enabled is false; nothing to send")
        return True
    with try_lock(folder.path) as has_lock:
        if not has_lock:
            logger.info(f"{folder.run_id}: another process is working on the run and sends what is missing")
            return True
        if (folder.path / "COMPLETE.json").is_file():
            return register(folder)
        # A local run without a recorded ending was killed, because nobody has its lock. The status of such a run on S3
        # stays open, because another machine may be working on the run.
        status = SentRecord(folder).values.get("ending") or (None if folder.home else "KILLED")
        if not Tracker(folder).close(status):
            return False
        logger.info(f"{folder.run_id}: {public_uri(folder.config)} has everything; {status or 'not finished'}")
        return True


def register(folder: RunFolder) -> bool:
    """Sends the tracker what it lacks of a complete run, and registers the run's model.

    COMPLETE.json records whether the tracker has everything. Returns False if the tracker does not accept everything.
    """
    summary, uri = folder.summary or {}, public_uri(folder.config)
    if summary["tracked"] and uri in stored_records(folder):
        logger.info(f"{folder.run_id}: {uri} has everything")
        return True
    registered = Tracker(folder).finish(summary["scores"], local_bundle(folder))
    if summary["tracked"] != (registered is not None):
        write_json(folder.path / "COMPLETE.json", summary | {"tracked": registered is not None})
        folder.push("COMPLETE.json")
    if registered is not None:
        logger.info(f"{folder.run_id}: {uri} has everything; FINISHED, model {registered}")
    return registered is not None


def _run_names(config: RunConfig) -> list[str]:
    """The sorted names of the runs in the configuration's storage that have its name."""
    place = config.storage_place / "runs"
    if place.is_remote:
        names = [file.removesuffix("/run.json") for file in place.list() if file.endswith("/run.json")]
    else:  # not `list`, because listing all files of a network file system can take minutes
        names = [file.parent.name for file in place.path.glob("*/run.json")]
    # A run's id is the configuration's name and a digest. Other names are skipped, because they belong to other
    # configurations or may lead out of the folder of runs.
    parts = {name: name.rpartition("-") for name in sorted(names)}
    return [name for name, (prefix, _, digest) in parts.items() if prefix == config.name and digest.isalnum()]


def _open_runs(config: RunConfig, names: list[str]) -> Iterator[RunFolder]:
    """Yields the runs of these names, with the configuration's tracker and storage."""
    for name in names:
        try:
            folder = open_folder(config.working_path / "runs" / name, config.home(f"runs/{name}"), config)
            stored = stored_config(folder.path, config.variables)
        except UserError as error:
            logger.warning(f"{name}: not sent: {error}")
            continue
        places = {"tracking": config.tracking, "storage": config.storage}
        yield replace(folder, config=stored.model_copy(update=places))
