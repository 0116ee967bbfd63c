"""A search on the tracker: the search as a parent run, every trial as a child, fed from the book.

Like the tracker of runs (`pipeline/tracking/run_sync.py`) it repeats nothing,
remembers in the search's folder what was sent, and costs a search nothing when it is down.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from pipeline.search.spec import SCORE
from pipeline.search.trials import OVER, Book, TrialRecord
from pipeline.storage.atomic import read_json, write_json
from pipeline.tracking.mlflow_client import experiment_of, public_uri, tracking_client, without_secrets

logger = logging.getLogger(__name__)


FILES = ("search.html", "pareto.png", "parallel.png", "trials.csv", "trials.parquet", "best.yaml")


class SearchTracker:
    """Sends what is new in the background, whenever a trial is over and at the end."""

    def __init__(self, book: Book) -> None:
        self.book, self.config = book, book.search.base
        self._wake, self._stop = threading.Event(), threading.Event()
        self._warned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.config.tracking.enabled:
            self._thread = threading.Thread(target=self._follow, name="search tracker", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def close(self, status: str, files: bool = False) -> bool:
        """Sends what is left and ends the parent with `status`; False when the tracker does not take it."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        return self.config.tracking.enabled and self._try(status, files)

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            if not self._stop.is_set():
                self._try("RUNNING")

    def _try(self, status: str, files: bool = False) -> bool:
        try:
            sync_search(self.book, status, files)
        except Exception as error:  # whatever the tracker does, the search goes on
            if not self._warned:
                reason = without_secrets(str(error)).splitlines()[0] if str(error) else type(error).__name__
                logger.info(
                    f"tracker: {public_uri(self.config)} does not take everything ({reason}); the book keeps it"
                )
                self._warned = True
            return False
        return True


UNTOLD = {"set", "storage", "base", "backbone"}  # passwords, and paths of this machine


def sync_search(book: Book, status: str, files: bool = False) -> None:
    """Creates what runs are missing and sends what was not sent before. Raises what the tracker raises."""
    config = book.search.base
    client, path = tracking_client(config), book.folder.path / "log" / "tracked.json"
    known: dict[str, Any] = read_json(path) if path.is_file() else {}
    where = public_uri(config)
    mine = known.setdefault(where, {"parent": None, "trials": {}, "ended": []})
    experiment = experiment_of(client, config)
    if mine["parent"] is None:
        tags = {"mlflow.runName": book.folder.path.name, "raycap.search": book.folder.path.name}
        mine["parent"] = client.create_run(experiment, tags=tags).info.run_id
        write_json(path, known)
        for key, value in book.search.config.model_dump(mode="json", exclude=UNTOLD).items():
            client.log_param(mine["parent"], key, str(value)[:500])
    for record in list(book.records):
        number = str(record.number)
        if number in mine["ended"]:
            continue
        if number not in mine["trials"]:
            mine["trials"][number] = _create_trial(client, experiment, book, record, mine["parent"])
            write_json(path, known)
        if record.state in OVER:
            _send_trial(client, book, record, mine["trials"][number])
            mine["ended"].append(number)
            write_json(path, known)
    if files:
        for file in [*FILES, *(found.name for found in sorted(book.folder.path.glob("front-*.yaml")))]:
            if (book.folder.path / file).is_file():
                client.log_artifact(mine["parent"], str(book.folder.path / file))
    if status == "RUNNING":
        client.update_run(mine["parent"], status=status)
    else:
        client.set_terminated(mine["parent"], status)


def _create_trial(client: Any, experiment: str, book: Book, record: TrialRecord, parent: str) -> str:
    name = f"trial-{record.number}"
    query = f"tags.`mlflow.parentRunId` = '{parent}' and tags.`mlflow.runName` = '{name}'"
    found = client.search_runs([experiment], query)  # made by a driver that was killed before it could note it
    if found:
        return str(found[0].info.run_id)
    tags = {"mlflow.runName": name, "mlflow.parentRunId": parent, "raycap.search": book.folder.path.name}
    run_id = str(client.create_run(experiment, tags=tags).info.run_id)
    for key, value in {**book.search.changes(record.point), "seed": record.seed}.items():
        client.log_param(run_id, key, str(value)[:500])
    return run_id


def _send_trial(client: Any, book: Book, record: TrialRecord, run_id: str) -> None:
    for step, (_, score) in enumerate(record.reports):
        client.log_metric(run_id, "validation_CIDEr-D", score, step=step)
    for name in dict.fromkeys([SCORE, *record.scores, *record.costs]):
        value = record.value(name)
        if value is not None:
            client.log_metric(run_id, name, value)
    client.set_tag(run_id, "raycap.state", record.state)
    client.set_tag(run_id, "raycap.run_id", Path(record.run).name)
    if record.reason:
        client.set_tag(run_id, "raycap.reason", record.reason[:500])
    status = {"finished": "FINISHED", "stopped": "KILLED"}.get(record.state, "FAILED")
    client.set_terminated(run_id, status)
