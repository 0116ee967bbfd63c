"""Asks a Ray cluster for the resources of a stage before the stage starts, and reports what it waits for.

Without this, a request that no node can serve looks like a slow start and never ends.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycap.pipeline.errors import JobFailedError, UserError

logger = logging.getLogger(__name__)

MESSAGE_EVERY_S = 30.0
POLL_S = 2.0
STATUS_TIMEOUT_S = 10.0
UNNAMED = re.compile(r"^(node:|memory$|object_store_memory$)|_group_")  # resources that messages leave out
Resources = Mapping[str, float]  # by name, such as {"CPU": 1, "GPU": 1}


class WaitedTooLongError(JobFailedError):
    """The cluster did not provide the resources of a stage within the limit of the configuration."""


@dataclass(frozen=True)
class ClusterStatus:
    """The nodes of a cluster and the requests that wait."""

    nodes: Sequence[Resources]  # the total resources of each live node
    used: float  # CPUs and GPUs in use
    pending: Sequence[Resources]  # requests that wait for resources
    num_starting: int  # nodes that the autoscaler starts now
    has_autoscaler: bool
    version: int = 0  # increases with each look at the cluster's state, by the autoscaler as well
    answered: int = 0  # the version on which the autoscaler last decided
    refused: Sequence[Sequence[Resources]] = ()  # what could be served by no node type, by that decision

    @property
    def text(self) -> str:
        """The nodes and the requests, as a clause of a sentence."""
        nodes = [readable(node) for node in self.nodes if node.get("CPU") or node.get("GPU")]
        parts = [f"nodes: {counted(nodes)}" if nodes else "no node has CPUs"]
        if self.num_starting:
            parts.append(f"{self.num_starting} more starting")
        if self.pending:
            parts.append(f"pending: {counted([readable(request) for request in self.pending])}")
        return "; ".join(parts)

    def fits(self, bundles: Sequence[Resources]) -> bool:
        """Whether the live nodes could hold the bundles at the same time if nothing else ran on them."""
        free = [dict(node) for node in self.nodes]
        for bundle in sorted(bundles, key=lambda resources: -sum(resources.values())):
            node = next((node for node in free if _holds(node, bundle)), None)
            if node is None:
                return False
            for name, amount in bundle.items():
                node[name] = node.get(name, 0) - amount
        return True


def cluster_status() -> ClusterStatus:
    """The cluster's state. Ray must have been started."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.autoscaler.v2.schema import Stats
    from ray.autoscaler.v2.utils import ClusterStatusParser
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]

    # as ray.autoscaler.v2.sdk does, whose result leaves out the autoscaler's decision
    reply = GetClusterStatusReply()
    client = GcsClient(ray.get_runtime_context().gcs_address)
    reply.ParseFromString(client.get_cluster_status(timeout_s=STATUS_TIMEOUT_S))
    status, decision = ClusterStatusParser.from_get_cluster_status_reply(reply, Stats()), reply.autoscaling_state
    demands = status.resource_demands
    nodes = [node.total_resources() for node in (*status.active_nodes, *status.idle_nodes)]
    usage = {usage.resource_name: usage.used for usage in status.cluster_resource_usage}
    return ClusterStatus(
        nodes=nodes,
        used=usage.get("CPU", 0) + usage.get("GPU", 0),
        pending=[
            by_count.bundle
            for demand in (*demands.placement_group_demand, *demands.ray_task_actor_demand)
            for by_count in demand.bundles_by_count
            for _ in range(by_count.count)
        ],
        num_starting=len(status.pending_nodes) + sum(launch.count for launch in status.pending_launches),
        has_autoscaler=decision.autoscaler_state_version > 0,
        version=reply.cluster_resource_state.cluster_resource_state_version,
        answered=decision.last_seen_cluster_resource_state_version,
        refused=[
            [each.resources_bundle for each in selector.resource_requests]
            for gang in decision.infeasible_gang_resource_requests
            for selector in gang.bundle_selectors
        ],
    )


def wait_for(
    bundles: Sequence[Resources],
    stage: str,
    *,
    limit_s: float,
    limit_name: str = "workers.max_wait_minutes",
    remedy: str = "",
) -> None:
    """Waits until the cluster can place all bundles at once, so that its autoscaler starts all missing nodes together.

    bundles: the resources of each process of the stage. A process needs one node. limit_name: the setting of the limit.
    remedy: what a user can lower, for the message; by default the keys of a run.
    Logs what is pending, at once and every 30 s. Raises UserError when the resources can never be there: nothing else
    runs or starts, and the autoscaler, which decides every 5 s by default, has seen the request and found no node type
    for it. Raises WaitedTooLongError after `limit_s` seconds.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    request = f"{stage} asks for {counted([readable(bundle) for bundle in wanted])}"
    remedy = remedy or _remedy(bundles)
    group: Any = None
    begin = last_message = time.monotonic()
    status = cluster_status()
    if status.fits(wanted) and not status.used:
        return
    asked: int | None = None  # a version with the request, since which nothing else ran or started
    try:
        group = placement_group(wanted, strategy="PACK")
        while not group.wait(POLL_S):
            status, now = cluster_status(), time.monotonic()
            if status.num_starting or status.used or status.fits(wanted):
                asked = None
            elif asked is None:
                asked = status.version
            elif status.answered > asked and any(_are_equal(bundles, wanted) for bundles in status.refused):
                raise UserError(f"{request}, which no node type of this cluster can serve ({status.text}); {remedy}")
            if now - begin > limit_s:
                raise WaitedTooLongError(
                    f"{request}, which the cluster did not provide within {limit_name} "
                    f"({limit_s / 60:g} min); {status.text}"
                )
            if last_message == begin or now - last_message > MESSAGE_EVERY_S:
                logger.info(f"waiting   {request}; {status.text}; {now - begin:.0f} s so far")
                last_message = now
    finally:
        if group is not None:
            remove_placement_group(group)


def _remedy(bundles: Sequence[Resources]) -> str:
    with_gpus = any(bundle.get("GPU") for bundle in bundles)
    keys = "workers.gpus_per_worker or features.gpus_per_actor" if with_gpus else "workers.cpus_per_worker"
    others = any(bundle.keys() - {"CPU", "GPU"} for bundle in bundles)
    change = "change workers.resources, " if others else ""
    return (
        f"{change}lower {keys} or the number of workers and actors, or join a cluster with larger nodes or more of them"
    )


def _are_equal(bundles: Sequence[Resources], others: Sequence[Resources]) -> bool:
    """Whether two requests ask for the same, in any order."""
    ours, theirs = (sorted(sorted(bundle.items()) for bundle in each) for each in (bundles, others))
    return ours == theirs


def _holds(node: Resources, bundle: Resources) -> bool:
    return all(node.get(name, 0) + 1e-9 >= amount for name, amount in bundle.items())


def readable(resources: Resources) -> str:
    """CPUs, GPUs and the resources of `workers.resources`, without memory and Ray's markers of nodes and groups."""
    others = sorted(name for name in resources if name not in ("CPU", "GPU") and not UNNAMED.search(name))
    named = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU", *others) if resources.get(name)]
    return " + ".join(named) or "a token amount"


def counted(items: Sequence[str]) -> str:
    return ", ".join(f"{count} x ({item})" for item, count in Counter(items).items())
