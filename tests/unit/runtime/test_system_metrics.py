"""System metrics: MLflow's names, and no CUDA context on a GPU that the process does not compute on."""

from __future__ import annotations

import pytest
import torch

from raycap.pipeline.training.step_metrics import system_metrics


def test_the_machine_is_measured_without_a_gpu() -> None:
    metrics = system_metrics(torch.device("cpu"))
    assert 0 < metrics["system/system_memory_usage_percentage"] <= 100
    assert metrics["system/disk_available_megabytes"] > 0
    assert not any("gpu" in name for name in metrics)


def test_gpus_are_measured_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_memory_used", lambda index: (index + 1) * 10**9)
    monkeypatch.setattr("torch.cuda.utilization", lambda index: 50 + index)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: pytest.fail("this opens a CUDA context"))
    metrics = system_metrics(torch.device("cuda", 1))
    assert {name: value for name, value in metrics.items() if "gpu" in name} == {
        "system/gpu_0_memory_usage_megabytes": 1000.0,
        "system/gpu_0_utilization_percentage": 50.0,
        "system/gpu_1_memory_usage_megabytes": 2000.0,
        "system/gpu_1_utilization_percentage": 51.0,
    }
