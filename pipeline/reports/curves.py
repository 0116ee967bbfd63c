"""The training curves of a run as pictures for the tracker: one PNG per metric over all stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# {(kind of journal entry, key): title of the picture}
CURVES = {
    ("train", "loss"): "loss",
    ("train", "reward"): "reward (CIDEr-D)",
    ("train", "lr"): "learning rate",
    ("train", "images_per_s"): "images/s",
    ("validation", "CIDEr-D"): "validation CIDEr-D",
}


def write_curves(entries: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes a picture of each metric in a run's journal to `folder`, and returns the pictures' paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first_steps = _first_steps(entries)
    written = []
    for (kind, key), title in CURVES.items():
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for stage, first_step in first_steps.items():
            points = [
                (first_step + entry["step"], entry[key])
                for entry in entries
                if entry["stage"] == stage and entry["kind"] == kind and key in entry
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=stage)
        if not axes.lines:
            continue
        axes.set(xlabel="step, all stages", title=title)
        axes.grid(color="#dddddd")
        axes.legend()
        written.append(folder / f"{kind}_{key}.png")
        figure.savefig(written[-1], dpi=110)
    return written


def _first_steps(entries: list[dict[str, Any]]) -> dict[str, int]:
    """The number of steps before each stage: the sum of the lengths of all earlier stages."""
    lengths: dict[str, int] = {}
    for entry in entries:
        lengths[entry["stage"]] = max(lengths.get(entry["stage"], 0), entry["step"])
    first_steps, total = {}, 0
    for stage, length in lengths.items():
        first_steps[stage] = total
        total += length
    return first_steps
