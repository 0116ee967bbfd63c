"""`raycap doctor` on this machine: every check meets a real failure once and names a remedy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.doctor import machine_checks as checks
from raycap.jobs.doctor.finding import Finding
from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.runtime.processor import PrecisionTimes
from raycap.pipeline.storage.path import StorageError, StorageOptions, StoragePath, try_rights
from raycap.pipeline.storage.s3 import S3Object
from tests.conftest import small_config
from tests.support.ray_cluster import free_port


def config_of(folder: Path, **changes: Any) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(folder / "storage", **changes)))
    return load_config(path)


def test_a_torchvision_from_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.torch_pair().level == "ok"
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    found = checks.torch_pair()
    assert found.level == "fail" and "nms does not exist" in found.text and "one place" in found.remedy


@pytest.mark.parametrize(("float32", "faster"), [(0.2, "bfloat16"), (0.11, "float32"), (0.05, "float32")])
def test_the_faster_precision_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32: float, faster: str
) -> None:
    times = PrecisionTimes("a processor", float32, bfloat16=0.1)
    monkeypatch.setattr("raycap.jobs.doctor.machine_checks.measure_extraction", lambda *_: times)
    asked = checks.bfloat16(config_of(tmp_path, features={"compute_dtype": "bfloat16"}))
    assert asked.level == ("ok" if faster == "bfloat16" else "warn")
    plain = checks.bfloat16(None)
    assert plain.level == "ok" and f"{1000 * float32:.1f} ms in float32" in plain.text
    assert f"auto means {faster}" in plain.text

    def fail(*_: object) -> PrecisionTimes:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("raycap.jobs.doctor.machine_checks.measure_extraction", fail)
    assert checks.bfloat16(None).level == "warn" and "out of memory" in checks.bfloat16(None).text


def test_missing_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = config_of(tmp_path, workers__gpus_per_worker=1)
    found = checks.gpus(config, on_cluster=False)
    assert found.level == "fail" and "uses 1, torch sees 0" in found.text
    assert checks.gpus(config, on_cluster=True).level == "ok" and checks.gpus(None, on_cluster=False).level == "ok"


def test_java_that_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.java().level == "warn" and "not found on the PATH" in checks.java().text
    fake = tmp_path / "java"
    for script, said in (("#!/bin/sh\nexit 3\n", "exit code 3"), ("#!/nowhere\n", "does not start")):
        fake.write_text(script)
        fake.chmod(0o755)
        assert said in checks.java().text and checks.java().level == "warn"
    fake.write_text("#!/bin/sh\necho 'openjdk version \"21\"' >&2\n")
    assert checks.java() == Finding("java", "ok", 'openjdk version "21"')


def test_spice_without_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCAP_SPICE_MODELS", str(tmp_path))
    found = checks.spice()
    assert found.level == "warn" and "make spice" in found.text
    for name in ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"):
        (tmp_path / name).write_bytes(b"")
    assert checks.spice().level == "ok"


@pytest.mark.parametrize(("free_gib", "level"), [(0.5, "fail"), (5, "warn"), (50, "ok")])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, level: str) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free_gib * 2**30})())
    found = checks.disk(tmp_path / "not" / "there" / "yet", "disk", "free some")
    assert found.level == level and bool(found.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("free_mb", "level", "eight"), [(800, "fail", "fail"), (2500, "warn", "fail"), (20_000, "ok", "ok")]
)
def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mb: float, level: str, eight: str) -> None:
    monkeypatch.setattr("raycap.jobs.doctor.machine_checks.free_memory_mb", lambda: free_mb)
    assert checks.memory(config_of(tmp_path), on_cluster=False).level == level
    many = config_of(tmp_path, workers__num_workers=8)
    assert checks.memory(many, on_cluster=False).level == eight and checks.memory(many, on_cluster=True).level == level


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.shared_memory(tmp_path / "none").level == "ok"
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 64 * 2**20})())
    assert checks.shared_memory(tmp_path).level == "warn" and "--shm-size" in checks.shared_memory(tmp_path).remedy


def test_storage_that_is_a_file_or_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert checks.storage(StoragePath(str(folder))).level == "ok" and not folder.exists(), "nothing is left"
    (tmp_path / "kept").mkdir()
    assert checks.storage(StoragePath(str(tmp_path / "kept"))).level == "ok" and not list((tmp_path / "kept").iterdir())
    (tmp_path / "file").write_text("")
    found = checks.storage(StoragePath(str(tmp_path / "file")))
    assert found.level == "fail" and str(tmp_path / "file") in found.text and found.remedy
    read_only = Path("/proc/raycap") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid():
        read_only.mkdir(mode=0o555)
    assert checks.storage(StoragePath(str(read_only))).level == "fail"


def test_storage_on_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that takes conditional writes, a missing one, and one that ignores conditions."""
    options = StorageOptions(s3)
    assert checks.storage(StoragePath("s3://data/doctor", options)).level == "ok"
    assert StoragePath("s3://data/doctor", options).list() == {}
    absent = checks.storage(StoragePath("s3://absent/doctor", options))
    assert absent.level == "fail" and "no such bucket" in absent.text and "bucket" in absent.remedy
    monkeypatch.setattr(S3Object, "put_if", lambda self, data, tag: self.put(data))
    with pytest.raises(StorageError, match="conditional writes are ignored"):
        try_rights(StoragePath("s3://data/doctor", options))
    assert StoragePath("s3://data/doctor", options).list() == {}


def test_missing_data(tmp_path: Path) -> None:
    assert checks.data(config_of(tmp_path)).level == "ok"
    (tmp_path / "set").mkdir()
    config = config_of(tmp_path, data={"root": str(tmp_path / "set"), "train_splits": ["train"]})
    assert checks.data(config).level == "fail" and "dataset.json" in checks.data(config).text
    (tmp_path / "set" / "dataset.json").write_text("{}")
    assert checks.data(config).level == "ok"


@pytest.mark.parametrize("password", ["SECRETPW", "SECR/ETPW", "SECR ETPW", "SECR@ETPW", "SECR%2FETPW", "SECR:ETPW?"])
def test_the_trackers_password_is_not_shown(password: str, tmp_path: Path, answers: dict[str, Any]) -> None:
    for address in (answers["address"], f"http://127.0.0.1:{free_port()}"):
        with_password = address.replace("http://", f"http://user:{password}@")
        found = checks.tracker(config_of(tmp_path, tracking={"uri": with_password}))
        assert found.level == "warn" and found.text.startswith(address), found.line
        assert "SECR" not in found.line and "ETPW" not in found.line


def test_a_dead_tracker_is_a_warning(tmp_path: Path, answers: dict[str, Any]) -> None:
    dead = f"http://user:marked-password@127.0.0.1:{free_port()}"
    found = checks.tracker(config_of(tmp_path, tracking={"uri": dead}))
    assert found.level == "warn" and "raycap sync" in found.remedy and "marked-password" not in found.line
    found = checks.tracker(config_of(tmp_path, tracking={"uri": answers["address"]}))
    assert found.level == "warn", "a server that is not MLflow's"
    assert checks.tracker(config_of(tmp_path)).text == "off"
    assert checks.tracker(config_of(tmp_path, tracking={})).level == "ok"
    on_s3 = parse_config(small_config({"uri": "s3://data/x"}, tracking={}))
    assert checks.tracker(on_s3).level == "warn" and "set tracking.uri" in checks.tracker(on_s3).remedy


def test_a_token_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "token"
    path.write_text("marked-token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    path.chmod(0o644)
    found = checks.auth_token()
    assert found.level == "warn" and "chmod 600" in found.remedy and "marked-token" not in found.line
    path.chmod(0o600)
    assert checks.auth_token().level == "ok"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    assert checks.auth_token().level == "fail"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    found = checks.auth_token()
    assert found.level == "warn" and "everybody" in found.text and "RAY_AUTH_MODE" in found.remedy


def test_the_exit_code_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    assert main(["doctor", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("can run here") and any(line.startswith("ok    torch") for line in lines)
    file = tmp_path / "a file \u202e"
    file.write_text("")
    assert main(["doctor", str(config), "--json", "--set", f"storage={file}"]) == 1
    printed = capsys.readouterr().out
    assert all(map(str.isprintable, printed.splitlines())) and r"a file \u202e" in printed
    found = json.loads(printed)
    assert not found["ok"] and [row["name"] for row in found["findings"] if row["level"] == "fail"] == ["storage"]
    assert main(["doctor", str(config), "--set", "seeed=1"]) == 2
