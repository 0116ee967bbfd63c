"""`raycap doctor` on a cluster: one finding, with a remedy, for each problem that a node can have.

Real nodes are asked in tests/integration/test_private_disks.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.doctor import cluster_checks, node_facts
from raycap.jobs.doctor import command as doctor
from raycap.jobs.doctor.cluster_facts import ClusterFacts
from raycap.jobs.doctor.finding import Finding
from raycap.jobs.doctor.node_facts import NodeFacts, Probe, collect, look
from raycap.pipeline.cluster.capacity import ClusterStatus, Resources
from raycap.pipeline.cluster.submission import used_variables
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.storage.path import StorageOptions, StoragePath
from tests.conftest import small_config
from tests.support.ray_cluster import free_port

GIB = 2**30
VERSIONS = {"python": "3.11", "ray": "2.60.0", "torch": "2.15.0", "raycap": "abc"}
HEAD = {"node:__internal_head__": 1.0, "CPU": 0.0}
LARGE: Resources = {"CPU": 8.0, "GPU": 1.0}


def node(**changes: Any) -> NodeFacts:
    """A node without problems."""
    values: dict[str, Any] = {"host": "a", "versions": VERSIONS, "cache": "/cache", "cache_bytes": 100 * GIB}
    return NodeFacts(**values | {"store_folder": "/dev/shm", "store_bytes": 8 * GIB} | changes)


def status(*nodes: Resources, **changes: Any) -> ClusterStatus:
    return ClusterStatus(nodes or (HEAD, LARGE), **{"used": 0.0, "pending": [], "num_starting": 0} | changes)  # type: ignore[arg-type]


def cluster(*found: NodeFacts, **changes: Any) -> ClusterFacts:
    values: dict[str, Any] = {"status": status(has_autoscaler=False), "versions": VERSIONS}
    return ClusterFacts(**values | {"nodes": {f"n{number}": facts for number, facts in enumerate(found)}} | changes)


def findings(facts: ClusterFacts, **changes: Any) -> dict[str, Finding]:
    config = parse_config(small_config("s3://data/x", **changes))
    return {found.name: found for found in cluster_checks.check_cluster(facts, config, {}, scores_on_nodes=True)}


def test_a_cluster_without_problems() -> None:
    gpu = node(num_gpus=1, driver="580.65.06", cuda="13.0", cuda_works=True)
    found = findings(cluster(node(), gpu, offered_gpus={"n1": 1}, clocks={"n0": 0.0, "n1": 1.0}))
    assert {each.level for each in found.values()} == {"ok"}, found
    assert not any(each.remedy for each in found.values())


@pytest.mark.parametrize(
    ("name", "changes", "level", "text"),
    [
        ("versions", {"versions": VERSIONS | {"torch": "2.9.0"}}, "fail", "n1: torch 2.9.0"),
        ("versions", {"versions": VERSIONS | {"raycap": "def"}}, "fail", "n1: raycap def"),
        ("drivers", {"num_gpus": 1, "driver": "550.54.15", "cuda": "13.0"}, "warn", "CUDA 13.0 needs 580 or later"),
        ("drivers", {"num_gpus": 1, "driver": "580.65.06", "cuda": "13.0"}, "warn", "torch cannot use the GPUs"),
        ("drivers", {"num_gpus": 1, "driver": "580.65.06"}, "warn", "torch is a build without CUDA"),
        ("disks", {"cache_bytes": 5 * GIB}, "warn", "n1: 5.0 GiB for /cache"),
        ("disks", {"cache_bytes": GIB // 2}, "fail", "n1: 0.5 GiB for /cache"),
        ("objects", {"store_folder": "/tmp/ray"}, "warn", "n1: 8.0 GiB in /tmp/ray"),
        ("objects", {"store_bytes": 100 * 2**20}, "warn", "n1: 0.1 GiB in /dev/shm"),
        ("node java", {"java_problem": "java not found"}, "warn", "n1: java not found"),
        ("writes", {"storage_problem": "403 Forbidden"}, "fail", "n1: 403 Forbidden"),
        ("metrics", {"tracker_problem": "mlflow:5000: refused"}, "warn", "n1: mlflow:5000: refused"),
    ],
)
def test_one_node_has_a_problem(name: str, changes: dict[str, Any], level: str, text: str) -> None:
    found = findings(cluster(node(), node(**changes)))
    assert found[name].level == level and text in found[name].text and found[name].remedy
    assert [each.name for each in found.values() if each.level != "ok"] == [name]


def test_what_is_no_problem() -> None:
    unknown = node(versions=VERSIONS | {"raycap": "unknown"})
    assert cluster_checks.versions(cluster(node(), unknown)).level == "ok", "an installation has no commit"
    no_java = cluster(node(java_problem="java not found"))
    assert cluster_checks.java(no_java, scores_on_nodes=False).level == "ok", "the driver computes the scores"


def test_old_drivers_end_a_run_that_needs_them() -> None:
    facts = cluster(node(num_gpus=1, driver="550.54.15", cuda="13.0"))
    assert cluster_checks.drivers(facts, needed=True).level == "fail"
    missing = cluster_checks.drivers(cluster(node(), offered_gpus={"n0": 1}), needed=True)
    assert missing.level == "fail" and "Ray offers 1 GPUs, and there is no NVIDIA driver" in missing.text


def test_clocks_that_differ_and_a_shared_cache() -> None:
    found = findings(cluster(node(), node(), clocks={"n0": -300.0, "n1": 2.0}, shared_caches={"n1": ["n0"]}))
    assert found["clocks"].level == "warn" and found["clocks"].text.endswith("n0: -300 s")
    assert found["disks"].level == "warn" and "n1: shares its cache with n0" in found["disks"].text


def test_a_cache_limit_above_the_disk() -> None:
    assert findings(cluster(node()), features={"cache_gib": 200})["disks"].level == "warn"
    assert findings(cluster(node()), features={"cache_gib": 50})["disks"].level == "ok"


def test_a_node_that_does_not_answer() -> None:
    found = findings(cluster(node(), silent={"n9": "no answer within 60 s"}))["nodes"]
    assert found.level == "fail" and "1 of 2 do not answer: n9: no answer within 60 s" in found.text
    assert list(findings(cluster(silent={"n9": "no answer within 60 s"}))) == ["nodes"], "nothing else is known"


@pytest.mark.parametrize(
    ("types", "has_autoscaler", "level", "text"),
    [
        ([({"CPU": 8.0, "GPU": 1.0}, 4)], True, "ok", "the autoscaler can start 4 x (8 CPU + 1 GPU)"),
        (None, True, "warn", "repeat this while a job runs"),
        (None, False, "fail", "there is no autoscaler"),
    ],
)
def test_no_worker_is_up(types: Any, has_autoscaler: bool, level: str, text: str) -> None:
    facts = cluster(node(node_types=types), status=status(HEAD, has_autoscaler=has_autoscaler))
    found = findings(facts)["nodes"]
    assert found.level == level and "no worker is up, so only the head is checked" in found.text and text in found.line


@pytest.mark.parametrize(
    ("nodes", "types", "has_autoscaler", "level", "text"),
    [
        ((HEAD, LARGE, LARGE), None, False, "ok", "live nodes have it"),
        ((HEAD, LARGE), None, False, "fail", "the cluster does not have"),
        ((HEAD, LARGE), None, True, "warn", "the autoscaler's types are unknown"),
        ((HEAD,), [(LARGE, 2)], True, "ok", "the autoscaler can start 2 x (8 CPU + 1 GPU)"),
        ((HEAD, LARGE), [(LARGE, 1)], True, "fail", "can start only 1 x (8 CPU + 1 GPU)"),
        ((HEAD,), [({"CPU": 7.0, "GPU": 1.0}, 9)], True, "fail", "can start only 9 x (7 CPU + 1 GPU)"),
    ],
)
def test_what_a_stage_asks_for(
    nodes: Sequence[Resources], types: Any, has_autoscaler: bool, level: str, text: str
) -> None:
    facts = cluster(node(node_types=types), status=status(*nodes, has_autoscaler=has_autoscaler))
    found = cluster_checks.stage_fits(facts, "training", [LARGE, LARGE])
    assert found.level == level and text in found.text and bool(found.remedy) == (level != "ok")
    assert found.text.startswith("training asks for 2 x (8 CPU + 1 GPU)")


def test_the_facts_of_this_machine(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage and a tracker that this machine reaches, and others that it does not."""
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        good = collect("me", Probe(StoragePath("s3://data/probe", StorageOptions(s3)), tracker=address), "")
    assert good.storage_problem == good.tracker_problem == "" and good.cache_bytes > 0
    assert good.versions == node_facts.versions() and good.node_types is None
    refused = Probe(StoragePath("s3://absent/probe", StorageOptions(s3)), tracker=("127.0.0.1", free_port()))
    bad = collect("me", refused, "")
    assert "no such bucket" in bad.storage_problem and "refused" in bad.tracker_problem
    assert look("other")[1] == ["me"], "a node that shares the cache sees it"
    (tmp_path / "cache" / ".raycap-node-other").touch()
    assert look("me")[1] == ["other"] and look("other")[1] == []


def test_a_local_storage_must_be_the_drivers(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert collect("me", Probe(StoragePath(str(tmp_path)), "file"), "").storage_problem == ""
    assert (
        "is not the driver's folder" in collect("me", Probe(StoragePath(str(tmp_path)), "absent"), "").storage_problem
    )


def test_the_driver_by_its_files(tmp_path: Path) -> None:
    assert node_facts._nvidia(tmp_path) == (0, "")
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    for line in ("x86_64 Kernel Module  550.54.15  Tue", "Open Kernel Module for x86_64  550.54.15  Release Build"):
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {line}\nGCC version:  gcc version 12.3.0\n")
        assert node_facts._nvidia(tmp_path) == (1, "550.54.15")


def test_the_clusters_ray_version_and_token(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    address = answers["address"]
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    for version, level in ((ray.__version__, "warn"), (f"{ray.__version__}1", "warn"), ("2.9.3", "fail")):
        answers["/api/version"] = 200, {"ray_version": version}
        found = cluster_checks.jobs_server(address)
        assert found.level == level and version in found.text
    assert set(answers["tokens"]) == {None}, "a token goes only to a server that asks for one"
    answers["/api/version"] = 200, {"ray_version": ray.__version__}
    found = cluster_checks.jobs_server(address)
    assert "no token needed: everybody" in found.text and "RAY_AUTH_MODE=token" in found.remedy
    answers["/api/version"] = 200, {"ray_version": ray.__version__, "token": "Bearer right"}
    found = cluster_checks.jobs_server(address)
    assert found.level == "ok" and "token accepted" in found.text
    monkeypatch.setenv("RAY_AUTH_TOKEN", "marked-wrong")
    found = cluster_checks.jobs_server(address)
    assert found.level == "fail" and "refuses the token" in found.text and "marked-wrong" not in found.line
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "asks for a token" in cluster_checks.jobs_server(address).text
    answers["/api/version"] = 200, {}
    assert "not a Ray dashboard" in cluster_checks.jobs_server(address).text
    nobody = cluster_checks.jobs_server(f"http://127.0.0.1:{free_port()}")
    assert nobody.level == "fail" and "cannot be reached" in nobody.text


def test_a_job_that_cannot_ask_the_nodes(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative storage cannot be submitted, which is a finding, not the end of the command."""
    import ray

    answers["/api/version"] = 200, {"ray_version": ray.__version__}
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(tmp_path / "results")))
    assert main(["doctor", str(path), "--json", "--address", answers["address"], "--set", "storage=results"]) == 1
    report = json.loads(capsys.readouterr().out)
    (found,) = [found for found in report["findings"] if found["name"] == "nodes"]
    assert found["level"] == "fail" and "storage = results is relative" in found["text"]


def test_the_findings_of_a_job() -> None:
    report = {"ok": True, "findings": [vars(Finding("clocks", "ok", "agree"))]}
    log = f"a line of Ray {{\n{json.dumps(report, indent=1)}\nanother line\n"
    assert doctor._findings_in(log, "job") == [Finding("clocks", "ok", "agree")]
    (missing,) = doctor._findings_in("sh: 1: KEY: KEY is not set on the cluster\n", "job")
    assert missing.level == "fail" and "KEY is not set on the cluster" in missing.text


def test_the_variables_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {root: '${ROOT}'}  # ${NOT_THIS}\n")
    (tmp_path / "run.yaml").write_text("extends: base.yaml\n# ${NOR_THIS}\ntracking: {uri: 'http://${KEY}@x'}\n")
    assert used_variables(tmp_path / "run.yaml") == ["KEY", "ROOT"]
