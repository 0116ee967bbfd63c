"""Waits for the resources of a stage on a Ray cluster, reports a stage without progress, and ends it after a limit.

Otherwise a request that no node can serve would look like a slow start, and so would a process that hangs, or a node
that was lost and not replaced.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from raycap.pipeline.config.sections import WorkersSection
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.storage.s3 import StorageError

logger = logging.getLogger(__name__)

MESSAGE_EVERY_S = 30.0
PLACEMENT_POLL_S, POLL_S = 2.0, 1.0
QUIET_S = 120.0  # how long a stage may be quiet before the first message, because its first batch and step take long
MAX_INIT_DEATHS = 3  # how many actors in a row may die while they start, for example for lack of memory
MAX_STORAGE_RETRIES = 5  # how often a task is repeated if its requests to the storage have failed
SIGNAL = signal.SIGUSR1  # not SIGINT or SIGTERM, because they stop the command
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
        while not group.wait(PLACEMENT_POLL_S):
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


class StallWatch:
    """Watches a stage in a `with` block of the main thread. The stage calls `progressed` when it makes progress.

    After two minutes without a call, a background thread logs the nodes and the pending requests every 30 s. After
    `workers.max_stall_minutes` the block ends with JobFailedError. The background thread ends it by a signal, because
    the main thread waits inside Ray.
    """

    def __init__(self, stage: str, workers: WorkersSection) -> None:
        self.stage, self.limit_s = stage, 60 * workers.max_stall_minutes
        self._stop = threading.Event()
        self._error: JobFailedError | None = None
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Callable[[], None]:
        self._earlier_handler, self._main_thread = signal.signal(SIGNAL, _interrupt), threading.get_ident()
        self.progressed()
        self._thread.start()
        return self.progressed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        try:
            self._thread.join()  # a thread that has ended sends no signal, so the earlier handler can be restored
        finally:
            signal.signal(SIGNAL, self._earlier_handler)
        if self._error is not None and kind is KeyboardInterrupt:
            raise self._error

    def progressed(self) -> None:
        self._progress_at = time.monotonic()

    def stream(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], options: Any) -> Iterator[Any]:
        """Calls a generator function in one Ray task per element of `calls`. Yields the tasks' values as they come.

        Each value counts as progress. If a node is lost, Ray repeats its tasks and leaves out as many values as were
        delivered before, so a repeated task must yield the same values. calls: the arguments of each task. options: the
        tasks' options of Ray. Raises the errors of `one_sentence`.
        """
        import ray

        task = ray.remote(function).options(num_returns="streaming", **options)
        running = [task.remote(*arguments) for arguments in calls]
        with one_sentence(self.stage):
            while running:
                ready: Any = ray.wait(running)[0][0]
                try:
                    value = ray.get(next(ready))
                except StopIteration:
                    running.remove(ready)
                    continue
                self.progressed()
                yield value

    def _watch(self) -> None:
        """Logs a stall and ends the block, as the class describes. Runs in the background thread."""
        quiet_s = min(QUIET_S, self.limit_s / 2)
        progress_at = message_after_s = 0.0
        while not self._stop.wait(POLL_S):
            if self._progress_at != progress_at:
                progress_at, message_after_s = self._progress_at, quiet_s
            idle_s = time.monotonic() - progress_at
            if idle_s > self.limit_s:
                self._error = JobFailedError(
                    f"{self.stage} finished nothing within {self.limit_s / 60:g} min (workers.max_stall_minutes of a "
                    f"configuration); {situation()}; the same command continues from what was stored"
                )
                if not self._stop.is_set():  # the block may have ended while `situation` asked the cluster
                    signal.pthread_kill(self._main_thread, SIGNAL)
                return
            if idle_s > message_after_s:
                logger.info(f"waiting   {self.stage} has finished nothing for {idle_s:.0f} s; {situation()}")
                message_after_s = idle_s + MESSAGE_EVERY_S


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Handles SIGNAL. Raises KeyboardInterrupt, because Ray ignores other exceptions while the main thread waits."""
    raise KeyboardInterrupt


def situation() -> str:
    """What a stage or a search waits for, as a clause of a sentence."""
    try:
        status = cluster_status()
    except Exception as error:  # whatever its type, it must not end the thread that reports
        return f"the cluster does not report its state ({' '.join(str(error).split())})"
    return status.text if status.pending else f"{status.text}; no request is pending, so a process is slow or hangs"


def repeat_interrupted_tasks() -> None:
    """Makes Ray Data repeat tasks that an outage of the storage has interrupted, as Ray does for lost nodes.

    Tasks must be safe to repeat.
    """
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.max_consecutive_actor_init_deaths = MAX_INIT_DEATHS
    context.retried_map_errors = [StorageError.__name__]
    context.max_map_retries = MAX_STORAGE_RETRIES
    context.raise_original_map_exception = True  # otherwise the type of the error is lost


@contextmanager
def one_sentence(stage: str) -> Iterator[None]:
    """In the context, cuts a task's StorageError to one line, and turns the loss of a process into JobFailedError."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, StorageError):
            raise type(error.cause)(str(error.cause).splitlines()[0]) from error  # Ray Data appends lines
        raise
    except RayError as error:
        reason = " ".join(str(error).split())
        raise JobFailedError(f"{stage} lost a process several times, last with: {reason}") from error
