"""Asks every node of a cluster for its facts, as tasks of Ray. Nodes that do not answer delay this by PROBE_S."""

from __future__ import annotations

import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from raycap.jobs.doctor.node_facts import NodeFacts, Probe, collect, look, versions
from raycap.pipeline.cluster.capacity import ClusterStatus, Resources, cluster_status
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.runtime.secrets import split_userinfo

PROBE_S = 60.0  # the deadline for the answers of nodes, whose processes must start first
CLOCKS_AT_A_TIME = 100  # nodes; with more, the driver would be late to see the answers
POLL_S = 0.1  # between two looks at which nodes have answered, the precision of the clocks


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
        nodes, _, silent = _ask(list(alive), collect, probe, ray.get_runtime_context().gcs_address)
    clocks, shared = {}, {}
    for first in range(0, len(nodes), CLOCKS_AT_A_TIME):
        before = time.time()
        looks, after, failed = _ask(list(nodes)[first : first + CLOCKS_AT_A_TIME], look)
        silent |= failed
        for key, (now, others) in looks.items():
            clocks[names[key]] = max(0.0, now - after[key]) or min(0.0, now - before)
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


def _ask(
    nodes: Sequence[str], function: Callable[..., Any], *arguments: Any
) -> tuple[dict[str, Any], dict[str, float], dict[str, str]]:
    """Calls `function(node, *arguments)` on each node, on all at once.

    Returns {node: answer}, {node: when the answer was there, in Unix seconds} and {node: why it has none}.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, answers, times, failed = ray.remote(function), {}, {}, {}
    references = {
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(node, *arguments): node
        for node in nodes
    }
    late, deadline = list(references), time.monotonic() + PROBE_S
    while late and time.monotonic() < deadline:
        done, late = ray.wait(late, num_returns=len(late), timeout=POLL_S)
        now = time.time()
        for reference in done:
            node = references[reference]
            try:
                answers[node], times[node] = ray.get(reference), now
            except Exception as error:  # a node that has just died, or code that cannot be imported there
                failed[node] = str(error).strip().splitlines()[-1]
    for reference in late:
        ray.cancel(reference, force=True)
        failed[references[reference]] = f"no answer within {PROBE_S:g} s"
    return answers, times, failed


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
