"""The clustering matrix C of Ada-ClustFormer (equations 3 to 8), computed without a loop over positions.

Shapes: B sequences (images or captions), N tokens, D width, H rows and W columns of a grid; token n = row * W + column.

P(s_k | s_i .. s_{k-1}) = sigmoid(z[i,k]), z[i,k] = FC([s_k; mean of s_i .. s_{k-1}]) for i < k (equation 4; the mean
does not include s_k). FC is linear, so that it commutes with the mean: with u = S w_a, v = S w_m, the prefix sums V of
v, and the bias b,

    z[i,k] = u[k] + (V[k] - V[i]) / (k - i) + b

C[i,j] is the product of the factors k = i + 1 .. j (equations 3 and 5), computed as a cumulative sum of logarithms. C
is symmetric, with diagonal 1. On a grid (equation 8) two FC layers give one matrix along rows, Ch, and one along
columns, Cv. For cells a and b, C[a,b] = Ch[top row][columns] * Cv[left column][rows] of their bounding box. C is
symmetric, although the top-left corner of the box may be neither a nor b.

Choices where the paper leaves something open:

- The product starts at k = i + 1, because the sub-sequence before k = i is empty.
- "matrix" stacking applies equation 6 to the matrices, as written. "conditional" stacks the conditionals instead,
  before they are multiplied, as Tree Transformer does.
- Down-up sampling takes means over the members that a group has (the last group of an odd length is smaller), and
  repeats each entry of the pooled matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, ...]  # what a layer passes to the next one for equation 6; empty before the first layer


def conditional_scores(scalar: Tensor, context: Tensor, bias: Tensor) -> Tensor:
    """z (..., N, N) with row i and column k, from u = `scalar` (..., N), v = `context` (..., N) and b = `bias`.

    Only entries with i < k are defined; the others are 0.
    """
    count = scalar.shape[-1]
    positions = torch.arange(count, device=scalar.device)
    distance = positions - positions[:, None]
    sums = F.pad(context.cumsum(-1)[..., :-1], (1, 0))  # V[0] .. V[N-1]
    z = scalar[..., None, :] + (sums[..., None, :] - sums[..., :, None]) / distance.clamp_min(1) + bias
    # the undefined entries become 0 before the sigmoid, so that they cause no gradient and no overflow
    return torch.where(distance > 0, z, 0.0)


def log_products(log_conditionals: Tensor) -> Tensor:
    """log C (..., N, N), symmetric with zeros on the diagonal, from log P (..., N, N).

    Only entries of log P with row i < column k are read.
    """
    upper = log_conditionals.triu(1).cumsum(-1).triu(1)
    return upper + upper.mT


def grid_log_products(horizontal: Tensor, vertical: Tensor) -> Tensor:
    """Equation 8: log C (B, N, N) from log P along rows (B, H, W, W) and along columns (B, W, H, H)."""
    rows, columns = horizontal.shape[1:3]
    cell = torch.arange(rows * columns, device=horizontal.device)
    row, column = cell // columns, cell % columns
    top, left = torch.minimum(row[:, None], row), torch.minimum(column[:, None], column)
    # (N, N) indices into the flattened factors Ch (H, W, W) and Cv (W, H, H)
    across = (top * columns + column[:, None]) * columns + column
    down = (left * rows + row[:, None]) * rows + row
    along_rows, along_columns = (log_products(part).flatten(1) for part in (horizontal, vertical))
    # index_select is four times as fast as indexing with a matrix
    log_products_of_cells = along_rows.index_select(1, across.flatten()) + along_columns.index_select(1, down.flatten())
    return log_products_of_cells.unflatten(1, (rows * columns, -1))


def window_matrix(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """A matrix (N, N): 1 where two cells are at most `window` apart along both axes, else 0 (below equation 2)."""
    cell = torch.arange(rows * columns, device=device)
    row, column = cell // columns, cell % columns
    near = ((row - row[:, None]).abs() <= window) & ((column - column[:, None]).abs() <= window)
    return near.float()


@dataclass(frozen=True)
class Layout:
    """Tokens as a grid, or as a sequence when `rows` is 1.

    Down-up sampling pools groups of `rate` tokens of a sequence, or of `rate` x `rate` tokens of a grid.
    """

    rows: int
    columns: int
    rate: int = 1
    valid_mask: Tensor | None = None  # (B, N), True at valid tokens; padding comes after them

    def pool(self, x: Tensor) -> Tensor:
        """Means (B, H, W, D) over the groups, where the pooled grid has H x W cells, from x (B, N, D)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        grid = x.unflatten(1, (self.rows, self.columns))
        if self.rate == 1:
            return grid
        if self.valid_mask is None:
            return self._means(grid)
        valid_mask = self.valid_mask.to(x.dtype).view(-1, self.rows, self.columns, 1)
        # the mean of a group's valid members; clamp_min avoids 0 / 0 in a group without any
        return self._means(torch.where(valid_mask > 0, grid, 0.0)) / self._means(valid_mask).clamp_min(1e-6)

    def _means(self, grid: Tensor) -> Tensor:
        """The mean of each group of a grid's cells; the last groups may be smaller."""
        size = (min(self.rate, self.rows), min(self.rate, self.columns))
        pooled = F.avg_pool2d(grid.permute(0, 3, 1, 2), size, ceil_mode=True, count_include_pad=False)
        return pooled.permute(0, 2, 3, 1)

    def spread(self, matrix: Tensor) -> Tensor:
        """A pooled matrix (B, n, n) at full size (B, N, N): each entry is repeated for the members of its groups."""
        if self.rate == 1:
            return matrix
        cell = torch.arange(self.rows * self.columns, device=matrix.device)
        pooled_row, pooled_column = cell // self.columns // self.rate, cell % self.columns // self.rate
        group = pooled_row * math.ceil(self.columns / self.rate) + pooled_column
        return matrix.index_select(1, group).index_select(2, group)


class ClusterMaps(nn.Module):
    """Computes one layer's C, with one linear layer FC for a sequence and two (rows, columns) for a grid."""

    def __init__(self, d_model: int, axes: int, stacking: str) -> None:
        super().__init__()
        self.stacking = stacking
        self.maps = cast(Sequence[nn.Linear], nn.ModuleList(nn.Linear(2 * d_model, 1) for _ in range(axes)))

    def init_weights(self) -> None:
        """Starts with b = 2, where all conditionals are about 0.88 and C is 0.53, 0.28, 0.09 at distance 5, 10, 19.

        With b = 0, C would halve at every position, and attention would start almost without context.
        """
        for linear in self.maps:
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.constant_(linear.bias, 2.0)

    def scalars(self, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """u and v, (...) each, from x (..., D) for one axis."""
        scalar, context = (x @ self.maps[axis].weight.to(x.dtype).view(2, -1).T).unbind(-1)
        return scalar, context

    def forward(self, grid: Tensor, before: State) -> tuple[Tensor, State]:
        """C (B, N, N) from a grid (B, H, W, D), and the next layer's state; `before` is the previous layer's."""
        with torch.autocast(grid.device.type, enabled=False):
            sides = (grid, grid.transpose(1, 2))[: len(self.maps)]  # its rows and its columns; a sequence is one row
            scores = [
                conditional_scores(*self.scalars(side, axis), self.maps[axis].bias) for axis, side in enumerate(sides)
            ]
            logs, log_complements = self._conditionals(scores, before)
            log_matrix = grid_log_products(*logs) if len(logs) == 2 else log_products(logs[0][:, 0])
            return self._stacked(log_matrix.exp(), log_complements, before)

    def step(self, x: Tensor, sums: Tensor, log_row: Tensor, before: State) -> tuple[Tensor, State, Tensor, Tensor]:
        """Row t of a sequence's C, for the next token x (R, D).

        sums (R, t + 1) are V[0] .. V[t]; log_row (R, t) is log C[j, t-1] of this layer before stacking. Returns the
        stacked row (R, t + 1), the state for the next layer, and the new sums and log_row, each longer by one.
        """
        with torch.autocast(x.device.type, enabled=False):
            scalar, context = self.scalars(x.to(sums.dtype), 0)
            distance = torch.arange(log_row.shape[1], 0, -1, device=x.device)
            z = scalar[:, None] + (sums[:, -1:] - sums[:, :-1]) / distance + self.maps[0].bias
            (log_p,), log_complements = self._conditionals([z], before)
            log_row = F.pad(log_row + log_p, (0, 1))
            row, state = self._stacked(log_row.exp(), log_complements, before)
            sums = torch.cat((sums, sums[:, -1:] + context[:, None]), 1)
            return row, state, sums, log_row

    def _conditionals(self, scores: Sequence[Tensor], before: State) -> tuple[list[Tensor], State]:
        """log P of each axis, and log(1 - P) of each axis (empty without conditional stacking).

        With conditional stacking, 1 - P is the product of this layer's 1 - P and those of the layers before it.
        """
        if self.stacking != "conditional":
            return [F.logsigmoid(z) for z in scores], ()
        complements = tuple(F.logsigmoid(-z) for z in scores)
        if before:
            complements = tuple(old + new for old, new in zip(before, complements, strict=True))
        largest = -torch.finfo(complements[0].dtype).tiny  # below 0, so that the logarithm of P is finite
        return [torch.log(-torch.expm1(complement.clamp(max=largest))) for complement in complements], complements

    def _stacked(self, matrix: Tensor, log_complements: State, before: State) -> tuple[Tensor, State]:
        """C after stacking, and the state for the next layer."""
        if self.stacking == "matrix":
            if before:
                matrix = before[0] + matrix * (1 - before[0])
            return matrix, (matrix,)
        return matrix, log_complements


@dataclass(frozen=True)
class Arrangement:
    """Regions arranged into a grid: cell n has region order[n], or a dummy where valid_mask is False."""

    order: Tensor  # (B, H * W)
    valid_mask: Tensor  # (B, H * W)

    def apply(self, x: Tensor) -> Tensor:
        """Reorders x (B, N, D) from regions to cells, (B, H * W, D); dummies get zeros."""
        x = F.pad(x, (0, 0, 0, self.order.shape[1] - x.shape[1]))
        return x.gather(1, self.order[:, :, None].expand(-1, -1, x.shape[2]))

    def undo(self, x: Tensor, count: int) -> Tensor:
        """Reorders x (B, H * W, D) from cells to regions, (B, count, D)."""
        back = self.order.argsort(1)[:, :count]
        return x.gather(1, back[:, :, None].expand(-1, -1, x.shape[2]))

    def row_by_row(self) -> Arrangement:
        """The same order as a sequence, with the dummies at its end."""
        moved = (~self.valid_mask).to(torch.uint8).argsort(stable=True, dim=1)
        return Arrangement(self.order.gather(1, moved), self.valid_mask.gather(1, moved))


def arrange_regions(boxes: Tensor, lengths: Tensor | None, rows: int) -> Arrangement:
    """Arranges regions with boxes (B, N, 4) by their centers into a grid of `rows` rows and ceil(N / rows) columns.

    Sorted from left to right, every `rows` regions form a column, which is then sorted from top to bottom. Dummies
    fill the bottom of the last column with regions, and the columns after it. Equal centers stay in their order.
    """
    count = boxes.shape[1]
    columns = math.ceil(count / rows)
    center_x, center_y = boxes[..., 0::2].mean(-1), boxes[..., 1::2].mean(-1)
    if lengths is not None:
        padding = torch.arange(count, device=boxes.device) >= lengths[:, None]
        center_x, center_y = (axis.masked_fill(padding, torch.inf) for axis in (center_x, center_y))
    center_x, center_y = (F.pad(axis, (0, columns * rows - count), value=torch.inf) for axis in (center_x, center_y))
    # sort by y, then stably by x: regions with the same x stay sorted by y
    order = center_y.argsort(stable=True, dim=1)
    order = order.gather(1, center_x.gather(1, order).argsort(stable=True, dim=1))
    order_in_column = center_y.gather(1, order).view(-1, columns, rows).argsort(stable=True, dim=2)
    order = order.view(-1, columns, rows).gather(2, order_in_column).transpose(1, 2).flatten(1)
    # indices from this limit on are padding, or dummies
    limit = count if lengths is None else lengths[:, None]
    return Arrangement(order, order < limit)
