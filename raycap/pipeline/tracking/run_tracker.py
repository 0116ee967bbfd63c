"""The tracker of a run: sends its journal in the background, and ends it as FINISHED, FAILED or KILLED.

A tracker that is down or slow does not affect training and delays the run's end by a bounded time (`BoundedClient`).
`raycap sync`, or starting the same run again, sends what it has not received.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.journal import journal_bytes
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.tracking.mlflow_client import (
    BoundedClient,
    ClientStopped,
    public_uri,
    reason_of,
    tracking_client,
    warn_of_local_file,
)
from raycap.pipeline.tracking.registry import register_model
from raycap.pipeline.tracking.run_sync import SentRecord, log_plots, log_results, sync

logger = logging.getLogger(__name__)


JOIN_S = 30  # The end of a run waits this long for a pending call. HTTP requests end earlier (CALL_TIMEOUT_S).
LONGEST_PAUSE_S = 60.0  # the longest time between two attempts to reach a tracker that is down


class Tracker:
    """Sends a run's journal in the background, every `every_s` seconds after `start`, until `close` or `finish`."""

    def __init__(self, folder: RunFolder, config: RunConfig, every_s: float = 5.0) -> None:
        self.folder, self.config, self.every_s = folder, config, every_s
        self._stop = threading.Event()
        self._failing = False  # whether the last attempt failed
        self._unsure = True  # an earlier process may have sent more than it could record
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the background thread, unless tracking is off."""
        if self.config.tracking.enabled:
            warn_of_local_file(self.config)
            with contextlib.suppress(OSError):  # storage errors are raised where they matter
                SentRecord(self.folder, self.config).set("ending", None)
            self._thread = threading.Thread(target=self._follow, name="tracker", daemon=True)
            self._thread.start()

    def close(self, status: str | None) -> bool:
        """Sends the rest and ends the runs with `status` (FAILED or KILLED; None: leaves them RUNNING).

        False when the tracker does not accept everything.
        """
        if not self.config.tracking.enabled:
            return True
        with self._attempt():
            SentRecord(self.folder, self.config).set("ending", status)
            self._join()
            sync(self.folder, self.config, self._client(), status=status, unsure=self._unsure)
            return True
        return False

    def finish(self, scores: dict[str, float], bundle: Path) -> str | None:
        """Sends everything, with scores, report and model; returns the registered name/version.

        None when tracking is off or the tracker does not accept everything; `finish` may then be called again.
        """
        if not self.config.tracking.enabled:
            return None
        with self._attempt():
            self._join()
            client = self._client()
            sync(self.folder, self.config, client, unsure=self._unsure)
            log_results(self.folder, self.config, scores, client)
            registered = register_model(self.folder, self.config, bundle, scores)
            sync(self.folder, self.config, client, status="FINISHED")
            log_plots(self.folder, self.config, client)  # last, because a picture that fails must stop nothing else
            return registered
        return None

    @property
    def remedy(self) -> str:
        """The command that sends the rest. It finds a run on S3 by its configuration."""
        return f"`raycap sync {'CONFIG' if self.folder.home else self.folder.path}`"

    def _client(self, stop: threading.Event | None = None) -> BoundedClient:
        return BoundedClient(tracking_client(self.config), stop)

    def _join(self) -> None:
        """Ends the background thread. TimeoutError when it hangs in a call that has no deadline, as on a database."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                raise TimeoutError(f"no answer for {JOIN_S} s")

    def _follow(self) -> None:
        """Sends new entries until the run ends. After a failure it waits longer before the next attempt."""
        journal, pause = self.folder.journal, self.every_s
        sent_bytes = 0  # the size of the journal that was sent last
        while not self._stop.wait(pause):
            size = journal_bytes(journal)
            if size == sent_bytes and not self._failing:
                continue
            pause = min(2 * pause, max(LONGEST_PAUSE_S, self.every_s))
            with self._attempt():
                sync(self.folder, self.config, self._client(self._stop), unsure=self._unsure)
                pause, sent_bytes = self.every_s, size

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Suppresses every error of the tracker, which must not stop training. Logs the first error of a series."""
        address = public_uri(self.config)
        try:
            yield
        except Exception as error:
            self._unsure = True
            if not self._failing and not isinstance(error, ClientStopped):
                self._failing = True
                logger.info(
                    f"tracker   {address} does not accept everything ({reason_of(error)[:600]}); the journal keeps it, "
                    f"and {self.remedy} sends it"
                )
            return
        if self._failing:
            logger.info(f"tracker   {address} accepts everything again")
        self._failing = self._unsure = False


def register_run(folder: RunFolder, config: RunConfig) -> str | None:
    """Sends what the tracker lacks of a complete run, with its model, and records the outcome in COMPLETE.json.

    Returns the registered name/version; None when the tracker does not accept everything now.
    """
    from raycap.pipeline.runs.run_bundle import local_bundle

    summary = folder.summary
    if summary is None:
        return None
    registered = Tracker(folder, config).finish(summary["scores"], local_bundle(folder))
    if summary["tracked"] != (registered is not None):
        write_json(folder.path / "COMPLETE.json", summary | {"tracked": registered is not None})
        folder.push("COMPLETE.json")
    return registered
