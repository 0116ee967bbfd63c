"""What the training loop needs to know of its process: ranks, device, notices, and how to report metrics.

The loop gets it as a `Context`, so that it never imports Ray.
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
    control_group: dist.ProcessGroup | None  # exchanges small CPU tensors and objects; None for the default group

    def report(self, metrics: Values) -> None:
        """Sends metrics to the driver. All ranks wait for each other, so all must call it together."""

    def has_notice(self) -> bool:
        """Whether this worker will soon be ended. The method does not wait, and its answer may differ between ranks."""
        return False

    def must_stop(self) -> bool:
        """Whether training must save its state and end. As for `has_notice`, ranks may get different answers."""
        return False


class LocalContext(Context):
    """A single process without a cluster and a driver, for tests, benchmarks and trials."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.world_rank, self.world_size = 0, 1
        self.device = torch.device(device)
        self.control_group = None

    def report(self, metrics: Values) -> None:
        pass


class RayContext:
    """A worker of Ray Train. Ray has already set up the process group.

    It has a notice when this process got SIGTERM, which does not end the process, or when Ray drains the node of any
    worker. Providers of spot nodes ask for that before they take a node away.

    It must stop when `asked_to_stop` returns True. Rank 0 calls this function every STOP_POLL_S seconds in a background
    thread. An OSError counts as False.
    """

    def __init__(self, asked_to_stop: Callable[[], bool]) -> None:
        import ray.train
        import ray.util
        from ray.train.torch import get_device

        context = ray.train.get_context()
        self.world_rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = torch.device("cpu") if computes_on_cpus() else get_device()
        # with NCCL a message would wait until the GPU has finished the step, so messages go through gloo
        uses_nccl = self.device.type == "cuda" and self.world_size > 1
        self.control_group: dist.ProcessGroup | None = None
        if uses_nccl:
            _choose_interface(ray.util.get_node_ip_address())
            self.control_group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        set_rank(self.world_rank)
        # Signal handlers are set in the main thread, which runs the actor's methods. This is the training thread.
        ray.get(ray.get_runtime_context().current_actor.__ray_call__.remote(_note_sigterm))
        self._must_stop, self._asked_to_stop = False, asked_to_stop
        if self.world_rank == 0:
            threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    def report(self, metrics: Values) -> None:
        import ray.train

        ray.train.report(metrics)

    def has_notice(self) -> bool:
        # The public `ray.train.get_preemption_info` would make all ranks wait for each other.
        from ray.train.v2._internal.execution.context import get_train_context

        return _got_sigterm or get_train_context().preemption_context.preemption_info is not None

    def must_stop(self) -> bool:
        return self._must_stop

    def _watch(self) -> None:
        """Runs in the background thread."""
        while not self._must_stop:
            time.sleep(STOP_POLL_S)
            with suppress(OSError):
                self._must_stop = self._asked_to_stop()


def _choose_interface(address: str) -> None:
    """Makes gloo use the network interface with this address, unless GLOO_SOCKET_IFNAME names an interface.

    By default gloo uses the address of the host's name, which other hosts may be unable to reach.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _note_sigterm(actor: object) -> None:
    """On SIGTERM, sets a flag instead of ending the process. actor: unused; Ray passes it."""

    def note(*_: object) -> None:
        global _got_sigterm
        _got_sigterm = True

    signal.signal(signal.SIGTERM, note)


def gather_objects(context: Context, value: Value) -> list[Value]:
    """The values of all ranks in their order. All ranks must call this together, and all get the result."""
    values = [value] * context.world_size
    if context.world_size > 1:
        dist.all_gather_object(values, value, group=context.control_group)
    return values


def any_rank(context: Context, *answers: bool) -> Callable[[], list[bool]]:
    """Finds out for each of `answers` whether it is True on any rank. Returns a function that waits for the results.

    All ranks must call this together. Until the function is called, the ranks exchange their answers in the background.
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
    """Element-wise sum over all ranks, in place. All ranks must call this together."""
    if context.world_size > 1:
        dist.all_reduce(values)
    return values
