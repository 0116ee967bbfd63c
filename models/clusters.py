"""The clustering matrix C of Ada-ClustFormer (equations 3 to 8), without a loop over positions.

Shapes: B sequences (images or captions), N tokens, D width, H rows and W columns of a grid; token n = row * W + column.

P(s_k | s_i .. s_{k-1}) = sigmoid(z[i,k]), z[i,k] = FC([s_k; mean of s_i .. s_{k-1}]) for i < k (equation 4; the mean
leaves s_k out). FC is linear, so it commutes with the mean: with u = S w_a, v = S w_m and the prefix sums V of v,

    z[i,k] = u[k] + (V[k] - V[i]) / (k - i) + b

C[i,j] is the product of the factors k = i + 1 .. j (equations 3 and 5), a cumulative sum in log space; symmetric, with
diagonal 1. On a grid (equation 8) cells a and b have C[a,b] = Ch[top row][columns] * Cv[left column][rows] over their
bounding box, so that C is symmetric although its top-left corner may be neither; two maps, one for each direction.

Choices where the paper is open. The product starts at k = i + 1: the factor k = i has no sub-sequence to join.
Stacking (equation 6) is of the matrices, as written; "conditional" stacks the conditionals in the same way before
multiplying them, as Tree Transformer does. One C per layer for all heads, as equation 3 has no index for them. Down-up
sampling pools means of the members that exist (an odd length has a smaller last group), and repeats each entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, ...]  # of equation 6, from one layer to the next; empty before the first


def conditional_scores(scalar: Tensor, context: Tensor, bias: Tensor) -> Tensor:
    """z (..., N, N) from u and v (..., N): row i, column k; where i >= k it is 0 and means nothing."""
    count = scalar.shape[-1]
    places = torch.arange(count, device=scalar.device)
    apart = places - places[:, None]
    sums = F.pad(context.cumsum(-1)[..., :-1], (1, 0))  # V[0] .. V[N-1]
    z = scalar[..., None, :] + (sums[..., None, :] - sums[..., :, None]) / apart.clamp_min(1) + bias
    return torch.where(apart > 0, z, 0.0)  # before any sigmoid: no gradient, no overflow from there


def log_products(log_conditionals: Tensor) -> Tensor:
    """log C (..., N, N), symmetric with zeros on the diagonal, from log P (..., N, N) where i < k."""
    upper = log_conditionals.triu(1).cumsum(-1).triu(1)
    return upper + upper.mT


def boxes_of_cells(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every pair of cells, (N * N,): where Ch (H, W, W) and Cv (W, H, H), flattened, hold their box's factors."""
    cell = torch.arange(rows * columns, device=device)
    row, column = cell // columns, cell % columns
    top, left = torch.minimum(row[:, None], row), torch.minimum(column[:, None], column)
    horizontal = (top * columns + column[:, None]) * columns + column
    vertical = (left * rows + row[:, None]) * rows + row
    return horizontal.flatten(), vertical.flatten()


def grid_log_products(horizontal: Tensor, vertical: Tensor) -> Tensor:
    """log C (B, N, N) from log P along rows (B, H, W, W) and along columns (B, W, H, H): equation 8."""
    rows, columns = horizontal.shape[1:3]
    places = boxes_of_cells(rows, columns, horizontal.device)
    parts = [
        log_products(part).flatten(1).index_select(1, place)
        for part, place in zip((horizontal, vertical), places, strict=True)
    ]
    return (parts[0] + parts[1]).unflatten(1, (rows * columns, -1))


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, finite at 0."""
    return torch.log(-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).tiny)))


def window_matrix(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """(N, N) of 1 where two cells are at most `window` apart along both axes, else 0 (below equation 2)."""
    cell = torch.arange(rows * columns, device=device)
    row, column = cell // columns, cell % columns
    near = ((row - row[:, None]).abs() <= window) & ((column - column[:, None]).abs() <= window)
    return near.float()


@dataclass(frozen=True)
class Layout:
    """Tokens as a grid (rows, columns), or a sequence (rows 1): how they are pooled, and a matrix comes back up."""

    rows: int
    columns: int
    rate: int = 1
    valid_mask: Tensor | None = None  # (B, N) True at valid tokens, which padding follows

    def pool(self, x: Tensor) -> Tensor:
        """(B, N, D) to means over groups of rate (x rate) neighbors, (B, H, W, D) of the pooled grid."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        grid = x.unflatten(1, (self.rows, self.columns))
        if self.rate == 1:
            return grid
        pooled = self._means(grid)
        if self.valid_mask is None:
            return pooled
        valid_mask = self.valid_mask.to(x.dtype).view(-1, self.rows, self.columns, 1)
        return self._means(torch.where(valid_mask > 0, grid, 0.0)) / self._means(valid_mask).clamp_min(1e-6)

    def _means(self, grid: Tensor) -> Tensor:
        size = (min(self.rate, self.rows), min(self.rate, self.columns))
        pooled = F.avg_pool2d(grid.permute(0, 3, 1, 2), size, ceil_mode=True, count_include_pad=False)
        return pooled.permute(0, 2, 3, 1)

    def spread(self, matrix: Tensor) -> Tensor:
        """A pooled matrix (B, n, n) at full size (B, N, N): each entry repeated for the members of its groups."""
        if self.rate == 1:
            return matrix
        cell = torch.arange(self.rows * self.columns, device=matrix.device)
        group = cell // self.columns // self.rate * -(-self.columns // self.rate) + cell % self.columns // self.rate
        return matrix.index_select(1, group).index_select(2, group)


class ClusterMaps(nn.Module):
    """One layer's C: a map FC for each axis, 1 for a sequence and 2 (along rows, along columns) for a grid.

    `stacking`: "matrix" (equation 6), "conditional" (see the head of this file) or "none".
    """

    def __init__(self, d_model: int, axes: int, stacking: str) -> None:
        super().__init__()
        self.stacking = stacking
        self.maps = cast(Sequence[nn.Linear], nn.ModuleList(nn.Linear(2 * d_model, 1) for _ in range(axes)))

    def init_weights(self) -> None:
        """Nearly constant conditionals of 0.88: C is 0.53, 0.28, 0.09 at distance 5, 10, 19. At b = 0 it halves at
        every step, and starves the context before anything is learned."""
        for linear in self.maps:
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.constant_(linear.bias, 2.0)

    def scalars(self, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """u and v (...) of x (..., D) for one axis."""
        scalar, context = (x @ self.maps[axis].weight.to(x.dtype).view(2, -1).T).unbind(-1)
        return scalar, context

    def forward(self, grid: Tensor, before: State) -> tuple[Tensor, State]:
        """C (B, N, N), stacked on the layer before, from (B, H, W, D); and what the next layer stacks on."""
        with torch.autocast(grid.device.type, enabled=False):
            sides = (grid, grid.transpose(1, 2))[: len(self.maps)]
            scores = [
                conditional_scores(*self.scalars(side, axis), self.maps[axis].bias) for axis, side in enumerate(sides)
            ]
            logs, hidden = self._conditionals(scores, before)
            log_matrix = grid_log_products(*logs) if len(logs) == 2 else log_products(logs[0][:, 0])
            return self._stacked(log_matrix.exp(), hidden, before)

    def step(self, x: Tensor, sums: Tensor, log_row: Tensor, before: State) -> tuple[Tensor, State, Tensor, Tensor]:
        """Row t of a sequence's C, for its next token x (R, D).

        sums (R, t + 1): V[0] .. V[t]; log_row (R, t): log C[j, t-1] of this layer, not stacked. Returns the row
        (R, t + 1) stacked on the layer before, what the next layer stacks on, and both caches one longer.
        """
        with torch.autocast(x.device.type, enabled=False):
            scalar, context = self.scalars(x.to(sums.dtype), 0)
            apart = torch.arange(log_row.shape[1], 0, -1, device=x.device)
            z = scalar[:, None] + (sums[:, -1:] - sums[:, :-1]) / apart + self.maps[0].bias
            (log_p,), hidden = self._conditionals([z], before)
            log_row = F.pad(log_row + log_p, (0, 1))
            row, state = self._stacked(log_row.exp(), hidden, before)
            return row, state, torch.cat((sums, sums[:, -1:] + context[:, None]), 1), log_row

    def _conditionals(self, scores: Sequence[Tensor], before: State) -> tuple[list[Tensor], State]:
        """log P of each axis; with conditional stacking also log(1 - P), which is what adds up over layers."""
        if self.stacking != "conditional":
            return [F.logsigmoid(z) for z in scores], ()
        hidden = tuple(F.logsigmoid(-z) for z in scores)
        if before:
            hidden = tuple(old + new for old, new in zip(before, hidden, strict=True))
        return [log_one_minus_exp(one) for one in hidden], hidden

    def _stacked(self, matrix: Tensor, hidden: State, before: State) -> tuple[Tensor, State]:
        if self.stacking == "matrix":
            if before:
                matrix = before[0] + matrix * (1 - before[0])
            return matrix, (matrix,)
        return matrix, hidden


@dataclass(frozen=True)
class Arrangement:
    """Regions as a grid: token n of the grid is region order[n]; places behind the last region are dummies."""

    order: Tensor  # (B, H * W)
    valid_mask: Tensor  # (B, H * W)

    def apply(self, x: Tensor) -> Tensor:
        """(B, N, D) in the regions' order to (B, H * W, D) in the grid's, zeros at dummies."""
        x = F.pad(x, (0, 0, 0, self.order.shape[1] - x.shape[1]))
        return x.gather(1, self.order[:, :, None].expand(-1, -1, x.shape[2]))

    def undo(self, x: Tensor, count: int) -> Tensor:
        """(B, H * W, D) in the grid's order to (B, count, D) in the regions'."""
        back = self.order.argsort(1)[:, :count]
        return x.gather(1, back[:, :, None].expand(-1, -1, x.shape[2]))

    def row_by_row(self) -> Arrangement:
        """The same order as a sequence, dummies moved to its end."""
        moved = (~self.valid_mask).to(torch.uint8).argsort(stable=True, dim=1)
        return Arrangement(self.order.gather(1, moved), self.valid_mask.gather(1, moved))


def arrange_regions(boxes: Tensor, lengths: Tensor | None, rows: int) -> Arrangement:
    """Regions (B, N, 4) by their centers: columns of `rows` from left to right, each sorted from top to bottom.

    The last column that has regions is filled up with dummies at the bottom; columns of dummies follow up to
    ceil(N / rows). Ties keep the regions' order.
    """
    count = boxes.shape[1]
    columns = -(-count // rows)
    center_x, center_y = boxes[..., 0::2].mean(-1), boxes[..., 1::2].mean(-1)
    if lengths is not None:
        padding = torch.arange(count, device=boxes.device) >= lengths[:, None]
        center_x, center_y = (axis.masked_fill(padding, torch.inf) for axis in (center_x, center_y))
    center_x, center_y = (F.pad(axis, (0, columns * rows - count), value=torch.inf) for axis in (center_x, center_y))
    order = center_y.argsort(stable=True, dim=1)
    order = order.gather(1, center_x.gather(1, order).argsort(stable=True, dim=1))
    inside = center_y.gather(1, order).view(-1, columns, rows).argsort(stable=True, dim=2)
    order = order.view(-1, columns, rows).gather(2, inside).transpose(1, 2).flatten(1)
    limit = count if lengths is None else lengths[:, None]
    return Arrangement(order, order < limit)
