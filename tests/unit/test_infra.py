"""The files of infra/: valid by their own schemas, pinned, without secrets, and their commands are ours."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raycap.jobs.serve import deployments
from raycap.pipeline.config.load import load_config
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.serving.address import TOKEN_VARIABLE, ServeArguments
from raycap.pipeline.storage.cache import SIZE_VARIABLE
from tests.conftest import ROOT
from tests.support.checkout import own
from tests.support.command_line import parse

INFRA = ROOT / "infra"
KUBERNETES = sorted((INFRA / "kubernetes").glob("*.yaml"))
KUBERNETES_VERSION = "1.33"
NO_SECRETS = (
    SIZE_VARIABLE, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "RAY_JOB_STOP_WAIT_TIME_S"
)  # fmt: skip
DEFINITIONS = {"RayCluster": "rayclusters", "RayJob": "rayjobs", "RayCronJob": "raycronjobs"}
SERVICE = INFRA / "kubernetes" / "rayservice.yaml"
CONFIGS = own((ROOT / "raycap" / "configs").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> list[Any]:
    return [
        pytest.param(document, id=f"{path.name}-{document['kind']}-{number}")
        for path in KUBERNETES
        for number, document in enumerate(documents(path))
    ]


def strict(schema: Any) -> Any:
    """The schema, which also refuses unknown fields. The API server warns of these."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and "type" in schema and not is_open:
        closed["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


@lru_cache
def definition(folder: Path, plural: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (folder / f"ray.io_{plural}.yaml").read_text()
    (found,) = [document for document in yaml.load_all(text, loader) if document]
    (version,) = [version for version in found["spec"]["versions"] if version["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


@pytest.mark.parametrize("document", manifests())
def test_manifests_are_valid(document: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if document["kind"] == "RayService":
        # there is no definition of a RayService, but there are ones of its cluster and its applications
        document = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": document["spec"]["rayClusterConfig"]}
    if document["kind"] not in DEFINITIONS:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        return
    folder = request.getfixturevalue("shared") / "schemas"
    if not folder.is_dir():
        pytest.skip(f"no KubeRay definitions at {folder}")
    jsonschema.validate(document, definition(folder, DEFINITIONS[document["kind"]]))


def test_the_service_is_valid_by_rays_schema_and_by_our_arguments() -> None:
    from ray.serve.schema import ServeDeploySchema

    document = documents(SERVICE)[0]
    assert document["spec"].keys() == {"serveConfigV2", "rayClusterConfig", "excludeHeadPodFromServeSvc"}
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(config)
    (application,) = schema.applications
    assert application.import_path == f"{deployments.__name__}:{deployments.application.__name__}"
    arguments = ServeArguments(**application.args)
    assert not arguments.insecure and arguments.replicas == (1, 4)
    (group,) = cluster_spec(document)["workerGroupSpecs"]
    assert arguments.replicas[1] == group["maxReplicas"], "each node has one GPU"
    assert config["http_options"]["request_timeout_s"] >= 2 * (arguments.limits.body_s + arguments.limits.answer_s)
    port = config["http_options"]["port"]
    (policy,) = documents(SERVICE)[1:]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port}]
    worker = worker_container(document)
    assert worker["ports"] == [{"name": "serve", "containerPort": port}]
    assert {probe["httpGet"]["path"] for probe in (worker["startupProbe"], worker["readinessProbe"])} == {"/-/healthz"}
    for bad in ({"poll": 1}, {"models": []}, {"limits": {"pixel": 1}}, {"gpus": "many"}):
        with pytest.raises(ValueError, match="validation error"):
            ServeArguments(**application.args | bad)


def ray_manifests() -> Iterator[dict[str, Any]]:
    for path in KUBERNETES:
        yield from (document for document in documents(path) if document["kind"] in {*DEFINITIONS, "RayService"})


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    spec = spec.get("jobTemplate", spec)
    found: dict[str, Any] = spec.get("rayClusterSpec", spec.get("rayClusterConfig", spec))
    return found


def test_the_ray_manifests_describe_one_cluster_of_rays_version() -> None:
    import importlib.metadata

    first, *others = [without_serving(document) for document in ray_manifests()]
    assert len(others) == 3 and all(other == first for other in others)
    assert first["rayVersion"] == importlib.metadata.version("ray") and first["authOptions"]["mode"] == "token"


def test_the_ray_manifests_have_different_names() -> None:
    """KubeRay names the head's service after them, and points the service of two at one of their heads."""
    names = [document["metadata"]["name"] for document in ray_manifests() if "name" in document["metadata"]]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_worker_of_every_shipped_configuration_fits_a_node(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "COCO", "SWIN", "REGIONS", "GLOVE", "CLASSES"):
        monkeypatch.setenv(f"RAYCAP_{name}", "/somewhere")
    is_search = path.name.startswith("search_")
    worker = load_search(path).bundle if is_search else load_config(path).workers.resources_of_worker
    limits = worker_container(documents(INFRA / "kubernetes" / "raycluster.yaml")[0])["resources"]["limits"]
    aws = documents(INFRA / "ray-cluster-aws.yaml")[0]["available_node_types"]["spot_gpu"]["resources"]
    for node in ({"CPU": limits["cpu"], "GPU": limits["nvidia.com/gpu"]}, aws):
        assert all(amount <= float(node[name]) for name, amount in worker.items())


def without_serving(document: dict[str, Any]) -> dict[str, Any]:
    """The cluster of a manifest, without what only a service has."""
    spec = copy.deepcopy(cluster_spec(document))
    if document["kind"] == "RayService":
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            (container,) = group["template"]["spec"]["containers"]
            container["env"] = [each for each in container["env"] if each["name"] != TOKEN_VARIABLE]
            container["ports"] = [each for each in container.get("ports", ()) if each["name"] != "serve"]
        (worker,) = spec["workerGroupSpecs"]
        worker |= {"replicas": 0, "minReplicas": 0}
        (container,) = worker["template"]["spec"]["containers"]
        for name in ("ports", "startupProbe", "readinessProbe"):
            del container[name]
    return spec


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pod_specs(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_specs(value)


@pytest.mark.parametrize("document", manifests())
def test_pods_are_not_root_read_only_and_bounded(document: dict[str, Any]) -> None:
    for pod in pod_specs(document):
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
            assert (
                context["capabilities"] == {"drop": ["ALL"]} and context["seccompProfile"]["type"] == "RuntimeDefault"
            )
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"][
                "limits"
            ].keys()
            assert ":" in container["image"] and not container["image"].endswith(":latest")
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert "emptyDir" in volumes[mounts["/tmp"]]
            for variable in container.get("env", ()):
                if variable["name"] not in NO_SECRETS:
                    assert "secretKeyRef" in variable["valueFrom"] and "value" not in variable


def worker_container(document: dict[str, Any]) -> dict[str, Any]:
    (group,) = cluster_spec(document)["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    worker: dict[str, Any] = container
    return worker


def commands() -> list[list[str]]:
    """Every raycap command in infra/, as words without `raycap`."""
    found = []
    for document in ray_manifests():
        job = document["spec"].get("jobTemplate", document["spec"])
        if "entrypoint" in job:
            found.append(shlex.split(job["entrypoint"]))
    for path in KUBERNETES:
        for document in documents(path):
            for pod in pod_specs(document):
                found += [container["command"] for container in pod["containers"] if "command" in container]
    texts = [INFRA / name for name in ("README.md", "Dockerfile", "ray-cluster-aws.yaml", "compose.yaml")]
    for path in texts:
        text = re.sub(r"\\\n#?", " ", path.read_text())
        for line in re.findall(r"^(?:#   |RUN |   )(raycap [a-z].*)$", text, re.MULTILINE):
            found.append(shlex.split(line, comments=True))
    assert all(words[0] == "raycap" for words in found) and len(found) >= 8
    return [words[1:] for words in found]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    context = parse(words)
    if words[0] == "submit" and context.params["command"] not in ("status", "logs", "stop"):
        parse([context.params["command"], context.params["argument"], *context.args])


def test_the_dockerfile_is_pinned_and_copies_what_exists() -> None:
    text = (INFRA / "Dockerfile").read_text()
    stages: set[str] = set()
    for image, name in re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE):
        assert image == "${BASE}" or image in stages, f"{image} is not a stage of this file"
        stages.add(name)
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base), "a patch version and a named distribution"
    assert "--constraint requirements.lock" in text and re.search(r"uv==\d+\.\d+\.\d+", text)
    assert "{cpu}" not in text and all(f" {flavor}) " in text for flavor in ("cpu", "cuda"))
    ignore = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignore, f"{source} does not reach the builder"
    last = text[text.rindex("\nFROM ") :]
    assert "USER 1000:1000" in last and last.index("useradd") < last.index("USER ")
    assert "openjdk" in text and "infra/spice.sh" in text and "RAYCAP_SPICE_MODELS=/opt/spice" in last


def test_no_file_holds_a_secret_or_an_open_registry() -> None:
    for path in [*KUBERNETES, *INFRA.glob("*.yaml"), INFRA / "Dockerfile", INFRA / "README.md"]:
        text = path.read_text()
        assert "kind: Secret" not in text and "stringData" not in text, path.name
        assert not re.search(r"AKIA[0-9A-Z]{16}|-----BEGIN|://[^/\s:@]+:[^/\s@$]+@", text), path.name
        assert ":latest" not in text, path.name
