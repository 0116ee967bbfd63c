"""Trains stages with Ray Train, which starts data-parallel workers. Each worker runs `pipeline.training.loop`."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.runtime.context import RayContext
from raycap.pipeline.runtime.processor import computes_on_cpus
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.runtime.stopping import SAVE_LIMIT_S, call_in_thread, saving_first
from raycap.pipeline.storage.atomic import is_disk_full
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.training.loop import StageJob, train_stages
from raycap.pipeline.training.stage_output import AbandonedError
from raycap.pipeline.training.step_metrics import DivergedError

logger = logging.getLogger(__name__)

HOUR_S = 3600.0
SCRATCH = ".ray"  # a folder in a run's log folder, for files of Ray Train that raycap does not use
STOP = "stop"  # a file in a run's log folder, with the token of the driver whose workers must stop
NUM_STARTS = 5  # how often Ray Train tries to start the workers of an attempt. A start fails after a minute.


class FailureBudget:
    """Limits the failures per hour. The total has no limit, because a cloud takes nodes away from time to time."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_hour, self.clock = per_hour, clock
        self.times: list[float] = []

    def charge(self, reason: str) -> None:
        """Counts a failure and logs its reason. Raises JobFailedError if there were too many within an hour."""
        now = self.clock()
        self.times = [earlier for earlier in self.times if now - earlier < HOUR_S] + [now]
        count = f"failure {len(self.times)} within an hour"
        if len(self.times) > self.per_hour:
            raise JobFailedError(
                f"training failed: {reason} ({count}, workers.max_failures_per_hour is {self.per_hour}); "
                "the same command resumes from the last checkpoint"
            )
        logger.warning(f"{reason}; training resumes from the last checkpoint ({count}, at most {self.per_hour})")


def fit(job: StageJob, start_ray: Callable[[], None] | None = None) -> None:
    """Runs the job's stages on the cluster. After a failure, new workers resume the stage.

    start_ray: called after a failure, to join or start Ray if necessary and to wait for resources. If it is None and
    Ray Train's controller dies, no other attempt follows.

    Raises JobFailedError for a failure that would repeat, such as a loss that is not finite, and after more than
    `workers.max_failures_per_hour` failures within an hour. In the second case, the same command resumes the stage.
    """
    import ray
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    budget = FailureBudget(job.folder.config.workers.max_failures_per_hour)
    while True:
        try:
            _attempt(job)
            return
        except (TrainingFailedError, RayActorError) as error:
            logger.debug("training failed", exc_info=error)
            if start_ray is None and isinstance(error, RayActorError):
                raise JobFailedError(f"{_reason(error)}; the same command resumes from the last checkpoint") from error
            budget.charge(_reason(error))
            if isinstance(error, RayActorError):
                ray.shutdown()  # frees the placement group of the dead controller, which blocks resources
        if start_ray is not None:
            start_ray()


def _attempt(job: StageJob) -> None:
    """Runs the job's stages until they are finished or a worker fails.

    After Ctrl-C or SIGTERM the workers save a checkpoint and end, and KeyboardInterrupt is raised.
    """

    def request_stop() -> None:
        logger.info(f"stopping  a checkpoint is saved first (within {SAVE_LIMIT_S} s); a second signal skips it")
        with suppress(OSError):  # without the request, the run can still resume from the last checkpoint
            (job.folder.root / "log" / STOP).write_bytes(job.driver_token.encode())

    try:
        with saving_first(lambda: threading.Thread(target=request_stop, name="stop-request", daemon=True).start()):
            call_in_thread(_trainer(job).fit)
    finally:
        shutil.rmtree(job.folder.path / "log" / SCRATCH, ignore_errors=True)
        if failure_file(job).exists():
            raise JobFailedError(failure_file(job).read_bytes().decode())


def _reason(error: Exception) -> str:
    """The cause of a failed attempt, as a part of a sentence. A RayActorError means that the controller died."""
    from ray.train import ControllerError, WorkerGroupError

    if isinstance(error, WorkerGroupError):
        # If a worker died, the others fail because they lost it, so only the error of the dead worker is the cause. Ray
        # wraps this error in one with `health_check_failure`.
        died = {
            rank: failure.health_check_failure
            for rank, failure in error.worker_failures.items()
            if hasattr(failure, "health_check_failure")
        }
        causes = died or error.worker_failures
        rank = min(causes)
        return f"worker {rank} {'died' if died else 'failed'}: {_first_line(causes[rank])}"
    if isinstance(error, ControllerError):
        return f"the workers did not start: {_first_line(error.controller_failure)}"
    return "Ray Train's controller died"


def _first_line(error: BaseException) -> str:
    """The line of an error in which Ray names a cause, or else the error's type and the first line of its message.

    If a GPU ran out of memory, the text ends with the keys that reduce the memory.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first_line = f"{type(error).__name__}: {lines[0] if lines else ''}"
    text = next((line for line in lines if " because " in line), first_line)
    if "CUDA out of memory" in str(error):
        text += "; raise the stage's gradient_accumulation_steps, or set backbone.gradient_checkpointing to true"
    return text


def _trainer(job: StageJob) -> Any:
    """Ray Train's trainer for the job's stages."""
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    logging.getLogger("ray.train").setLevel(logging.ERROR)
    # The seconds between two looks at the workers. With Ray Train's default of 2, a fit ends 4 s after its last step.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    workers = job.folder.config.workers
    uses_nccl = workers.gpus_per_worker > 0 and not computes_on_cpus()
    num_workers = (workers.min_workers, workers.num_workers) if workers.min_workers else workers.num_workers
    return TorchTrainer(
        partial(_run_worker, job),  # not train_loop_config, for which Ray Train's controller would import the models
        torch_config=TorchConfig(backend="nccl" if uses_nccl else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=num_workers,  # type: ignore[arg-type]  # for an elastic fit, the smallest and largest number
            use_gpu=workers.gpus_per_worker > 0,
            resources_per_worker=workers.resources_of_worker,
        ),
        run_config=RayRunConfig(
            # The name is new for each attempt, because Ray Train returns the old result of a name that it knows.
            name=f"{job.stages[0]}-{uuid.uuid4().hex[:8]}",
            storage_path=str(job.folder.path / "log" / SCRATCH),
            # Ray Train must not repeat a failed attempt, because `fit` does. A drained node is not a failure.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=NUM_STARTS),  # type: ignore[call-arg]
        ),
    )


def failure_file(job: StageJob) -> StoragePath:
    """The file for the reason of a worker's failure that would repeat. Each driver has a file of its own."""
    return job.folder.root / f"log/failure-{job.driver_token}"


def _run_worker(job: StageJob) -> None:
    """The function that Ray Train runs on every worker."""
    if failure_file(job).exists():
        return  # Another attempt would fail in the same way. If Ray Train starts workers again, they end here.
    reason = ""
    try:
        train_stages(RayContext(lambda: job.folder.token(STOP) == job.driver_token), job)
    except (AbandonedError, DivergedError, JobFailedError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise
    except OSError as error:
        if is_disk_full(error):
            remedy = "free space, and the same command continues from the last checkpoint"
            reason = f"{job.folder.path} cannot be written ({error.strerror}); {remedy}"
        raise
    finally:
        if reason:  # written, because another attempt would fail in the same way
            with suppress(OSError):  # the disk may be too full for this file
                failure_file(job).write_bytes(without_secrets(reason).encode())
