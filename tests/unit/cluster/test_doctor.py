"""`raycap doctor`: every check meets a real failure once and names a remedy."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.cli import main
from pipeline.cluster import doctor
from pipeline.config.load import load_config
from pipeline.config.run import RunConfig
from pipeline.storage.path import StorageError, StorageOptions, StoragePath, try_rights
from pipeline.storage.s3 import S3Object
from tests.conftest import small_config
from tests.support.ray_cluster import free_port


def config_of(folder: Path, **changes: Any) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(folder / "storage", **changes)))
    return load_config(path)


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    """An HTTP server that answers GET by path: (status, body); its address is under `address`."""
    found: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.setdefault("tokens", []).append(self.headers.get("Authorization"))
            status, body = found.get(self.path.split("?")[0], (404, ""))
            if isinstance(body, dict) and body.get("token") not in (None, self.headers.get("Authorization")):
                status, body = 401 if self.headers.get("Authorization") is None else 403, "no"
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found["address"] = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_torchvision_from_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.torch_pair().level == "ok"
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    found = doctor.torch_pair()
    assert found.level == "fail" and "nms does not exist" in found.text and "one place" in found.remedy


def test_bfloat16_without_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(name: str) -> str:
        return "float32" if name == "auto" else name

    config = config_of(tmp_path, features={"compute_dtype": "bfloat16"})
    assert doctor.bfloat16(config).level == "ok" or "emulates" in doctor.bfloat16(config).text
    monkeypatch.setattr("pipeline.features.extraction.resolve_dtype", resolved)
    assert doctor.bfloat16(config).level == "warn" and "float32" in doctor.bfloat16(config).remedy
    assert doctor.bfloat16(None).level == "ok"


def test_missing_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = config_of(tmp_path, workers__gpus_per_worker=1)
    found = doctor.gpus(config, on_cluster=False)
    assert found.level == "fail" and "uses 1, torch sees 0" in found.text
    assert doctor.gpus(config, on_cluster=True).level == "ok" and doctor.gpus(None, on_cluster=False).level == "ok"


def test_java_that_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.java().level == "warn" and "not found on the PATH" in doctor.java().text
    fake = tmp_path / "java"
    for script, said in (("#!/bin/sh\nexit 3\n", "exit code 3"), ("#!/nowhere\n", "does not start")):
        fake.write_text(script)
        fake.chmod(0o755)
        assert said in doctor.java().text and doctor.java().level == "warn"
    fake.write_text("#!/bin/sh\necho 'openjdk version \"21\"' >&2\n")
    assert doctor.java() == doctor.Finding("java", "ok", 'openjdk version "21"')


def test_spice_without_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCAP_SPICE_MODELS", str(tmp_path))
    found = doctor.spice()
    assert found.level == "warn" and "make spice" in found.text
    for name in ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"):
        (tmp_path / name).write_bytes(b"")
    assert doctor.spice().level == "ok"


@pytest.mark.parametrize(("free_gib", "level"), [(0.5, "fail"), (5, "warn"), (50, "ok")])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, level: str) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free_gib * 2**30})())
    found = doctor.disk(tmp_path / "not" / "there" / "yet", "disk", "free some")
    assert found.level == level and bool(found.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("free_mb", "level", "eight"), [(800, "fail", "fail"), (2500, "warn", "fail"), (20_000, "ok", "ok")]
)
def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mb: float, level: str, eight: str) -> None:
    monkeypatch.setattr("pipeline.cluster.doctor.free_memory_mb", lambda: free_mb)
    assert doctor.memory(config_of(tmp_path), on_cluster=False).level == level
    many = config_of(tmp_path, workers__num_workers=8)
    assert doctor.memory(many, on_cluster=False).level == eight and doctor.memory(many, on_cluster=True).level == level


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared_memory(tmp_path / "none").level == "ok"
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 64 * 2**20})())
    assert doctor.shared_memory(tmp_path).level == "warn" and "--shm-size" in doctor.shared_memory(tmp_path).remedy


def test_storage_that_is_a_file_or_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert doctor.storage(StoragePath(str(folder))).level == "ok" and not folder.exists(), "nothing is left"
    (tmp_path / "kept").mkdir()
    assert doctor.storage(StoragePath(str(tmp_path / "kept"))).level == "ok" and not list((tmp_path / "kept").iterdir())
    (tmp_path / "file").write_text("")
    found = doctor.storage(StoragePath(str(tmp_path / "file")))
    assert found.level == "fail" and str(tmp_path / "file") in found.text and found.remedy
    read_only = Path("/proc/raycap") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid():
        read_only.mkdir(mode=0o555)
    assert doctor.storage(StoragePath(str(read_only))).level == "fail"


def test_storage_on_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that takes conditional writes, a missing one, and one that ignores conditions."""
    options = StorageOptions(s3)
    assert doctor.storage(StoragePath("s3://data/doctor", options)).level == "ok"
    assert StoragePath("s3://data/doctor", options).list() == {}
    absent = doctor.storage(StoragePath("s3://absent/doctor", options))
    assert absent.level == "fail" and "no such bucket" in absent.text and "bucket" in absent.remedy
    monkeypatch.setattr(S3Object, "put_if", lambda self, data, tag: self.put(data))
    with pytest.raises(StorageError, match="conditional writes are ignored"):
        try_rights(StoragePath("s3://data/doctor", options))
    assert StoragePath("s3://data/doctor", options).list() == {}


def test_missing_data(tmp_path: Path) -> None:
    assert doctor.data(config_of(tmp_path)).level == "ok"
    (tmp_path / "set").mkdir()
    config = config_of(tmp_path, data={"root": str(tmp_path / "set"), "train_splits": ["train"]})
    assert doctor.data(config).level == "fail" and "dataset.json" in doctor.data(config).text
    (tmp_path / "set" / "dataset.json").write_text("{}")
    assert doctor.data(config).level == "ok"


def test_a_dead_tracker_is_a_warning(tmp_path: Path, answers: dict[str, Any]) -> None:
    dead = f"http://user:marked-password@127.0.0.1:{free_port()}"
    found = doctor.tracker(config_of(tmp_path, tracking={"uri": dead}))
    assert found.level == "warn" and "raycap sync" in found.remedy and "marked-password" not in found.line
    found = doctor.tracker(config_of(tmp_path, tracking={"uri": answers["address"]}))
    assert found.level == "warn", "a server that is not MLflow's"
    assert doctor.tracker(config_of(tmp_path)).text == "off"
    assert doctor.tracker(config_of(tmp_path, tracking={})).level == "ok"


def test_a_token_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "token"
    path.write_text("marked-token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    path.chmod(0o644)
    found = doctor.auth_token()
    assert found.level == "warn" and "chmod 600" in found.remedy and "marked-token" not in found.line
    path.chmod(0o600)
    assert doctor.auth_token().level == "ok"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    assert doctor.auth_token().level == "fail"


def test_the_clusters_ray_version_and_token(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    address = answers["address"]
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    for version, level in ((ray.__version__, "ok"), (f"{ray.__version__}1", "warn"), ("2.9.3", "fail")):
        answers["/api/version"] = 200, {"ray_version": version}
        found = doctor.cluster_ray(address)
        assert found.level == level and version in found.text
    assert set(answers["tokens"]) == {None}, "a token goes only to a server that asks for one"
    answers["/api/version"] = 200, {"ray_version": ray.__version__, "token": "Bearer right"}
    assert doctor.cluster_ray(address).level == "ok" and "token accepted" in doctor.cluster_ray(address).text
    monkeypatch.setenv("RAY_AUTH_TOKEN", "marked-wrong")
    found = doctor.cluster_ray(address)
    assert found.level == "fail" and "refuses the token" in found.text and "marked-wrong" not in found.line
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "asks for a token" in doctor.cluster_ray(address).text
    answers["/api/version"] = 200, {}
    assert "not a Ray dashboard" in doctor.cluster_ray(address).text
    nobody = doctor.cluster_ray(f"http://127.0.0.1:{free_port()}")
    assert nobody.level == "fail" and "cannot be reached" in nobody.text


def test_a_cluster_that_is_too_small(answers: dict[str, Any], tmp_path: Path) -> None:
    alive = {"state": "ALIVE", "resources_total": {"CPU": 2.0}}
    nodes = [alive, {"state": "DEAD", "resources_total": {"CPU": 9.0, "GPU": 9.0}}]
    answers["/api/v0/nodes"] = 200, {"data": {"result": {"result": nodes}}}
    assert doctor.cluster_resources(answers["address"], None).text == "1 with 2 CPUs and 0 GPUs"
    small = doctor.cluster_resources(answers["address"], config_of(tmp_path, workers__gpus_per_worker=1))
    assert small.level == "warn" and "has grown" in small.remedy


def test_the_exit_code_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    assert main(["doctor", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("can run here") and any(line.startswith("ok    torch") for line in lines)
    (tmp_path / "file").write_text("")
    assert main(["doctor", str(config), "--json", "--set", f"storage={tmp_path / 'file'}"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and [row["name"] for row in found["findings"] if row["level"] == "fail"] == ["storage"]
    assert main(["doctor", str(config), "--set", "seeed=1"]) == 2
