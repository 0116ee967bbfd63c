"""Checkpoints of a stage. Each is written atomically, and a stage resumes from the newest exactly where it stopped.

    stages/<stage>/step-<n>/   state.pt (captioner, optimizer), progress.json   the stage resumes from the newest one
                   best-<n>/   model.safetensors, backbone.safetensors          the next stage starts from these weights
                   DONE.json   the stage's result; it is written last and marks the stage as finished

Checkpoints hold no random state. Every random draw is seeded by (seed, stage, step, rank), so repeating a step gives
identical numbers.
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
from pipeline.storage.atomic import atomic_folder, read_json, write_json
from pipeline.storage.weights import save_weights

NUM_KEPT = 2  # checkpoints per stage


@dataclass
class Progress:
    """The position of a stage; `step` counts finished optimizer steps."""

    step: int = 0
    best_step: int = -1
    best_score: float = float("-inf")
    since_best: int = 0  # number of validations since the best score
    reductions: int = 0  # how often the plateau rule has lowered the learning rate
    ended_early: str = ""  # why the stage ends before its last step; empty otherwise


@dataclass(frozen=True)
class StageResult:
    """The result of a finished stage, as DONE.json stores it."""

    steps: int
    best_step: int
    best_score: float  # validation CIDEr-D
    kept: bool  # False when later stages start from the weights that preceded this stage
    ended_early: str  # why the stage ended before its last step; empty otherwise


class CheckpointWriter:
    """Writes checkpoints in the background: training waits for a copy of the tensors, not for the disk.

    One checkpoint is written at a time: `save` and `wait` block until the previous one is on disk, and raise the error
    that stopped its writing.

    identity: stored in each checkpoint, so that `load_checkpoint` can refuse those of another run.
    check_may_write: called right before a checkpoint becomes visible; raises when this worker must stop writing.
    on_written: called after a checkpoint has become visible.
    """

    def __init__(
        self, folder: Path, identity: str, check_may_write: Callable[[], None], on_written: Callable[[], None]
    ) -> None:
        self.folder, self.identity = folder, identity
        self.check_may_write, self.on_written = check_may_write, on_written
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, captioner: Captioner, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Starts writing step-<n>. Once it is complete, all but the newest `NUM_KEPT` checkpoints are removed."""
        self.wait()
        state = _copied_to_cpu({"captioner": captioner.state_dict(), "optimizer": optimizer.state_dict()})
        record = {"identity": self.identity, **asdict(progress)}
        self._pending = self._pool.submit(self._write, state, record)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; raises the error that stopped its writing."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def _write(self, state: dict[str, Any], record: dict[str, Any]) -> None:
        target = self.folder / f"step-{record['step']}"
        with atomic_folder(target) as temporary:
            torch.save(state, temporary / "state.pt")
            (temporary / "progress.json").write_text(json.dumps(record))
            self.check_may_write()
        for _, old in _numbered(self.folder, "step-")[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        # Older best weights were still needed until now, when the newest checkpoint on disk refers to the new ones.
        _remove_best_before(self.folder, record["best_step"])
        self.on_written()


def _copied_to_cpu(value: Any) -> Any:
    """The same structure with every tensor copied to the CPU, because training keeps changing the originals."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied_to_cpu(item) for item in value]
    return value


def load_checkpoint(
    folder: Path, captioner: Captioner, optimizer: torch.optim.Optimizer, identity: str
) -> Progress | None:
    """Restores the newest checkpoint and returns its progress, or None without one.

    Raises ValueError for a checkpoint of another run.
    """
    checkpoints = _numbered(folder, "step-")
    if not checkpoints:
        return None
    _, newest = checkpoints[-1]
    record = read_json(newest / "progress.json")
    if record.pop("identity") != identity:
        raise ValueError(f"checkpoint {newest} belongs to another run; remove the folder or give the run another name")
    state = torch.load(newest / "state.pt", map_location="cpu", weights_only=True)
    captioner.load_state_dict(state["captioner"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**record)


def save_best(folder: Path, captioner: Captioner, step: int) -> None:
    """Writes the best weights so far. `CheckpointWriter` removes older ones once a checkpoint refers to these."""
    with atomic_folder(folder / f"best-{step}") as temporary:
        save_weights(captioner.model, temporary / "model.safetensors")
        if captioner.backbone is not None:
            save_weights(captioner.backbone, temporary / "backbone.safetensors")


def _remove_best_before(folder: Path, step: int) -> None:
    """Removes the best weights of steps before `step`. Later ones stay, for a checkpoint that is yet to be written."""
    for number, old in _numbered(folder, "best-"):
        if number < step:
            shutil.rmtree(old, ignore_errors=True)


def finish_stage(folder: Path, result: StageResult) -> None:
    """Marks a stage as finished and removes its checkpoints, which are not needed any more."""
    _remove_best_before(folder, result.best_step)
    write_json(folder / "DONE.json", asdict(result))
    for old in (*folder.glob("step-*"), *folder.glob(".*.tmp")):
        shutil.rmtree(old, ignore_errors=True)


def stage_result(folder: Path) -> StageResult | None:
    """The result that `finish_stage` wrote; None while the stage is not finished."""
    path = folder / "DONE.json"
    return StageResult(**read_json(path)) if path.is_file() else None


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """The folders named prefix and number, sorted by their number."""
    return sorted((int(path.name.removeprefix(prefix)), path) for path in folder.glob(f"{prefix}*"))
