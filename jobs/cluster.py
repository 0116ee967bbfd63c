"""Starts Ray on this machine or joins a cluster."""

from __future__ import annotations

import logging
import math
import os
from typing import Literal

from pipeline.cluster.capacity import wait_for
from pipeline.cluster.local_ray import start_local_ray
from pipeline.config.run import RunConfig
from pipeline.config.sections import ACTOR_CPUS, DECODING_CPUS
from pipeline.errors import UserError
from pipeline.runtime.stopping import keeping_handlers

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 512 * 2**20  # little is needed, because workers read features and models from the storage

Stage = Literal["features", "dry run", "training", "captions"]


def start_ray(config: RunConfig, address: str | None, stage: Stage = "training") -> None:
    """Joins the Ray at `address` (or RAY_ADDRESS), or starts one on this machine; later calls use the same Ray.

    On a cluster it waits until the processes of `stage` can be placed. A Ray that this process has started ends with
    the process, also when it is killed. Raises UserError if this machine or no node of the cluster has what the stage
    needs, and WaitedTooLongError after `workers.max_wait_minutes`.
    """
    import ray

    bundles = stage_bundles(config, stage)
    training, extraction = stage_bundles(config, "training"), stage_bundles(config, "features")
    needed_cpus = max(sum(bundle["CPU"] for bundle in each) for each in (training, extraction))
    if connect(address, needed_cpus=math.ceil(needed_cpus)):
        wait_for(bundles, stage, limit_s=60 * config.workers.max_wait_minutes)
        return
    num_gpus = ray.cluster_resources().get("GPU", 0)
    for key, each in (("workers.gpus_per_worker", training), ("features.gpus_per_actor", extraction)):
        count = sum(bundle.get("GPU", 0) for bundle in each)
        if count > num_gpus:
            raise UserError(
                f"{key} asks for {count:g} GPUs in all and this Ray has {num_gpus:g}; set it to 0, or join a cluster "
                "with --address"
            )


def stage_bundles(config: RunConfig, stage: Stage) -> list[dict[str, float]]:
    """The resources of each process that a stage needs before it can make progress."""
    workers, features = config.workers, config.features
    if stage == "features":
        actor = {"CPU": ACTOR_CPUS, "GPU": features.gpus_per_actor}
        return [*[actor] * features.num_actors, {"CPU": DECODING_CPUS}]
    # Captions and the dry run progress with one worker, and training with the smallest number of workers.
    count = workers.counts[0] if stage == "training" else 1
    return [{"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}] * count


def connect(address: str | None, needed_cpus: int = 2) -> bool:
    """Joins the Ray at `address` (or RAY_ADDRESS) and returns True, or starts one on this machine and returns False.

    A second call only returns the same answer. needed_cpus: a Ray that is started gets this number of CPUs, or more if
    the machine has more.
    """
    # Ray sends no usage reports and no state of Ray Train, and leaves CUDA_VISIBLE_DEVICES of tasks without GPUs alone.
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_ENABLE_STATE_TRACKING", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        os.environ.setdefault(name, "0")
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        return bool(address)
    with keeping_handlers():
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            start_local_ray(
                num_cpus=max(os.cpu_count() or 1, needed_cpus, 2),
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    place = f"joined {address}" if address else "started on this machine"
    logger.debug(f"ray       {place}: {ray.cluster_resources()}")
    return bool(address)
