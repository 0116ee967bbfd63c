"""Ada-ClustFormer (Hu, Wang, Yang et al. 2022): self-attention inside soft clusters of patches and of words.

Shapes: B images, N image tokens, C feature width (and the clustering matrix), K captions per image, R = B*K rows,
T caption tokens, D width, H heads, V vocabulary. `models/clusters.py` has the clustering matrix itself.

A layer's self-attention weights are multiplied by its clustering matrix, one for all heads and stacked on the layers
below (equation 6), separately in encoder and decoder; cross-attention has none. The decoder is causal: C
between words j <= t is a function of the words j to t, and a step needs one prefix sum and one row of each layer.

Choices where the paper is open, and why. Where C multiplies: the weights after the softmax, without a second one. The
printed softmax(A * C) with A a softmax already stays within a factor e of uniform, and a binary window would leave most
weight outside of it, against the paper's own sentence about windows; Tree Transformer, which it cites, multiplies
probabilities. Rows then sum to less than 1, which residual and norm absorb; the other readings are settings. The scale
is sqrt(D / H). Pre-norm is the default, because the recipe has no warm-up; "post" is equation 1. C comes from the same
normalized input as the queries. Image tokens have no positions beyond what C sees of them; words have sinusoids. A
causal decoder cannot sample down: a group's mean would hold a later word. Widths and heads are not in the paper: 512
and 8. Six layers on each side are inferred from its Figure 5.

Regions (`inputs: regions`) are arranged into the grid by their boxes for the encoder; what the decoder sees, and what
`encode` returns, is in the regions' own order, without dummies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import (
    Cache,
    CaptionModel,
    Features,
    Macs,
    Memory,
    ModelSizes,
    captions_per_image,
    check_features,
    check_positions,
    linear_macs,
    valid_tokens,
)
from models.beam_cache import TreeCache, TreeSlots
from models.clusters import Arrangement, ClusterMaps, Layout, State, arrange_regions, window_matrix
from models.config import ClustFormerConfig
from models.layers import (
    MASKED_SCORE,
    CrossAttention,
    Dropout,
    FeedForward,
    cached_for_steps,
    merge_heads,
    padding_bias,
    sinusoids,
    split_heads,
    xavier_blocks_,
)
from models.token_embeddings import lm_head, token_embedding, token_macs


class ClusteredAttention(nn.Module):
    """Self-attention whose weights the clustering matrix multiplies (equation 2); dropout on the result."""

    def __init__(self, config: ClustFormerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.reading = config.attention
        self.in_proj = nn.Linear(config.d_model, 3 * config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.dropout)

    def init_weights(self) -> None:
        xavier_blocks_(self.in_proj.weight, 3)
        xavier_blocks_(self.out_proj.weight)

    def forward(self, x: Tensor, clusters: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """x (B, N, D), clusters (B, N, N), attention_mask True where a query may attend, broadcast to (B, 1, N, N)."""
        query, key, value = (split_heads(part, self.num_heads) for part in self.in_proj(x).chunk(3, -1))
        return self.out_proj(merge_heads(self._mix(query, key, value, clusters, attention_mask)))

    def step(self, x: Tensor, row: Tensor | None, slots: TreeSlots, ancestors: Tensor) -> Tensor:
        """The next token of each beam: x (B*K, D), its row of C (B*K, t), ancestors (B, K, t)."""
        images, beams, _ = ancestors.shape
        maps = self.in_proj(x).view(images, beams, 3, -1)
        query = split_heads(maps[:, :, 0], self.num_heads)
        cached = slots.append("key_value", maps[:, :, 1:].permute(2, 0, 1, 3))  # (2, B, slots, D)
        key, value = (split_heads(part, self.num_heads) for part in cached.unbind())
        path = torch.zeros(images, beams, cached.shape[2], dtype=torch.bool, device=x.device)
        path.scatter_(2, ancestors, True)
        clusters = None
        if row is not None:
            clusters = row.new_zeros(path.shape).scatter_(2, ancestors, row.view(images, beams, -1))
        return self.out_proj(merge_heads(self._mix(query, key, value, clusters, path[:, None])).flatten(0, 1))

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, clusters: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        hidden = None if attention_mask is None else ~attention_mask
        if hidden is not None:
            scores = scores.masked_fill(hidden, MASKED_SCORE)  # finite: an image without regions gives no NaN
        if clusters is not None and self.reading == "renormalized":
            scores = scores + clusters[:, None].clamp_min(torch.finfo(clusters.dtype).tiny).log()
        weights = scores.softmax(-1)
        weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
        if clusters is not None and self.reading != "renormalized":
            weights = weights * clusters[:, None]
            if self.reading == "literal":
                weights = weights if hidden is None else weights.masked_fill(hidden, MASKED_SCORE)
                weights = weights.softmax(-1)
        return self.dropout(weights).to(value.dtype) @ value


class Clustered(nn.Module):
    """What encoder and decoder layers share: norms before or after, C, self-attention, feed-forward."""

    def __init__(self, config: ClustFormerConfig, axes: int) -> None:
        super().__init__()
        width = config.d_model
        self.pre = config.norm == "pre"
        self.clusters = ClusterMaps(width, axes, config.stacking) if axes else None
        self.attention_norm = nn.LayerNorm(width)
        self.attention = ClusteredAttention(config)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, config.d_ff, config.dropout)
        self.dropout = Dropout(config.dropout)

    def before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """A sublayer's input."""
        return norm(x) if self.pre else x

    def after(self, x: Tensor, result: Tensor, norm: nn.Module) -> Tensor:
        """Residual, and the norm where it comes last (equation 1)."""
        x = x + self.dropout(result)
        return x if self.pre else norm(x)

    def transform(self, x: Tensor) -> Tensor:
        return self.after(x, self.feed_forward(self.before(x, self.feed_forward_norm)), self.feed_forward_norm)


@dataclass
class Stack:
    """C from layer to layer: the last layer's at full size, and the state that equation 6 stacks the next one on."""

    matrix: Tensor | None = None  # (B, N, N), or a row (R, t)
    state: State = ()
    trace: list[Tensor] = field(default_factory=list)  # the matrix of every layer, if it is recorded


class EncoderLayer(Clustered):
    def forward(
        self, x: Tensor, layout: Layout, attention_mask: Tensor | None, stack: Stack, window: Tensor | None
    ) -> Tensor:
        normed = self.before(x, self.attention_norm)
        matrix = window
        if self.clusters is not None:
            pooled, stack.state = self.clusters(layout.pool(normed), stack.state)
            matrix = layout.spread(pooled)
        stack.matrix = matrix
        x = self.after(x, self.attention(normed, matrix, attention_mask), self.attention_norm)
        return self.transform(x)


class DecoderLayer(Clustered):
    def __init__(self, config: ClustFormerConfig, axes: int) -> None:
        super().__init__(config, axes)
        self.cross_norm = nn.LayerNorm(config.d_model)
        self.cross = CrossAttention(config.d_model, config.num_heads)

    def forward(
        self,
        y: Tensor,
        states: Tensor,
        bias: Tensor | None,
        attention_mask: Tensor,
        stack: Stack,
        window: Tensor | None,
    ) -> Tensor:
        """y (R, T, D), states (B, N, D)."""
        normed = self.before(y, self.attention_norm)
        stack.matrix = window
        if self.clusters is not None:
            stack.matrix, stack.state = self.clusters(Layout(1, y.shape[1]).pool(normed), stack.state)
        y = self.after(y, self.attention(normed, stack.matrix, attention_mask), self.attention_norm)
        return self._rest(y, self.cross.project(states), bias)

    def step(self, y: Tensor, cache: ClusterCache, index: int, stack: Stack, window: Tensor | None) -> Tensor:
        """y (R, D): the next token of each row, through layer `index`."""
        normed = self.before(y, self.attention_norm)
        row = window
        if self.clusters is not None:
            row, stack.state, cache.sums[index], cache.rows[index] = self.clusters.step(
                normed, cache.sums[index], cache.rows[index], stack.state
            )
        y = self.after(y, self.attention.step(normed, row, cache.layers[index], cache.ancestors), self.attention_norm)
        return self._rest(y[:, None], cache.cross[index], cache.bias)[:, 0]

    def _rest(self, y: Tensor, cross: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        result = self.cross(self.before(y, self.cross_norm), *cross, bias)
        return self.transform(self.after(y, result, self.cross_norm))


@dataclass
class ClusterCache(TreeCache):
    """Beside the slots, for each layer and beam: prefix sums (R, t + 1) of equation 4 and the last row (R, t) of C."""

    sums: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def expand_beams(self, beams: int) -> ClusterCache:
        super().expand_beams(beams)
        self._reorder(torch.arange(self.images, device=self.ancestors.device).repeat_interleave(beams))
        return self

    def select(self, index: Tensor) -> ClusterCache:
        super().select(index)
        self._reorder(index)
        return self

    def keep_images(self, index: Tensor) -> ClusterCache:
        beams = torch.arange(self.beams, device=index.device)
        self._reorder((index[:, None] * self.beams + beams).flatten())
        super().keep_images(index)
        return self

    def _reorder(self, index: Tensor) -> None:
        self.sums = [sums.index_select(0, index) for sums in self.sums]
        self.rows = [row.index_select(0, index) for row in self.rows]


class ClustFormer(CaptionModel):
    """Its memory holds the last encoder level in the order of the input's tokens."""

    config: ClustFormerConfig

    def __init__(self, config: ClustFormerConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        self.input_dropout = Dropout(config.dropout)
        kind = {"2d": 2, "1d": 1, "none": 0}
        adaptive = config.window is None

        def axes(clusters: str, chosen: tuple[int, ...] | None, index: int) -> int:
            return kind[clusters] if adaptive and (chosen is None or index + 1 in chosen) else 0

        encoder, decoder = config.clustered_encoder_layers, config.clustered_decoder_layers
        self.encoder = cast(
            Sequence[EncoderLayer],
            nn.ModuleList(
                EncoderLayer(config, axes(config.encoder_clusters, encoder, i))
                for i in range(config.num_encoder_layers)
            ),
        )
        self.encoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(sizes.max_positions, width), persistent=False)
        self.decoder = cast(
            Sequence[DecoderLayer],
            nn.ModuleList(
                DecoderLayer(config, axes(config.decoder_clusters, decoder, i))
                for i in range(config.num_decoder_layers)
            ),
        )
        self.decoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    def init_weights(self) -> None:
        """Xavier uniform; the maps of C as in `ClusterMaps`; biases as PyTorch draws them."""
        for module in self.modules():
            if isinstance(module, ClusteredAttention | CrossAttention | FeedForward | ClusterMaps):
                module.init_weights()
        for plain in (self.input, self.token_embedding, self.lm_head):
            xavier_blocks_(plain.weight)

    def encode(self, features: Features) -> Memory:
        states, _ = self._encoded(features, False)
        return Memory(states, features.lengths, features.boxes)

    @torch.no_grad()
    def encoder_clusters(self, features: Features) -> tuple[Tensor, Arrangement | None]:
        """C (layers, B, N, N) of every encoder layer, 1 where a layer has none; for regions also their arrangement.

        Its rows and columns are the grid's cells, row by row; of regions, as the arrangement orders them.
        """
        _, clusters = self._encoded(features, True)
        return clusters

    @torch.no_grad()
    def decoder_clusters(self, memory: Memory, tokens: Tensor) -> Tensor:
        """C (layers, B*K, T, T) of every decoder layer for tokens (B*K, T) with SOS; 1 where a layer has none."""
        return torch.stack(self._decoded(memory, tokens, True)[1])

    def _encoded(self, features: Features, trace: bool) -> tuple[Tensor, tuple[Tensor, Arrangement | None]]:
        check_features(features, self.sizes.feature_width)
        x = self.input_dropout(F.relu(self.input(features.tokens.to(self.input.weight.dtype))))
        arrangement, layout = self._layout(features)
        if arrangement is not None:
            x = arrangement.apply(x)
        window = self._window(layout, self.config.encoder_clusters, x)
        attention_mask = None if layout.valid_mask is None else layout.valid_mask[:, None, None]
        stack = Stack()
        for number, layer in enumerate(self.encoder, 1):
            layer_window = window if self._has(self.config.clustered_encoder_layers, number) else None
            x = layer(x, layout, attention_mask, stack, layer_window)
            if trace:
                matrix = x.new_ones(1, 1, 1) if stack.matrix is None else stack.matrix
                stack.trace.append(matrix.expand(x.shape[0], x.shape[1], x.shape[1]))
        x = self.encoder_norm(x)
        if arrangement is not None:
            x = arrangement.undo(x, features.tokens.shape[1])
        return x, (torch.stack(stack.trace) if trace else x, arrangement)

    def _layout(self, features: Features) -> tuple[Arrangement | None, Layout]:
        """The grid that image tokens (B, N, C) form and, for regions, the order in which they fill it."""
        config, lengths, boxes = self.config, features.lengths, features.boxes
        images, count = features.tokens.shape[:2]
        if config.inputs == "regions" and config.encoder_clusters != "none":
            if boxes is None or boxes.shape != (images, count, 4):
                found = "none" if boxes is None else f"shape {tuple(boxes.shape)}"
                raise ValueError(
                    f"regions are arranged by their boxes: expected boxes {(images, count, 4)}, found {found}; "
                    "import region features with their boxes, or set model.encoder_clusters to none"
                )
            arrangement = arrange_regions(boxes, lengths, config.region_rows)
            columns = arrangement.order.shape[1] // config.region_rows
            if config.encoder_clusters == "1d":
                arrangement = arrangement.row_by_row()
                return arrangement, Layout(1, arrangement.order.shape[1], valid_mask=arrangement.valid_mask)
            return arrangement, Layout(config.region_rows, columns, valid_mask=arrangement.valid_mask)
        valid_mask = valid_tokens(lengths, count)
        if config.encoder_clusters != "2d":
            return None, Layout(1, count, config.sampling, valid_mask)
        if lengths is not None and bool((lengths != count).any()):
            raise ValueError(
                f"grid features have no padding, found lengths from {int(lengths.min())} to {int(lengths.max())} of "
                f"{count}; for regions set model.inputs to regions"
            )
        rows, columns = config.grid or (math.isqrt(count), math.isqrt(count))
        if rows * columns != count:
            raise ValueError(
                f"{count} image tokens are no grid of {rows} x {columns} = {rows * columns}; "
                "set model.grid to [rows, columns]"
            )
        return None, Layout(rows, columns, config.sampling)

    def _window(self, layout: Layout, clusters: str, like: Tensor) -> Tensor | None:
        """(1, N, N), the fixed window in place of C; None where C is adaptive or there is none."""
        if self.config.window is None or clusters == "none":
            return None
        return window_matrix(layout.rows, layout.columns, self.config.window, like.device)[None]

    @staticmethod
    def _has(chosen: tuple[int, ...] | None, number: int) -> bool:
        return chosen is None or number in chosen

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """Tokens (R, T) that start at `position`."""
        check_positions(position + tokens.shape[1], self.sizes.max_positions)
        words = self.token_embedding(tokens) * math.sqrt(self.config.d_model)
        positions = cast(Tensor, self.positions)
        return self.word_dropout(words + positions[position : position + tokens.shape[1]])

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        return self._decoded(memory, tokens, False)[0]

    def _decoded(self, memory: Memory, tokens: Tensor, trace: bool) -> tuple[Tensor, list[Tensor]]:
        captions_per_image(memory, tokens.shape[0])
        bias = padding_bias(valid_tokens(memory.lengths, memory.states.shape[1]), memory.states.dtype)
        y = self.embed(tokens, 0)
        rows, length = tokens.shape
        attention_mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        window = self._window(Layout(1, length), self.config.decoder_clusters, y)
        stack = Stack()
        for number, layer in enumerate(self.decoder, 1):
            layer_window = window if self._has(self.config.clustered_decoder_layers, number) else None
            y = layer(y, memory.states, bias, attention_mask, stack, layer_window)
            if trace:
                matrix = y.new_ones(1, 1, 1) if stack.matrix is None else stack.matrix
                stack.trace.append(matrix.expand(rows, length, length))
        return self.lm_head(self.decoder_norm(y)), stack.trace

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> ClusterCache:
        states, images = memory.states, memory.batch_size
        bias = padding_bias(valid_tokens(memory.lengths, states.shape[1]), states.dtype)
        cross = [cached_for_steps(*layer.cross.project(states)) for layer in self.decoder]
        slots = [TreeSlots(beams) for _ in self.decoder]
        paths = torch.empty(images, beams, 0, dtype=torch.int64, device=states.device)
        dtype = torch.promote_types(states.dtype, torch.float32)
        sums = [states.new_zeros(images * beams, 1, dtype=dtype) for _ in self.decoder]
        rows = [states.new_zeros(images * beams, 0, dtype=dtype) for _ in self.decoder]
        return ClusterCache(images, beams, cross, bias, slots, paths, sums=sums, rows=rows)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, ClusterCache]:
        assert isinstance(cache, ClusterCache)
        y = self.embed(tokens[:, None], cache.length)[:, 0]
        cache.advance()
        window = self._window(Layout(1, cache.length), self.config.decoder_clusters, y)
        row = None if window is None else window[:, -1].expand(y.shape[0], -1)
        stack = Stack()
        for index, layer in enumerate(self.decoder):
            layer_window = row if self._has(self.config.clustered_decoder_layers, index + 1) else None
            y = layer.step(y, cache, index, stack, layer_window)
        return self.lm_head(self.decoder_norm(y)), cache

    def macs(self, image_tokens: int) -> Macs:
        """The clustering matrix costs two products of vectors per pooled token and axis."""
        config, width = self.config, self.config.d_model
        tokens, pooled = image_tokens, image_tokens
        if config.inputs == "regions" and config.encoder_clusters != "none":  # dummies fill the last column
            tokens = pooled = math.ceil(image_tokens / config.region_rows) * config.region_rows
        elif config.encoder_clusters == "1d":
            pooled = math.ceil(image_tokens / config.sampling)
        elif config.encoder_clusters == "2d":
            sides = config.grid or (math.isqrt(image_tokens), math.isqrt(image_tokens))
            pooled = math.prod(math.ceil(side / config.sampling) for side in sides)
        clusters = linear_macs(*(layer.clusters for layer in self.encoder if layer.clusters is not None))
        attention = len(self.encoder) * 2 * tokens * tokens * width
        linear = linear_macs(*self.encoder) - clusters
        key_value = sum(linear_macs(layer.cross.key_value) for layer in self.decoder)
        token = linear_macs(*self.decoder) - key_value
        token += len(self.decoder) * 2 * image_tokens * width  # what cross-attention mixes
        return Macs(
            encoder=image_tokens * linear_macs(self.input) + tokens * linear + attention + pooled * clusters,
            keys=image_tokens * key_value,
            token=token + token_macs(config, self.sizes),
            mixing=lambda length: len(self.decoder) * 2 * length * length * width,
            step=lambda slots, length: len(self.decoder) * 2 * slots * width,
        )
