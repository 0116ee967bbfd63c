"""The training curves of a run as pictures for the tracker: one PNG per metric over all stages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

# {(kind of journal entry, key): title of the picture}
CURVES = {
    ("train", "loss"): "loss",
    ("train", "reward"): "reward",
    ("train", "lr"): "learning rate",
    ("train", "images_per_s"): "images/s",
    ("validation", "CIDEr-D"): "validation CIDEr-D",
}


def write_curves(entries: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes a picture of each metric in a run's journal to `folder`, and returns the pictures' paths."""
    from matplotlib.figure import Figure

    lengths: dict[str, int] = {}  # steps of each stage
    for entry in entries:
        lengths[entry["stage"]] = max(lengths.get(entry["stage"], 0), entry["step"])
    first_steps = itertools.accumulate(lengths.values(), initial=0)
    offsets = dict(zip(lengths, first_steps, strict=False))  # the last sum belongs to no stage
    written = []
    for (kind, key), title in CURVES.items():
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        of_kind = [entry for entry in entries if entry["kind"] == kind and key in entry]
        for stage, offset in offsets.items():
            points = [(offset + entry["step"], entry[key]) for entry in of_kind if entry["stage"] == stage]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=stage)
        if axes.lines:
            axes.set(xlabel="step, all stages", title=title)
            axes.grid(color="#dddddd")
            axes.legend()
            written.append(folder / f"{kind}_{key}.png")
            figure.savefig(written[-1], dpi=110)
    return written
