"""The precision `auto` of searches: which computation is timed, and what tells decisions apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.features import precision
from raycap.pipeline.features.precision import measure_search, with_search_precision
from raycap.pipeline.runtime.processor import PrecisionTimes
from tests.conftest import small_config

SYSTEMS: list[dict[str, Any]] = [
    {},
    {"name": "transformer"},
    {"name": "meshed_memory", "num_memory_slots": 2},
    {"name": "clustformer"},
    {"name": "clustformer", "grid": [4, 4]},
]


def config_of(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    values = small_config(folder) | {"evaluation": {"precision": "auto", "beam_size": 2}}
    values["model"] = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1} | (
        model or {}
    )
    return parse_config(values | changes)


@pytest.mark.parametrize("model", SYSTEMS, ids=str)
def test_a_search_of_each_system_can_be_timed(tmp_path: Path, model: dict[str, Any]) -> None:
    times = measure_search(config_of(tmp_path, model))
    assert times.device == "CPU" and 0 < times.float32 < 60 and 0 < times.bfloat16 < 60


def test_the_first_command_measures_where_a_worker_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def decided(work: dict[str, Any], folder: Any, measure: Any, *, label: str, measured: str) -> str:
        return str(measure().fastest)

    class Task:
        def options(self, **resources: Any) -> Task:
            started.append(f"{resources['num_cpus']} CPUs")
            return self

        def remote(self, config: RunConfig) -> PrecisionTimes:
            assert not config.tracking.enabled, "the tracker's address was sent to a worker"
            return PrecisionTimes("CPU", float32=1.0, bfloat16=0.1)

    monkeypatch.setattr(precision, "decided_precision", decided)
    monkeypatch.setattr("ray.remote", lambda function: Task())
    monkeypatch.setattr("ray.get", lambda result: result)
    config = config_of(tmp_path, workers={"num_workers": 1, "cpus_per_worker": 2})

    monkeypatch.setattr(precision, "start_ray", lambda *_: started.append("Ray"))
    assert with_search_precision(config, None).evaluation.precision == "bfloat16"
    assert started == ["Ray", "2.0 CPUs"]
