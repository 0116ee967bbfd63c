"""Checks of one machine: this one, or a node of a cluster."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import stat
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from raycap.pipeline.cluster.jobs_api import find_token
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.formats.source import find_files
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.java import free_memory_mb, java_version, spice_models
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path, try_rights
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.tracking.mlflow_client import SERVER_REMEDY, is_only_here, public_uri, reason_of, tracking_client
from raycap.pipeline.version import commit

RAY_GIB, WORKER_GIB, SPICE_GIB = 1.0, 0.75, 4.0  # of memory, before a model is loaded
OBJECT_STORE_GIB = 0.5  # the size of the object store of a Ray that `cluster.start` starts


@dataclass(frozen=True)
class Finding:
    """The result of one check, whose texts may quote an error: secrets are removed from them.

    level: `fail` means that a configuration cannot run, `warn` that a part of it will be missing, slower or delayed.
    """

    name: str
    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "remedy"):
            object.__setattr__(self, name, without_secrets(getattr(self, name)))

    @property
    def line(self) -> str:
        """The finding as a line for the terminal."""
        return f"{self.level:<5} {self.name:<10} {self.text}" + (f"; {self.remedy}" if self.remedy else "")


class ScarceError(Exception):
    """What a check has found suffices for a part of the work only."""


def find(name: str, look: Callable[[], str], remedy: str, *, is_needed: bool = True) -> Finding:
    """The finding of a check. look: returns what is there; any error that it raises is the problem."""
    try:
        return Finding(name, "ok", look())
    except Exception as error:  # libraries raise many types for a broken installation, credentials and settings
        level: Literal["warn", "fail"] = "fail" if is_needed and not isinstance(error, ScarceError) else "warn"
        return Finding(name, level, reason_of(error), remedy)


def check_machine(config: RunConfig | None, on_cluster: bool) -> Iterator[Finding]:
    """Checks this machine. on_cluster: a run computes on a cluster, not here."""
    yield Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in versions().items()))
    yield find("torch", torch_pair, "install both from one place, as `uv pip install -r requirements.lock` does")
    yield java()
    yield from folders()
    yield find("token", token, "chmod 600 the file of the token, or unset RAY_AUTH_MODE")
    if config is None:
        return
    if not on_cluster:
        workers, features = config.workers, config.features
        wanted = max(workers.num_workers * workers.gpus_per_worker, features.least_actors * features.gpus_per_actor)
        yield gpus(wanted, is_needed=True)
        yield find("memory", partial(memory, workers.num_workers), "use fewer workers or free memory")
    if not is_remote(config.storage.uri):
        yield find("disk", partial(space, config.working_path), "free space, or set another storage")
    yield storage(config.storage_place)
    yield find("data", partial(data, config), "check data.root, data.annotations and the credentials")
    remedy = "training continues without it; check tracking.uri, then `raycap sync` sends the rest"
    remedy = SERVER_REMEDY if is_only_here(config) else remedy
    yield find("tracker", partial(tracker, config), remedy, is_needed=False)


def folders() -> Iterator[Finding]:
    """Whether the folders that raycap and Ray write to can be written and have space."""
    ray_folder, shared = Path(os.environ.get("RAY_TMPDIR", "/tmp")), Path("/dev/shm")
    remedy = "free space, or set RAYCAP_CACHE to a folder that can be written"
    yield find("cache", partial(space, cache_folder()), remedy)
    remedy = "set HOME to a folder that can be written; Ray keeps its token there"
    yield find("home", partial(space, Path.home(), 0, 0), remedy)
    remedy = "free space, or set RAY_TMPDIR to a folder with a short path that can be written"
    yield find("tmp", partial(space, ray_folder, 0.1, 1), remedy)
    if shared.is_dir():  # for Ray's object store, which is slower on a disk
        remedy = "start the container with --shm-size=2g or more, and let everybody write there (mode 1777)"
        yield find("shm", partial(space, shared, 0, OBJECT_STORE_GIB), remedy)


def space(folder: Path, least: float = 1, enough: float = 10) -> str:
    """The free space for a folder, which need not exist yet, in GiB. OSError if it is below `least`, or not writable.

    Raises ScarceError if it is below `enough`.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error.strerror}") from error
    free = shutil.disk_usage(existing).free / 2**30
    if free < enough:
        raise (OSError if free < least else ScarceError)(f"{free:.1f} GiB free for {folder}")
    return f"{free:.1f} GiB free for {folder}"


def torch_pair() -> str:
    """Different builds of torch and torchvision fail only when an operator is called, as here."""
    torch, vision = importlib.import_module("torch"), importlib.import_module("torchvision")
    vision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    return f"torch {torch.__version__}, torchvision {vision.__version__}"


def gpus(wanted: float, *, is_needed: bool) -> Finding:
    """Whether torch can use as many GPUs as a run wants, or as Ray offers on a node."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"torch (CUDA {torch.version.cuda or 'not built in'}) can use {count} GPUs, and {wanted:g} are wanted"
    if wanted <= count:
        return Finding("gpus", "ok", text)
    remedy = "set workers.gpus_per_worker and features.gpus_per_actor to 0, or install a driver that fits torch"
    return Finding("gpus", "fail" if is_needed else "warn", text, remedy)


def java() -> Finding:
    """Whether METEOR and SPICE can be computed."""
    remedy = "METEOR or SPICE will be unavailable"
    return find("java", lambda: f"{java_version()}, models of SPICE in {spice_models()}", remedy, is_needed=False)


def memory(num_workers: int) -> str:
    """Whether the free memory suffices for Ray, the workers on this machine and SPICE."""
    free, needed = free_memory_mb() / 2**10, RAY_GIB + WORKER_GIB * num_workers
    if free < needed:
        raise OSError(f"{free:.1f} GiB free, {num_workers} workers and Ray need {needed:.1f}")
    if free < SPICE_GIB:
        raise ScarceError(f"{free:.1f} GiB free, SPICE needs {SPICE_GIB:g} in addition")
    return f"{free:.1f} GiB free"


def storage(folder: StoragePath, probe: str = "") -> Finding:
    """Whether results can be written, by a conditional write. probe: a file that another machine has written there."""

    def look() -> str:
        if probe and not (folder / probe).exists():
            raise OSError(f"{folder} is another folder than on the machine of this command")
        try_rights(folder)
        return f"{folder}: conditional write, read, list and delete work"

    remedy = "correct the folder's permissions, or set a storage that all nodes share, such as s3://bucket/prefix"
    if folder.is_remote:
        remedy = "check the bucket's policy, the credentials and storage.endpoint_url"
    return find("storage", look, remedy)


def data(config: RunConfig) -> str:
    """Whether the data set's annotations exist; `raycap check` reads them."""
    section = config.data
    if section.root is None:
        return "synthetic data set"
    root = storage_path(section.root, config.storage.options.hasty)
    patterns = [source.annotations for source in section.sources] or [section.annotations]
    name = next(name for pattern in patterns for name in find_files(root, pattern))
    if section.format != "text" and not (root / name).exists():
        raise UserError(f"{root / name} does not exist")
    return f"{root / name} exists"


def tracker(config: RunConfig) -> str:
    """Whether the tracker answers; a run continues without it and sends the missing data later."""
    if not config.tracking.enabled:
        return "off"
    address = public_uri(config)
    if is_only_here(config):
        raise ScarceError(f"{address} is lost with this machine, the storage is not")
    if urllib.parse.urlsplit(address).scheme in ("http", "https"):
        try:
            tracking_client(config).search_experiments(max_results=1)
        except Exception as error:
            raise ScarceError(f"{address} does not answer: {reason_of(error)}") from error
    return address


def token() -> str:
    """The token for clusters that ask for one. ScarceError if other users can read its file, or none is used."""
    if (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
        raise ScarceError(f"RAY_AUTH_MODE={mode}: everybody who can reach a Ray of this machine can run code in it")
    found, origin = find_token()
    path = Path(origin)
    if found and path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ScarceError(f"from {origin}, which others on this machine can read")
    return f"from {origin}" if found else "none; a cluster may ask for RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


def versions() -> dict[str, str]:
    """The versions that must be equal on all machines. Builds of torch for different hardware count as equal."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "raycap": commit()}
    return found | {name: importlib.metadata.version(name).partition("+")[0] for name in ("ray", "torch")}


def same_versions(expected: Mapping[str, str]) -> Finding:
    """Compares this machine's versions with those of another. An unknown commit, as without git, is no difference."""
    found = versions()
    different = [name for name in expected if len({found[name], expected[name]} - {"unknown"}) > 1]
    text = ", ".join(f"{name} {found[name]} and not {expected[name]}" for name in different)
    if different:
        return Finding("versions", "fail", text, "give all nodes the same image")
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))
