"""What this machine, or a cluster, can and cannot do: one small check each, with the remedy where something is amiss.

A check never raises: what it finds is a Finding. `fail` means that a configuration cannot run; `warn` that a part of
it will be missing, slower or delayed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import platform
import shutil
import socket
import stat
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.cluster.jobs_api import JobsServer, UnreachableError, find_token
from pipeline.config.run import RunConfig
from pipeline.errors import UserError
from pipeline.scoring.java import JavaError, free_memory_mb, java_version
from pipeline.scoring.java_metrics import spice_models
from pipeline.storage.cache import cache_folder
from pipeline.storage.path import StorageError, StoragePath, is_remote, try_rights

LEAST_DISK_GIB, ENOUGH_DISK_GIB = 1, 10
LEAST_MEMORY_GIB, ENOUGH_MEMORY_GIB = 1, 4  # Ray and one worker; SPICE's heap beside them
WORKER_GIB = 0.75  # a worker process before its model: torch, Ray and their libraries
SHM_GIB = 0.5  # what Ray's object store takes here
TRACKER_S = 5.0


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        return f"{self.level:<5} {self.name:<10} {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def torch_pair() -> Finding:
    """torch and torchvision from different places do not work together, which shows only when torchvision is used."""
    try:
        torch, vision = importlib.import_module("torch"), importlib.import_module("torchvision")
        vision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:  # whatever a broken pair raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Finding(
            "torch", "fail", f"torch and torchvision do not work together: {reason}",
            "install both from one place, as `uv pip install -r requirements.lock` does",
        )  # fmt: skip
    return Finding("torch", "ok", f"torch {torch.__version__}, torchvision {vision.__version__}")


def bfloat16(config: RunConfig | None) -> Finding:
    from pipeline.features.extraction import resolve_dtype

    wanted = "auto" if config is None else config.features.compute_dtype
    in_hardware = resolve_dtype("auto") == "bfloat16"
    if in_hardware:
        return Finding(
            "bfloat16", "ok", "in hardware: features are computed in bfloat16 unless a configuration says float32"
        )
    if wanted == "bfloat16":
        return Finding(
            "bfloat16", "warn", "features.compute_dtype asks for bfloat16, which this processor only emulates",
            "set features.compute_dtype=float32, which is faster here",
        )  # fmt: skip
    return Finding("bfloat16", "ok", "not in hardware: features are computed in float32")


def gpus(config: RunConfig | None, elsewhere: bool) -> Finding:
    """GPUs that torch sees, against what the workers ask for; `elsewhere` is a cluster whose nodes have them."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    wanted = gpus_wanted(config)
    if wanted > count and not elsewhere:
        return Finding(
            "gpus", "fail", f"{wanted:g} are asked for and torch sees {count}",
            "set workers.gpus_per_worker and features.gpus_per_actor to 0, join a cluster, or check the driver",
        )  # fmt: skip
    if wanted > count:
        return Finding("gpus", "ok", f"{count} here; the {wanted:g} that are asked for must be on the cluster's nodes")
    return Finding("gpus", "ok", f"{count}: {names}" if count else "none here, none asked for")


def gpus_wanted(config: RunConfig | None) -> float:
    if config is None:
        return 0
    training = config.workers.num_workers * config.workers.gpus_per_worker
    return max(training, config.features.num_actors * config.features.gpus_per_actor)


def java() -> Finding:
    try:
        return Finding("java", "ok", java_version())
    except JavaError as error:
        return Finding("java", "warn", f"METEOR and SPICE will be reported as unavailable: {error}")


def spice() -> Finding:
    try:
        return Finding("spice", "ok", f"models in {spice_models()}")
    except JavaError as error:
        return Finding("spice", "warn", f"SPICE will be reported as unavailable: {error}")


def disk(folder: Path, name: str, remedy: str) -> Finding:
    """Free space where a folder is or will be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    text = f"{free:.1f} GiB free for {folder}"
    if free < LEAST_DISK_GIB:
        return Finding(name, "fail", text, remedy)
    return Finding(name, "ok" if free >= ENOUGH_DISK_GIB else "warn", text, "" if free >= ENOUGH_DISK_GIB else remedy)


def memory(config: RunConfig | None, elsewhere: bool) -> Finding:
    free = free_memory_mb() / 2**10
    workers = 0 if config is None or elsewhere else config.workers.num_workers
    least = LEAST_MEMORY_GIB + WORKER_GIB * workers
    text = f"{free:.1f} GiB free"
    if free < least:
        return Finding(
            "memory", "fail", f"{text}, {workers} workers and Ray need {least:.1f}", "take fewer workers or free some"
        )
    if free < ENOUGH_MEMORY_GIB:
        return Finding("memory", "warn", text, f"SPICE needs {ENOUGH_MEMORY_GIB} GiB beside the rest")
    return Finding("memory", "ok", text)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Ray's object store lies there; without room it moves to /tmp, which is slower."""
    if not folder.is_dir():
        return Finding("shm", "ok", f"no {folder} on this system")
    free = shutil.disk_usage(folder).free / 2**30
    if free < SHM_GIB:
        return Finding(
            "shm", "warn", f"{free:.2f} GiB free in {folder}", "start the container with --shm-size=2g or more"
        )
    return Finding("shm", "ok", f"{free:.1f} GiB free in {folder}")


def storage(place: StoragePath) -> Finding:
    """Whether results can be written: a conditional write, tried and removed."""
    try:
        try_rights(place)
    except StorageError as error:
        remedy = (
            "check the bucket's policy, the credentials and storage.endpoint_url"
            if place.is_remote
            else "mend the folder's rights or set another storage"
        )
        return Finding("storage", "fail", str(error), remedy)
    return Finding("storage", "ok", f"{place}: conditional write, read, list and delete work")


def data(config: RunConfig) -> Finding:
    """Whether the data set's folder can be reached; what is in it is for `raycap check` to say."""
    section = config.data
    if section.root is None:
        return Finding("data", "ok", "drawn, not read")
    root = StoragePath(section.root, config.storage.options)
    if not root.is_remote:
        root = StoragePath(str(Path(section.root).expanduser().absolute()), config.storage.options)
    names = [source.annotations for source in section.sources] or [section.annotations]
    try:
        missing = [name for name in names if not (root / name).exists()]
    except OSError as error:
        return Finding("data", "fail", str(error), "check data.root and the credentials")
    if missing:
        return Finding("data", "fail", f"{root / missing[0]} is not there", "check data.root and data.annotations")
    return Finding("data", "ok", f"{root / names[0]} is there")


def tracker(config: RunConfig) -> Finding:
    """Whether the tracker answers; a run goes on without it and sends what it missed."""
    from pipeline.tracking.mlflow_client import public_uri, tracking_client

    if not config.tracking.enabled:
        return Finding("tracker", "ok", "off")
    where, later = (
        public_uri(config),
        "training goes on without it; check tracking.uri, then `raycap sync` sends the rest",
    )
    parts = urllib.parse.urlsplit(config.tracking.uri or "")
    if parts.scheme not in ("http", "https"):
        return Finding("tracker", "ok", f"{where}: a file, made when it is first used" if not parts.hostname else where)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), TRACKER_S).close()
        tracking_client(config).search_experiments(max_results=1)
    except Exception as error:  # whatever the tracker answers
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Finding("tracker", "warn", f"{where} does not answer: {reason}", later)
    return Finding("tracker", "ok", f"{where} answers")


def ray_here() -> Finding:
    """Ray as it is installed here, with what the jobs server needs."""
    try:
        version = importlib.metadata.version("ray")
        importlib.import_module("aiohttp")
    except ImportError as error:
        return Finding("ray", "fail", f"{error}", "install ray[data,default,train,tune], as requirements.lock has it")
    return Finding("ray", "ok", f"Ray {version}")


def token_here() -> Finding:
    """A token for clusters that ask for one, and whether its file is for its owner only."""
    try:
        token, origin = find_token()
    except UserError as error:
        return Finding("token", "fail", str(error))
    if token is None:
        return Finding("token", "ok", "none; a cluster that asks for one needs RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")
    path = Path(origin)
    if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return Finding("token", "warn", f"from {origin}, which others on this machine can read", f"chmod 600 {origin}")
    return Finding("token", "ok", f"from {origin}")


def ray_there(address: str) -> Finding:
    """The cluster's jobs server: reached, the token taken, and Ray's version the one that the code runs with here."""
    try:
        server = JobsServer(address)
        there = str(server.version()["ray_version"])
    except UserError as error:
        return Finding("cluster", "fail", str(error))
    except UnreachableError as error:
        return Finding(
            "cluster", "fail", str(error), "check the address, the network and that the head runs a dashboard"
        )
    here = importlib.metadata.version("ray")
    text = f"{server.address}, Ray {there}, {'token taken' if server.token_sent else 'no token asked for'}"
    if there.split(".")[:2] != here.split(".")[:2]:
        return Finding("cluster", "fail", f"{text}; here Ray {here}", f"give the cluster an image with Ray {here}")
    if there != here:
        return Finding("cluster", "warn", f"{text}; here Ray {here}", "use one version at both ends")
    return Finding("cluster", "ok", text)


def resources_there(address: str, config: RunConfig | None) -> Finding:
    """What the cluster's living nodes have, against what the workers ask for; a cluster may grow."""
    try:
        nodes = JobsServer(address).nodes()
    except (UserError, UnreachableError, FileNotFoundError) as error:
        return Finding("nodes", "warn", f"cannot be listed: {error}")
    alive = [node.get("resources_total") or {} for node in nodes if node.get("state") == "ALIVE"]
    cpus, cards = (sum(float(node.get(kind, 0)) for node in alive) for kind in ("CPU", "GPU"))
    text = f"{len(alive)} with {cpus:g} CPUs and {cards:g} GPUs"
    wanted = 0 if config is None else math.ceil(config.workers.num_workers * config.workers.cpus_per_worker)
    if wanted > cpus or gpus_wanted(config) > cards:
        asked = f"{wanted} CPUs and {gpus_wanted(config):g} GPUs"
        return Finding("nodes", "warn", f"{text}, {asked} are asked for", "the job waits until the cluster has grown")
    return Finding("nodes", "ok", text)


def examine(config: RunConfig | None, address: str | None) -> Iterator[Finding]:
    """All checks, one after another. With an address the compute is the cluster's, without it this machine's."""
    elsewhere = address is not None or "RAY_ADDRESS" in os.environ
    checks: list[Callable[[], Finding]] = [
        *(python, torch_pair, lambda: bfloat16(config), lambda: gpus(config, elsewhere), java, spice),
        lambda: disk(cache_folder(), "cache", "free some, or set RAYCAP_CACHE to a folder on another disk"),
        *(lambda: memory(config, elsewhere), shared_memory, ray_here, token_here),
    ]
    if address is not None:
        checks += [lambda: ray_there(address), lambda: resources_there(address, config)]
    if config is not None:
        given = config
        if not is_remote(given.storage.uri):
            checks.append(lambda: disk(given.working_path, "disk", "free some, or set another storage"))
        checks += [lambda: storage(given.storage_place), lambda: data(given), lambda: tracker(given)]
    for check in checks:
        yield check()


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "ok": all(finding.level != "fail" for finding in findings),
        "findings": [vars(finding) for finding in findings],
    }
