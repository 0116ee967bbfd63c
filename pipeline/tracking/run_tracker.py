"""The tracker of a run while it goes on: sends its journal in the background, ends it FINISHED, FAILED or KILLED.

A tracker that is down or slow costs training nothing and the run's end a bounded time (`PatientClient`); what it has
not taken is sent by `raycap sync` or the same run called again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.runs.folder import RunFolder
from pipeline.storage.atomic import read_json, write_json
from pipeline.tracking.mlflow_client import (
    PatientClient,
    Stopped,
    log_results,
    note_ending,
    public_uri,
    register_model,
    sync,
    tracking_client,
    without_secrets,
)

logger = logging.getLogger(__name__)


JOIN_S = 30  # how long the end of a run waits for a call under way; a request of HTTP ends earlier (tracking.CALL_S)
LONGEST_PAUSE_S = 60.0  # between attempts at a tracker that does not answer


class Tracker:
    """Sends a run's journal in the background once started; the end of a run goes through `close` or `finish`."""

    def __init__(self, folder: RunFolder, config: RunConfig, every_s: float = 5.0) -> None:
        self.folder, self.config, self.every_s = folder, config, every_s
        self._stop = threading.Event()
        self._failing = False
        self._unsure = True  # what a former process sent and could not note
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.config.tracking.enabled:
            with contextlib.suppress(OSError):  # a storage that fails says so where it matters
                note_ending(self.folder, self.config, None)
            self._thread = threading.Thread(target=self._follow, name="tracker", daemon=True)
            self._thread.start()

    def close(self, status: str | None) -> bool:
        """Sends what is left and ends the runs with `status` (FAILED, KILLED; None: not); False when it has to wait."""
        if not self.config.tracking.enabled:
            return True

        def everything() -> None:
            note_ending(self.folder, self.config, status)
            self._join()
            sync(self.folder, self.config, status=status, unsure=self._unsure)

        return self._try(everything)

    def finish(self, scores: dict[str, float], bundle: Path) -> str | None:
        """Sends all there is, with scores, report and model; returns the registered name/version.

        None when tracking is off or the tracker does not take it: nothing is lost, and it may be called again.
        """
        registered: list[str] = []

        def everything() -> None:
            self._join()
            client = PatientClient(tracking_client(self.config))
            sync(self.folder, self.config, unsure=self._unsure, client=client)
            log_results(self.folder, self.config, scores, client=client)
            registered.append(register_model(self.folder, self.config, bundle, scores))
            sync(self.folder, self.config, status="FINISHED", client=client)

        done = self.config.tracking.enabled and self._try(everything)
        return registered[0] if done else None

    @property
    def remedy(self) -> str:
        """The command that sends what the tracker lacks."""
        return f"`raycap sync {'CONFIG' if self.folder.home else self.folder.path}`"

    def _join(self) -> None:
        """Ends the background; TimeoutError when it hangs in a call that has no deadline, as a database's have none."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                raise TimeoutError(f"no answer for {JOIN_S} s")

    def _follow(self) -> None:
        pause, sent = self.every_s, 0
        while not self._stop.wait(pause):
            changed = _changed(self.folder.journal)
            if changed == sent and not self._failing:
                continue
            if self._try(self._send):
                pause, sent = self.every_s, changed
            else:
                pause = min(2 * pause, max(LONGEST_PAUSE_S, self.every_s))

    def _send(self) -> None:
        client = PatientClient(tracking_client(self.config), self._stop)
        sync(self.folder, self.config, unsure=self._unsure, client=client)

    def _try(self, action: Callable[[], None]) -> bool:
        where = public_uri(self.config)
        try:
            action()
        except Stopped:
            self._unsure = True
            return False
        except Exception as error:  # whatever the tracker does, training goes on
            self._unsure = True
            if not self._failing:
                reason = without_secrets(str(error)).splitlines()[0] if str(error) else type(error).__name__
                logger.info(
                    f"tracker   {where} does not take everything ({reason[:600]}); the journal keeps it, and "
                    f"{self.remedy} sends it"
                )
                self._failing = True
            return False
        if self._failing:
            logger.info(f"tracker   {where} takes everything again")
        self._failing = self._unsure = False
        return True


def register_run(folder: RunFolder, config: RunConfig) -> str | None:
    """Sends what the tracker lacks of a complete run, its model with it, and notes in COMPLETE.json whether it has all.

    Returns the registered name/version, None when the tracker does not take it now.
    """
    from pipeline.runs.run_bundle import local_bundle

    done = folder.path / "COMPLETE.json"
    summary = read_json(done)
    registered = Tracker(folder, config).finish(summary["scores"], local_bundle(folder))
    if summary["tracked"] != (registered is not None):
        write_json(done, summary | {"tracked": registered is not None})
        folder.push(done.name)
    return registered


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
