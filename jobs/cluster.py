"""Starts Ray on this machine or joins a cluster. A local Ray listens on the loopback interface only."""

from __future__ import annotations

import logging
import math
import os

from pipeline.config.run import RunConfig
from pipeline.errors import UserError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 512 * 2**20  # little is needed, because workers read features and models from the storage


def start_ray(config: RunConfig, address: str | None) -> None:
    """Joins the Ray at `address` (or RAY_ADDRESS), or starts one on this machine with the workers' resources.

    A second call does nothing. A Ray that this process has started ends with the process, also when it is killed.
    Raises UserError if this machine has fewer GPUs than `config` needs. On a cluster, which may grow, it only warns.
    """
    import ray

    if ray.is_initialized():
        return
    workers, features = config.workers, config.features
    is_cluster = connect(address, needed_cpus=math.ceil(workers.num_workers * workers.cpus_per_worker))
    num_gpus = ray.cluster_resources().get("GPU", 0)
    requested = {
        "workers.gpus_per_worker": workers.num_workers * workers.gpus_per_worker,
        "features.gpus_per_actor": features.num_actors * features.gpus_per_actor,
    }
    for key, count in requested.items():
        if count > num_gpus:
            text = f"{key} asks for {count:g} GPUs in all and this Ray has {num_gpus:g}"
            if not is_cluster:
                raise UserError(f"{text}; set it to 0, or join a cluster with --address")
            logger.warning(f"{text}; waiting until the cluster has them")


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
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        logger.debug(f"ray       joined {address}: {ray.cluster_resources()}")
        return True
    ray.init(
        num_cpus=max(os.cpu_count() or 1, needed_cpus, 2),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logger.debug(f"ray       started on this machine: {ray.cluster_resources()}")
    return False
