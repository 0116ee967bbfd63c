"""Starts Ray on this machine for this user alone, or joins a cluster.

If Ray is started here, its processes listen on the loopback interface, and ask for a token that only this process and
its children have. Logs and sockets are in a folder that only this user can open. docs/cluster.md lists the ports that
Ray leaves open.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from raycap.pipeline.cluster.stalls import REMEDY, Resources, StallWatch, wait_for
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import ACTOR_CPUS, DECODING_CPUS
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.runtime.processor import num_cores
from raycap.pipeline.runtime.secrets import remember_variable
from raycap.pipeline.runtime.stopping import restoring_handlers
from raycap.pipeline.storage.atomic import require_writable
from raycap.pipeline.version import package_folder

OBJECT_STORE_BYTES = 512 * 2**20  # enough, because workers read features and models from the storage
REMEDIES = {  # for folders that Ray cannot write
    "shm": "start the container with --shm-size=2g or more, and let everybody write there (mode 1777)",
    "tmp": "free space, or set RAY_TMPDIR to a folder with a short path that can be written",
}

# The environment variable that limits malloc's arenas, see `prepare_processor`. It must be set before a process starts,
# because Ray's threads create arenas.
ARENAS = "MALLOC_ARENA_MAX"
MAX_CPUS_PER_CORE = 32
JOIN_WAIT_S = 10.0
AGENTS_S = 3.0  # how long Ray's agents have to end before they are killed

Stage = Literal["features", "dry run", "training", "captions"]
LARGEST: tuple[Stage, Stage] = ("training", "features")  # one of these stages needs the most resources


def start_ray(config: RunConfig, address: str | None, stage: Stage = "training") -> None:
    """Joins the Ray cluster at `address` (or RAY_ADDRESS), or starts Ray on this machine. Later calls use the same Ray.

    On a cluster, waits until the processes of `stage` can be placed, and raises JobFailedError after
    `workers.max_wait_minutes`. On this machine, raises UserError if training or features need more than the machine
    has. If this process starts Ray, Ray ends with the process, even if the process is killed.
    """
    requests = {largest: stage_resources(config, largest) for largest in LARGEST}
    needed_cpus = max(sum(process["CPU"] for process in processes) for processes in requests.values())
    if connect(address, needed_cpus=math.ceil(needed_cpus)):
        wait_for(stage_resources(config, stage), stage, limit_s=60 * config.workers.max_wait_minutes)
        return
    import ray

    available = ray.cluster_resources() | {"CPU": math.inf}  # CPUs suffice, because `connect` got their number
    for largest, processes in requests.items():
        require_resources(processes, largest, available)


def start_extraction(config: RunConfig, address: str | None) -> StallWatch:
    """Starts or joins Ray for an extraction. Returns the watch that ends the extraction if it stalls."""
    start_ray(config, address, "features")
    return StallWatch("extraction", config.workers)


def require_resources(requests: Sequence[Resources], stage: str, available: Resources) -> None:
    """Raises UserError if the processes of a stage ask for more resources than Ray on this machine has.

    requests: the resources that each process asks for. available: the total resources of Ray.
    """
    names = dict.fromkeys(name for request in requests for name in request)
    for name in names:
        total = sum(request.get(name, 0) for request in requests)
        most = available.get(name, 0)
        if total > most:
            raise UserError(
                f"{stage} asks for {total:g} {shown(name)} in all, and a Ray on this machine has at most {most:g}; "
                f"{REMEDY}"
            )


def with_processors(config: RunConfig, address: str | None) -> RunConfig:
    """A copy that uses all cores of this machine where keys are not set. On a cluster, the configuration itself."""
    return config if cluster_address(address) else config.with_processors(num_cores())


def check_resources(config: RunConfig, address: str | None) -> None:
    """Raises UserError if the address is wrong, or if Ray on this machine would have too few resources for the run."""
    check_address(address)
    import ray

    if cluster_address(address) or ray.is_initialized():
        return  # a cluster may grow, and `start_ray` checks the resources of a Ray that already runs
    import torch

    # Ray accepts more CPUs than the machine has cores, but starts a process for each. So numbers that are far above the
    # number of cores are refused as mistakes.
    most = {"CPU": MAX_CPUS_PER_CORE * (os.cpu_count() or 1), "GPU": torch.cuda.device_count()}
    available = dict.fromkeys(config.workers.resources, math.inf) | most
    for stage in LARGEST:
        require_resources(stage_resources(config, stage), stage, available)


def cluster_address(address: str | None) -> str | None:
    """The address of the cluster to join, from `address` or RAY_ADDRESS, or None for Ray on this machine."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def check_address(address: str | None) -> None:
    """Raises UserError unless the address (or RAY_ADDRESS) has a form that Ray accepts.

    If there is no address, sets a variable that Ray reads when it is imported. So `import ray` must come later.
    """
    address = cluster_address(address)
    if not address:
        # With this setting, Ray keeps the loopback address instead of replacing it by the machine's own address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    elif not re.fullmatch(r"auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:.%]+\]):\d{1,5}(/.*)?", address):
        raise UserError(
            f"--address {shown(address)} (or RAY_ADDRESS) is no address of a Ray cluster; give auto or HOST:PORT, for "
            "example head:6379"
        )


def stage_resources(config: RunConfig, stage: Stage) -> list[dict[str, float]]:
    """The resources of each process that must run before a stage can make progress."""
    workers, features = config.workers, config.features
    if stage == "features":
        actor = {"CPU": ACTOR_CPUS, "GPU": features.gpus_per_actor}
        return [*[actor] * features.least_actors, {"CPU": DECODING_CPUS}]
    # Captions and the dry run can progress with one worker, but training needs the smallest configured number.
    count = workers.counts[0] if stage == "training" else 1
    return [workers.resources_of_worker] * count


def connect(address: str | None, needed_cpus: int = 0) -> bool:
    """Joins the Ray cluster at `address` (or RAY_ADDRESS) and returns True, or starts Ray here and returns False.

    If this process already uses Ray, only returns the answer. Ray on this machine gets a CPU for each core, but at
    least 2 and `needed_cpus`. Raises JobFailedError if the cluster cannot be joined.
    """
    # With these settings Ray sends no usage reports and no state of Ray Train, and does not change CUDA_VISIBLE_DEVICES
    # for tasks without GPUs.
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_ENABLE_STATE_TRACKING", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        os.environ.setdefault(name, "0")
    check_address(address)
    check_token_file()
    import ray

    cluster = cluster_address(address)
    if not ray.is_initialized():
        with restoring_handlers():
            if cluster:
                _join(cluster)
            else:
                _start_local_ray(max(os.cpu_count() or 1, needed_cpus, 2))
    return bool(cluster)


def _join(address: str) -> None:
    """Joins the Ray cluster at an address. Raises JobFailedError if nothing answers there or Ray refuses."""
    import ray

    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    remedy = "check --address or RAY_ADDRESS"
    if host:  # otherwise the address is "auto", so Ray looks for the cluster itself
        try:  # without this attempt, Ray would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_WAIT_S).close()
        except (OSError, OverflowError) as error:
            reason = f"nothing answers ({one_line(error)})"
            raise JobFailedError(f"no Ray cluster can be joined at {address}: {reason}; {remedy}") from error
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {ARENAS: "1"}},
            **_import_paths(address),
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = next(line for line in [*str(error).splitlines(), type(error).__name__] if line)
        raise JobFailedError(f"no Ray cluster can be joined at {address}: {reason}; {remedy}") from error


def _start_local_ray(num_cpus: int) -> None:
    """Starts Ray here, for this user alone.

    Raises UserError if Ray could not write its files or does not start in time.
    """
    folder = private_folder() / "ray"
    if Path("/dev/shm").is_dir():  # without this look, Ray would try for more than a minute
        require_writable("Ray's object store", Path("/dev/shm"), REMEDIES["shm"])
    if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = token = secrets.token_hex(32)  # children inherit the token, so no file needs it
        remember_variable("RAY_AUTH_TOKEN", token)
    # With this setting, Torch's workers exchange gradients on the loopback interface, which no other machine can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Torch's threads wait for each other in a loop. With a short one, they are not slow beside other busy processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault(ARENAS, "1")
    import ray

    try:
        ray.init(
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
            **_import_paths(),
        )
    except Exception as error:  # Ray raises no narrower error after its limits, for example on a busy machine
        raise UserError(
            f"Ray did not start ({one_line(error)}); repeat the command, or see the logs in {folder}/session_latest"
        ) from error
    atexit.register(_shut_down)  # runs before Ray's own shutdown, because `ray` registered that earlier


def _import_paths(address: str = "") -> dict[str, Any]:
    """The argument of `ray.init` that keeps the working folder off the workers' sys.path, as if they had another one.

    If raycap itself is imported from the working folder, workers may need it, too. A Ray client (ray://) sends none.
    """
    if address.startswith("ray://") or package_folder().parent == Path.cwd():
        return {}
    from ray.job_config import JobConfig

    config = JobConfig()
    config._runtime_env_has_working_dir = lambda: True  # type: ignore[method-assign]
    return {"job_config": config}


def _shut_down() -> None:
    """Ends Ray and kills its processes that remain, because an agent that is just starting does not end with Ray."""
    import ray

    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    for process in psutil.wait_procs(started, AGENTS_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def private_folder() -> Path:
    """Returns the folder for Ray's files, below RAY_TMPDIR or /tmp. Creates it so that only this user can open it.

    Ray's default folder, /tmp/ray, is open to everybody. The name is short, because the paths of sockets must be short.
    Raises UserError if another user owns the folder, or if it cannot be written.
    """
    parent = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    with suppress(OSError):  # the next line names the problem
        parent.mkdir(parents=True, exist_ok=True)
    require_writable("Ray's files", parent, REMEDIES["tmp"])
    folder = parent / f"raycap-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or folder.is_symlink():
        raise UserError(f"{folder}, where Ray keeps its files, belongs to another user; remove it or set RAY_TMPDIR")
    folder.chmod(0o700)
    return folder


def check_token_file() -> str:
    """The file with Ray's token, or "no file". Raises UserError if RAY_AUTH_TOKEN_PATH names a file without a token."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if os.environ.get("RAY_AUTH_TOKEN") or not path:
        return "no file"
    try:
        if Path(path).read_bytes().strip():
            return path
        problem = "is empty"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise UserError(f"RAY_AUTH_TOKEN_PATH: {shown(path)} {problem}; name the file with Ray's token, or unset it")
