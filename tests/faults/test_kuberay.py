"""What KubeRay's own code makes of the manifests in infra/kubernetes: pods, accounts and roles. Needs Go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

KUBERAY = "v1.6.1"
MANIFESTS = ("raycluster", "rayjob", "raycronjob", "rayservice")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled tests/support/kuberay/main.go."""
    if shutil.which("go") is None:
        pytest.skip("no Go on the PATH")
    folder = tmp_path_factory.mktemp("kuberay")
    shutil.copy(ROOT / "tests" / "support" / "kuberay" / "main.go", folder)
    environment = os.environ | {"GOFLAGS": "-mod=mod -buildvcs=false"}
    module = f"github.com/ray-project/kuberay/ray-operator@{KUBERAY}"
    for command in (["mod", "init", "kuberaypods"], ["get", module], ["mod", "tidy"], ["build", "-o", "pods", "."]):
        done = subprocess.run(["go", *command], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            if command[0] == "build":
                pytest.fail(done.stderr)
            pytest.skip(f"KubeRay {KUBERAY} cannot be fetched: {reason}")
    return folder / "pods"


@pytest.mark.proof
@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberays_pods_can_scale_and_reach_the_cloud(program: Path, name: str) -> None:
    manifest = ROOT / "infra" / "kubernetes" / f"{name}.yaml"
    done = subprocess.run([str(program), str(manifest)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    head = made["Head"]["spec"]
    assert head["serviceAccountName"] == "raycap-head" and head["automountServiceAccountToken"] is True
    assert [container["name"] for container in head["containers"]] == ["ray-head", "autoscaler"]
    (subject,) = made["RoleBinding"]["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", "raycap-head")
    assert any("rayclusters" in rule["resources"] and "patch" in rule["verbs"] for rule in made["Role"]["rules"])
    for worker in made["Workers"]:
        assert worker["spec"]["serviceAccountName"] == "raycap"
        assert worker["spec"]["automountServiceAccountToken"] is False
    for pod in (made["Head"], *made["Workers"]):
        ray = pod["spec"]["containers"][0]
        shared = [mount["name"] for mount in ray["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        assert len(shared) == 1, "KubeRay keeps our volume for the object store and adds none"
        command = " ".join(ray["args"] + ray["command"])
        assert "--num-cpus=0" in command if pod is made["Head"] else "--num-gpus=1" in command, command
    if name == "rayservice":
        serve = made["Serve"]
        assert (serve["metadata"]["name"], serve["metadata"]["namespace"]) == ("raycap-serve-svc", "raycap")
        assert [port["port"] for port in serve["spec"]["ports"]] == [8000]
        for worker in made["Workers"]:
            container = worker["spec"]["containers"][0]
            probes = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")}
            assert probes == {"/-/healthz"}, "KubeRay keeps the probes of a node with a proxy"


@pytest.mark.proof
def test_kuberay_refuses_what_it_does_not_know(program: Path, tmp_path: Path) -> None:
    manifest = (ROOT / "infra" / "kubernetes" / "rayservice.yaml").read_text()
    for good, bad in (("serveConfigV2:", "serveConfigV3:"), ("headGroupSpec:", "headSpec:")):
        (tmp_path / "bad.yaml").write_text(manifest.replace(good, bad, 1))
        done = subprocess.run([str(program), str(tmp_path / "bad.yaml")], capture_output=True, text=True)
        assert done.returncode == 1 and "unknown field" in done.stderr, done.stderr
