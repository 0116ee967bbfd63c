"""The formats of exported graphs: writes and runs ONNX graphs, and programs of torch.export.

No other module imports ONNX's packages. The TorchScript exporter is not used: it takes what depends on sizes for
constants.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from raycap.models.convert.export_graphs import GraphTensor

OPSETS = range(18, 24)  # that the exporter of PyTorch and onnxruntime know
DEFAULT_OPSET = 20
MAX_EMBEDDED_BYTES = 2**30  # of weights in a graph's file, which has at most 2 GiB; larger ones have their own file
INT32 = 6  # ONNX's number of the type
REMEDY = "install raycap with the extra `export`, as docs/python.md describes"


def require_packages() -> None:
    """Raises UserError if a package is missing that writes graphs."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--format onnx needs the package {package}, which is not installed; {REMEDY}")


def has_runtime() -> bool:
    """Whether graphs can be run."""
    return importlib.util.find_spec("onnxruntime") is not None


def write_graph(
    path: Path, graph: nn.Module, inputs: Sequence[GraphTensor], output_names: Sequence[str], opset: int
) -> None:
    """Writes a graph of tensors to tensors, with the weights; large ones go to a file beside it, with `.data` added.

    Raises UserError for what the exporter cannot translate.
    """
    import onnx_ir.passes.common
    import torch

    for name in ("torch.onnx", "onnxscript", "onnx_ir"):  # which report their progress
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of names of dimensions
        try:
            program = torch.onnx.export(
                graph,
                tuple(each.example for each in inputs),
                input_names=[each.name for each in inputs],
                output_names=list(output_names),
                opset_version=opset,
                dynamic_shapes=(tuple(dict(each.dims) for each in inputs),),  # of one argument, `*inputs`
                custom_translation_table=_translations(),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # the exporter raises nearly any type
            cause = error.__cause__ or error
            raise UserError(
                f"{path.name} cannot be exported with opset {opset} ({type(cause).__name__}: {one_line(cause)}); try "
                "another --opset, or --format torch"
            ) from error
        assert program is not None
        # The exporter adds to each node where it was called, with the paths of this machine.
        onnx_ir.passes.common.ClearMetadataAndDocStringPass()(program.model)
        weights = sum(each.numel() * each.element_size() for each in graph.state_dict().values())
        program.save(str(path), external_data=weights > MAX_EMBEDDED_BYTES)


class OnnxGraph:
    """A graph in a file, run on the CPU."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._names = [each.name for each in self._session.get_inputs()]

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs for inputs in the order of the graph."""
        results: list[np.ndarray] = self._session.run(None, dict(zip(self._names, inputs, strict=True)))
        return results


def _translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Operations of PyTorch for which the exporter has no translation."""
    import onnxscript
    import torch

    op: Any = onnxscript.opset18

    def stable_sort(values: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
        """TopK, which puts equal values in the order of their indices."""
        if values.dtype.name in ("BOOL", "UINT8"):  # which onnxruntime does not sort
            values = op.Cast(values, to=INT32)
        length = op.Gather(op.Shape(values), op.Constant(value_ints=[dim]))
        return op.TopK(values, length, axis=dim, largest=descending, sorted=True)

    def remainder(values: object, divisor: object) -> Any:
        return op.Mod(values, divisor)

    return {torch.ops.aten.sort.stable: stable_sort, torch.ops.aten.remainder.Scalar: remainder}


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
