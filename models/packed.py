"""Linear maps, and how decoding lays them out for its steps in bfloat16 on a CPU.

A step multiplies every weight of the decoder with the few rows of a batch's beams. On a CPU much of such a product is
bringing the weights into the order that its matrix unit reads. They do not change between steps, so once a batch is
enough. oneDNN, which computes these products in any case, takes weights in that order through the operators that
torch's own compiler calls. Where they are missing, in other precisions and on other devices everything is as torch does
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 80  # that the order is chosen for, 16 images with 5 beams; any number can be multiplied
OPERATORS = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight")

Map = Callable[[Tensor], Tensor]
_laid_out: ContextVar[PackedMaps | None] = ContextVar("laid_out", default=None)  # a thread's own


class Linear(nn.Linear):
    """torch's, but for decoding's steps (`PackedMaps`). The decoders' maps are of this class."""

    def forward(self, x: Tensor) -> Tensor:
        maps = _laid_out.get()
        return super().forward(x) if maps is None or not maps.takes(self.weight) else maps.of(self)(x)


class PackedMaps:
    """The maps of one batch's decoding, each laid out at its first use. Costs their size in bfloat16.

    They are copies: the weights must not change from the first use to the last.
    """

    def __init__(self) -> None:
        self.maps: dict[Linear, Map] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, and under bfloat16 autocast on a CPU, this thread's maps are these. Without gradient."""
        before = _laid_out.set(self)
        try:
            yield
        finally:
            _laid_out.reset(before)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether autocast would make it bfloat16; it leaves float64 alone."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.is_autocast_enabled("cpu")
            and torch.get_autocast_dtype("cpu") == torch.bfloat16
        )

    def of(self, layer: Linear) -> Map:
        if layer not in self.maps:
            self.maps[layer] = packed_map(layer.weight, layer.bias, torch.bfloat16)
        return self.maps[layer]


def packed_map(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Map:
    """x (..., in) -> x W^T + b (..., out) in `dtype`, for many x of few rows; weight (out, in), bias (out,) or None.

    Holds copies: what is written to weight and bias later has no effect. Without gradient.
    """
    weight, bias = weight.detach().to(dtype, copy=True), None if bias is None else bias.detach().to(dtype, copy=True)
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
        and all(hasattr(operators, name) for name in OPERATORS)
        and operators._is_mkldnn_bf16_supported()
    )
