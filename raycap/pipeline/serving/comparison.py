"""The log of a challenger: what the champion and the challenger answered to the same request, as JSON lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

MAX_BYTES = 50 * 2**20  # of a file; with the previous one, the log takes at most twice as much


class ComparisonLog:
    """Appends lines to a file. A file above `max_bytes` is renamed to NAME.1, in place of the one there."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self._lock = threading.Lock()

    def append(self, entry: dict[str, Any]) -> None:
        """Adds a line. Raises OSError if the file cannot be written."""
        line = (json.dumps(entry, ensure_ascii=True) + "\n").encode()
        with self._lock:
            if self.path.exists() and self.path.stat().st_size + len(line) > self.max_bytes:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            with self.path.open("ab") as file:
                file.write(line)
