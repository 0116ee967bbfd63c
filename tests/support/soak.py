"""What a soak test starts, measures and draws.

python -m tests.support.soak serve BUNDLE IMAGES ENDPOINT COUNT    captions images for ever, counting in the file COUNT
python -m tests.support.soak tune WORDS...                         `raycap tune` whose lease expires after seconds
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT

LEASE_S = 6.0
MIB = 2**20


def folder_bytes(folder: Path) -> int:
    """The bytes of all files below a folder, of which some may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{parent}/{name}").st_blocks * 512
    return total


def marked_processes(mark: str) -> list[psutil.Process]:
    """The processes with this text in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


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


class SmallDisk:
    """A folder that can be filled up: a file system in memory of its own, where this process may mount one."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0

    def fill(self) -> None:
        """Takes all free space."""
        with suppress(OSError), (self.folder / ".ballast").open("wb") as file:
            while True:
                file.write(bytes(MIB))
                file.flush()

    def free(self) -> None:
        (self.folder / ".ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
            self.is_mounted = False


def serve(bundle: str, images: str, endpoint: str, count: str) -> None:
    """Captions images of a folder on S3 for ever. In between it is sent damaged images and wrong columns."""
    from raycap.pipeline.evaluation.captioning.bundle import load_bundle
    from raycap.pipeline.evaluation.captioning.service import CaptionService
    from raycap.pipeline.storage.path import StoragePath
    from raycap.pipeline.storage.s3 import StorageOptions
    from raycap.pipeline.tracking.pyfunc import PyfuncModel

    model = PyfuncModel(CaptionService(load_bundle(Path(bundle)), beam_size=2, max_length=8))
    place = StoragePath(images, StorageOptions(endpoint, retry_minutes=0.05))
    files, number = [b""], 0
    while True:
        with suppress(OSError):
            names = sorted(place.list())
            files = [(place / names[number % len(names)]).read_bytes()]
        for table in ({"image": files}, {"image": [files[0][:60]]}, {"uri": ["/nowhere"]}, {"other": [1]}):
            with suppress(ValueError):
                model.predict(table)
        number += 1
        Path(count).write_text(str(number))
        time.sleep(0.1)


def tune(words: Sequence[str]) -> int:
    """`raycap tune` with a short lease, so that a killed search can continue soon."""
    import raycap.jobs.tune.command
    from raycap.jobs.cli import main

    raycap.jobs.tune.command.LEASE_S = LEASE_S
    return main(["tune", *words])


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


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    sys.exit(tune(sys.argv[2:]))
