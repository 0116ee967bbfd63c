"""Asks every node of a cluster for its facts, as tasks of Ray. A node that does not answer delays this by PROBE_S."""

from __future__ import annotations

import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeline.cluster.capacity import ClusterStatus, Resources, cluster_status
from pipeline.cluster.node_facts import NodeFacts, Probe, collect, look, versions
from pipeline.config.run import RunConfig
from pipeline.runtime.secrets import split_userinfo

PROBE_S = 60.0  # the deadline for the answer of a node, whose process must start first


@dataclass(frozen=True)
class ClusterFacts:
    """What the nodes of a cluster have reported. Nodes are named by address and id."""

    status: ClusterStatus
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)  # {node: why it has not reported}
    offered_gpus: Mapping[str, float] = field(default_factory=dict)  # {node: number of GPUs that Ray assigns to tasks}
    clocks: Mapping[str, float] = field(default_factory=dict)  # {node: seconds ahead of this machine, at least}
    shared_caches: Mapping[str, Sequence[str]] = field(default_factory=dict)  # {node: others with the same cache}
    versions: Mapping[str, str] = field(default_factory=dict)  # of the driver

    @property
    def node_types(self) -> Sequence[tuple[Resources, int]] | None:
        """The autoscaler's node types; None if they are unknown."""
        return next((facts.node_types for facts in self.nodes.values() if facts.node_types is not None), None)


def cluster_facts(config: RunConfig | None) -> ClusterFacts:
    """Asks all live nodes. Ray must have been started. A node that fails or is late is `silent`."""
    import ray

    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    names = {key: f"{node['NodeManagerAddress']} ({key[:6]})" for key, node in alive.items()}
    with _probe(config) as probe:
        nodes, silent = _ask(list(alive), collect, probe, ray.get_runtime_context().gcs_address)
    clocks, shared = {}, {}
    for key in nodes:
        before = time.time()
        looks, failed = _ask([key], look)
        silent |= failed
        for now, others in looks.values():
            clocks[names[key]] = max(0.0, now - time.time()) or min(0.0, now - before)
            # several nodes of one machine may share its cache
            on_others = [other for other in others if other in nodes and nodes[other].host != nodes[key].host]
            if on_others:
                shared[names[key]] = [names[other] for other in on_others]
    return ClusterFacts(
        status=cluster_status(),
        nodes={names[key]: facts for key, facts in nodes.items()},
        silent={names[key]: reason for key, reason in silent.items()},
        offered_gpus={names[key]: node["Resources"].get("GPU", 0) for key, node in alive.items()},
        clocks=clocks,
        shared_caches=shared,
        versions=versions(),
    )


def _ask(nodes: Sequence[str], function: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Calls `function(node, *arguments)` on each node. Returns {node: answer} and {node: why it has none}."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, answers, failed = ray.remote(function), {}, {}
    references = {
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(node, *arguments): node
        for node in nodes
    }
    done, late = ray.wait(list(references), num_returns=len(references), timeout=PROBE_S)
    for reference in done:
        try:
            answers[references[reference]] = ray.get(reference)
        except Exception as error:  # a node that has just died, or code that cannot be imported there
            failed[references[reference]] = str(error).strip().splitlines()[-1]
    for reference in late:
        ray.cancel(reference, force=True)
        failed[references[reference]] = f"no answer within {PROBE_S:g} s"
    return answers, failed


@contextmanager
def _probe(config: RunConfig | None) -> Iterator[Probe]:
    """What the nodes try. Until the end of the context, a local storage contains a file that they must find."""
    if config is None:
        yield Probe()
        return
    storage, parts = config.storage_place, urllib.parse.urlsplit(split_userinfo(config.tracking.uri or "")[1])
    tracker = None
    if config.tracking.enabled and parts.scheme in ("http", "https") and parts.hostname:
        tracker = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    if storage.is_remote:
        yield Probe(storage, tracker=tracker)
        return
    file, is_new = storage.path / f".raycap-probe-{uuid.uuid4().hex}", not storage.path.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:  # the check of the storage from this machine reports it
        yield Probe(tracker=tracker)
        return
    try:
        yield Probe(storage, file.name, tracker)
    finally:
        file.unlink()
        if is_new:
            storage.path.rmdir()
