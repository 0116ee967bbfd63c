"""Trains stages with Ray Train. One fit starts data-parallel workers, and each runs `pipeline.training.loop`."""

from __future__ import annotations

import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.errors import JobFailedError
from pipeline.storage.path import StoragePath
from pipeline.training.loop import DivergedError, StageJob, train_stages
from pipeline.training.stage_output import AbandonedError


class StageFailedError(JobFailedError):
    """Training failed and would fail again in the same way. The message names the stage and the reason."""


def fit(job: StageJob, config: RunConfig) -> None:
    """Runs the job's stages on the cluster. A worker that dies is replaced, and the stage resumes.

    Raises StageFailedError without another attempt for failures that would repeat, such as a loss that is not finite
    or a setting that does not fit the data. After `workers.max_failures` failures, raises the last worker's error.
    Raises JobFailedError when Ray Train's controller dies. The same command resumes the stage.
    """
    from ray.exceptions import RayActorError

    try:
        _trainer(job, config).fit()
    except RayActorError as error:  # of the controller, because errors of workers have other types
        raise JobFailedError("training's controller died; the same command resumes from the last checkpoint") from error
    finally:
        shutil.rmtree(_scratch(job), ignore_errors=True)
        if failure_file(job).exists():
            raise StageFailedError(failure_file(job).read_bytes().decode())


def _scratch(job: StageJob) -> Path:
    """The driver's folder for files that Ray Train demands and raycap does not use."""
    return job.folder.path / "log" / ".ray"


def _trainer(job: StageJob, config: RunConfig) -> Any:
    """Ray Train's trainer for the job's stages."""
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from pipeline.runtime.context import computes_on_cpus

    logging.getLogger("ray.train").setLevel(logging.ERROR)
    workers = config.workers
    uses_nccl = workers.gpus_per_worker > 0 and not computes_on_cpus()
    num_workers = (workers.min_workers, workers.num_workers) if workers.min_workers else workers.num_workers
    return TorchTrainer(
        _run_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if uses_nccl else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=num_workers,  # type: ignore[arg-type]  # for an elastic fit, the smallest and largest number
            use_gpu=workers.gpus_per_worker > 0,
            resources_per_worker={"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker},
        ),
        run_config=RayRunConfig(
            # a new name, because Ray Train returns the old result when a name is used twice
            name=f"{job.stages[0]}-{uuid.uuid4().hex[:8]}",
            storage_path=str(_scratch(job)),
            failure_config=FailureConfig(max_failures=workers.max_failures),
        ),
    )


def failure_file(job: StageJob) -> StoragePath:
    """The file in which a worker writes the reason of a failure that would repeat. Each driver has another file."""
    return job.folder.root / f"log/failure-{job.driver_token}"


def _run_worker(settings: dict[str, Any]) -> None:
    """The function that Ray Train runs on every worker."""
    from pipeline.runtime.context import RayContext

    job: StageJob = settings["job"]
    if failure_file(job).exists():
        return  # When Ray Train restarts the workers, all of them end here, which ends the fit.
    try:
        train_stages(RayContext(), job)
    except (AbandonedError, DivergedError, ValueError) as error:
        failure_file(job).write_bytes(" ".join(str(error).split()).encode())
        raise
