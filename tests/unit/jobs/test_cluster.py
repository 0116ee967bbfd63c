"""What is refused before Ray starts: addresses, and more processes or GPUs than this machine has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.jobs.train import _trainer
from raycap.pipeline.cluster.stalls import amounts
from raycap.pipeline.cluster.start import (
    check_address,
    check_resources,
    connect,
    require_resources,
    stage_resources,
    with_processors,
)
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.training.loop import StageJob
from tests.conftest import ROOT, small_config

CONNECT = """
from raycap.pipeline.cluster.start import connect
from raycap.pipeline.errors import UserError
try:
    connect("local")
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("address", ["nonsense", "http://head:8265", "head:6379 x", "x" * 10**5, "ray://"])
def test_an_address_that_ray_cannot_join_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is no address of a Ray cluster; give auto or HOST:PORT") as error:
        check_address(address)
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError):
        check_address(None)


def test_workers_ask_for_further_resources(tmp_path: Path) -> None:
    """This holds for Ray Train's workers, for the tasks that replace them, and for the wait before a stage."""
    others = {"accelerator_type:A100": 0.001, "memory": 2.4e10}
    config = parse_config(small_config(tmp_path, workers__resources=others, workers__num_workers=2))
    worker = {"CPU": 1, "GPU": 0, **others}
    assert stage_resources(config, "training") == [worker] * 2
    assert stage_resources(config, "captions") == stage_resources(config, "dry run") == [worker]
    assert all(others.keys().isdisjoint(each) for each in stage_resources(config, "features"))
    trainer = _trainer(StageJob(RunFolder(tmp_path, config), ("xe_frozen",), None))
    assert trainer.scaling_config.resources_per_worker == worker
    options = {"num_cpus": 1, "num_gpus": 0, "resources": {"accelerator_type:A100": 0.001}, "memory": 2.4e10}
    assert config.workers.task_options == options
    assert amounts(worker) == "1 CPU + 0.001 accelerator_type:A100"
    assert amounts({"CPU": 2, "node:10.0.0.1": 1, "CPU_group_1a": 1, "object_store_memory": 1e9}) == "2 CPU"
    with pytest.raises(
        UserError, match="training asks for 0.002 accelerator_type:A100 in all, .* has at most 0; lower"
    ):
        require_resources([worker] * 2, "training", {"CPU": 4, "memory": 1e12})
    require_resources([{"CPU": 2, "memory": 5e11}] * 2, "training", {"CPU": 4, "memory": 1e12})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"workers__gpus_per_worker": 1}, "training asks for 1 GPU in all, and a Ray on this machine has at most 0; "),
        ({"features__gpus_per_actor": 0.5}, "features asks for 0.5 GPU in all, .* lower .*features.gpus_per_actor"),
        ({"workers__cpus_per_worker": 9000}, "training asks for 9000 CPU in all, and .* at most 64; lower"),
        ({"features__num_actors": 9000}, "features asks for 4500.4 CPU in all, and .* at most 64; lower"),
    ],
)
def test_a_machine_is_not_asked_for_what_it_cannot_have(
    changes: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_resources(parse_config(small_config(tmp_path)), None)
    config = parse_config(small_config(tmp_path, **changes))
    with pytest.raises(UserError, match=found):
        check_resources(config, None)
    check_resources(config, "head:6379")


def test_processes_share_the_cores_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    unset: dict[str, Any] = {"workers__num_workers": 2, "features__threads_per_actor": None}
    unset |= {"workers__cpus_per_worker": None, "workers__threads_per_worker": None}
    config = parse_config(small_config(tmp_path, **unset))
    assert (config.workers.cpus, config.workers.threads, config.features.threads) == (1, 1, 1)
    assert with_processors(config, "head:6379") is config
    here = with_processors(config, "local")
    assert (here.workers.cpus, here.workers.threads, here.features.threads) == (4, 4, 9)
    on_gpus = parse_config(small_config(tmp_path, **unset, features__gpus_per_actor=1))
    assert with_processors(on_gpus, None).features.threads == 1, "the number of actors depends on Ray"
    set_here = {"workers__cpus_per_worker": 2, "workers__threads_per_worker": 3, "features__threads_per_actor": 5}
    here = with_processors(parse_config(small_config(tmp_path, **unset | set_here)), None)
    assert (here.workers.cpus, here.workers.threads, here.features.threads) == (2, 3, 5)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://[::1]:1", "127.0.0.1:99999"])
def test_an_address_where_nothing_answers_is_not_left_to_ray(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Ray tries for more than five minutes."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("raycap.pipeline.cluster.start.JOIN_WAIT_S", 0.1)
    with pytest.raises(
        JobFailedError, match=rf"joined at {re.escape(address)}: nothing answers .*; check --address or RAY_ADDRESS$"
    ):
        connect(address)


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("RAY_TMPDIR", "file", "file cannot be written (Not a directory); free space, or set RAY_TMPDIR to"),
        ("RAY_TMPDIR", "/proc/x", "/proc/x cannot be written (No such file or directory); free space"),
        ("RAY_AUTH_TOKEN_PATH", "absent", "absent cannot be read (No such file or directory); name the file"),
        ("RAY_AUTH_TOKEN_PATH", "file", "file is empty; name the file with Ray's token"),
        ("RAY_AUTH_TOKEN_PATH", ".", " cannot be read (Is a directory); name the file"),
    ],
)
def test_what_ray_cannot_use_is_refused_before_ray_starts(
    variable: str, value: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("\n")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    with pytest.raises(UserError, match=re.escape(found)):
        connect(None)


def test_shared_memory_that_is_read_only(tmp_path: Path) -> None:
    inside = "mount -t tmpfs -o ro tmpfs /dev/shm && exec " + shlex.join([sys.executable, "-c", CONNECT])
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    command, environment = ["unshare", "-m", "sh", "-c", inside], os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("Ray's object store: /dev/shm cannot be written (Read-only file system); "), ended


def test_python_does_not_import_files_of_the_working_folder(tmp_path: Path) -> None:
    for name in ("typer.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit(3)\n")
    command, environment = [sys.executable, "-m", "raycap", "--version"], os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended


def test_a_ray_that_does_not_start_ends_with_one_sentence(tmp_path: Path) -> None:
    """The paths of its sockets are longer than the system allows."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    command = [sys.executable, "-m", "raycap", "extract", "demo", "--set", f"storage={tmp_path}"]
    command += ["--set", "data.synthetic.num_images=60"]
    environment = os.environ | {"RAY_TMPDIR": str(folder)}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert re.search(r"Ray did not start \(.* cannot exceed 107 bytes: .*\); repeat", line)
