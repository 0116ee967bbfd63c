"""Checks of a cluster: every node runs `doctor.checks` on itself, as a task of Ray."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raycap.jobs.doctor import checks
from raycap.jobs.doctor.checks import Finding
from raycap.pipeline.cluster.capacity import ClusterStatus, Resources, cluster_status, counted, readable
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.runtime.processor import computes_on_cpus
from raycap.pipeline.storage.path import StoragePath

PROBE_S = 60.0  # the deadline for the answers of nodes, whose processes must start first
CLOCK_S = 3.0  # differences of clocks below this are normal
POLL_S = 0.1  # between two looks at which nodes have answered, the precision of the clocks
Answer = tuple[list[Finding], float]  # what a node has found, and its clock in Unix seconds


def check_node(
    expected: Mapping[str, str], gpus: tuple[float, bool], storage: tuple[StoragePath, str] | None
) -> Answer:
    """Runs the checks on the node on which this runs.

    expected: the driver's versions. gpus: how many Ray offers there, and whether a run needs them. storage: the place,
    and the name of a file that the driver wrote there.
    """
    found = [checks.same_versions(expected), checks.gpus(gpus[0], is_needed=gpus[1]), checks.java(), *checks.folders()]
    found += [] if storage is None else [checks.storage(*storage)]
    return found, time.time()


def check_cluster(config: RunConfig | None, requests: Mapping[str, Sequence[Resources]]) -> Iterator[Finding]:
    """Asks all live nodes and compares their answers. Ray must have been started.

    requests: the resources of each process, by the name of the stage.
    """
    import ray

    alive = {f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node for node in ray.nodes() if node["Alive"]}
    uses_gpus = any(bundle.get("GPU") for bundles in requests.values() for bundle in bundles) and not computes_on_cpus()
    storage, file = None, StoragePath("")
    if config is not None:
        file = config.storage_place / f".raycap-probe-{uuid.uuid4().hex}"
        with suppress(OSError):  # the check of the storage from this machine reports it
            file.write_bytes(b"")
            storage = (config.storage_place, file.name)
    arguments = {
        name: (checks.versions(), (node["Resources"].get("GPU", 0.0), uses_gpus), storage)
        for name, node in alive.items()
    }
    try:
        found, silent, ahead = _ask({name: node["NodeID"] for name, node in alive.items()}, arguments)
    finally:
        with suppress(OSError):
            if storage is not None:
                file.delete()
    status = cluster_status()
    yield nodes(status, silent, len(alive))
    yield from (stage_fits(status, stage, bundles) for stage, bundles in requests.items())
    yield from merged(found)
    if found:
        yield clocks(ahead)


def nodes(status: ClusterStatus, silent: Mapping[str, str], count: int) -> Finding:
    """Whether there are workers, and all nodes answer. silent: {node: why it has not answered} of `count` nodes."""
    if silent:
        text = f"{len(silent)} of {count} do not answer: {listed(silent)}"
        return Finding("nodes", "fail", text, "look at the node's log, give it the same image, or remove it")
    if any(node.get("CPU") or node.get("GPU") for node in status.nodes):
        return Finding("nodes", "ok", status.text)
    text = "no worker is up, so only the head is checked"
    if status.has_autoscaler:
        return Finding("nodes", "warn", text, "repeat this while a job runs, to check its nodes")
    return Finding("nodes", "fail", f"{text}, and there is no autoscaler", "start worker nodes")


def stage_fits(status: ClusterStatus, stage: str, bundles: Sequence[Resources]) -> Finding:
    """Whether the live nodes can serve what a stage asks for. What an autoscaler can start is not known."""
    wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    text = f"{stage} asks for {counted([readable(bundle) for bundle in wanted])}"
    if status.fits(wanted):
        return Finding("resources", "ok", f"{text}, and live nodes have it")
    text += f", which the live nodes do not have ({status.text})"
    if status.has_autoscaler:
        remedy = "a stage that no node type of the autoscaler can serve ends at once with exit code 2"
        return Finding("resources", "warn", text, remedy)
    return Finding(
        "resources", "fail", text, "lower the keys of workers, features or a search's resources, or add nodes"
    )


def clocks(ahead: Mapping[str, float]) -> Finding:
    """Whether the clocks agree. Leases expire by the clock, and S3 refuses requests that are 15 minutes off."""
    wrong = {node: f"{seconds:+.0f} s" for node, seconds in ahead.items() if abs(seconds) > CLOCK_S}
    if wrong:
        return Finding("clocks", "warn", f"differ from this machine: {listed(wrong)}", "run a time service (NTP)")
    return Finding("clocks", "ok", f"agree within {CLOCK_S:g} s")


def merged(found: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """One finding for each check of the nodes, called `node NAME`: the worst level, with the nodes that have it."""
    for name in dict.fromkeys(finding.name for each in found.values() for finding in each):
        ours = {node: finding for node, each in found.items() for finding in each if finding.name == name}
        bad = {node: finding for node, finding in ours.items() if finding.level != "ok"}
        if bad:
            worst = min(bad.values(), key=lambda finding: finding.level)  # "fail" is before "warn"
            text = listed({node: finding.text for node, finding in bad.items()})
            yield replace(worst, name=f"node {name}", text=text)
        else:
            yield Finding(f"node {name}", "ok", "; ".join(dict.fromkeys(finding.text for finding in ours.values())))


def listed(texts: Mapping[str, str]) -> str:
    """The texts of nodes; equal ones together."""
    by_text: dict[str, list[str]] = {}
    for node, text in texts.items():
        by_text.setdefault(text, []).append(node)
    return "; ".join(f"{', '.join(nodes)}: {text}" for text, nodes in by_text.items())


def _ask(
    ids: Mapping[str, str], arguments: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, list[Finding]], dict[str, str], dict[str, float]]:
    """Calls `check_node` on all nodes at once. ids, arguments: Ray's id of each node, and those of the call.

    Returns {node: findings}, {node: why it has none} and {node: seconds that its clock is ahead, at least}.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    task, before = ray.remote(check_node), time.time()
    references = {
        task.options(num_cpus=0, max_retries=0, scheduling_strategy=OnNode(ids[name], soft=False)).remote(*each): name
        for name, each in arguments.items()
    }
    found, failed, ahead = dict[str, list[Finding]](), dict[str, str](), dict[str, float]()
    late, deadline = list(references), time.monotonic() + PROBE_S
    while late and time.monotonic() < deadline:
        done, late = ray.wait(late, num_returns=len(late), timeout=POLL_S)
        now = time.time()
        for reference in done:
            name = references[reference]
            try:
                found[name], clock = ray.get(reference)
                ahead[name] = max(0.0, clock - now) or min(0.0, clock - before)
            except Exception as error:  # a node that has just died, or code that cannot be imported there
                failed[name] = str(error).strip().splitlines()[-1]
    for reference in late:
        ray.cancel(reference, force=True)
        failed[references[reference]] = f"no answer within {PROBE_S:g} s"
    return found, failed, ahead
