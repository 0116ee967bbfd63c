"""Checks of this machine, with a remedy for each problem. A check returns a Finding and never raises."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import stat
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from raycap.jobs.doctor.finding import Finding
from raycap.models.config import BackboneConfig
from raycap.pipeline.cluster.jobs_api import find_token
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import FeatureSection
from raycap.pipeline.data.formats.source import find_files
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.java import JavaError, free_memory_mb, java_version, spice_models
from raycap.pipeline.features.precision import measure_extraction
from raycap.pipeline.runtime.secrets import split_userinfo
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path, try_rights
from raycap.pipeline.storage.s3 import StorageError, is_remote
from raycap.pipeline.tracking.mlflow_client import SERVER_REMEDY, is_only_here, public_uri, reason_of, tracking_client

MIN_DISK_GIB, ENOUGH_DISK_GIB = 1, 10  # free space below the first is a failure, below the second a warning
MIN_MEMORY_GIB, ENOUGH_MEMORY_GIB = 1, 4  # the first is for Ray and one worker, the second also for SPICE's heap
WORKER_GIB = 0.75  # a worker process uses this much before it loads a model
OBJECT_STORE_GIB = 0.5  # the size of the object store of a Ray that `cluster.start` starts
TRACKER_TIMEOUT_S = 5.0
MAX_LOOKED_UP = 100  # annotation files


def python() -> Finding:
    """The versions of Python and of the operating system."""
    return Finding("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def torch_pair() -> Finding:
    """Whether torch and torchvision fit each other. Different builds fail only when an operator is called, as here."""
    try:
        torch, vision = importlib.import_module("torch"), importlib.import_module("torchvision")
        vision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:  # a broken pair can raise any error
        remedy = "install both from one place, as `uv pip install -r requirements.lock` does"
        return Finding("torch", "fail", f"torch and torchvision do not work together: {reason_of(error)}", remedy)
    return Finding("torch", "ok", f"torch {torch.__version__}, torchvision {vision.__version__}")


def bfloat16(config: RunConfig | None) -> Finding:
    """The time of a backbone's blocks in float32 and in bfloat16, measured here, and the faster one."""
    if config is not None and not config.has_backbone:
        return Finding("bfloat16", "ok", "a detector's features need no backbone")
    backbone, settings = BackboneConfig(), FeatureSection()
    if config is not None:
        backbone, settings = config.backbone, config.features
    try:
        times = measure_extraction(backbone, settings)
    except (RuntimeError, ValueError) as error:  # no GPU here, or one without free memory
        return Finding("bfloat16", "warn", f"the speed of {backbone.name} cannot be measured here: {reason_of(error)}")
    text = f"{times}, with one block of each stage of {backbone.name}"
    if settings.compute_dtype == "bfloat16" and times.fastest == "float32":
        return Finding("bfloat16", "warn", text, "set features.compute_dtype=float32, which is not slower here")
    return Finding("bfloat16", "ok", f"{text}; auto means {times.fastest} in a storage that has not decided yet")


def gpus(config: RunConfig | None, on_cluster: bool) -> Finding:
    """Compares the GPUs that torch sees with those of the configuration, which may be on a cluster's nodes instead."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    wanted = gpus_wanted(config)
    if wanted <= count:
        return Finding("gpus", "ok", f"{count}: {names}" if count else "none here, none needed")
    if on_cluster:
        return Finding("gpus", "ok", f"{count} here; the configuration uses {wanted:g} on the cluster's nodes")
    remedy = "set workers.gpus_per_worker and features.gpus_per_actor to 0, join a cluster, or check the driver"
    return Finding("gpus", "fail", f"the configuration uses {wanted:g}, torch sees {count}", remedy)


def gpus_wanted(config: RunConfig | None) -> float:
    """The number of GPUs that a run needs at a time. Extraction and training do not run at the same time."""
    if config is None:
        return 0
    training = config.workers.num_workers * config.workers.gpus_per_worker
    return max(training, config.features.least_actors * config.features.gpus_per_actor)


def java() -> Finding:
    """Whether Java, which METEOR and SPICE need, can be started."""
    try:
        return Finding("java", "ok", java_version())
    except JavaError as error:
        return Finding("java", "warn", f"METEOR and SPICE will be unavailable: {error}")


def spice() -> Finding:
    """Whether the models of SPICE are installed."""
    try:
        return Finding("spice", "ok", f"models in {spice_models()}")
    except JavaError as error:
        return Finding("spice", "warn", f"SPICE will be unavailable: {error}")


def disk(folder: Path, name: str, remedy: str) -> Finding:
    """The free space on the disk of a folder, which need not exist yet. name: that of the finding."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    text = f"{free:.1f} GiB free for {folder}"
    if free >= ENOUGH_DISK_GIB:
        return Finding(name, "ok", text)
    return Finding(name, "warn" if free >= MIN_DISK_GIB else "fail", text, remedy)


def memory(config: RunConfig | None, on_cluster: bool) -> Finding:
    """Whether the free memory suffices for Ray, the workers on this machine and SPICE."""
    free = free_memory_mb() / 2**10
    workers = 0 if config is None or on_cluster else config.workers.num_workers
    needed = MIN_MEMORY_GIB + WORKER_GIB * workers
    text = f"{free:.1f} GiB free"
    if free < needed:
        text += f", {workers} workers and Ray need {needed:.1f}"
        return Finding("memory", "fail", text, "use fewer workers or free memory")
    if free < ENOUGH_MEMORY_GIB:
        return Finding("memory", "warn", text, f"SPICE needs {ENOUGH_MEMORY_GIB} GiB in addition")
    return Finding("memory", "ok", text)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """The memory of Ray's object store; when it is full, Ray uses /tmp, which is slower."""
    if not folder.is_dir():
        return Finding("shm", "ok", f"no {folder} on this system")
    free = shutil.disk_usage(folder).free / 2**30
    if free < OBJECT_STORE_GIB:
        text = f"{free:.2f} GiB free in {folder}"
        return Finding("shm", "warn", text, "start the container with --shm-size=2g or more")
    return Finding("shm", "ok", f"{free:.1f} GiB free in {folder}")


def storage(folder: StoragePath) -> Finding:
    """Whether results can be written. It tries a conditional write and removes the file again."""
    try:
        try_rights(folder)
    except StorageError as error:
        remedy = "correct the folder's permissions or set another storage"
        if folder.is_remote:
            remedy = "check the bucket's policy, the credentials and storage.endpoint_url"
        return Finding("storage", "fail", str(error), remedy)
    return Finding("storage", "ok", f"{folder}: conditional write, read, list and delete work")


def data(config: RunConfig) -> Finding:
    """Whether the data set's annotations exist; `raycap check` reads them."""
    section = config.data
    if section.root is None:
        return Finding("data", "ok", "synthetic data set")
    root = storage_path(section.root, config.storage.options.hasty)
    names = [source.annotations for source in section.sources] or [section.annotations]
    try:
        names = [name for pattern in names for name in find_files(root, pattern)]
        missing = [name for name in names[:MAX_LOOKED_UP] if section.format != "text" and not (root / name).exists()]
    except (OSError, UserError) as error:
        return Finding("data", "fail", str(error), "check data.root and the credentials")
    if missing:
        return Finding("data", "fail", f"{root / missing[0]} does not exist", "check data.root and data.annotations")
    return Finding("data", "ok", f"{root / names[0]} exists")


def tracker(config: RunConfig) -> Finding:
    """Whether the tracker answers; a run continues without it and sends the missing data later."""
    if not config.tracking.enabled:
        return Finding("tracker", "ok", "off")
    address = public_uri(config)
    if is_only_here(config):
        return Finding("tracker", "warn", f"{address} is lost with this machine, the storage is not", SERVER_REMEDY)
    parts = urllib.parse.urlsplit(split_userinfo(config.tracking.uri or "")[1])
    if parts.scheme not in ("http", "https"):
        return Finding("tracker", "ok", address + ("" if parts.hostname else ": a file, created when it is first used"))
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), TRACKER_TIMEOUT_S).close()
        tracking_client(config).search_experiments(max_results=1)
    except Exception as error:  # a tracker can fail with any error
        remedy = "training continues without it; check tracking.uri, then `raycap sync` sends the rest"
        return Finding("tracker", "warn", f"{address} does not answer: {reason_of(error)}", remedy)
    return Finding("tracker", "ok", f"{address} answers")


def local_ray() -> Finding:
    """Whether Ray is installed with the packages of its jobs server."""
    try:
        version = importlib.metadata.version("ray")
        importlib.import_module("aiohttp")
    except ImportError as error:
        return Finding("ray", "fail", f"{error}", "install ray[data,default,train,tune], as requirements.lock has it")
    return Finding("ray", "ok", f"Ray {version}")


def auth_token() -> Finding:
    """The token for clusters that ask for one; a warning when other users can read its file, or when none is used."""
    if (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
        text = f"RAY_AUTH_MODE={mode}: everybody who can reach a Ray of this machine can run code in it"
        return Finding("token", "warn", text, "unset RAY_AUTH_MODE")
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


def check_machine(config: RunConfig | None, on_cluster: bool) -> Iterator[Finding]:
    """Runs the checks one after another. on_cluster: a run computes on a cluster, not on this machine."""
    yield python()
    yield torch_pair()
    yield bfloat16(config)
    yield gpus(config, on_cluster)
    yield java()
    yield spice()
    yield disk(cache_folder(), "cache", "free space, or set RAYCAP_CACHE to a folder on another disk")
    yield memory(config, on_cluster)
    yield shared_memory()
    yield local_ray()
    yield auth_token()
    if config is not None:
        if not is_remote(config.storage.uri):
            yield disk(config.working_path, "disk", "free space, or set another storage")
        yield storage(config.storage_place)
        yield data(config)
        yield tracker(config)
