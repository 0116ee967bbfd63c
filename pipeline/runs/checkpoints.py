"""Checkpoints of a stage: written whole or not at all, the newest kept, resumed exactly.

    stages/<stage>/step-<n>/   state.pt (captioner, optimizer), progress.json   to go on from
                   best-<n>/   model.safetensors, backbone.safetensors          what the next stage starts from
                   DONE.json   the stage's result; its presence says that the stage is over

No random state is stored: every draw is seeded by (seed, stage, step, rank), so that a step repeats itself exactly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.captioner import Captioner
from pipeline.runtime.weights import save_weights
from pipeline.storage.atomic import atomic_folder, read_json, write_json

KEEP = 2


@dataclass
class Progress:
    """Where a stage stands. `step` counts finished optimizer steps."""

    step: int = 0
    best_step: int = -1
    best_score: float = float("-inf")
    since_best: int = 0  # validations since the best
    reductions: int = 0  # how often the plateau rule has lowered the rate
    ended_early: str = ""  # why the stage stops before its last step, once it does


class CheckpointWriter:
    """Writes checkpoints in the background: training waits for a copy of the tensors, not for the disk.

    At most one is being written; the next waits for it, and `close` for the last. An error of the writing thread
    surfaces at the next call. `allowed` is asked right before a checkpoint becomes visible (the fence), `written` is
    called after (what is remote sends it home).
    """

    def __init__(self, folder: Path, identity: str, allowed: Callable[[], None], written: Callable[[], None]) -> None:
        self.folder, self.identity, self.allowed, self.written = folder, identity, allowed, written
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def save(self, captioner: Captioner, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Adds step-<n>, then removes all but the newest `KEEP`; the old go only when the new one is whole."""
        self.wait()
        state = _copied({"captioner": captioner.state_dict(), "optimizer": optimizer.state_dict()})
        record = {"identity": self.identity, **asdict(progress)}
        self._last = self._pool.submit(self._write, state, record)

    def wait(self) -> None:
        """Until what was handed over is on disk; raises what went wrong there."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def _write(self, state: dict[str, Any], record: dict[str, Any]) -> None:
        target = self.folder / f"step-{record['step']}"
        with atomic_folder(target) as temporary:
            torch.save(state, temporary / "state.pt")
            (temporary / "progress.json").write_text(json.dumps(record))
            self.allowed()
        for _, old in _numbered(self.folder, "step-")[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        _keep_best(self.folder, record["best_step"])  # only now does a checkpoint on disk name it
        self.written()


def _copied(value: Any) -> Any:
    """The same structure with every tensor copied to the CPU: training goes on changing the originals."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def load_checkpoint(
    folder: Path, captioner: Captioner, optimizer: torch.optim.Optimizer, identity: str
) -> Progress | None:
    """Restores the newest checkpoint of this run; None when there is none. Another run's is refused (ValueError)."""
    found = _numbered(folder, "step-")
    if not found:
        return None
    _, newest = found[-1]
    record = read_json(newest / "progress.json")
    if record.pop("identity") != identity:
        raise ValueError(f"checkpoint {newest} belongs to another run; remove the folder or give the run another name")
    state = torch.load(newest / "state.pt", map_location="cpu", weights_only=True)
    captioner.load_state_dict(state["captioner"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**record)


def save_best(folder: Path, captioner: Captioner, step: int) -> None:
    """The weights of the best validation so far; the ones before go when a checkpoint that names these is on disk."""
    with atomic_folder(folder / f"best-{step}") as temporary:
        save_weights(captioner.model, temporary / "model.safetensors")
        if captioner.backbone is not None:
            save_weights(captioner.backbone, temporary / "backbone.safetensors")


def _keep_best(folder: Path, step: int) -> None:
    """Removes the bests before that of `step`; a later one belongs to a checkpoint that is not written yet."""
    for number, old in _numbered(folder, "best-"):
        if number < step:
            shutil.rmtree(old, ignore_errors=True)


def finish_stage(folder: Path, result: dict[str, Any]) -> None:
    """Marks a stage as over and removes the checkpoints that only served to go on."""
    _keep_best(folder, result["best_step"])
    write_json(folder / "DONE.json", result)
    for old in (*folder.glob("step-*"), *folder.glob(".*.tmp")):
        shutil.rmtree(old, ignore_errors=True)


def stage_result(folder: Path) -> dict[str, Any] | None:
    """What `finish_stage` wrote, or None while the stage is not over."""
    path = folder / "DONE.json"
    return read_json(path) if path.is_file() else None


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    found = [(int(path.name.removeprefix(prefix)), path) for path in folder.glob(f"{prefix}*")]
    return sorted(found)
