"""Follows a champion: loads each new one beside the current one, which serves until the new one is ready."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.serving.address import ModelAddress
from raycap.pipeline.serving.host import ModelHost
from raycap.pipeline.serving.loading import LoadedModel

logger = logging.getLogger(__name__)


class ChampionWatcher:
    """Looks for another champion every `interval_s` seconds, in a thread of its own.

    load: loads a bundle. A champion that cannot be read or loaded changes nothing: the current one stays, the reason is
    logged once, and the next look tries again. A rollback is a new champion, too.
    """

    def __init__(
        self,
        address: ModelAddress,
        host: ModelHost,
        current: StoredBundle,
        load: Callable[[StoredBundle], LoadedModel],
        interval_s: float,
    ) -> None:
        self.address, self.host, self.current, self.load, self.interval_s = address, host, current, load, interval_s
        self._ended = threading.Event()
        self._logged = ""
        self._thread = threading.Thread(target=self._follow, name="champion", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether the last look failed, so that the current model may be older than the champion."""
        return bool(self._logged)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the look that it may be taking."""
        self._ended.set()

    def look(self) -> bool:
        """Loads the champion if it is another one. Returns whether it took over."""
        try:
            found = self.address.resolve()
            if found == self.current:
                self._logged = ""
                return False
            self.host.replace(self.load(found))
        except Exception as error:  # of the storage, the bundle, or memory: the current model can still serve
            text = without_secrets(one_line(error))
            if text != self._logged:
                logger.warning(f"{self.address.text}: the current champion stays, because the new one failed: {text}")
            self._logged = text
            return False
        self.current, self._logged = found, ""
        logger.info(f"{self.address.text} is now {found.location} ({self.host.current.digest})")
        return True

    def _follow(self) -> None:
        while not self._ended.wait(self.interval_s):
            self.look()
