"""Counts the operations of a computation, and finds those at which the processor would wait for a GPU.

The computation runs on the CPU, so that no GPU is needed. An operation waits if it reads values of a tensor, or if
values decide about the shape of its result.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT

READS = {"_local_scalar_dense", "equal", "is_nonzero"}
VALUES_DECIDE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
COPIES = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.tensor}


class Operations(TorchDispatchMode):
    """Records the operations in its `with` block.

    count: of the operations without views, which compute nothing. waits: {(operation, function of the project): times}
    of those that wait for a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waits: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        masks = any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in READS | VALUES_DECIDE or masks or repeats:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, operation: str) -> None:
        """Counts an operation for the innermost function of the project. An optimizer's steps are on the CPU anyway."""
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.match("torch/optim/*.py"):
                return
            if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests") and ".venv" not in path.parts:
                self.waits[operation, f"{path.stem}.{frame.f_code.co_name}"] += 1
                return
            frame = frame.f_back  # type: ignore[assignment]


class _Copies(TorchFunctionMode):
    """Records copies between the memories of CPU and GPU. On a CPU alone, torch dispatches no operation for them."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES:
            self.operations.note(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Operations]:
    """Counts the operations of a `with` block."""
    operations = Operations()
    with operations, _Copies(operations):
        yield operations
