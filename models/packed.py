"""Linear maps laid out for the steps of decoding in bfloat16 on a CPU.

A step multiplies every weight of the decoder with the few rows of a batch's beams. On a CPU much of such a product,
half of it for the words' logits, is bringing the weights into the order that its matrix unit reads. They do not change
between steps, so once a batch is enough. oneDNN, which computes these products in any case, takes weights in that order
through the operators that torch's own compiler calls. Where they are missing, in other precisions and on other devices
everything is as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 80  # that the order is chosen for, 16 images with 5 beams; any number can be multiplied


def packed_map(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> x W^T + b (..., out) in `dtype`, for many x of few rows; weight (out, in), bias (out,) or None.

    Holds a copy of the weights; what is written to them later has no effect. Without gradient.
    """
    weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    if not _available(weight):
        return lambda x: F.linear(x.to(dtype), weight, bias)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x.to(dtype), laid_out, bias, "none", [], "")


def _available(weight: Tensor) -> bool:
    operators = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(operators, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
        and operators._is_mkldnn_bf16_supported()
    )


class PackedMaps:
    """Inside it, if autocast is on in bfloat16, the models' linear maps on a CPU are those laid out at their first use.

    To be entered for each step, with weights that do not change in between; outside it the models are as they were.
    Costs the size of the maps used, in bfloat16.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        layers = {module for model in models for module in model.modules() if type(module) is nn.Linear}
        self.maps = {layer: _FirstUse(layer) for layer in layers if layer.weight.device.type == "cpu"}

    def __enter__(self) -> None:
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
            for layer, packed in self.maps.items():
                layer.__dict__["forward"] = packed  # hides the class's

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for layer in self.maps:
            layer.__dict__.pop("forward", None)


class _FirstUse:
    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.map: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.map is None:
            self.map = packed_map(self.layer.weight, self.layer.bias, torch.bfloat16)
        return self.map(x)
