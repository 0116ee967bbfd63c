"""Checkpoints of a stage: written atomically, the newest kept, resumed exactly.

    stages/<stage>/step-<n>/   state.pt (captioner, optimizer), progress.json   the stage resumes from it
                   best-<n>/   model.safetensors, backbone.safetensors          the next stage starts from it
                   DONE.json   the stage's result; written last, when the stage is finished

No random state is stored: every random draw is seeded by (seed, stage, step, rank), so a repeated step is identical.
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

KEEP = 2


@dataclass
class Progress:
    """The position of a stage; `step` counts finished optimizer steps."""

    step: int = 0
    best_step: int = -1
    best_score: float = float("-inf")
    since_best: int = 0  # validations since the best
    reductions: int = 0  # how often the plateau rule has lowered the learning rate
    ended_early: str = ""  # the reason, when the stage ends before its last step


@dataclass(frozen=True)
class StageResult:
    """The result of a finished stage: DONE.json."""

    steps: int
    best_step: int
    best_score: float  # validation CIDEr-D
    kept: bool  # False: later stages start from the weights before this stage
    ended_early: str  # "" or the reason


class CheckpointWriter:
    """Writes checkpoints in the background: training waits for a copy of the tensors, not for the disk.

    One checkpoint is written at a time: `save` and `wait` block until the one before is on disk, and raise the error
    that the writing thread met. `allowed` is called right before a checkpoint becomes visible and raises where this
    worker may not write any more; `written` is called after it.
    """

    def __init__(self, folder: Path, identity: str, allowed: Callable[[], None], written: Callable[[], None]) -> None:
        self.folder, self.identity, self.allowed, self.written = folder, identity, allowed, written
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def save(self, captioner: Captioner, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Adds step-<n>; once it is complete, removes all but the newest `KEEP`."""
        self.wait()
        state = _copied({"captioner": captioner.state_dict(), "optimizer": optimizer.state_dict()})
        record = {"identity": self.identity, **asdict(progress)}
        self._last = self._pool.submit(self._write, state, record)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; raises the error of its writing."""
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
        _keep_best(self.folder, record["best_step"])  # only now does a checkpoint on disk refer to it
        self.written()


def _copied(value: Any) -> Any:
    """The same structure with every tensor copied to the CPU, because training keeps changing the originals."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def load_checkpoint(
    folder: Path, captioner: Captioner, optimizer: torch.optim.Optimizer, identity: str
) -> Progress | None:
    """Restores the newest checkpoint; None when there is none. Raises ValueError for another run's checkpoint."""
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
    """Writes the best weights so far; `CheckpointWriter` removes older ones once a checkpoint refers to these."""
    with atomic_folder(folder / f"best-{step}") as temporary:
        save_weights(captioner.model, temporary / "model.safetensors")
        if captioner.backbone is not None:
            save_weights(captioner.backbone, temporary / "backbone.safetensors")


def _keep_best(folder: Path, step: int) -> None:
    """Removes best weights of steps before `step`; later ones belong to a checkpoint that is not written yet."""
    for number, old in _numbered(folder, "best-"):
        if number < step:
            shutil.rmtree(old, ignore_errors=True)


def finish_stage(folder: Path, result: StageResult) -> None:
    """Marks a stage as finished and removes its checkpoints, which are not needed any more."""
    _keep_best(folder, result.best_step)
    write_json(folder / "DONE.json", asdict(result))
    for old in (*folder.glob("step-*"), *folder.glob(".*.tmp")):
        shutil.rmtree(old, ignore_errors=True)


def stage_result(folder: Path) -> StageResult | None:
    """The result that `finish_stage` wrote; None while the stage is not finished."""
    path = folder / "DONE.json"
    return StageResult(**read_json(path)) if path.is_file() else None


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    return sorted((int(path.name.removeprefix(prefix)), path) for path in folder.glob(f"{prefix}*"))
