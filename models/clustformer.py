"""Ada-ClustFormer (Hu, Wang, Yang et al. 2022): self-attention inside soft clusters of patches and of words.

Shapes: B images, N image tokens, C feature width, K captions per image, R = B*K rows, T caption tokens, D width,
H heads, V vocabulary. Elsewhere C is the clustering matrix, which `models/clusters.py` computes.

Each layer multiplies its self-attention weights by its clustering matrix. All heads share the matrix, and it is stacked
on those of the layers below (equation 6), separately in encoder and decoder. Cross-attention has no such matrix. The
decoder is causal: C between words j <= t depends on the words j to t only, so that a decoding step needs one prefix sum
and one row of C per layer.

Choices where the paper leaves something open:

- C multiplies the weights after the softmax, and there is no second softmax. The printed softmax(A * C), where A is a
  softmax already, would stay within a factor e of uniform. A binary window would then leave most of the weight outside
  of it, which contradicts what the paper writes about windows. Tree Transformer, which the paper cites, multiplies
  probabilities. The rows then sum to less than 1, which residual and norm absorb. The alternatives are settings.
- The scale is sqrt(D / H).
- Pre-norm is the default, because the recipe has no warm-up; "post" is equation 1.
- C is computed from the same normalized input as the queries.
- Image tokens have no positions other than those in C; words have sinusoids.
- The decoder has no down-up sampling, because the mean of a group would contain a later word.
- The paper does not give the width and the heads: they are 512 and 8. Its Figure 5 suggests six layers on each side.

For the encoder, regions (`inputs: regions`) are arranged into a grid by their boxes. `encode` returns them in their
original order and without dummies, and so the decoder reads them.
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
    """Self-attention whose weights are multiplied by the clustering matrix (equation 2), then by dropout."""

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
        """x (B, N, D), clusters (B, N, N); attention_mask, for (B, 1, N, N), is True where a query may attend."""
        query, key, value = (split_heads(part, self.num_heads) for part in self.in_proj(x).chunk(3, -1))
        return self.out_proj(merge_heads(self._mix(query, key, value, clusters, attention_mask)))

    def step(self, x: Tensor, row: Tensor | None, slots: TreeSlots, ancestors: Tensor) -> Tensor:
        """Computes the next token of each beam from x (B*K, D), its row of C (B*K, t) and ancestors (B, K, t)."""
        images, beams, _ = ancestors.shape
        projected = self.in_proj(x).view(images, beams, 3, -1)
        query = split_heads(projected[:, :, 0], self.num_heads)
        cached = slots.append("key_value", projected[:, :, 1:].permute(2, 0, 1, 3))  # (2, B, slots, D)
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
        """The attended values, with C applied as the setting `attention` says."""
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        hidden = None if attention_mask is None else ~attention_mask
        if hidden is not None:
            scores = scores.masked_fill(hidden, MASKED_SCORE)  # finite: no NaN without regions
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
    """The base of encoder and decoder layers: norms (before or after a sublayer), C, self-attention, feed-forward."""

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
        """The input of a sublayer."""
        return norm(x) if self.pre else x

    def after(self, x: Tensor, result: Tensor, norm: nn.Module) -> Tensor:
        """Adds a sublayer's result to its input x; with post-norm (equation 1) the norm follows."""
        x = x + self.dropout(result)
        return x if self.pre else norm(x)

    def transform(self, x: Tensor) -> Tensor:
        """The feed-forward sublayer."""
        return self.after(x, self.feed_forward(self.before(x, self.feed_forward_norm)), self.feed_forward_norm)


@dataclass
class Stack:
    """What each layer passes to the next: its C at full size, and the state on which the next C is stacked."""

    matrix: Tensor | None = None  # (B, N, N), or in a decoding step a row (R, t)
    state: State = ()
    trace: list[Tensor] = field(default_factory=list)  # the matrices of all layers, filled only when requested


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
        return self._after_self_attention(y, self.cross.project(states), bias)

    def step(self, y: Tensor, cache: ClusterCache, index: int, stack: Stack, window: Tensor | None) -> Tensor:
        """Passes the next token of each row, y (R, D), through this layer, whose index is `index`."""
        normed = self.before(y, self.attention_norm)
        row = window
        if self.clusters is not None:
            row, stack.state, cache.sums[index], cache.rows[index] = self.clusters.step(
                normed, cache.sums[index], cache.rows[index], stack.state
            )
        y = self.after(y, self.attention.step(normed, row, cache.layers[index], cache.ancestors), self.attention_norm)
        return self._after_self_attention(y[:, None], cache.cross[index], cache.bias)[:, 0]

    def _after_self_attention(self, y: Tensor, cross: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """Cross-attention and feed-forward."""
        result = self.cross(self.before(y, self.cross_norm), *cross, bias)
        return self.transform(self.after(y, result, self.cross_norm))


@dataclass
class ClusterCache(TreeCache):
    """A tree of slots, and for each layer prefix sums (R, t + 1) of equation 4 and the last row (R, t) of C."""

    sums: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

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


class ClustFormer(CaptionModel):
    """Ada-ClustFormer. `encode` returns the last encoder level, in the order of the input's tokens."""

    config: ClustFormerConfig

    def __init__(self, config: ClustFormerConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        self.input_dropout = Dropout(config.dropout)
        num_axes = {"2d": 2, "1d": 1, "none": 0}
        adaptive = config.window is None

        def axes(clusters: str, clustered_layers: tuple[int, ...] | None, number: int) -> int:
            """The number of axes of layer `number` (from 1); 0 for a layer without an adaptive C."""
            return num_axes[clusters] if adaptive and self._has_clusters(clustered_layers, number) else 0

        self.encoder = cast(
            Sequence[EncoderLayer],
            nn.ModuleList(
                EncoderLayer(config, axes(config.encoder_clusters, config.clustered_encoder_layers, number))
                for number in range(1, config.num_encoder_layers + 1)
            ),
        )
        self.encoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(sizes.max_positions, width), persistent=False)
        self.decoder = cast(
            Sequence[DecoderLayer],
            nn.ModuleList(
                DecoderLayer(config, axes(config.decoder_clusters, config.clustered_decoder_layers, number))
                for number in range(1, config.num_decoder_layers + 1)
            ),
        )
        self.decoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    def init_weights(self) -> None:
        """Draws weights Xavier-uniform, those of C as `ClusterMaps` does, and biases as PyTorch does."""
        for module in self.modules():
            if isinstance(module, ClusteredAttention | CrossAttention | FeedForward | ClusterMaps):
                module.init_weights()
        for module in (self.input, self.token_embedding, self.lm_head):
            xavier_blocks_(module.weight)

    def encode(self, features: Features) -> Memory:
        states, _ = self._encode(features, with_clusters=False)
        return Memory(states, features.lengths, features.boxes)

    @torch.no_grad()
    def encoder_clusters(self, features: Features) -> tuple[Tensor, Arrangement | None]:
        """C (layers, B, N, N) of every encoder layer, all 1 where a layer has none, and the arrangement of regions.

        Rows and columns of C are the cells of the grid, row by row. For grid features the arrangement is None.
        """
        _, clusters = self._encode(features, with_clusters=True)
        return clusters

    @torch.no_grad()
    def decoder_clusters(self, memory: Memory, tokens: Tensor) -> Tensor:
        """C (layers, B*K, T, T) of every decoder layer for tokens (B*K, T) with SOS; all 1 where a layer has none."""
        _, matrices = self._decode(memory, tokens, with_clusters=True)
        return torch.stack(matrices)

    def _encode(self, features: Features, with_clusters: bool) -> tuple[Tensor, tuple[Tensor, Arrangement | None]]:
        """The states, and what `encoder_clusters` returns (without clusters the tensor of C has no meaning)."""
        check_features(features, self.sizes.feature_width)
        x = self.input_dropout(F.relu(self.input(features.tokens.to(self.input.weight.dtype))))
        arrangement, layout = self._layout(features)
        if arrangement is not None:
            x = arrangement.apply(x)
        window = self._window(layout, self.config.encoder_clusters, x)
        attention_mask = None if layout.valid_mask is None else layout.valid_mask[:, None, None]
        stack = Stack()
        for number, layer in enumerate(self.encoder, 1):
            layer_window = window if self._has_clusters(self.config.clustered_encoder_layers, number) else None
            x = layer(x, layout, attention_mask, stack, layer_window)
            if with_clusters:
                matrix = x.new_ones(1, 1, 1) if stack.matrix is None else stack.matrix
                stack.trace.append(matrix.expand(x.shape[0], x.shape[1], x.shape[1]))
        x = self.encoder_norm(x)
        if arrangement is not None:
            x = arrangement.undo(x, features.tokens.shape[1])
        return x, (torch.stack(stack.trace) if with_clusters else x, arrangement)

    def _layout(self, features: Features) -> tuple[Arrangement | None, Layout]:
        """The grid that image tokens (B, N, C) form, and for regions their arrangement in it (else None)."""
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
        """The fixed window (1, N, N) that replaces C; None where C is adaptive, and where there is no clustering."""
        if self.config.window is None or clusters == "none":
            return None
        return window_matrix(layout.rows, layout.columns, self.config.window, like.device)[None]

    @staticmethod
    def _has_clusters(clustered_layers: tuple[int, ...] | None, number: int) -> bool:
        """Whether layer `number` (from 1) is one of the clustered layers; None stands for all layers."""
        return clustered_layers is None or number in clustered_layers

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """Embeddings (R, T, D) of tokens (R, T) whose first one is at `position`."""
        check_positions(position + tokens.shape[1], self.sizes.max_positions)
        words = self.token_embedding(tokens) * math.sqrt(self.config.d_model)
        positions = cast(Tensor, self.positions)
        return self.word_dropout(words + positions[position : position + tokens.shape[1]])

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        logits, _ = self._decode(memory, tokens, with_clusters=False)
        return logits

    def _decode(self, memory: Memory, tokens: Tensor, with_clusters: bool) -> tuple[Tensor, list[Tensor]]:
        """The logits, and with `with_clusters` the matrix of every layer."""
        captions_per_image(memory, tokens.shape[0])
        bias = padding_bias(valid_tokens(memory.lengths, memory.states.shape[1]), memory.states.dtype)
        y = self.embed(tokens, 0)
        rows, length = tokens.shape
        attention_mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        window = self._window(Layout(1, length), self.config.decoder_clusters, y)
        stack = Stack()
        for number, layer in enumerate(self.decoder, 1):
            layer_window = window if self._has_clusters(self.config.clustered_decoder_layers, number) else None
            y = layer(y, memory.states, bias, attention_mask, stack, layer_window)
            if with_clusters:
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
            layer_window = row if self._has_clusters(self.config.clustered_decoder_layers, index + 1) else None
            y = layer.step(y, cache, index, stack, layer_window)
        return self.lm_head(self.decoder_norm(y)), cache

    def macs(self, image_tokens: int) -> Macs:
        """See `CaptionModel.macs`. The clustering matrix costs two products of vectors per pooled token and axis."""
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
        token += len(self.decoder) * 2 * image_tokens * width  # scores and weighted sums of cross-attention
        return Macs(
            encoder=image_tokens * linear_macs(self.input) + tokens * linear + attention + pooled * clusters,
            keys=image_tokens * key_value,
            token=token + token_macs(config, self.sizes),
            mixing=lambda length: len(self.decoder) * 2 * length * length * width,
            step=lambda slots, length: len(self.decoder) * 2 * slots * width,
        )
