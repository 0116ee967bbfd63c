"""The commands on the containers of infra/compose.yaml, which are hosts with disks and addresses of their own, and
what happens to a job when one of them fails."""

from __future__ import annotations

import json
import re
import resource
import shlex
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.pipeline.storage.path import StoragePath
from tests.conftest import ROOT, small_config
from tests.support.containers import IMAGE, SERVER, TRACKER, Containers, containers, docker
from tests.support.ray_cluster import wait_until
from tests.support.serving import FILE_HEAD, MULTIPART

NETWORK, PAUSE_S = "raycap_default", 60.0
pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    with containers(tmp_path_factory.mktemp("containers")) as cluster:
        yield cluster


def settings(name: str) -> dict[str, Any]:
    """A stage of a minute or less on two workers, one on each container."""
    values = small_config({"uri": f"s3://raycap/{name}"}, name=name)
    values["stages"] = values["stages"][:1]
    values["stages"][0] |= {"epochs": 30, "validate_every_epochs": 10}
    values["workers"] |= {"num_workers": 2, "dry_run": False}
    values["features"] |= {"max_images_for_tasks": 0, "rows_per_shard": 4, "batch_size": 2}
    return values


def scores(output: str) -> list[list[str]]:
    """The lines of the final table without METEOR and SPICE, which have stand-ins in tests on this machine."""
    lines = [line.split() for line in output.splitlines() if re.match(r"\w+ \(\d+ images\)", line)]
    assert len(lines) == 3, output[-4000:]
    return [line[:7] + line[8:10] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(cluster: Containers) -> list[list[str]]:
    """The scores of the same run on this machine, with its storage on the disk."""
    values = settings("local") | {"storage": str(cluster.folder / "results")}
    program, log = cluster.start("run", cluster.write("local.yaml", values))
    assert program.wait(900) == 0, log.read_text()
    return scores(log.read_text())


def test_commands(cluster: Containers, undisturbed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    values = settings("small") | {"tracking": {"uri": "http://mlflow:5000"}}
    config = cluster.write("small.yaml", values)

    def submit(*words: str) -> str:
        code, output = cluster.submit(*words)
        assert code == 0, output[-6000:]
        return output

    assert scores(submit("run", config)) == undisturbed
    with urllib.request.urlopen(f"{TRACKER}/api/2.0/mlflow/registered-models/search", timeout=60) as answer:
        assert json.load(answer)["registered_models"], "the model is registered"
    evaluated = re.findall(r"^  (?:BLEU-\d|ROUGE-L|CIDEr-D) +(\S+)", submit("evaluate", config), re.MULTILINE)
    assert evaluated[:6] == undisturbed[0][3:]

    search = {"name": "grid", "base": "small.yaml", "algorithm": "grid", "space": {"model.dynamic_expansion": [1, 2]}}
    search["trial"] = {"stages": ["xe_frozen"], "epochs": 2}
    output = submit("tune", cluster.write("search.yaml", search))
    assert output.count("finished at epoch 2") == 2

    assert "becomes it" in submit("retrain", cluster.write("retrain.yaml", settings("again") | {"retrain": {}}))

    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, cluster.environment[name])
    storage = StoragePath("s3://raycap")
    names = [path for path, _ in storage.walk()]
    (bundle,) = {path.rsplit("/", 1)[0] for path in names if re.match(r"small/models/.*model\.safetensors$", path)}
    images = sorted(path for path in names if path.startswith("small/") and path.endswith(".png"))
    assert images
    folder = images[0].rsplit("/", 1)[0]
    submit("caption", f"s3://raycap/{folder}", "--model", f"s3://raycap/{bundle}", "--out", "s3://raycap/captions")
    captions = b"".join((storage / path).read_bytes() for path, _ in storage.walk() if path.startswith("captions/"))
    assert captions.count(b'"caption"') == sum(path.startswith(folder) for path in images)

    serve = ["raycap", "serve", "--host", "0.0.0.0", "--address", "auto", "--model", f"s3://raycap/{bundle}"]
    cluster.compose("exec", "--detach", "head", *serve)
    body = FILE_HEAD + (storage / images[0]).read_bytes() + b"\r\n--x--\r\n"
    headers = MULTIPART | {"Authorization": f"Bearer {cluster.token}"}
    request = urllib.request.Request(f"{SERVER}/caption", data=body, headers=headers)
    for _ in range(60):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["captions"][0]["caption"]
            break
        except OSError:  # the server is starting
            time.sleep(5)
    else:
        raise AssertionError("the server did not answer")
    cluster.compose("exec", "head", "serve", "shutdown", "--yes", "--address", "http://127.0.0.1:8265")


def kill_a_worker(cluster: Containers) -> None:
    docker("kill", "raycap-worker-1")
    docker("start", "raycap-worker-1")


def pause_a_worker(cluster: Containers) -> None:
    docker("pause", "raycap-worker-1")
    time.sleep(PAUSE_S)
    docker("unpause", "raycap-worker-1")


def cut_off_a_worker(cluster: Containers) -> None:
    docker("network", "disconnect", NETWORK, "raycap-worker-1")
    time.sleep(PAUSE_S)
    docker("network", "connect", NETWORK, "raycap-worker-1")


def stop_the_store(cluster: Containers) -> None:
    docker("stop", "raycap-store-1")
    time.sleep(PAUSE_S)
    docker("start", "raycap-store-1")


def restart_the_head(cluster: Containers) -> None:
    docker("restart", "--time", "10", "raycap-head-1")


def fill_a_disk(cluster: Containers) -> None:
    """Fills /tmp and the cache of a worker for a minute."""
    fill = "for place in /tmp /cache; do cat /dev/zero > $place/filler; done; sleep 60; rm /tmp/filler /cache/filler"
    docker("exec", "raycap-worker-1", "sh", "-c", fill)


FAULTS = [kill_a_worker, pause_a_worker, cut_off_a_worker, stop_the_store, restart_the_head, fill_a_disk]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_survives(cluster: Containers, undisturbed: list[list[str]], fault: Callable[[Containers], None]) -> None:
    """The run ends with the scores of an undisturbed one, at once or, after another exit code than 0, repeated."""
    config = cluster.write(f"{fault.__name__}.yaml", settings(fault.__name__))

    def disturb(log: Path) -> None:
        wait_until(log, lambda text: "xe_frozen  2/" in text)
        fault(cluster)

    code, output = cluster.submit("run", config, meanwhile=disturb)
    print(f"{fault.__name__}: exit code {code}\n{output[-1500:]}")
    for _ in range(3):
        if code == 0:
            break
        cluster.compose("up", "--detach", "--wait")
        code, again = cluster.submit("run", config)
        assert code != 0 or re.search(r"continues from step|xe_frozen: .* done", again), "the stage began anew"
        output = again
    assert code == 0 and scores(output) == undisturbed


def test_the_launchers_commands(tmp_path: Path) -> None:
    """Two containers in place of AWS' nodes: a worker joins by the commands of the launcher's file, with the token."""
    launcher = yaml.safe_load((ROOT / "infra" / "ray-cluster-aws.yaml").read_text())
    token = tmp_path / "auth_token"
    token.write_text("0" * 64)
    token.chmod(0o644)
    files = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # this machine may allow fewer
    run_options = " ".join(launcher["docker"]["run_options"]).replace("65536:65536", f"{files}:{files}")
    options = shlex.split(run_options.replace("10g", "2g"))
    options += ["--volume", f"{token}:/home/raycap/.ray/auth_token:ro", "--network", "raycap-nodes"]
    docker("network", "create", "raycap-nodes")
    try:
        for name in ("head", "worker"):
            docker("run", "--detach", "--init", "--name", f"raycap-node-{name}", *options, IMAGE, "sleep", "infinity")
        # the launcher writes this file
        docker(
            "cp",
            str(ROOT / "infra" / "ray-cluster-aws.yaml"),
            "raycap-node-head:/home/raycap/ray_bootstrap_config.yaml",
        )
        for command in launcher["head_start_ray_commands"]:
            docker("exec", "raycap-node-head", "bash", "-c", command)
        for command in launcher["worker_start_ray_commands"]:
            docker("exec", "--env", "RAY_HEAD_IP=raycap-node-head", "raycap-node-worker", "bash", "-c", command)
        status = docker("exec", "raycap-node-head", "bash", "-c", "RAY_AUTH_MODE=token ray list nodes --limit 10")
        assert status.count("ALIVE") == 2, status
    finally:
        docker("rm", "--force", "--volumes", "raycap-node-head", "raycap-node-worker")
        docker("network", "rm", "raycap-nodes")
