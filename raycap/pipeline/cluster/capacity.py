"""Asks a Ray cluster for the resources of a stage before the stage starts, and reports what it waits for.

Without this check, a request that no node can serve looks like a slow start and never ends.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycap.pipeline.errors import JobFailedError

logger = logging.getLogger(__name__)

MESSAGE_EVERY_S = 30.0
POLL_S = 2.0
REMEDY = (
    "lower workers.cpus_per_worker, workers.gpus_per_worker, features.gpus_per_actor, workers.resources or the number "
    "of workers and actors, or join a cluster with larger nodes or more of them"
)
UNNAMED = re.compile(r"^(node:|memory$|object_store_memory$)|_group_")  # resources that messages leave out
Resources = Mapping[str, float]  # by name, such as {"CPU": 1, "GPU": 1}


@dataclass(frozen=True)
class ClusterStatus:
    """The nodes of a cluster and the requests that wait."""

    nodes: Sequence[Resources]  # the total resources of each live node
    pending: Sequence[Resources]  # requests that wait for resources
    num_starting: int  # nodes that the autoscaler starts now

    @property
    def text(self) -> str:
        """The nodes and the waiting requests, as a clause for messages."""
        nodes = [amounts(node) for node in self.nodes if node.get("CPU") or node.get("GPU")]
        parts = [f"nodes: {counted(nodes)}" if nodes else "no node has CPUs"]
        if self.num_starting:
            parts.append(f"{self.num_starting} more starting")
        if self.pending:
            parts.append(f"pending: {counted([amounts(request) for request in self.pending])}")
        return "; ".join(parts)

    def fits(self, requests: Sequence[Resources]) -> bool:
        """True if the live nodes, with nothing else running on them, can serve all requests at the same time.

        The requests are placed one after another, the largest first, each on the first node with room for it.
        """
        free = [dict(node) for node in self.nodes]
        for request in sorted(requests, key=lambda resources: -sum(resources.values())):
            node = next((node for node in free if _has_room(node, request)), None)
            if node is None:
                return False
            for name, amount in request.items():
                node[name] = node.get(name, 0) - amount
        return True


def _has_room(free: Resources, request: Resources) -> bool:
    """True if the free resources of a node suffice for a request, up to errors of rounding."""
    return all(free.get(name, 0) + 1e-9 >= amount for name, amount in request.items())


def cluster_status() -> ClusterStatus:
    """The cluster's current nodes and waiting requests. Ray must have been started."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=10)
    demands = status.resource_demands
    return ClusterStatus(
        nodes=[node.total_resources() for node in (*status.active_nodes, *status.idle_nodes)],
        pending=[
            by_count.bundle
            for demand in (*demands.placement_group_demand, *demands.ray_task_actor_demand)
            for by_count in demand.bundles_by_count
            for _ in range(by_count.count)
        ],
        num_starting=len(status.pending_nodes) + sum(launch.count for launch in status.pending_launches),
    )


def wait_for(
    requests: Sequence[Resources],
    stage: str,
    *,
    limit_s: float,
    remedy: str = REMEDY,
) -> None:
    """Waits until the cluster can serve all requests of a stage at the same time.

    The requests form one placement group, so that an autoscaler starts all missing nodes together. While it waits, the
    function logs what is pending, at once and then every 30 s. Raises JobFailedError after `limit_s` seconds.

    requests: the resources of each process of the stage. remedy: what a user can lower, for the error.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    clause, begin, last_message = asks_for(stage, requests), time.monotonic(), -math.inf
    bundles = [{name: amount for name, amount in request.items() if amount} for request in requests]
    group = placement_group(bundles, strategy="PACK")
    try:
        while not group.wait(POLL_S):
            status, now = cluster_status(), time.monotonic()
            if now - begin > limit_s:
                raise JobFailedError(
                    f"{clause}, which the cluster did not provide within {limit_s / 60:g} min "
                    f"(workers.max_wait_minutes of a configuration); {status.text}; {remedy}"
                )
            if now - last_message > MESSAGE_EVERY_S:
                logger.info(f"waiting   {clause}; {status.text}; {now - begin:.0f} s so far")
                last_message = now
    finally:
        remove_placement_group(group)


def asks_for(stage: str, requests: Sequence[Resources]) -> str:
    """A clause about the resources of a stage's processes, such as "training asks for 2 x (1 CPU)"."""
    return f"{stage} asks for {counted([amounts(request) for request in requests])}"


def amounts(resources: Resources) -> str:
    """The resources as a text, such as "2 CPU + 1 GPU", without memory and Ray's markers of nodes and groups."""
    others = sorted(name for name in resources if name not in ("CPU", "GPU") and not UNNAMED.search(name))
    named = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU", *others) if resources.get(name)]
    return " + ".join(named) or "a token amount"


def counted(items: Sequence[str]) -> str:
    """The distinct items with their counts, such as "2 x (1 CPU), 1 x (4 CPU)"."""
    return ", ".join(f"{count} x ({item})" for item, count in Counter(items).items())
