"""Starting or joining Ray; quiet, on the loopback where it is local."""

from __future__ import annotations

import logging
import math
import os

from pipeline.config import RunConfig


def start_ray(config: RunConfig, address: str | None) -> None:
    """Joins the Ray at `address` (or RAY_ADDRESS), else starts one in this machine with what the workers ask for.

    Called again, it does nothing. A Ray that this process started ends with it, also when it is killed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return
    workers = config.workers
    needed = math.ceil(workers.num_workers * workers.cpus_per_worker)
    ray.init(
        num_cpus=max(os.cpu_count() or 1, needed, 2),
        object_store_memory=512 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
