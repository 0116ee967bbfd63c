"""The files of a stage: rank 0 writes them, and every rank resumes from the newest checkpoint.

    stages/<stage>/step-<n>/   a checkpoint: state.pt (captioner, optimizer, average), progress.json
                   best-<n>/   model.safetensors, backbone.safetensors          the next stage starts from these weights
                   DONE.json   the stage's result, written last, because it marks the stage as finished

Each checkpoint is written atomically. The checkpoint before it remains, with the best weights at its time. Checkpoints
need no random state, because every random draw is seeded by (seed, stage, step, rank). So a repeated step gives
identical numbers.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from raycap.models.captioner import Captioner
from raycap.models.config import Values
from raycap.pipeline.data.caption_files import write_predictions
from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.folder import JOURNAL, RunFolder, StageResult
from raycap.pipeline.runs.journal import JOURNAL_EVERY_S, Journal
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.storage.atomic import atomic_folder, read_json, write_json
from raycap.pipeline.storage.digests import write_digests
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import save_weights
from raycap.pipeline.training.optimizer import WeightAverage

NUM_CHECKPOINTS = 2  # per stage
CLOSE_S = 20.0  # how long the end of a stage waits for background threads


class AbandonedError(RuntimeError):
    """Another driver has taken over the run: this worker's driver died or lost its storage."""


def require_driver(folder: RunFolder, driver_token: str) -> None:
    """Raises AbandonedError if the run's current driver has another token. The token "" is not checked."""
    if driver_token and folder.token("driver_token") != driver_token:
        raise AbandonedError(f"another driver has taken over {folder.run_id}; this worker stops")


@dataclass
class Progress:
    """The position of a stage in its training. step: the number of finished optimizer steps."""

    step: int = 0
    best_step: int = -1
    best_score: float = float("-inf")
    since_best: int = 0  # number of validations since the best score
    reductions: int = 0  # how often the plateau rule has lowered the learning rate
    ended_early: str = ""  # why the stage ends before its last step, or ""


class StageOutput:
    """Reads the checkpoints of a stage. Rank 0, for which `writes` is true, also writes the stage's files.

    Each write first checks that no other driver or group of workers has taken over the run. The check compares the
    run's tokens with those that these workers started with. An empty token is not checked.

    If the run is on S3, training steps make no requests. A background thread checks the tokens and uploads the journal,
    at most every JOURNAL_EVERY_S seconds. If a check fails, the next call raises its error.
    """

    def __init__(
        self, folder: RunFolder, stage: str, writes: bool, driver_token: str = "", worker_group_token: str = ""
    ) -> None:
        self.folder, self.stage, self.writes = folder, stage, writes
        self.driver_token, self.worker_group_token = driver_token, worker_group_token
        self.path, self.identity = folder.stage(stage), f"{folder.run_id}/{stage}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._journal_pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._journal_pending: Future[None] | None = None
        self._journal_uploaded_at = -math.inf
        self._best_steps = deque[int](maxlen=NUM_CHECKPOINTS)  # of the newest checkpoints that this object has written

    def check_may_write(self) -> None:
        """Raises AbandonedError if another driver has taken over the run.

        Raises RuntimeError if the driver could not reach this worker and has started other workers instead.
        """
        require_driver(self.folder, self.driver_token)
        if self.worker_group_token and self.folder.token("worker_group_token") != self.worker_group_token:
            raise RuntimeError(f"other workers train {self.folder.run_id} now; this one stops")

    def newest_step(self) -> int:
        """The step of the newest checkpoint, or 0."""
        return max((step for step, _ in self._numbered("step-")), default=0)

    def restore(
        self, step: int, captioner: Captioner, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
    ) -> Progress:
        """Restores the checkpoint of a step, and returns the progress. At step 0, there is nothing to restore.

        Raises ValueError if the checkpoint belongs to another run, and DamagedError if it cannot be read.
        """
        if step == 0:
            return Progress()
        checkpoint = self.path / f"step-{step}"
        try:
            record = read_json(checkpoint / "progress.json")
            state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
        except (DamagedError, FileNotFoundError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            original = self.folder.root / f"stages/{self.stage}/{checkpoint.name}"
            remedy = f"remove {original}, and the same command resumes from the checkpoint before it"
            raise DamagedError(f"{checkpoint} cannot be read: {one_line(error)}; {remedy}") from error
        if record.pop("identity") != self.identity:
            raise ValueError(
                f"checkpoint {checkpoint} belongs to another run; remove the folder or give the run another name"
            )
        captioner.load_state_dict(state["captioner"])
        optimizer.load_state_dict(state["optimizer"])
        if average is not None:
            average.restore(state["average"])
        return TypeAdapter(Progress).validate_python(record)

    def open_journal(self, step: int) -> None:
        """Opens the journal. The stage's entries after `step` do not count, because these steps are trained again.

        The best weights of steps after `step` are removed, because no checkpoint refers to them.
        """
        if self.writes:
            self.check_may_write()
            for number, later in self._numbered("best-"):
                if number > step:
                    shutil.rmtree(later, ignore_errors=True)
            self._journal = Journal(self.folder.journal, self.stage, step)

    def log(self, kind: str, step: int, values: Values) -> None:
        """Appends an entry to the journal. On other ranks than 0, does nothing."""
        if not self.writes:
            return
        if self.folder.home is None:
            self.check_may_write()  # cheap here, because it reads two local files
        self._raise_journal_error()
        self._journal.write(kind, step, values)
        if self.folder.home is not None and self._journal_pending is None:
            self._journal_pending = self._journal_pool.submit(self._send_journal, JOURNAL_EVERY_S)

    def save_checkpoint(
        self,
        captioner: Captioner,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        average: WeightAverage | None = None,
    ) -> None:
        """Writes a checkpoint in the background. Training waits until the tensors are copied, but not for the disk.

        Only one checkpoint is written at a time. After each, all but the newest NUM_CHECKPOINTS are removed.
        """
        if self.writes:
            self._raise_journal_error()
            self.wait()
            tensors = {"captioner": captioner.state_dict(), "optimizer": optimizer.state_dict()}
            if average is not None:
                tensors["average"] = average.weights
            state = _copied_to_cpu(tensors)
            record = {"identity": self.identity, **asdict(progress)}
            self._pending = self._pool.submit(self._write_checkpoint, state, record)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk, and raises the error that stopped its writing."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def save_best(self, captioner: Captioner, step: int, captions: Mapping[ImageId, str]) -> None:
        """Writes the best weights so far, and their captions of the validation split in COCO's format."""
        if not self.writes:
            return
        self.check_may_write()
        self.wait()  # because a pending checkpoint still removes older best weights
        with atomic_folder(self.path / f"best-{step}") as temporary:
            save_weights(captioner.model, temporary / "model.safetensors")
            if captioner.backbone is not None:
                save_weights(captioner.backbone, temporary / "backbone.safetensors")
            write_digests(temporary)
        write_predictions(self.path / "predictions-val.json", captions)

    def finish(self, result: StageResult, text: str) -> None:
        """Marks the stage as finished, and removes its checkpoints. text: for the journal."""
        if not self.writes:
            return
        self.check_may_write()
        self._remove_best_before(result.best_step)
        write_json(self.path / "DONE.json", asdict(result))
        for left in (*(path for _, path in self._numbered("step-")), *self.path.glob(".*.tmp")):
            shutil.rmtree(left, ignore_errors=True)
        self._upload()
        self.log("done", result.steps, {"text": text})
        self._upload_journal()

    def close(self) -> None:
        """Waits for the background threads, and pushes the journal. The local copy of the run can then be removed.

        If another worker may write now, or the storage fails, no error is raised, and the copy remains. Even if the
        storage is down, `close` takes only seconds, because a stage that failed reports its error afterwards.
        """
        pending = [each for each in (self._pending, self._journal_pending) if each is not None]
        if wait(pending, CLOSE_S).not_done:
            return
        self._pool.shutdown()  # first, because its thread uses the other pool
        self._journal_pool.shutdown()
        if self.writes and self.folder.home is not None:
            home = StoragePath(self.folder.home.uri, self.folder.home.options.hasty)
            self.folder = replace(self.folder, home=home)
            with suppress(OSError, RuntimeError):
                self.check_may_write()
                self.folder.push(JOURNAL, check_may_write=self.check_may_write)

    def _write_checkpoint(self, state: Values, record: Values) -> None:
        """Writes and uploads a checkpoint. Removes older checkpoints, and best weights that only they refer to."""
        with atomic_folder(self.path / f"step-{record['step']}") as temporary:
            _save_state(state, temporary / "state.pt")
            (temporary / "progress.json").write_text(json.dumps(record))
            self.check_may_write()  # last, because the checkpoint becomes visible at the end of this block
        for _, old in self._numbered("step-")[:-NUM_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
        self._best_steps.append(record["best_step"])
        if len(self._best_steps) == NUM_CHECKPOINTS:  # otherwise an earlier process's checkpoint may need them
            self._remove_best_before(min(self._best_steps))
        self._upload()

    def _remove_best_before(self, step: int) -> None:
        """Removes the best weights of steps before `step`, which no remaining checkpoint needs."""
        for number, old in self._numbered("best-"):
            if number < step:
                shutil.rmtree(old, ignore_errors=True)

    def _numbered(self, prefix: str) -> list[tuple[int, Path]]:
        """The stage's folders whose names are the prefix and a number, as (number, folder) in ascending order."""
        found = []
        for path in self.path.glob(f"{prefix}[0-9]*"):
            number = path.name.removeprefix(prefix)
            if re.fullmatch(r"0|[1-9][0-9]*", number) and path.is_dir():
                found.append((int(number), path))
        return sorted(found)

    def _raise_journal_error(self) -> None:
        """Raises the error of the last background upload. Uploads are repeated, so the storage's errors are ignored."""
        if self._journal_pending is not None and self._journal_pending.done():
            pending, self._journal_pending = self._journal_pending, None
            with suppress(OSError):
                pending.result()

    def _send_journal(self, every_s: float = 0.0) -> None:
        """Checks the tokens, and uploads the journal if the last upload was at least `every_s` seconds ago.

        Only the journal's thread calls this, so that uploads keep their order.
        """
        self.check_may_write()
        if self.folder.home is not None and time.monotonic() - self._journal_uploaded_at >= every_s:
            # Not by `RunFolder.push`, because that would wait for the upload of a checkpoint.
            self._journal.upload(self.folder.home / JOURNAL)
            self._journal_uploaded_at = time.monotonic()

    def _upload_journal(self) -> None:
        """Uploads the journal of a run on S3, and waits until the upload is done."""
        if self.folder.home is not None:
            self._journal_pool.submit(self._send_journal).result()

    def _upload(self) -> None:
        """Uploads the journal and the stage's folder."""
        self._upload_journal()
        self.folder.push(f"stages/{self.stage}", check_may_write=self.check_may_write)


def _save_state(state: Values, path: Path) -> None:
    """Writes a file for `torch.load`. Raises OSError, for example when the disk is full."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch raises its own error for one of the file, such as a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _copied_to_cpu(value: object) -> Any:
    """The same structure with copies of all tensors on the CPU, because training continues to change the originals."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied_to_cpu(item) for key, item in value.items()}
    return [_copied_to_cpu(item) for item in value] if isinstance(value, list) else value
