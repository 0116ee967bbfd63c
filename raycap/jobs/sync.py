"""`raycap sync`: sends a tracker the data of runs that it missed while it was down."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.options import Set
from raycap.pipeline.config.load import load_config, parse_config, read_values
from raycap.pipeline.config.shipped import named_place
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.delivery import local_bundle
from raycap.pipeline.runs.folder import RunFolder, open_folder, stored_config, try_lock, with_decisions_of
from raycap.pipeline.runs.preflight import check_storage
from raycap.pipeline.runtime.names import expanded_path, shown
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.tracking.mlflow_client import public_uri
from raycap.pipeline.tracking.run_tracker import SentRecord, Tracker, stored_records

logger = logging.getLogger(__name__)


def sync(
    target: Annotated[
        Path, typer.Argument(help="A run's folder, a storage's, or a configuration.", metavar="[RUN_FOLDER|CONFIG]")
    ] = Path("results"),
    set_: Set = None,
) -> int:
    """Send the tracker what it missed while it was down.

    The exit code is 1 when a tracker does not accept everything.

    Example: raycap sync results/runs/RUN --set tracking.uri=http://127.0.0.1:5000
    """
    overrides = set_ or ()
    place = named_place(target)
    if place is None:
        raise UserError(
            f"{shown(target)} does not exist; give a run's folder, a storage's, or the configuration of a run"
        )
    num_runs, unreachable = 0, set()
    runs = _runs_of_config(place, overrides) if place.is_file() else _runs_in_folder(place, overrides)
    for folder in runs:
        num_runs += 1
        uri = public_uri(folder.config)
        if uri in unreachable:  # not tried again, because each attempt waits until its timeout
            logger.info(f"{folder.run_id}: not tried, {uri} did not answer")
        elif not send(folder):
            unreachable.add(uri)
    if not num_runs:
        raise UserError(f"{target} contains no run; give a run's folder, a storage's, or the configuration of a run")
    return 1 if unreachable else 0


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


def _runs_of_config(path: Path, overrides: Sequence[str]) -> Iterator[RunFolder]:
    """Yields the runs in a configuration's storage that have its name, with the configuration's tracker and storage."""
    config = load_config(path, overrides)
    check_storage(config)
    place = config.storage_place / "runs"
    if place.is_remote:
        names = [file.removesuffix("/run.json") for file in place.list() if file.endswith("/run.json")]
    else:  # not `list`, because listing all files of a network file system can take minutes
        names = [file.parent.name for file in place.path.glob("*/run.json")]
    for name in sorted(names):
        # A run's id is the configuration's name and a digest. Other names are skipped, because they belong to other
        # configurations or may lead out of the folder of runs.
        prefix, _, digest = name.rpartition("-")
        if prefix != config.name or not digest.isalnum():
            continue
        try:
            folder = open_folder(config.working_path / "runs" / name, config.home(f"runs/{name}"))
        except UserError as error:
            logger.warning(f"{name}: not sent: {error}")
            continue
        stored = folder.config.model_copy(update={"tracking": config.tracking, "storage": config.storage})
        yield replace(folder, config=stored)


def _runs_in_folder(path: Path, overrides: Sequence[str]) -> Iterator[RunFolder]:
    """Yields the run in a folder, or all runs in a storage's folder. Each run keeps the tracker of its start."""
    path = expanded_path(path).resolve()
    is_run = (path / "run.json").is_file()
    folders = [path] if is_run else sorted(file.parent for file in path.glob("runs/*/run.json"))
    for folder in folders:
        try:
            values = read_values(folder / "config.yaml", overrides, is_stored=True)
            config, stored = parse_config(values), stored_config(folder)
        except UserError as error:
            if is_run:
                raise
            logger.warning(f"{folder.name}: not sent: {error}")
            continue
        opened = open_folder(folder, config.home(f"runs/{folder.name}"), config)
        # The stored configuration lacks the tracker's address, so the address comes from the records of what was sent.
        other_trackers = [uri for uri in stored_records(opened) if uri != public_uri(config)]
        if other_trackers and config.tracking.uri is None:
            values["tracking"]["uri"] = other_trackers[-1]
        yield replace(opened, config=with_decisions_of(parse_config(values), stored))
