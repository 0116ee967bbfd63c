"""Measures the load of this machine, with the names of MLflow's system metrics.

MLflow's monitor would send to the tracker from the training worker. Here the worker only writes its journal, which the
driver forwards.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch

MEGABYTE = 1e6


def system_metrics(device: torch.device) -> dict[str, float]:
    """The load of this machine, as {"system/<name>": value}.

    CPU load counts since the last call, network traffic since the first. GPUs are included if `device` is one.
    """
    import psutil

    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    (received, sent), (received_before, sent_before) = _network(), _network_at_first_call()
    metrics = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        "disk_available_megabytes": disk.free / MEGABYTE,
        "network_receive_megabytes": (received - received_before) / MEGABYTE,
        "network_transmit_megabytes": (sent - sent_before) / MEGABYTE,
    }
    if device.type == "cuda":
        metrics |= _gpu_metrics(device)
    return {f"system/{name}": round(float(value), 1) for name, value in metrics.items()}


def _gpu_metrics(device: torch.device) -> dict[str, float]:
    """Memory (of all processes) and utilization of every visible GPU, from NVML.

    Without NVML only the memory of `device` is reported, because for each other GPU `torch.cuda.mem_get_info` would
    open a CUDA context.
    """
    metrics: dict[str, float] = {}
    try:
        for index in range(torch.cuda.device_count()):
            metrics[f"gpu_{index}_memory_usage_megabytes"] = torch.cuda.device_memory_used(index) / MEGABYTE
            with suppress(Exception):  # not every GPU reports it, for example not a partition (MIG)
                metrics[f"gpu_{index}_utilization_percentage"] = torch.cuda.utilization(index)
    except Exception:  # NVML and a missing nvidia-ml-py raise various types
        free, total = torch.cuda.mem_get_info(device)
        metrics[f"gpu_{device.index or 0}_memory_usage_megabytes"] = (total - free) / MEGABYTE
    return metrics


def _network() -> tuple[int, int]:
    """Bytes received and sent since the machine started."""
    import psutil

    counters = psutil.net_io_counters()
    return (counters.bytes_recv, counters.bytes_sent) if counters else (0, 0)


@cache
def _network_at_first_call() -> tuple[int, int]:
    """The result of `_network` at the first call in this process."""
    return _network()
