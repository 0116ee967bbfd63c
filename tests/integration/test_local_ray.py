"""A Ray that raycap starts: it listens on the loopback, asks for a secret token, and its files are private."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raycap.pipeline.cluster.start import private_folder
from raycap.pipeline.errors import UserError
from tests.conftest import ROOT

# Starts Ray, runs a task, and prints the addresses on which this process and those below it listen, by process.
SCRIPT = """
import json, os, sys, time
import psutil
from raycap.pipeline.cluster.start import connect
from raycap.pipeline.runtime.secrets import without_secrets

without_secrets("the environment is read once")
connect(None)
import ray
sockets = {}

@ray.remote
def paths():
    return sys.path

@ray.remote
def faults():
    "The smallest number of pages that the system gave for one of eight tensors of 128 MiB, each freed before the next."
    import resource, torch
    from raycap.pipeline.runtime.processor import computing_thread
    found = []
    with computing_thread(1) as thread:
        for _ in range(8):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            thread.submit(lambda: torch.ones(2**25).sum()).result()
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)

paths, faults = ray.get([paths.remote(), faults.remote()])
time.sleep(3)  # the agents have begun to listen
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    for each in process.net_connections("inet"):
        if each.status == psutil.CONN_LISTEN:
            sockets.setdefault(" ".join(process.cmdline())[:200], []).append(each.laddr.ip)
from ray._private.worker import _global_node as node
print(json.dumps({"sockets": sockets, "folder": node.get_session_dir_path(), "mode": os.environ["RAY_AUTH_MODE"],
    "paths": paths, "faults": faults, "token": len(os.environ["RAY_AUTH_TOKEN"]),
    "log": without_secrets("bad: " + os.environ["RAY_AUTH_TOKEN"])}))
"""


@pytest.mark.ray
def test_a_local_ray_is_for_this_user_alone(tmp_path: Path) -> None:
    left_out = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    names = " ".join(found["sockets"])
    assert "gcs_server" in names and "raylet" in names and len(found["sockets"]) > 3
    for name, addresses in found["sockets"].items():
        assert {each.removeprefix("::ffff:") for each in addresses} <= {"127.0.0.1", "::1"}, (name, addresses)
    assert str(tmp_path) not in found["paths"] and "" not in found["paths"], "workers import the files of this folder"
    assert found["faults"] < 1000, "malloc returns large tensors to the system"
    assert found["mode"] == "token" and found["token"] == 64
    assert found["log"] == "bad: ${RAY_AUTH_TOKEN}"
    assert not (tmp_path / ".ray" / "auth_token").exists(), "Ray would let everybody read it"
    private = Path(found["folder"]).parents[1]
    assert private.name == f"raycap-{os.getuid()}" and private.stat().st_mode & 0o777 == 0o700


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_rays_folder_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    folder = private_folder()
    assert folder.parent == tmp_path / "new" and mode(folder) == 0o700
    folder.chmod(0o777)
    assert mode(private_folder()) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{folder}.* belongs to another user; remove it or set RAY_TMPDIR"):
        private_folder()
