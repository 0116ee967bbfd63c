"""Ada-ClustFormer (Hu, Wang, Yang et al. 2022): self-attention inside soft clusters of patches and of words.

Shapes: B images (or sequences), N tokens, K captions per image, R = B*K rows, T caption tokens, D width, H heads (or
rows of a grid with W columns, where token n = row * W + column). C is the clustering matrix.

Each layer multiplies its self-attention weights by its clustering matrix C, which all heads share. Equation 6 stacks C
on the matrices of the layers below, separately in encoder and decoder. Cross-attention has no such matrix. Between
words j <= t, C depends on the words j to t only. A step of the causal decoder therefore needs one prefix sum and one
row of C per layer.

C is computed without a loop over positions (equations 3 to 8). P(s_k | s_i .. s_{k-1}) is sigmoid(z[i,k]), where z[i,k]
= FC([s_k; mean of s_i .. s_{k-1}]) for i < k (equation 4; the mean does not include s_k). FC is linear, so that its
weights w_a and w_m can be applied before the mean. With u = S w_a, v = S w_m, prefix sums V of v, and bias b, this is

    z[i,k] = u[k] + (V[k] - V[i]) / (k - i) + b

C[i,j] is the product of P over k = i + 1 .. j (equations 3 and 5), computed as a cumulative sum of logarithms. C is
symmetric, with diagonal 1. On a grid (equation 8) two FC layers give matrices along rows, Ch, and along columns, Cv.
Take the smallest box of cells that contains the cells a and b: C[a,b] is the product of Ch along the box's top row and
Cv along its left column. C is therefore symmetric on a grid, too.

Choices where the paper leaves something open:

- The product starts at k = i + 1, because the sub-sequence before k = i is empty.
- "matrix" stacking applies equation 6 to the matrices, as written. "conditional" stacks the probabilities P instead,
  before they are multiplied, as Tree Transformer does.
- Down-up sampling takes the mean of each group of tokens, and repeats each entry of the pooled matrix. The last group
  of an odd length is smaller. The decoder has no sampling, because the mean of a group would contain a later word.
- C multiplies the weights after the softmax, as in Tree Transformer, which the paper cites. The paper prints softmax(A
  * C), where A is a softmax already. A second softmax would give weights within a factor e of uniform, so there is
  none. The weights of a token then add up to less than 1, which the residual connection and the norm compensate.
- The scores of attention are divided by sqrt(D / H).
- Pre-norm is the default, because the recipe has no warm-up. "post" follows equation 1.
- C is computed from the same normalized input as the queries.
- Image tokens have no positions other than those in C; words have sinusoids.
- The decoder is causal by default. The published code's decoder is not; it is a setting (`MaskTokenClustFormer`).
- The paper gives neither width nor heads; 512 and 8 are used. Its Figure 5 suggests six layers on each side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import Features, Memory, check_positions, valid_tokens
from raycap.models.config import ClustFormerConfig, ModelSizes
from raycap.models.decoding.cache import RowSlots, TreeCache, TreeSlots
from raycap.models.dropout import CaptionMasks, Dropout
from raycap.models.layers import (
    MASKED_SCORE,
    DecoderLayer,
    EncoderDecoder,
    Layer,
    SelfAttention,
    at_positions,
    full_precision,
    layer_list,
    layer_outputs,
    lm_head,
    merge_heads,
    position_rows,
    sinusoids,
    token_embedding,
)

State = tuple[Tensor, ...]  # what equation 6 needs of the layers below, or () in the first layer


def conditional_scores(scalar: Tensor, context: Tensor, bias: Tensor) -> Tensor:
    """Computes z (..., N, N) from u = `scalar`, v = `context` (..., N each) and b = `bias`. If i >= k, z[i,k] is 0."""
    count = scalar.shape[-1]
    positions = torch.arange(count, device=scalar.device)
    distance = positions - positions[:, None]
    sums = F.pad(context.cumsum(-1)[..., :-1], (1, 0))  # V[0] .. V[N-1]
    z = scalar[..., None, :] + (sums[..., None, :] - sums[..., :, None]) / distance.clamp_min(1) + bias
    # entries with i >= k are not defined; they become 0 before the sigmoid, so that they cause no gradient or overflow
    return torch.where(distance > 0, z, 0.0)


def log_products(log_conditionals: Tensor) -> Tensor:
    """Computes log C (..., N, N), symmetric with a diagonal of 0, from log P (..., N, N) above its diagonal."""
    upper = log_conditionals.triu(1).cumsum(-1).triu(1)
    return upper + upper.mT


def grid_log_products(horizontal: Tensor, vertical: Tensor) -> Tensor:
    """Computes log C (B, N, N) by equation 8 from log P along rows (B, H, W, W) and along columns (B, W, H, H)."""
    rows, columns = horizontal.shape[1:3]
    cell = torch.arange(rows * columns, device=horizontal.device)
    row, column = cell // columns, cell % columns
    top, left = torch.minimum(row[:, None], row), torch.minimum(column[:, None], column)
    # (N, N) indices of Ch[top, column of a, column of b] and Cv[left, row of a, row of b] in the flattened tensors
    across = (top * columns + column[:, None]) * columns + column
    down = (left * rows + row[:, None]) * rows + row
    along_rows, along_columns = (log_products(part).flatten(1) for part in (horizontal, vertical))
    # index_select is four times as fast as indexing with a matrix
    log_products_of_cells = along_rows.index_select(1, across.flatten()) + along_columns.index_select(1, down.flatten())
    return log_products_of_cells.unflatten(1, (rows * columns, -1))


def window_matrix(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """Returns a matrix (N, N): 1 if two cells are at most `window` apart on both axes, else 0 (paper, equation 2)."""
    cell = torch.arange(rows * columns, device=device)
    row, column = cell // columns, cell % columns
    near = ((row - row[:, None]).abs() <= window) & ((column - column[:, None]).abs() <= window)
    return near.float()


@dataclass(frozen=True)
class Layout:
    """Tokens as a grid, or as a sequence if `rows` is 1. Down-up sampling pools squares of `rate` x `rate` tokens."""

    rows: int
    columns: int
    rate: int = 1
    valid_mask: Tensor | None = None  # (B, N), True at valid tokens; padding comes after them

    def pool(self, x: Tensor) -> Tensor:
        """Returns the mean of each group of tokens: x (B, N, D) -> (B, H, W, D) for a pooled grid of H x W cells."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        grid = x.unflatten(1, (self.rows, self.columns))
        if self.rate == 1:
            return grid
        if self.valid_mask is None:
            return self._means(grid)
        valid_mask = self.valid_mask.to(x.dtype).view(-1, self.rows, self.columns, 1)
        # the mean of a group's valid members only; clamp_min avoids 0 / 0 in groups that have none
        return self._means(torch.where(valid_mask > 0, grid, 0.0)) / self._means(valid_mask).clamp_min(1e-6)

    def _means(self, grid: Tensor) -> Tensor:
        """Returns the mean of each group of cells of a grid (B, rows, columns, D). The last groups may be smaller."""
        size = (min(self.rate, self.rows), min(self.rate, self.columns))
        pooled = F.avg_pool2d(grid.permute(0, 3, 1, 2), size, ceil_mode=True, count_include_pad=False)
        return pooled.permute(0, 2, 3, 1)

    def spread(self, matrix: Tensor) -> Tensor:
        """Expands a pooled matrix (B, n, n) to (B, N, N). Each entry is repeated for the members of its groups."""
        if self.rate == 1:
            return matrix
        cell = torch.arange(self.rows * self.columns, device=matrix.device)
        pooled_row, pooled_column = cell // self.columns // self.rate, cell % self.columns // self.rate
        group = pooled_row * math.ceil(self.columns / self.rate) + pooled_column
        return matrix.index_select(1, group).index_select(2, group)


class ClusterMaps(nn.Module):
    """Computes one layer's C by one linear layer FC for a sequence, or by two for a grid (for rows and for columns)."""

    def __init__(self, d_model: int, axes: int, stacking: str) -> None:
        super().__init__()
        self.stacking = stacking
        self.maps = cast(Sequence[nn.Linear], nn.ModuleList(nn.Linear(2 * d_model, 1) for _ in range(axes)))

    def init_weights(self) -> None:
        """Sets b = 2, so that every P is about 0.88, and C is 0.53, 0.28 and 0.09 at the distances 5, 10 and 19.

        With b = 0, C would halve at every position, and attention would begin almost without context.
        """
        for linear in self.maps:
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.constant_(linear.bias, 2.0)

    def scalars(self, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Computes u and v, each (...), from x (..., D). axis: 0 along rows, 1 along columns."""
        scalar, context = (x @ self.maps[axis].weight.to(x.dtype).view(2, -1).T).unbind(-1)
        return scalar, context

    def forward(self, grid: Tensor, before: State) -> tuple[Tensor, State]:
        """Computes C (B, N, N) from a grid (B, H, W, D). before: the state that the layer below has returned.

        Also returns the state for the next layer.
        """
        with full_precision(grid):
            sides = (grid, grid.transpose(1, 2))[: len(self.maps)]  # by rows, by columns; a sequence is one row
            scores = [
                conditional_scores(*self.scalars(side, axis), self.maps[axis].bias) for axis, side in enumerate(sides)
            ]
            logs, log_complements = self._conditionals(scores, before)
            log_matrix = grid_log_products(*logs) if len(logs) == 2 else log_products(logs[0][:, 0])
            return self._stacked(log_matrix.exp(), log_complements, before)

    def step(self, x: Tensor, sums: Tensor, log_row: Tensor, before: State) -> tuple[Tensor, State, Tensor, Tensor]:
        """Computes row t of a sequence's C, for the next token x (R, D).

        sums: V[0] .. V[t], (R, t + 1). log_row: log C[j, t-1] of this layer before stacking, (R, t). Returns the
        stacked row (R, t + 1), the state for the next layer, and the new sums and log_row, each longer by one.
        """
        with full_precision(x):
            scalar, context = self.scalars(x.to(sums.dtype), 0)
            distance = torch.arange(log_row.shape[1], 0, -1, device=x.device)
            z = scalar[:, None] + (sums[:, -1:] - sums[:, :-1]) / distance + self.maps[0].bias
            (log_p,), log_complements = self._conditionals([z], before)
            new_log_row = F.pad(log_row + log_p, (0, 1))
            row, state = self._stacked(new_log_row.exp(), log_complements, before)
            new_sums = torch.cat((sums, sums[:, -1:] + context[:, None]), 1)
            return row, state, new_sums, new_log_row

    def _conditionals(self, scores: Sequence[Tensor], before: State) -> tuple[list[Tensor], State]:
        """Returns log P of each axis from its z, and for conditional stacking log(1 - P) of each axis (else ())."""
        if self.stacking != "conditional":
            return [F.logsigmoid(z) for z in scores], ()
        log_complements = tuple(F.logsigmoid(-z) for z in scores)
        if before:  # equation 6: the stacked 1 - P is the product of 1 - P in this layer and in all layers below
            log_complements = tuple(below + own for below, own in zip(before, log_complements, strict=True))
        largest = -torch.finfo(log_complements[0].dtype).tiny  # below 0, so that P is above 0 and its logarithm finite
        return [torch.log(-torch.expm1(each.clamp(max=largest))) for each in log_complements], log_complements

    def _stacked(self, matrix: Tensor, log_complements: State, before: State) -> tuple[Tensor, State]:
        """Returns C after stacking, and the state for the next layer."""
        if self.stacking != "matrix":
            return matrix, log_complements
        if before:
            matrix = before[0] + matrix * (1 - before[0])
        return matrix, (matrix,)


@dataclass(frozen=True)
class Arrangement:
    """Regions arranged into a grid. Cell n has the region order[n] if valid_mask[n] is True, and else is a dummy."""

    order: Tensor  # (B, H * W)
    valid_mask: Tensor  # (B, H * W)

    def apply(self, x: Tensor) -> Tensor:
        """Reorders x from regions (B, N, D) to cells (B, H * W, D). Dummies get zeros."""
        x = F.pad(x, (0, 0, 0, self.order.shape[1] - x.shape[1]))
        return x.gather(1, self.order[:, :, None].expand(-1, -1, x.shape[2]))

    def undo(self, x: Tensor, count: int) -> Tensor:
        """Reorders x from cells (B, H * W, D) to regions (B, count, D)."""
        back = self.order.argsort(1)[:, :count]
        return x.gather(1, back[:, :, None].expand(-1, -1, x.shape[2]))

    def row_by_row(self) -> Arrangement:
        """Returns the same order as a sequence, with the dummies at the end."""
        moved = (~self.valid_mask).to(torch.uint8).argsort(stable=True, dim=1)
        return Arrangement(self.order.gather(1, moved), self.valid_mask.gather(1, moved))


def arrange_regions(boxes: Tensor, lengths: Tensor | None, rows: int) -> Arrangement:
    """Arranges regions with boxes (B, N, 4) by their centers into a grid of `rows` rows and ceil(N / rows) columns.

    Regions are sorted from left to right. Every `rows` of them form a column, which is then sorted from top to bottom.
    Dummies fill the rest of the last such column, and all columns after it. Equal centers stay in their order.
    """
    count = boxes.shape[1]
    columns = math.ceil(count / rows)
    limit = count if lengths is None else lengths[:, None]  # indices from this limit on are padding or dummies
    is_empty = torch.arange(columns * rows, device=boxes.device) >= limit
    centers = torch.stack((boxes[..., 0::2].mean(-1), boxes[..., 1::2].mean(-1)))  # (2, B, N)
    center_x, center_y = F.pad(centers, (0, columns * rows - count)).masked_fill(is_empty, torch.inf)
    # sorted by y and then stably by x, so that regions with the same x stay sorted by y
    by_y = center_y.argsort(stable=True, dim=1)
    by_x = by_y.gather(1, center_x.gather(1, by_y).argsort(stable=True, dim=1))
    order_in_column = center_y.gather(1, by_x).view(-1, columns, rows).argsort(stable=True, dim=2)
    by_column = by_x.view(-1, columns, rows).gather(2, order_in_column)
    order = by_column.transpose(1, 2).flatten(1)  # row by row
    return Arrangement(order, order < limit)


class ClusteredAttention(SelfAttention):
    """Self-attention whose weights are multiplied by the clustering matrix (equation 2), then by dropout."""

    def __init__(self, config: ClustFormerConfig) -> None:
        super().__init__(config.d_model, config.num_heads, causal=False)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, clusters: Tensor | None = None) -> Tensor:
        """Mixes the tokens x (B, N, D). clusters: C (B, N, N), or None for attention without C.

        attention_mask: True where a query may attend to a key, with broadcasting to (B, 1, N, N); None if everywhere.
        """
        query, key, value = self.project(x)
        weights = self._weights(query, key, attention_mask, clusters)
        weights = self.dropout(weights, lambda masks, p: masks.of_pairs((self.num_heads,), p).permute(0, 3, 1, 2))
        return self.out_proj(merge_heads(weights.to(value.dtype) @ value), x)

    def step(self, x: Tensor, slots: TreeSlots, ancestors: Tensor, row: Tensor | None = None) -> Tensor:
        """Mixes the next token of each beam, x (B*K, D) -> (B*K, D). row: the token's row of C (B*K, t), or None."""
        if isinstance(slots, RowSlots):
            query, key, value = self.project_rows(x, slots)
            weights = self._weights(query, key, None, None if row is None else row[:, None])
            return self.out_proj(merge_heads(weights.to(value.dtype) @ value)[:, 0], x)
        query, key, value, path = self.project_step(x, slots, ancestors)
        clusters = None
        if row is not None:
            clusters = row.new_zeros(path.shape).scatter_(2, ancestors, row.view(ancestors.shape))
        weights = self._weights(query, key, path[:, None], clusters)

        def of_slots(masks: CaptionMasks, p: float) -> Tensor:
            of_new_token = masks.of_pairs((self.num_heads,), p)[0]  # (B*K, t, H)
            on_path = of_new_token.view(*ancestors.shape, -1).permute(0, 3, 1, 2)  # (B, H, K, t)
            return on_path.new_zeros(weights.shape).scatter_(3, ancestors[:, None].expand_as(on_path), on_path)

        mixed = self.dropout(weights, of_slots).to(value.dtype) @ value
        return self.out_proj(merge_heads(mixed).flatten(0, 1), x)

    def _weights(self, query: Tensor, key: Tensor, attention_mask: Tensor | None, clusters: Tensor | None) -> Tensor:
        """Computes the attention weights (B, H, Q, N), multiplied by C unless `clusters` is None."""
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if attention_mask is None:
            weights = scores.softmax(-1)
        else:  # MASKED_SCORE and not -inf, because the softmax of an image without regions would be NaN
            hidden = ~attention_mask
            weights = scores.masked_fill(hidden, MASKED_SCORE).softmax(-1).masked_fill(hidden, 0.0)
        return weights if clusters is None else weights * clusters[:, None]


@dataclass
class PassState:
    """What the layers share in a pass over image tokens or captions: inputs of all layers, and results for the next."""

    layout: Layout
    attention_mask: Tensor | None  # broadcasts to (B, 1, N, N), True where a query may attend
    window: Tensor | None  # the fixed C (1, N, N) of all layers; None if each layer computes its C
    stacked: State = ()  # the state that the layer below has returned


class ClusteredLayer(Layer):
    """Layer `number` (from 1) of a `side` ("encoder" or "decoder"), with C, self-attention and feed-forward."""

    def __init__(self, config: ClustFormerConfig, side: str, number: int) -> None:
        super().__init__(config, pre_norm=config.norm == "pre")
        chosen = getattr(config, f"clustered_{side}_layers")
        axes = {"2d": 2, "1d": 1, "none": 0}[getattr(config, f"{side}_clusters")]
        self.has_clusters = axes > 0 and (chosen is None or number in chosen)
        adaptive = self.has_clusters and config.window is None
        self.clusters = ClusterMaps(config.d_model, axes, config.stacking) if adaptive else None
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = ClusteredAttention(config)
        self.add_feed_forward(config, config.activation)

    def mix(self, x: Tensor, shared: PassState) -> Tensor:
        return self.residual(x, self.attention_norm, self._attend, shared)

    def _attend(self, x: Tensor, shared: PassState) -> Tensor:
        """Computes this layer's C, and mixes the tokens x (B, N, D) by self-attention with it."""
        matrix = shared.window if self.has_clusters else None
        if self.clusters is not None:
            pooled, shared.stacked = self.clusters(shared.layout.pool(x), shared.stacked)
            matrix = shared.layout.spread(pooled)
        return self.attention(x, shared.attention_mask, matrix)


class ClusteredEncoderLayer(ClusteredLayer):
    def forward(self, x: Tensor, shared: PassState) -> Tensor:
        return self.transform(self.mix(x, shared))


class ClusteredDecoderLayer(ClusteredLayer, DecoderLayer):
    def __init__(self, config: ClustFormerConfig, side: str, number: int) -> None:
        super().__init__(config, side, number)
        self.add_cross_attention(config, config.dropout if config.cross_attention_dropout else None)

    def mix_step(self, y: Tensor, cache: ClusterCache, index: int) -> Tensor:
        return self.residual(y, self.attention_norm, self._attend_step, cache, index)

    def _attend_step(self, y: Tensor, cache: ClusterCache, index: int) -> Tensor:
        """Does what `_attend` does for the next token of each beam, y (R, D)."""
        row = cache.window_row if self.has_clusters else None
        if self.clusters is not None:
            row, cache.state, cache.sums[index], cache.rows[index] = self.clusters.step(
                y, cache.sums[index], cache.rows[index], cache.state
            )
        return self.attention.step(y, cache.layers[index], cache.ancestors, row)


@dataclass
class ClusterCache(TreeCache):
    """A tree of slots with the state of each layer's clusters. V and C are those of the file's docstring."""

    sums: list[Tensor] = field(default_factory=list)  # of each layer the prefix sums V (R, t + 1)
    rows: list[Tensor] = field(default_factory=list)  # of each layer the logarithm (R, t) of the last row of C
    window: int | None = None  # the size of a fixed window that replaces C
    state: State = ()  # what the layer below has returned for equation 6 in the current step
    window_row: Tensor | None = None  # row (R, t) of a fixed C for the current step

    def advance(self) -> None:
        super().advance()
        self.state = ()
        if self.window is not None:
            row = window_matrix(1, self.length, self.window, self.ancestors.device)[-1]
            self.window_row = row.expand(self.images * self.beams, -1)

    def expand_beams(self, beams: int) -> ClusterCache:
        super().expand_beams(beams)
        self._select_rows(torch.arange(self.images, device=self.ancestors.device).repeat_interleave(beams))
        return self

    def select(self, index: Tensor) -> ClusterCache:
        super().select(index)
        self._select_rows(index)
        return self

    def keep_images(self, index: Tensor) -> ClusterCache:
        beams = torch.arange(self.beams, device=index.device)
        self._select_rows((index[:, None] * self.beams + beams).flatten())
        super().keep_images(index)
        return self

    def _select_rows(self, index: Tensor) -> None:
        self.sums = [sums.index_select(0, index) for sums in self.sums]
        self.rows = [row.index_select(0, index) for row in self.rows]


class ClustFormer(EncoderDecoder):
    """Ada-ClustFormer. `encode` returns the output of the last encoder layer, in the order of the input's tokens."""

    config: ClustFormerConfig
    encoder: Sequence[ClusteredEncoderLayer]
    decoder: Sequence[ClusteredDecoderLayer]

    def __init__(self, config: ClustFormerConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        own_dropout = config.input_dropout
        is_fixed = own_dropout is not None  # a training stage's dropout does not change a given dropout
        self.input_dropout = Dropout(config.dropout if own_dropout is None else own_dropout, fixed=is_fixed)
        self.encoder = layer_list(
            ClusteredEncoderLayer(config, "encoder", number) for number in range(1, config.num_encoder_layers + 1)
        )
        self.encoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(sizes.max_positions, width), persistent=False)
        self.decoder = layer_list(
            ClusteredDecoderLayer(config, "decoder", number) for number in range(1, config.num_decoder_layers + 1)
        )
        self.decoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    def encode(self, features: Features) -> Memory:
        x = self.input_dropout(F.relu(self.read_features(features)))
        arrangement, layout = self._layout(features)
        if arrangement is not None:
            x = arrangement.apply(x)
        attention_mask = None if layout.valid_mask is None else layout.valid_mask[:, None, None]
        shared = self._start_pass(layout, attention_mask, x.device)
        states = self.encoder_norm(layer_outputs(self.encoder, x, shared)[-1])
        if arrangement is not None:
            states = arrangement.undo(states, features.tokens.shape[1])
        return Memory(states, features.lengths)

    def _start_pass(self, layout: Layout, attention_mask: Tensor | None, device: torch.device) -> PassState:
        """Returns the state before the first layer, with the matrix of a fixed window if the configuration has one."""
        window = self.config.window
        matrix = None if window is None else window_matrix(layout.rows, layout.columns, window, device)[None]
        return PassState(layout, attention_mask, window=matrix)

    def _layout(self, features: Features) -> tuple[Arrangement | None, Layout]:
        """Returns the arrangement of regions (None if the input order stays), and the layout of the image tokens."""
        config, lengths, count = self.config, features.lengths, features.tokens.shape[1]
        if config.inputs == "regions" and config.encoder_clusters != "none":
            return self._arrange(features)
        if config.encoder_clusters != "2d":
            return None, Layout(1, count, config.sampling, valid_tokens(lengths, count))
        side = math.isqrt(count)  # images are squares
        if side * side != count:
            raise ValueError(f"{count} image tokens are no square grid; set model.encoder_clusters to 1d or none")
        return None, Layout(side, side, config.sampling)

    def _arrange(self, features: Features) -> tuple[Arrangement, Layout]:
        """Does what `_layout` does for regions in a grid. Raises ValueError if their boxes are missing."""
        boxes, rows = features.boxes, self.config.region_rows
        if boxes is None:
            raise ValueError(
                "regions are arranged by their boxes, and these features have none; import region features with their "
                "boxes, or set model.encoder_clusters to none"
            )
        arrangement = arrange_regions(boxes, features.lengths, rows)
        if self.config.encoder_clusters == "1d":
            arrangement, rows = arrangement.row_by_row(), 1
        return arrangement, Layout(rows, arrangement.order.shape[1] // rows, valid_mask=arrangement.valid_mask)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        words = self.token_embedding(tokens) * math.sqrt(self.config.d_model)
        return self.word_dropout(words + position_rows(cast(Tensor, self.positions), position, tokens.shape[1]))

    def logits(self, outputs: list[Tensor]) -> Tensor:
        return self.lm_head(self.decoder_norm(outputs[-1]))

    def decode(self, memory: Memory, tokens: Tensor, *context: object, positions: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        is_causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        shared = self._start_pass(Layout(1, length), is_causal, tokens.device)
        return super().decode(memory, tokens, shared, positions=positions)

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        cache, states = super().init_cache(memory, beams), memory.states
        zeros = states.new_zeros(cache.images * beams, 1, dtype=torch.promote_types(states.dtype, torch.float32))
        # before the first step, the prefix sums are V[0] = 0, and C has no row
        sums, rows = [zeros for _ in self.decoder], [zeros[:, :0] for _ in self.decoder]
        return ClusterCache(**vars(cache), sums=sums, rows=rows, window=self.config.window)


class MaskTokenClustFormer(ClustFormer):
    """Ada-ClustFormer with the decoder of its published code, which predicts each word at a mask token.

    To predict the word after t tokens, the decoder reads these tokens and then a mask token, which is PAD. The logits
    are taken at the mask token. All t + 1 tokens attend to each other, so that the states of earlier tokens change with
    each new word. A step can therefore reuse only the keys and values of cross-attention. Teacher forcing runs the T
    prefixes of a caption as T rows of T + 1 tokens, so that its layers take T + 1 times the work and memory of those in
    the causal decoder.
    """

    steps_compute_prefix = True

    def __init__(self, config: ClustFormerConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        # one position more, because the mask token follows the longest caption
        self.register_buffer("positions", sinusoids(sizes.max_positions + 1, config.d_model), persistent=False)

    def decode(self, memory: Memory, tokens: Tensor, *context: object, positions: Tensor | None = None) -> Tensor:
        rows, length = tokens.shape
        check_positions(length, self.sizes.max_positions)
        if self.masks is not None:
            self.masks.begin_pass(length)
        # Row t has the tokens 0 to t and the mask token at t + 1. All PAD after this mask token is hidden.
        is_visible = torch.ones(length, length + 1, dtype=torch.bool, device=tokens.device).tril(1)
        prefixes = F.pad(tokens, (0, 1), value=self.sizes.pad)[:, None].expand(-1, length, -1)
        prefixes = prefixes.masked_fill(~is_visible.tril(), self.sizes.pad).flatten(0, 1)
        shared = self._start_pass(Layout(1, length + 1), is_visible.repeat(rows, 1)[:, None, None], tokens.device)
        outputs = self.decoder_outputs(memory, prefixes, shared)
        return self.logits(at_positions([self.predicting(outputs[-1])], positions))

    def predicting(self, values: Tensor) -> Tensor:
        by_prefix = values.unflatten(0, (-1, values.shape[1] - 1))  # (B*K, T, T + 1, ...)
        # the mask token of prefix t is at t + 1
        return by_prefix.diagonal(offset=1, dim1=1, dim2=2).movedim(-1, 1)

    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        return EncoderDecoder.init_cache(self, memory, beams)  # only the causal decoder needs sums and rows of C

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: TreeCache) -> tuple[Tensor, TreeCache]:
        check_positions(cache.length + 1, self.sizes.max_positions)
        cache.advance()
        consumed = cache.layers[0].append("tokens", tokens.view(1, cache.images, cache.beams))[0]  # (B, slots)
        paths = consumed[:, None].expand(-1, cache.beams, -1).gather(2, cache.ancestors)  # (B, K, t)
        prefixes = F.pad(paths.flatten(0, 1), (0, 1), value=self.sizes.pad)
        shared = self._start_pass(Layout(1, prefixes.shape[1]), None, tokens.device)
        y = self.embed(prefixes, position=0)
        for layer, cross in zip(self.decoder, cache.cross, strict=True):
            y = layer.read_image(layer.mix(y, shared), cross, cache.bias)
        return self.logits([y[:, -1]]), cache
