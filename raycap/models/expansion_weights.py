"""Forward and backward weights of the expansions (equations 3, 4 and 6) and their gradient, in few passes over memory.

Shapes as in `expansion.py`; a leading 2 counts the streams, positive and negative.

Autograd's graph of these few lines would keep five tensors of the size of M per stream and pass over them about
thirty times; the hand-written gradient keeps only the results and needs half of the passes. With y = a r and
r = 1 / (sum a + eps), the gradient is

    da = r (dy - sum(dy y)),   dM = da+ where M > 0, -da- where M < 0.

Elements that dropout set to 0 get no gradient, as relu has none there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Dims = int | tuple[int, ...]
EXPORT_SCALE = 2.0**30  # a power of 2, so that products with it are exact


def signed_parts(m: Tensor) -> Tensor:
    """Returns relu(m) and relu(-m) as one tensor (2, ...)."""
    parts = m.new_empty(2, *m.shape)
    torch.clamp_min(m, 0.0, out=parts[0])
    torch.sub(parts[0], m, out=parts[1])
    return parts


def total(a: Tensor, dims: Dims) -> Tensor:
    """The sum over `dims`, which keep size 1, in float32 or float64."""
    if a.dtype == torch.bfloat16 and a.device.type == "cpu":
        # this sum accumulates in float32 as well; with dtype=float32 torch would first convert a copy of `a`
        return a.sum(dims, keepdim=True).float()
    return a.sum(dims, keepdim=True, dtype=torch.promote_types(a.dtype, torch.float32))


def inverse(sums: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    """1 / (sums + epsilon) in `dtype`; overwrites `sums`, which must be float32 or float64 so that epsilon counts."""
    if torch.compiler.is_exporting():  # the same number; optimizers of ONNX graphs take an addend below 1e-8 for 0
        sums, epsilon = sums * EXPORT_SCALE, epsilon * EXPORT_SCALE
        result = sums.add(epsilon).reciprocal().mul(EXPORT_SCALE)
    else:
        result = sums.add_(epsilon).reciprocal_()
    if dtype == torch.float16:  # an all-zero row would give inf, and inf * 0 = nan
        result = result.clamp_(max=6e4)  # float16 ends at 65504
    return result.to(dtype)


def _normalized_gradient(gradient: Tensor, y: Tensor, inverse: Tensor, dims: Dims) -> Tensor:
    """The gradient r (dy - sum(dy y)) of a, from dy = `gradient` and r = `inverse`; the sum is over `dims`."""
    product = gradient * y
    return torch.sub(gradient, total(product, dims).to(y.dtype), out=product).mul_(inverse)


def _signed_gradient(positive: Tensor, above: Tensor, negative: Tensor, below: Tensor) -> Tensor:
    """The gradient of M from those of its two parts, which count where `above` or `below`, respectively, is above 0."""
    relu_gradient = torch.ops.aten.threshold_backward  # one pass; a comparison and a product would be two
    return relu_gradient(positive, above, 0).sub_(relu_gradient(negative, below, 0))


class _StaticWeights(torch.autograd.Function):
    """Computes each stream separately, because the tensors are large and their gradients arrive separately."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, valid_mask: Tensor | None, groups: tuple[int, ...], epsilon: float) -> Any:
        results, inverses = [], []
        for part in (m.clamp_min(0.0), m.clamp_max(0.0).neg_()):  # (B, L, E)
            # masked before the product, which overflows at padding in float16
            masked = part if valid_mask is None else part * valid_mask
            inverses.append(inverse(total(masked, 1), m.dtype, epsilon))
            results.append(masked * inverses[-1])
            for group in part.split(groups, -1):  # in place: `part` becomes the backward weights
                inverses.append(inverse(total(group, -1), m.dtype, epsilon).div_(len(groups)))
                group *= inverses[-1]
            results.append(part)
        ctx.save_for_backward(valid_mask, *results, *inverses)
        ctx.groups = groups
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        valid_mask, *saved = ctx.saved_tensors
        results, inverses = saved[:4], saved[4:]
        count = len(ctx.groups)
        parts = []
        for stream in range(2):
            forward, backward = results[2 * stream : 2 * stream + 2]
            inverse, *group_inverses = inverses[stream * (count + 1) : (stream + 1) * (count + 1)]
            da = _normalized_gradient(gradients[2 * stream], forward, inverse, 1)
            if valid_mask is not None:
                da *= valid_mask
            split = (x.split(ctx.groups, -1) for x in (da, gradients[2 * stream + 1], backward))
            for part, gradient, y, group_inverse in zip(*split, group_inverses, strict=True):
                # here y is a r divided by the number of groups, `count`, so that the sum is taken over count * y
                product = gradient * y
                shift = total(product, -1).to(y.dtype)
                part += torch.sub(gradient, shift, alpha=count, out=product).mul_(group_inverse)
            parts += [da, backward]
        return _signed_gradient(*parts), None, None, None


class _DynamicWeights(torch.autograd.Function):
    """Computes both streams in one tensor: as the tensors are small, the number of operations decides the time."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, forward_mask: Tensor | None, backward_mask: Tensor | None, epsilon: float) -> Any:
        a = signed_parts(m)  # (2, B, s, N_E, t)
        results, inverses = [], []
        for mask, dims in ((forward_mask, (4,)), (backward_mask, (2, 3))):
            masked = a if mask is None else a * mask
            inverses.append(inverse(total(masked, dims), m.dtype, epsilon))
            results.append(masked * inverses[-1])
        ctx.save_for_backward(m, forward_mask, backward_mask, *results, *inverses)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        m, forward_mask, backward_mask, *saved = ctx.saved_tensors
        da = _normalized_gradient(gradients[0], saved[0], saved[2], 4)
        backward_da = _normalized_gradient(gradients[1], saved[1], saved[3], (2, 3))
        if forward_mask is not None:
            da *= forward_mask
            backward_da *= backward_mask
        da += backward_da
        return _signed_gradient(da[0], m, da[1], -m), None, None, None


def static_weights(m: Tensor, valid_mask: Tensor | None, groups: tuple[int, ...], epsilon: float) -> tuple[Tensor, ...]:
    """Forward and backward weights of the positive stream, then of the negative one, from M: all (B, L, E).

    Forward: normalized over the valid tokens L, 0 at padding; valid_mask (B, L) or None. Backward: normalized in each
    group of E, divided by the number of groups, not masked (the reference's rule).
    """
    mask = None if valid_mask is None else valid_mask[:, :, None].to(m.dtype)
    return _StaticWeights.apply(m, mask, groups, epsilon)


def dynamic_weights(
    m: Tensor, forward_mask: Tensor | None, backward_mask: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Forward and backward weights (2, B, s, N_E, t) of M (B, s, N_E, t).

    Forward: normalized over t where `forward_mask` is 1; backward: over (s, N_E) where `backward_mask` is 1; both are 0
    elsewhere. The masks broadcast to M and have its dtype; both are None or neither.
    """
    return _DynamicWeights.apply(m, forward_mask, backward_mask, epsilon)
