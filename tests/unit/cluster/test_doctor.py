"""`raycap doctor`: every check meets a real failure once and names a remedy.

Real nodes are asked in tests/integration/test_private_disks.py.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from raycap.jobs import doctor
from raycap.jobs.cli import main
from raycap.jobs.doctor import Finding, check_machine, find, side_by_side
from raycap.pipeline.cluster.stalls import ClusterStatus, Resources
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.storage.path import StoragePath, try_rights
from raycap.pipeline.storage.s3 import S3Object, StorageError, StorageOptions
from tests.conftest import small_config
from tests.support.ray_cluster import free_port


def config_of(folder: Path, **changes: Any) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(folder / "storage", **changes)))
    return load_config(path)


def found(config: RunConfig, *, on_cluster: bool = False) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_machine(config, on_cluster)}


def test_a_torchvision_from_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    assert found(config)["torch"].level == "ok"
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    broken = found(config)["torch"]
    assert broken.level == "fail" and "nms does not exist" in broken.text and "one place" in broken.remedy


@pytest.mark.parametrize(("free_gib", "level"), [(0.5, "fail"), (5, "warn"), (50, "ok")])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, level: str) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free_gib * 2**30))
    disk = found(config_of(tmp_path))["disk"]
    assert disk.level == level and bool(disk.remedy) == (level != "ok")


@pytest.mark.parametrize("place", ["/proc/raycap", f"/tmp/{'a' * 300}"])
def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """As in a container with a read-only file system, and a folder that cannot even be looked up."""
    for variable in ("RAYCAP_CACHE", "HOME", "RAY_TMPDIR"):
        monkeypatch.setenv(variable, place)
    monkeypatch.setattr(doctor, "HF_HUB_CACHE", place)
    for needs_cache in (False, True):
        by_name = {finding.name: finding for finding in doctor.folders(needs_cache=needs_cache)}
        levels = {"cache": "fail" if needs_cache else "warn", "home": "warn", "hub": "warn", "tmp": "fail"}
        for name, level in levels.items():
            assert by_name[name].level == level and "cannot be written" in by_name[name].text and by_name[name].remedy
    assert "/dev/shm" in by_name["shm"].text or not Path("/dev/shm").exists()


def test_the_temporary_folder_and_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(config.storage.uri))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/raycap"])
    findings = found(config)
    assert findings["temp"].level == "fail" and "TMPDIR" in findings["temp"].remedy
    assert findings["token"].level == "fail" and "name the file with Ray's token" in findings["token"].text


def test_storage_that_is_a_file_or_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert doctor.storage(StoragePath(str(folder))).level == "ok" and not list(folder.iterdir()), "nothing is left"
    other = doctor.storage(StoragePath(str(tmp_path)), "written-elsewhere")
    assert other.level == "fail" and "another folder" in other.text and "s3://" in other.remedy
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in doctor.storage(StoragePath(str(tmp_path / "file"))).text
    read_only = Path("/proc/raycap") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid():
        read_only.mkdir(mode=0o555)
    assert doctor.storage(StoragePath(str(read_only))).level == "fail"


def test_storage_on_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that takes conditional writes, a missing one, and one that ignores conditions."""
    options = StorageOptions(s3)
    assert doctor.storage(StoragePath("s3://data/doctor", options)).level == "ok"
    absent = doctor.storage(StoragePath("s3://absent/doctor", options))
    assert absent.level == "fail" and "no such bucket" in absent.text and "bucket" in absent.remedy
    monkeypatch.setattr(S3Object, "put_if", lambda self, data, tag: self.put(io.BytesIO(data), len(data)))
    with pytest.raises(StorageError, match="conditional writes are ignored"):
        try_rights(StoragePath("s3://data/doctor", options))
    assert StoragePath("s3://data/doctor", options).list() == {}


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_a_tracker_that_does_not_answer_and_its_password(tmp_path: Path, scheme: str) -> None:
    address = f"{scheme}://127.0.0.1:{free_port()}"
    with_password = address.replace("://", "://user:SECRETPW@")
    dead = found(config_of(tmp_path, tracking={"uri": with_password}), on_cluster=True)["tracker"]
    assert dead.level == "warn" and dead.text.startswith(address) and "raycap sync" in dead.remedy, dead.line
    assert "SECR" not in dead.line and "ETPW" not in dead.line


def test_servers_are_asked_side_by_side_and_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 0.1)
    ok, never = Finding("data", "ok", ""), threading.Event()
    silent = lambda: find("tracker", lambda: str(never.wait()), "")  # noqa: E731
    results = list(side_by_side({"storage": silent, "data": lambda: ok, "tracker": silent}))
    never.set()
    assert [(each.name, each.level) for each in results] == [("storage", "fail"), ("data", "ok"), ("tracker", "warn")]


def test_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    assert main(["doctor", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("can run here") and any(line.startswith("ok    torch") for line in lines)
    file = tmp_path / "a file \u202e"
    file.write_text("")
    assert main(["doctor", str(config), "--set", f"storage={file}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(map(str.isprintable, lines)) and any(r"a file \u202e" in line for line in lines)
    assert lines[-1].endswith("cannot run here: disk, storage")
    assert main(["doctor", str(config), "--set", "seeed=1"]) == 2


def test_the_nodes_and_what_a_stage_asks_for() -> None:
    head: Resources = {"node:__internal_head__": 1.0, "CPU": 0.0}
    large: Resources = {"CPU": 8.0, "GPU": 1.0}
    there = doctor.has_workers(ClusterStatus((head, large), pending=[], num_starting=0), {"training": [large, large]})
    assert there.line == "ok    nodes      nodes: 1 x (8 CPU + 1 GPU); training asks for 2 x (8 CPU + 1 GPU)"
    alone = doctor.has_workers(ClusterStatus((head,), pending=[], num_starting=0), {})
    assert alone.level == "warn" and alone.remedy


def test_the_findings_of_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check is said once, with the nodes that have a problem and the worst level."""
    expected = doctor.versions()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    good = doctor.check_node(expected, 0.0, True, StoragePath(str(tmp_path)), "")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**30))
    bad = doctor.check_node(expected | {"torch": "2.9.0"}, 1.0, True, StoragePath("/proc/raycap"), "")
    merged = list(doctor.merged({"n0": good, "n1": bad, "n2": bad}))
    problems = {finding.name: finding for finding in merged if finding.level != "ok"}
    failed = {name for name, finding in problems.items() if finding.level == "fail"}
    assert failed == {"node versions", "node gpus", "node storage"}
    assert problems["node cache"].level == "warn" and problems["node cache"].text.startswith("n1, n2: 5.0 GiB free")
    assert "and not 2.9.0" in problems["node versions"].text and "n0" not in problems["node versions"].text
    assert doctor.Finding("node storage", "ok", "1 nodes") in merged
