"""`raycap doctor`: checks what this machine or a cluster can run, and gives a remedy for each problem.

On a cluster, a task of Ray checks each node.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from huggingface_hub.constants import HF_HUB_CACHE

from raycap.jobs.options import Address, Set
from raycap.models.config import Values
from raycap.pipeline.cluster.stalls import ClusterStatus, Resources, asks_for, cluster_status
from raycap.pipeline.cluster.start import REMEDIES, check_token_file, cluster_address, connect, stage_resources
from raycap.pipeline.config.load import parse_config, read_values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.data.formats.files import find_files
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.java import java_version, spice_models
from raycap.pipeline.runtime.names import one_line, print_line
from raycap.pipeline.runtime.processor import computes_on_cpus
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path, try_rights
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.tracking.mlflow_client import public_uri, reason_of, tracking_client, tracking_uri
from raycap.pipeline.version import commit

OBJECT_STORE_GIB = 0.5  # the size of the object store of a Ray that `cluster.start` starts
ANSWER_S = 60.0  # the deadline for the answers of all nodes, including the start of their processes
Requests = Mapping[str, Sequence[Resources]]  # the resources of each process, by stage


@dataclass(frozen=True)
class Finding:
    """The result of one check. The texts may quote an error, so secrets of this machine are removed from them.

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


def find(name: str, look: Callable[[], str], remedy: str, *, is_needed: bool = True) -> Finding:
    """Runs a check. look: returns a text about what it found, or raises an error that describes the problem.

    is_needed: False turns a problem into a warning. remedy: what the user can do about the problem.
    """
    try:
        return Finding(name, "ok", look())
    except Exception as error:  # any type, because libraries differ in what they raise for wrong settings
        return Finding(name, "fail" if is_needed else "warn", reason_of(error), remedy)


def doctor(
    config: Annotated[
        Path,
        typer.Argument(
            help="The YAML file to run here, or the name of a shipped one.", metavar="[CONFIG]", callback=named_config
        ),
    ] = Path("demo"),
    set_: Set = None,
    address: Address = None,
) -> int:
    """Check what this machine or a cluster can run.

    Each line names a capability and, where it is missing, the remedy. The exit code is 1 when CONFIG cannot run. With
    an address, every node of the cluster is asked. `raycap submit doctor` asks them from outside the cluster.

    Example: raycap doctor demo
    """
    address = cluster_address(address)
    run, requests = _read(config, set_ or ())
    failed = list[str]()
    for finding in _examine(run, requests, address):
        print_line(finding.line)
        if finding.level == "fail" and finding.name not in failed:
            failed.append(finding.name)
    if failed:
        print(f"{config} cannot run here: {', '.join(failed)}")
        return 1
    print(f"{config} can run here")
    return 0


def _read(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, Requests]:
    """The run that a YAML file describes, and the resources of each stage. The run of a search is that of its base."""
    values = read_values(path, overrides)
    if "space" in values:  # only the file of a search has this key
        search = load_search(path, overrides)
        trial = [search.bundle] * search.config.resources.workers
        return search.base, {"features": stage_resources(search.base, "features"), "a trial": trial}
    config = parse_config(values)
    return config, {stage: stage_resources(config, stage) for stage in ("features", "training")}


def _examine(config: RunConfig, requests: Requests, address: str | None) -> Iterator[Finding]:
    """Checks this machine and, if there is an address, the nodes of the cluster."""
    yield from check_machine(config, on_cluster=address is not None)
    if address is None:
        return
    try:
        connect(address)
    except Exception as error:  # any type, because Ray raises various ones
        remedy = "give the address of a Ray head that this machine reaches, or use `raycap submit doctor`"
        yield Finding("cluster", "fail", f"{address} cannot be joined: {one_line(error)}", remedy)
    else:
        yield from check_nodes(config, requests)


def check_machine(config: RunConfig, on_cluster: bool) -> Iterator[Finding]:
    """Checks this machine. on_cluster: True if runs compute on a cluster, so that this machine needs no GPUs."""
    yield same_versions({})
    yield find("torch", torch_pair, "install both from one place, as `uv pip install -r requirements.lock` does")
    yield java()
    yield from folders(needs_cache=is_remote(config.storage.uri))
    yield find("token", check_token_file, "")
    if not on_cluster:
        workers, features = config.workers, config.features
        gpus_of_training = workers.num_workers * workers.gpus_per_worker
        yield gpus(max(gpus_of_training, features.least_actors * features.gpus_per_actor), is_needed=True)
    if not is_remote(config.storage.uri):
        yield space("disk", config.working_path, "free space, or set another storage")
    remedy = "training continues without it; check tracking.uri, then `raycap sync` sends the rest"
    checks: dict[str, Callable[[], Finding]] = {
        "storage": lambda: storage(config.storage_place),
        "data": lambda: find("data", partial(data, config), "check data.root, data.annotations and the credentials"),
        "tracker": lambda: find("tracker", partial(tracker, config), remedy, is_needed=False),
    }
    yield from side_by_side(checks)


def side_by_side(checks: Mapping[str, Callable[[], Finding]]) -> Iterator[Finding]:
    """Runs checks of servers in threads. One that does not end within ANSWER_S is a failure, or a tracker's warning."""
    found = dict[str, Finding]()
    threads = [
        threading.Thread(target=lambda name, check: found.update({name: check()}), args=item, daemon=True)
        for item in checks.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ANSWER_S
    for name, thread in zip(checks, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        text = f"no answer within {ANSWER_S:g} s"
        yield found.get(name) or Finding(name, "warn" if name == "tracker" else "fail", text, "check its address")


def folders(*, needs_cache: bool) -> Iterator[Finding]:
    """Checks the folders that raycap and Ray write to. needs_cache: True for a storage on S3, as others need none."""
    remedy = "free space, or set RAYCAP_CACHE to a folder that can be written"
    yield space("cache", cache_folder(), remedy, is_needed=needs_cache)
    remedy = "set HOME to a folder that can be written; libraries keep their files there"
    yield space("home", Path.home(), remedy, least_gib=0, enough_gib=0, is_needed=False)
    remedy = "set HF_HOME to a folder that can be written; downloaded weights are kept there"
    yield space("hub", Path(HF_HUB_CACHE), remedy, least_gib=0, enough_gib=1, is_needed=False)
    ray_folder, shared = Path(os.environ.get("RAY_TMPDIR", "/tmp")), Path("/dev/shm")
    yield space("tmp", ray_folder, REMEDIES["tmp"], least_gib=0.1, enough_gib=1)
    yield find("temp", tempfile.gettempdir, "set TMPDIR to a folder that can be written")
    if shared.is_dir():  # Ray puts its object store there, because it would be slower on a disk
        yield space("shm", shared, REMEDIES["shm"], least_gib=0, enough_gib=OBJECT_STORE_GIB)


def space(
    name: str, folder: Path, remedy: str, *, least_gib: float = 1, enough_gib: float = 10, is_needed: bool = True
) -> Finding:
    """Checks that a folder can be written and has free space. The folder need not exist yet.

    Less than `least_gib` GiB are a failure, if the folder is needed, and less than `enough_gib` GiB a warning.
    """
    worst: Literal["warn", "fail"] = "fail" if is_needed else "warn"
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
        free_gib = shutil.disk_usage(existing).free / 2**30
    except OSError as error:  # also if this user may not enter a folder above it, or the name is too long
        return Finding(name, worst, f"{folder} cannot be written: {error.strerror}", remedy)
    text = f"{free_gib:.1f} GiB free for {folder}"
    if free_gib >= enough_gib:
        return Finding(name, "ok", text)
    return Finding(name, "warn" if free_gib >= least_gib else worst, text, remedy)


def torch_pair() -> str:
    """The versions of torch and torchvision. Calls an operator, because builds that do not fit fail only then."""
    torch, vision = importlib.import_module("torch"), importlib.import_module("torchvision")
    vision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    return f"torch {torch.__version__}, torchvision {vision.__version__}"


def gpus(wanted: float, *, is_needed: bool) -> Finding:
    """Checks that torch can use `wanted` GPUs: the number that a run needs here, or that Ray offers on this node."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"torch (CUDA {torch.version.cuda or 'not built in'}) can use {count} GPUs, and {wanted:g} are wanted"
    if wanted <= count:
        return Finding("gpus", "ok", text)
    remedy = "set workers.gpus_per_worker and features.gpus_per_actor to 0, or install a driver that fits torch"
    return Finding("gpus", "fail" if is_needed else "warn", text, remedy)


def java() -> Finding:
    """Checks that METEOR and SPICE can be computed, which need Java."""
    remedy = "METEOR or SPICE will be unavailable"
    return find("java", lambda: f"{java_version()}, models of SPICE in {spice_models()}", remedy, is_needed=False)


def storage(folder: StoragePath, probe: str = "") -> Finding:
    """Checks that results can be written. probe: a file that the driver's machine has written there, or ""."""

    def look() -> str:
        if probe and not (folder / probe).exists():
            raise OSError(f"{folder} is another folder than on the machine of this command")
        try_rights(folder)
        return f"{folder}: conditional write, read and delete work"

    remedy = "correct the folder's permissions, or set a storage that all nodes share, such as s3://bucket/prefix"
    if folder.is_remote:
        remedy = "check the bucket's policy, the credentials and storage.endpoint_url"
    return find("storage", look, remedy)


def data(config: RunConfig) -> str:
    """A text that names the data set's annotations, which are not read. Raises UserError if they do not exist."""
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
    """The address of the tracker, or "off". Raises OSError if the tracker does not answer."""
    if not config.tracking.enabled:
        return "off"
    address = public_uri(config)
    try:
        if re.match("https?:", address):
            tracking_client(config).search_experiments(max_results=1)
        elif re.match("postgresql|mysql|mssql", address):  # MLflow's client would create its tables
            import sqlalchemy

            sqlalchemy.create_engine(tracking_uri(config)).connect().close()
    except Exception as error:
        raise OSError(f"{address} does not answer: {reason_of(error)}") from error
    return address


def versions() -> dict[str, str]:
    """The versions that must be equal on all machines. Suffixes of builds for one hardware, such as +cu126, are cut."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "raycap": commit()}
    return found | {name: importlib.metadata.version(name).partition("+")[0] for name in ("ray", "torch")}


def same_versions(expected: Mapping[str, str]) -> Finding:
    """Compares this machine's versions with those of another machine. An unknown commit is not compared."""
    found = versions()
    different = [
        f"{name} {found[name]} and not {version}"
        for name, version in expected.items()
        if found[name] != version and "unknown" not in (found[name], version)
    ]
    if different:
        return Finding("versions", "fail", ", ".join(different), "give all nodes the same image")
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def check_node(
    expected: Mapping[str, str], num_gpus: float, uses_gpus: bool, place: StoragePath, probe: str
) -> list[Finding]:
    """Runs the checks on the node of this process.

    expected: the driver's versions. num_gpus: the GPUs that Ray offers on the node. uses_gpus: true if a run needs
    GPUs. place: the storage. probe: the name of a file that the driver has written there.
    """
    findings = [same_versions(expected), gpus(num_gpus, is_needed=uses_gpus), java()]
    return [*findings, *folders(needs_cache=place.is_remote), storage(place, probe)]


def check_nodes(config: RunConfig, requests: Requests) -> Iterator[Finding]:
    """Checks all live nodes, and lists their resources and those that stages ask for. Ray must have been started.

    The driver writes a file into the storage, and all nodes must find the file. The file remains if the driver has no
    right to remove files.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    asks_for_gpus = any(process.get("GPU") for of_stage in requests.values() for process in of_stage)
    uses_gpus = asks_for_gpus and not computes_on_cpus()
    place, probe = config.storage_place, f".raycap-probe-{uuid.uuid4().hex}"
    with suppress(OSError):  # `check_machine` has reported this error
        (place / probe).write_bytes(b"")
    found = _ask(alive, uses_gpus, place, probe)
    with suppress(OSError):
        (place / probe).delete()
    yield has_workers(cluster_status(), requests)
    yield from merged(found)


def _ask(nodes: Sequence[Values], uses_gpus: bool, place: StoragePath, probe: str) -> dict[str, list[Finding]]:
    """Calls `check_node` on all nodes at once. Returns the findings by the nodes' names.

    A node that does not answer gets one finding about that. nodes: entries of `ray.nodes`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    task = ray.remote(num_cpus=0, max_retries=0)(check_node)
    remedy = "look at the node's log, give it the same image, or remove it"
    found = dict[str, list[Finding]]()
    running = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": task.options(
            scheduling_strategy=OnNode(node["NodeID"], soft=False)
        ).remote(versions(), node["Resources"].get("GPU", 0.0), uses_gpus, place, probe)
        for node in nodes
    }
    deadline = time.monotonic() + ANSWER_S
    for name, reference in running.items():
        try:
            found[name] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            ray.cancel(reference, force=True)
            found[name] = [Finding("answer", "fail", f"none within {ANSWER_S:g} s", remedy)]
        except Exception as error:  # for example, the node has just died or cannot import the code
            found[name] = [Finding("answer", "fail", str(error).strip().splitlines()[-1], remedy)]
    return found


def has_workers(status: ClusterStatus, requests: Requests) -> Finding:
    """Checks that some live node has CPUs or GPUs. Names what stages ask for, as an autoscaler may add such nodes."""
    if any(node.get("CPU") or node.get("GPU") for node in status.nodes):
        return Finding("nodes", "ok", "; ".join([status.text, *(asks_for(*each) for each in requests.items())]))
    text = "no worker is up, so only the head is checked"
    return Finding("nodes", "warn", text, "start worker nodes, or repeat this while a job runs, to check its nodes")


def merged(found: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """The findings of all nodes, each named `node NAME`. A finding that several nodes share is given once."""
    nodes: dict[Finding, list[str]] = {}
    for node, findings in found.items():
        for finding in findings:
            said = replace(finding, text="") if finding.level == "ok" else finding
            nodes.setdefault(said, []).append(node)
    for said, names in nodes.items():
        text = f"{len(names)} nodes" if said.level == "ok" else f"{', '.join(names)}: {said.text}"
        yield replace(said, name=f"node {said.name}", text=text)
