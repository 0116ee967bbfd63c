"""The `Context` from which the training loop gets its rank, device and requests to stop, and which takes its metrics.

The loop reaches Ray only through a `Context`, so that tests can run the loop without Ray.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from raycap.models.config import Values
from raycap.pipeline.runtime.log import set_rank
from raycap.pipeline.runtime.processor import computes_on_cpus

STOP_POLL_S = 1.0
Value = TypeVar("Value")

_got_sigterm = False


class Context(Protocol):
    """The environment of one worker of the training loop."""

    world_rank: int
    world_size: int
    device: torch.device
    control_group: dist.ProcessGroup | None  # for small CPU tensors and objects. None: torch's default group
    reads_checkpoints: bool = False  # whether `report` reads the checkpoint of its validation, which is written before

    def report(self, metrics: Values) -> None:
        """Sends metrics to the driver. All ranks must call this together, because they wait for each other."""

    def has_notice(self) -> bool:
        """True if a worker will soon be ended. Does not wait for the other ranks, so their answers may differ."""
        return False

    def must_stop(self) -> bool:
        """True if training must save its state and end. As with `has_notice`, the answers of ranks may differ."""
        return False


class LocalContext(Context):
    """The context of a single process without a cluster, for tests, benchmarks and trials. Metrics are discarded."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.world_rank, self.world_size = 0, 1
        self.device = torch.device(device)
        self.control_group = None

    def report(self, metrics: Values) -> None:
        pass


class RayContext(Context):
    """The context of a worker of Ray Train, which has already set up the process group.

    `has_notice` is True after this process got SIGTERM, which does not end the process, or when Ray drains the node of
    any worker. Ray drains a spot node before its provider takes the node away.

    `must_stop` is True on rank 0 after `asked_to_stop` has returned True. A background thread of rank 0 calls this
    function every STOP_POLL_S seconds and treats an OSError as False.
    """

    def __init__(self, asked_to_stop: Callable[[], bool]) -> None:
        import ray.train
        import ray.util
        from ray.train.torch import get_device

        context = ray.train.get_context()
        self.world_rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = torch.device("cpu") if computes_on_cpus() else get_device()
        # messages use gloo, because with NCCL a message would wait until the GPU has finished the step
        uses_nccl = self.device.type == "cuda" and self.world_size > 1
        self.control_group: dist.ProcessGroup | None = None
        if uses_nccl:
            _choose_interface(ray.util.get_node_ip_address())
            self.control_group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        set_rank(self.world_rank)
        # This code runs in Ray's training thread, but Python sets signal handlers only in the main thread. The call
        # goes through the actor, because the main thread executes the actor's methods.
        ray.get(ray.get_runtime_context().current_actor.__ray_call__.remote(_note_sigterm))
        self._must_stop, self._asked_to_stop = False, asked_to_stop
        if self.world_rank == 0:
            threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    def report(self, metrics: Values) -> None:
        import ray.train

        ray.train.report(metrics)

    def has_notice(self) -> bool:
        # The import is private, because the public `ray.train.get_preemption_info` makes all ranks wait for each other.
        from ray.train.v2._internal.execution.context import get_train_context

        return _got_sigterm or get_train_context().preemption_context.preemption_info is not None

    def must_stop(self) -> bool:
        return self._must_stop

    def _watch(self) -> None:
        """The background thread: calls `asked_to_stop` until it returns True."""
        while not self._must_stop:
            time.sleep(STOP_POLL_S)
            with suppress(OSError):
                self._must_stop = self._asked_to_stop()


def _choose_interface(address: str) -> None:
    """Makes gloo use the network interface with this IP address, unless GLOO_SOCKET_IFNAME names an interface.

    By default gloo uses the IP address to which the host's name resolves, which other hosts may be unable to reach.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _note_sigterm(actor: object) -> None:
    """On SIGTERM, sets a flag instead of ending the process. actor: unused, but passed by Ray."""

    def note(*_: object) -> None:
        global _got_sigterm
        _got_sigterm = True

    signal.signal(signal.SIGTERM, note)


def gather_objects(context: Context, value: Value) -> list[Value]:
    """Returns the values of all ranks, in the order of ranks, to every rank. All ranks must call this together."""
    if context.world_size == 1:
        return [value]
    values = [value] * context.world_size  # `all_gather_object` replaces each entry
    dist.all_gather_object(values, value, group=context.control_group)
    return values


def any_rank(context: Context, *answers: bool) -> Callable[[], list[bool]]:
    """Starts to exchange answers between ranks. Returns a function that waits and returns the results.

    A result is True if the answer at its position is True on any rank. All ranks must call `any_rank` together and with
    equally many answers. The exchange runs in the background, so that training can continue until the result is needed.
    """
    if context.world_size == 1:
        return lambda: list(answers)
    counts = torch.tensor(answers, dtype=torch.int64)
    exchange = dist.all_reduce(counts, group=context.control_group, async_op=True)

    def result() -> list[bool]:
        exchange.wait()
        return [count > 0 for count in counts.tolist()]

    return result


def sum_over_ranks(context: Context, values: torch.Tensor) -> torch.Tensor:
    """Sums `values` over all ranks, in place, and returns them. All ranks must call this together."""
    if context.world_size > 1:
        dist.all_reduce(values)
    return values
