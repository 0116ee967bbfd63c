"""What a node of a cluster has and can reach. `collect` and `look` run on the node, as tasks of Ray."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from raycap.pipeline.evaluation.scores.java import JavaError, java_version
from raycap.pipeline.storage.cache import usable_bytes, used_bytes
from raycap.pipeline.storage.path import StoragePath, cache_folder, try_rights
from raycap.pipeline.version import commit

CONNECT_S = 5.0
MARKER = ".raycap-node-"  # a node's file in its cache; another node that sees it shares the cache


@dataclass(frozen=True)
class Probe:
    """What a node tries: to write to the storage, to find a file that the driver wrote, to reach the tracker."""

    storage: StoragePath | None = None
    file: str = ""  # the name of the driver's file in a local storage
    tracker: tuple[str, int] | None = None  # host and port


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node. A problem is "" where there is none."""

    host: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # of python, torch, ray and raycap
    num_gpus: int = 0  # that the NVIDIA driver has
    driver: str = ""  # the version of the NVIDIA driver
    cuda: str = ""  # the CUDA version of torch, on nodes with a GPU
    cuda_works: bool = False  # whether torch can use the GPUs
    cache: str = ""  # the folder for local copies
    cache_bytes: int = 0  # the size that it can reach
    store_folder: str = ""  # the folder of Ray's object store; "" if it cannot be found
    store_bytes: int = 0
    java_problem: str = ""
    storage_problem: str = ""
    tracker_problem: str = ""
    node_types: Sequence[tuple[dict[str, float], int]] | None = None  # of the autoscaler: (resources, largest number)


def collect(node: str, probe: Probe, gcs_address: str) -> NodeFacts:
    """The facts of the node on which this runs. node: its id. gcs_address: of the cluster."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"{MARKER}{node}").touch()
    held = used_bytes([cache / "shards", *(cache / "images").glob("??")])
    num_gpus, driver = _nvidia()
    cuda, cuda_works = _torch_cuda() if num_gpus else ("", False)
    store_folder, store_bytes = _object_store()
    return NodeFacts(
        host=platform.node(),
        versions=versions(),
        num_gpus=num_gpus,
        driver=driver,
        cuda=cuda,
        cuda_works=cuda_works,
        cache=str(cache),
        cache_bytes=usable_bytes(cache, held),
        store_folder=store_folder,
        store_bytes=store_bytes,
        java_problem=_java_problem(),
        storage_problem=_storage_problem(probe),
        tracker_problem=_tracker_problem(probe.tracker),
        node_types=_node_types(gcs_address),
    )


def look(node: str) -> tuple[float, list[str]]:
    """The node's clock (Unix seconds), and the ids of other nodes that share its cache. Removes the node's marker."""
    names = {path.name.removeprefix(MARKER) for path in cache_folder().glob(f"{MARKER}*")}
    (cache_folder() / f"{MARKER}{node}").unlink(missing_ok=True)
    return time.time(), sorted(names - {node})


def versions() -> dict[str, str]:
    """The versions that must be equal on all machines. Builds of torch for different hardware count as equal."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "raycap": commit()}
    for package in ("ray", "torch"):
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _nvidia(folder: Path = Path("/proc/driver/nvidia")) -> tuple[int, str]:
    """The number of GPUs and the version of the NVIDIA driver; (0, "") without a driver. folder: the driver's."""
    with suppress(OSError):
        version = re.search(r"\b\d{3}\.\d+(\.\d+)*", (folder / "version").read_text())
        return len(list((folder / "gpus").glob("*"))), version[0] if version else "unknown"
    return 0, ""


def _torch_cuda() -> tuple[str, bool]:
    """The CUDA version of torch ("" for a build without CUDA), and whether torch can use a GPU here."""
    import torch

    return torch.version.cuda or "", torch.cuda.is_available()


def _object_store() -> tuple[str, int]:
    """The folder and the size in bytes of Ray's object store, from the command line of the node's raylet."""
    for process in psutil.Process().parents():
        with suppress(psutil.Error):
            options = dict(word.split("=", 1) for word in process.cmdline() if word.startswith("--") and "=" in word)
            if "--plasma_directory" in options:
                return options["--plasma_directory"], int(options["--object_store_memory"])
    return "", 0


def _node_types(gcs_address: str) -> list[tuple[dict[str, float], int]] | None:
    """The autoscaler's node types: their resources and their largest number. None where no autoscaler runs.

    Ray publishes them nowhere. On the head of a cluster of `ray up` the autoscaler's command line names their file;
    KubeRay's autoscaler runs in a container of its own.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            options = dict(word.split("=", 1) for word in process.cmdline() if word.startswith("--") and "=" in word)
            if "--autoscaling-config" in options and options.get("--gcs-address") == gcs_address:
                config = yaml.safe_load(Path(options["--autoscaling-config"]).expanduser().read_text())
                most = int(config.get("max_workers", 2))
                return [
                    (dict(kind.get("resources") or {}), min(most, int(kind.get("max_workers", most))))
                    for name, kind in config["available_node_types"].items()
                    if name != config["head_node_type"]
                ]
    return None


def _java_problem() -> str:
    try:
        java_version()
    except JavaError as error:
        return str(error)
    return ""


def _storage_problem(probe: Probe) -> str:
    """Why this node cannot write to the storage, or does not see the driver's files there."""
    if probe.storage is None:
        return ""
    try:
        if not probe.storage.is_remote and not (probe.storage.path / probe.file).exists():
            return f"{probe.storage} is not the driver's folder"
        try_rights(probe.storage)
    except Exception as error:  # boto3 raises many types for wrong credentials and settings
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _tracker_problem(tracker: tuple[str, int] | None) -> str:
    """Why this node cannot connect to the tracker."""
    if tracker is None:
        return ""
    try:
        socket.create_connection(tracker, CONNECT_S).close()
    except OSError as error:
        return f"{tracker[0]}:{tracker[1]}: {error.strerror or error}"
    return ""
