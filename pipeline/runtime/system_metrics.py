"""How busy this machine is, under the names that MLflow's own system metrics have."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch

MEGABYTE = 1e6


def machine_use(device: torch.device) -> dict[str, float]:
    """Processor (percent since the last call), memory, disk, network since the first call, and the GPUs if any.

    GPU memory is the whole card's, other processes included; how busy a GPU is needs the package nvidia-ml-py.
    """
    import psutil

    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    received, sent = _network(psutil)
    received_before, sent_before = _network_before()
    use = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        "disk_available_megabytes": disk.free / MEGABYTE,
        "network_receive_megabytes": (received - received_before) / MEGABYTE,
        "network_transmit_megabytes": (sent - sent_before) / MEGABYTE,
    }
    for index in range(torch.cuda.device_count() if device.type == "cuda" else 0):
        free, total = torch.cuda.mem_get_info(index)
        use[f"gpu_{index}_memory_usage_megabytes"] = (total - free) / MEGABYTE
        with contextlib.suppress(Exception):  # torch asks nvidia-ml-py, which need not be there
            use[f"gpu_{index}_utilization_percentage"] = torch.cuda.utilization(index)
    return {f"system/{key}": round(float(value), 1) for key, value in use.items()}


def _network(psutil: Any) -> tuple[int, int]:
    counters = psutil.net_io_counters()
    return (counters.bytes_recv, counters.bytes_sent) if counters else (0, 0)


@cache
def _network_before() -> tuple[int, int]:
    import psutil

    return _network(psutil)
