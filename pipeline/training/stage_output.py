"""The files that rank 0 writes for a stage, and a check that this worker has not been replaced."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from models.captioner import Captioner
from pipeline.runs.checkpoints import CheckpointWriter, Progress, StageResult, finish_stage, save_best
from pipeline.runs.folder import JOURNAL, RunFolder
from pipeline.runs.journal import JOURNAL_EVERY_S, Journal
from pipeline.storage.atomic import write_json


class AbandonedError(RuntimeError):
    """Another driver has taken over the run: this worker's driver died or lost its storage."""


class ReplacedError(RuntimeError):
    """The driver has started other workers in place of these, because it could not reach them any more."""


@dataclass(frozen=True)
class Fence:
    """Stops workers that their driver has given up or replaced.

    The tokens are those that the run had when these workers started. An empty token is not checked.
    """

    folder: RunFolder
    driver_token: str = ""
    worker_group_token: str = ""

    def check(self) -> None:
        """Raises AbandonedError when another driver has taken over, ReplacedError when other workers have."""
        run_id = self.folder.run_id
        if self.driver_token and self.folder.driver_token != self.driver_token:
            raise AbandonedError(f"another driver has taken over {run_id}; this worker stops")
        if self.worker_group_token and self.folder.worker_group_token != self.worker_group_token:
            raise ReplacedError(f"other workers train {run_id} now; this one stops")


class StageOutput:
    """Writes the files of a stage on rank 0. On other ranks (`writes` is False) every method does nothing.

    The fence is checked before each write. For a run on S3 each write is uploaded, the journal at most every
    JOURNAL_EVERY_S seconds.
    """

    def __init__(self, folder: RunFolder, stage: str, fence: Fence, writes: bool) -> None:
        self.folder, self.stage, self.fence, self.writes = folder, stage, fence, writes
        self.path, self.identity = folder.stage(stage), f"{folder.run_id}/{stage}"
        self._checkpoints = CheckpointWriter(self.path, self.identity, fence.check, self._upload)
        self._journal_uploaded_at = -math.inf

    def open_journal(self, step: int) -> None:
        """Opens the journal for a stage that starts or resumes at `step`."""
        if self.writes:
            self.fence.check()
            self._journal = Journal(self.folder.journal, self.stage, step)

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends an entry to the journal."""
        if not self.writes:
            return
        self.fence.check()
        self._journal.write(kind, step, values)
        if time.monotonic() - self._journal_uploaded_at > JOURNAL_EVERY_S:
            with suppress(OSError):  # a later upload replaces one that failed
                self._upload_journal()

    def save_checkpoint(self, captioner: Captioner, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Starts writing a checkpoint in the background."""
        if self.writes:
            self._checkpoints.save(captioner, optimizer, progress)

    def save_best(self, captioner: Captioner, step: int, captions: Mapping[int, str]) -> None:
        """Writes the best weights so far and their captions of the validation split, the latter in COCO's format."""
        if not self.writes:
            return
        self.fence.check()
        self._checkpoints.wait()  # a pending checkpoint removes older best weights when it is done
        save_best(self.path, captioner, step)
        results = [{"image_id": image, "caption": caption} for image, caption in captions.items()]
        write_json(self.path / "predictions-val.json", results)

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self._checkpoints.close()

    def finish(self, result: StageResult, text: str) -> None:
        """Marks the stage as finished. `text` is written to the journal."""
        if self.writes:
            self.fence.check()
            finish_stage(self.path, result)
            self._upload()
            self.log("done", result.steps, {"text": text})
            self._upload_journal()

    def _upload_journal(self) -> None:
        """Uploads the journal directly. Through `RunFolder.push` it would wait for the upload of a checkpoint."""
        if self.folder.home is not None:
            (self.folder.home / JOURNAL).write_bytes(self.folder.journal.read_bytes())
        self._journal_uploaded_at = time.monotonic()

    def _upload(self) -> None:
        """Uploads the journal and the stage's folder."""
        self._upload_journal()
        self.folder.push(f"stages/{self.stage}", check_may_write=self.fence.check)
