"""What a soak test starts, measures and draws."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

MIB = 2**20


class Samples:
    """Rows of numbers over time, and the moments of faults. Units: seconds, MiB, counts."""

    def __init__(self, sources: Mapping[str, Callable[[], float]]) -> None:
        self.sources, self.begin = sources, time.monotonic()
        self.rows: list[dict[str, float]] = []
        self.events: list[tuple[float, str]] = []

    def take(self) -> None:
        """Adds a row. A number that cannot be read is NaN."""
        row = {"seconds": time.monotonic() - self.begin}
        for name, source in self.sources.items():
            try:
                row[name] = source()
            except Exception:
                row[name] = float("nan")
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.events.append((time.monotonic() - self.begin, text))
        print(f"{self.events[-1][0]:7.1f} s  {text}", flush=True)

    def growth(self, name: str, since: float | None = None) -> tuple[float, float]:
        """The growth of a number from the time `since` on (half of all), and its median there.

        The slope is the median of all slopes between two samples (Theil-Sen), which single peaks do not move.
        """
        import numpy as np
        from scipy.stats import theilslopes

        since = self.rows[-1]["seconds"] / 2 if since is None else since
        times, values = np.array(
            [(row["seconds"], row[name]) for row in self.rows if row["seconds"] >= since and row[name] == row[name]]
        ).T
        return float(theilslopes(values, times)[0] * (times[-1] - times[0])), float(np.median(values))

    def write(self, folder: Path) -> None:
        """Writes soak.csv, events.csv and soak.png."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "soak.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        with (folder / "events.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("seconds", "event"), *self.events])
        self._draw(folder / "soak.png")

    def _draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = list(self.sources)
        figure, axes = pyplot.subplots(len(names), 1, figsize=(11, 1.9 * len(names)), sharex=True, squeeze=False)
        minutes = [row["seconds"] / 60 for row in self.rows]
        for axis, name in zip(axes[:, 0], names, strict=True):
            axis.plot(minutes, [row[name] for row in self.rows], linewidth=1)
            axis.set_title(name, fontsize=9, loc="left")
            axis.set_ylim(bottom=0)
            for seconds, _ in self.events:
                axis.axvline(seconds / 60, color="red", alpha=0.2, linewidth=0.6)
        axes[-1, 0].set_xlabel("minutes; a red line is a fault or the end of a call")
        figure.tight_layout()
        figure.savefig(path, dpi=110)


def start(words: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[Any]:
    """A process in a session of its own; its output is added to the file `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", *words],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
