"""A stage on Ray that makes no progress ends with a sentence. A task whose process dies is repeated."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.sections import WorkersSection
from raycap.pipeline.errors import JobFailedError, UserError
from tests.conftest import small_config

pytestmark = pytest.mark.ray
WORKERS = WorkersSection()


def numbers(count: int, marker: Path | None = None, always: bool = False) -> Iterator[int]:
    """Yields 0, 1, ... If a marker is given, the process is killed in the middle of the first attempt.

    always: it is killed in the middle of every attempt."""
    for number in range(count):
        if marker is not None and number == count // 2 and (always or not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield number
    if marker is None:
        raise ValueError("the end")


def stream(watch: StallWatch, *arguments: Any, **options: Any) -> list[int]:
    with watch:
        return list(watch.stream(numbers, arguments, options))


def test_the_values_of_a_killed_task_come_once(ray_session: None, tmp_path: Path) -> None:
    arguments = [(6, tmp_path / "a"), (8, tmp_path / "b")]
    values = stream(StallWatch("captioning", WORKERS), *arguments)
    assert all(marker.exists() for _, marker in arguments), "both were killed"
    assert sorted(values) == sorted([*range(6), *range(8)])


def test_an_error_of_a_task_is_raised_and_a_task_that_always_dies_ends_the_stage(
    ray_session: None, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="the end"):
        stream(StallWatch("captioning", WORKERS), (3,))
    with pytest.raises(JobFailedError, match="captioning lost a process several times"):
        stream(StallWatch("captioning", WORKERS), (3, tmp_path / "a", True), max_retries=1)


def test_a_request_that_is_never_served_ends_the_stage(ray_session: None) -> None:
    watch = StallWatch("captioning", WorkersSection(max_stall_minutes=0.05))
    with pytest.raises(JobFailedError, match=r"captioning finished nothing .* pending: (.*, )?1 x \(100 CPU\)"):
        stream(watch, (3,), num_cpus=100)


@pytest.mark.parametrize("key", ["workers.gpus_per_worker", "features.gpus_per_actor"])
def test_a_machine_without_gpus_refuses_a_stage_with_gpus(ray_session: None, tmp_path: Path, key: str) -> None:
    config = parse_config(small_config(tmp_path, **{key.replace(".", "__"): 1}))
    for stage in ("features", "dry run", "training", "captions"):
        with pytest.raises(
            UserError, match=f"asks for 1 GPU in all, and a Ray on this machine has at most 0; lower .*{key}"
        ):
            start_ray(config, None, stage)  # type: ignore[arg-type]
