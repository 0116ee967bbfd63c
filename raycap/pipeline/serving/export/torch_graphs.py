"""Graphs in the format of torch.export, for PyTorch without raycap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from raycap.models.convert.export_graphs import GraphTensor


def write_program(path: Path, graph: nn.Module, inputs: Sequence[GraphTensor]) -> None:
    """Writes a graph of tensors to tensors, with the weights."""
    import torch
    from torch.export import Dim

    arguments = tuple(each.example for each in inputs)
    shapes = (tuple(dict.fromkeys(each.dims, Dim.DYNAMIC) for each in inputs),)  # of one argument, `*inputs`
    with torch.no_grad():
        program = torch.export.export(graph, arguments, dynamic_shapes=shapes, strict=False)
    for module in program.graph_module.modules():  # a block without autocast is a graph of its own
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # with the paths of this machine
    torch.export.save(program, path)


class TorchProgram:
    """A program in a file."""

    def __init__(self, path: Path) -> None:
        import torch

        # Tracing guards numbers of rows that differ in its examples; one beam per image has equal ones.
        self._module = torch.export.load(path).module(check_guards=False)

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs for inputs in the order of the graph."""
        import torch

        with torch.no_grad():
            return [each.numpy() for each in self._module(*(torch.from_numpy(values) for values in inputs))]
