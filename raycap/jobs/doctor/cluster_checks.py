"""Checks of a cluster: the facts of its nodes against each other and against a configuration."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence

from raycap.jobs.doctor.cluster_facts import ClusterFacts
from raycap.jobs.doctor.finding import Finding
from raycap.jobs.doctor.machine_checks import ENOUGH_DISK_GIB, MIN_DISK_GIB, OBJECT_STORE_GIB
from raycap.pipeline.cluster.capacity import Resources, counted, readable
from raycap.pipeline.cluster.jobs_api import JobsServer, UnreachableError
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError

CLOCK_S = 3.0  # differences of clocks below this are normal
# The oldest driver for each major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility)
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def jobs_server(address: str) -> Finding:
    """Whether the cluster's jobs server answers, accepts the token, and has the Ray version installed here."""
    try:
        server = JobsServer(address)
        remote = server.ray_version
    except UserError as error:
        return Finding("cluster", "fail", str(error))
    except UnreachableError as error:
        remedy = "check the address, the network and that the head runs a dashboard"
        return Finding("cluster", "fail", str(error), remedy)
    local = importlib.metadata.version("ray")
    text = f"{server.address}, Ray {remote}, {'token accepted' if server.headers else 'no token needed'}"
    if remote.split(".")[:2] != local.split(".")[:2]:
        return Finding("cluster", "fail", f"{text}; here Ray {local}", f"give the cluster an image with Ray {local}")
    if remote != local:
        return Finding("cluster", "warn", f"{text}; here Ray {local}", "use the same version on both")
    if not server.headers:
        text += ": everybody who can reach the cluster can run code in it"
        return Finding("cluster", "warn", text, "start Ray on its nodes with RAY_AUTH_MODE=token")
    return Finding("cluster", "ok", text)


def check_cluster(
    facts: ClusterFacts, config: RunConfig | None, requests: Mapping[str, Sequence[Resources]], scores_on_nodes: bool
) -> Iterator[Finding]:
    """Runs the checks one after another.

    requests: the resources of each process, by the name of the stage. scores_on_nodes: whether not only the driver
    computes METEOR and SPICE, as in a search.
    """
    from raycap.pipeline.runtime.context import computes_on_cpus

    yield nodes(facts)
    for stage, bundles in requests.items():
        yield stage_fits(facts, stage, bundles)
    if not facts.nodes:  # none has answered
        return
    yield versions(facts)
    uses_gpus = any(bundle.get("GPU") for bundles in requests.values() for bundle in bundles)
    yield drivers(facts, needed=uses_gpus and not computes_on_cpus())
    yield disks(facts, None if config is None else config.features.cache_gib)
    yield object_stores(facts)
    yield clocks(facts)
    yield java(facts, scores_on_nodes)
    if config is not None:
        yield storage(facts)
        yield tracker(facts)


def nodes(facts: ClusterFacts) -> Finding:
    """Whether there are workers, and all nodes answer."""
    if facts.silent:
        count = len(facts.silent.keys() | facts.nodes.keys())
        text = f"{len(facts.silent)} of {count} do not answer: {_listed(facts.silent)}"
        return Finding("nodes", "fail", text, "look at the node's log, give it the same image, or remove it")
    if not any(node.get("CPU") or node.get("GPU") for node in facts.status.nodes):
        text = "no worker is up, so only the head is checked"
        if facts.node_types is not None:
            return Finding("nodes", "ok", f"{text}; the autoscaler can start {_types_text(facts.node_types)}")
        if facts.status.has_autoscaler:
            return Finding("nodes", "warn", text, "repeat this while a job runs, to check its nodes")
        return Finding("nodes", "fail", f"{text}, and there is no autoscaler", "start worker nodes")
    return Finding("nodes", "ok", facts.status.text)


def stage_fits(facts: ClusterFacts, stage: str, bundles: Sequence[Resources]) -> Finding:
    """Whether the live nodes, or those that the autoscaler can start, can serve what a stage asks for."""
    wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    text = f"{stage} asks for {counted([readable(bundle) for bundle in wanted])}"
    remedy = "change the keys of workers, features or a search's resources, or the node types"
    if facts.status.fits(wanted):
        return Finding("resources", "ok", f"{text}, and live nodes have it")
    if facts.node_types is not None:
        types = _types_text(facts.node_types)
        if facts.status.could_fit(wanted, facts.node_types):
            return Finding("resources", "ok", f"{text}, and the autoscaler can start {types}")
        return Finding("resources", "fail", f"{text}, and the autoscaler can start only {types}", remedy)
    if facts.status.has_autoscaler:
        text += f", which the live nodes do not have ({facts.status.text}), and the autoscaler's types are unknown here"
        return Finding("resources", "warn", text, "a stage that no type can serve ends at once with exit code 2")
    return Finding("resources", "fail", f"{text}, which the cluster does not have ({facts.status.text})", remedy)


def versions(facts: ClusterFacts) -> Finding:
    """Whether all nodes have the driver's versions of Python, torch, Ray and raycap."""
    different = {
        node: ", ".join(f"{name} {found.versions.get(name)}" for name in names)
        for node, found in facts.nodes.items()
        if (names := _different(facts.versions, found.versions))
    }
    text = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if different:
        return Finding("versions", "fail", f"here {text}; {_listed(different)}", "give all nodes the same image")
    return Finding("versions", "ok", f"{text} everywhere")


def drivers(facts: ClusterFacts, *, needed: bool) -> Finding:
    """Whether the NVIDIA drivers fit torch. needed: whether the configuration uses GPUs."""
    problems = {}
    for node, found in facts.nodes.items():
        oldest = OLDEST_DRIVER.get(found.cuda.partition(".")[0], 0)
        major = found.driver.partition(".")[0]
        if found.num_gpus and not found.cuda:
            problems[node] = "torch is a build without CUDA"
        elif found.num_gpus and major.isdigit() and int(major) < oldest:
            problems[node] = f"driver {found.driver}, and torch for CUDA {found.cuda} needs {oldest} or later"
        elif found.num_gpus and not found.cuda_works:
            problems[node] = f"torch cannot use the GPUs (driver {found.driver}, CUDA {found.cuda})"
        elif facts.offered_gpus.get(node) and not found.num_gpus:
            problems[node] = f"Ray offers {facts.offered_gpus[node]:g} GPUs, and there is no NVIDIA driver"
    if problems:
        remedy = "install the driver on the node's machine, or an image whose torch fits it"
        return Finding("drivers", "fail" if needed else "warn", _listed(problems), remedy)
    with_gpus = [f"{found.driver} for CUDA {found.cuda}" for found in facts.nodes.values() if found.num_gpus]
    return Finding("drivers", "ok", counted(with_gpus) if with_gpus else "no node has a GPU")


def disks(facts: ClusterFacts, cache_gib: float | None) -> Finding:
    """The space for the caches of each node, and whether nodes share one. cache_gib: the configured limit."""
    shared = {node: f"shares its cache with {', '.join(others)}" for node, others in facts.shared_caches.items()}
    if shared:
        remedy = "set RAYCAP_CACHE to a folder on a disk of the node, because locks need a local disk"
        return Finding("disks", "warn", _listed(shared), remedy)
    enough = max(ENOUGH_DISK_GIB, cache_gib or 0)
    small = {
        node: f"{found.cache_bytes / 2**30:.1f} GiB for {found.cache}"
        for node, found in facts.nodes.items()
        if found.cache_bytes < enough * 2**30
    }
    if small:
        is_full = any(found.cache_bytes < MIN_DISK_GIB * 2**30 for found in facts.nodes.values())
        text = f"less than {enough:g} GiB: {_listed(small)}"
        return Finding("disks", "fail" if is_full else "warn", text, "free space, or give the nodes larger disks")
    least = min(found.cache_bytes for found in facts.nodes.values())
    return Finding("disks", "ok", f"{least / 2**30:.1f} GiB or more for the cache of each node")


def object_stores(facts: ClusterFacts) -> Finding:
    """The size of Ray's object store on each node, and whether it is in memory."""
    slow = {
        node: f"{found.store_bytes / 2**30:.1f} GiB in {found.store_folder}"
        for node, found in facts.nodes.items()
        if found.store_folder not in ("", "/dev/shm") or 0 < found.store_bytes < OBJECT_STORE_GIB * 2**30
    }
    if slow:
        remedy = (
            f"give /dev/shm and the object store {OBJECT_STORE_GIB:g} GiB or more (--shm-size, an emptyDir in memory)"
        )
        return Finding("objects", "warn", f"Ray's object store is small or on a disk: {_listed(slow)}", remedy)
    least = min(found.store_bytes for found in facts.nodes.values())
    return Finding("objects", "ok", f"object stores of {least / 2**30:.1f} GiB or more in /dev/shm")


def clocks(facts: ClusterFacts) -> Finding:
    """Whether the clocks agree. Leases expire by the clock, and S3 refuses requests that are 15 minutes off."""
    wrong = {node: f"{ahead:+.0f} s" for node, ahead in facts.clocks.items() if abs(ahead) > CLOCK_S}
    if wrong:
        return Finding("clocks", "warn", f"differ from this machine: {_listed(wrong)}", "run a time service (NTP)")
    return Finding("clocks", "ok", f"agree within {CLOCK_S:g} s")


def java(facts: ClusterFacts, scores_on_nodes: bool) -> Finding:
    """Whether nodes can start Java; only a search needs it there, because otherwise the driver computes scores."""
    problems = {node: found.java_problem for node, found in facts.nodes.items() if found.java_problem}
    if not problems:
        return Finding("node java", "ok", "on all nodes")
    if not scores_on_nodes:
        return Finding(
            "node java", "ok", f"not on {len(problems)} of {len(facts.nodes)} nodes; only the driver needs it"
        )
    return Finding("node java", "warn", f"METEOR and SPICE will be unavailable: {_listed(problems)}", "install Java")


def storage(facts: ClusterFacts) -> Finding:
    """Whether each node can write to the storage, with conditional writes."""
    problems = {node: found.storage_problem for node, found in facts.nodes.items() if found.storage_problem}
    if problems:
        remedy = "check the node's credentials, role and network, or set a storage that all nodes reach"
        return Finding("writes", "fail", _listed(problems), remedy)
    return Finding("writes", "ok", "conditional write, read, list and delete work on all nodes")


def tracker(facts: ClusterFacts) -> Finding:
    """Whether the nodes reach the tracker; the one that runs a job's driver needs it."""
    problems = {node: found.tracker_problem for node, found in facts.nodes.items() if found.tracker_problem}
    if problems:
        remedy = "a driver there trains without the tracker; open the network, then `raycap sync` sends the rest"
        return Finding("metrics", "warn", _listed(problems), remedy)
    return Finding("metrics", "ok", "no node lacks the tracker")


def _different(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The names whose versions differ. An unknown commit, of an installation without git, is no difference."""
    pairs = {name: (version, found.get(name)) for name, version in expected.items()}
    return [name for name, (here, there) in pairs.items() if here != there and "unknown" not in (here, there)]


def _types_text(node_types: Sequence[tuple[Resources, int]]) -> str:
    return ", ".join(f"{most} x ({readable(resources)})" for resources, most in node_types) or "no node"


def _listed(texts: Mapping[str, str]) -> str:
    """The texts of nodes; equal ones together."""
    by_text: dict[str, list[str]] = {}
    for node, text in texts.items():
        by_text.setdefault(text, []).append(node)
    return "; ".join(f"{', '.join(nodes)}: {text}" for text, nodes in by_text.items())
