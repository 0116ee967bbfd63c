"""Ada-ClustFormer (Hu, Wang, Yang et al. 2022): self-attention inside soft clusters of patches and of words.

Shapes: B images, N image tokens, C feature width, K captions per image, R = B*K rows, T caption tokens, D width,
H heads, V vocabulary. Elsewhere C is the clustering matrix, which `models/clusters.py` computes.

Each layer multiplies its self-attention weights by its clustering matrix. All heads share the matrix, and it is stacked
on those of the layers below (equation 6), separately in encoder and decoder. Cross-attention has no such matrix. C
between words j <= t depends on the words j to t only, so that a step of the causal decoder needs one prefix sum and one
row of C per layer.

Choices where the paper leaves something open:

- C multiplies the weights after the softmax, as in Tree Transformer, which the paper cites, and there is no second
  softmax. The printed softmax(A * C), where A is a softmax already, would stay within a factor e of uniform, so that a
  binary window would leave most of the weight outside of it. The rows then sum to less than 1, which residual and norm
  absorb. The alternatives are settings.
- The scale is sqrt(D / H).
- Pre-norm is the default, because the recipe has no warm-up; "post" is equation 1.
- C is computed from the same normalized input as the queries.
- Image tokens have no positions other than those in C; words have sinusoids.
- The decoder has no down-up sampling, because the mean of a group would contain a later word.
- The decoder is causal. That of the published code, which is not, is a setting (`models/mask_token.py`).
- The paper does not give the width and the heads: they are 512 and 8. Its Figure 5 suggests six layers on each side.

The encoder arranges regions (`inputs: regions`) into a grid by their boxes. `encode` returns them in their original
order and without dummies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import Features, Macs, Memory, ModelSizes, linear_macs, valid_tokens
from raycap.models.clusters import Arrangement, ClusterMaps, Layout, State, arrange_regions, window_matrix
from raycap.models.config import ClustFormerConfig
from raycap.models.decoding.cache import RowSlots, TreeCache, TreeSlots
from raycap.models.encoder_decoder import DecoderLayer, EncoderDecoder, Layer, layer_list, layer_outputs, position_rows
from raycap.models.layers import MASKED_SCORE, Dropout, SelfAttention, merge_heads, sinusoids
from raycap.models.token_embeddings import lm_head, token_embedding

if TYPE_CHECKING:
    from raycap.models.decoding.masks import CaptionMasks


class ClusteredAttention(SelfAttention):
    """Self-attention whose weights are multiplied by the clustering matrix (equation 2), then by dropout."""

    def __init__(self, config: ClustFormerConfig) -> None:
        super().__init__(config.d_model, config.num_heads, causal=False)
        self.reading = config.attention  # the chosen reading of equation 2 (`ClustFormerConfig`)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, clusters: Tensor | None = None) -> Tensor:
        """The mixed tokens (B, N, D) from x (B, N, D) and `clusters`, which is C (B, N, N).

        attention_mask, which broadcasts to (B, 1, N, N), is True where a query may attend to a key.
        """
        query, key, value = self.project(x)
        weights = self._weights(query, key, attention_mask, clusters)
        weights = self.dropout(weights, lambda masks, p: masks.of_pairs((self.num_heads,), p).permute(0, 3, 1, 2))
        return self.out_proj(merge_heads(weights.to(value.dtype) @ value), x)

    def step(self, x: Tensor, slots: TreeSlots, ancestors: Tensor, row: Tensor | None = None) -> Tensor:
        """The output (B*K, D) for the next token of each beam, from x (B*K, D), its `row` of C (B*K, t) and its path.

        ancestors (B, K, t) are the slots on each beam's path.
        """
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
            on_path = masks.of_pairs((self.num_heads,), p)[0].view(*ancestors.shape, -1).permute(0, 3, 1, 2)
            return on_path.new_zeros(weights.shape).scatter_(3, ancestors[:, None].expand_as(on_path), on_path)

        mixed = self.dropout(weights, of_slots).to(value.dtype) @ value
        return self.out_proj(merge_heads(mixed).flatten(0, 1), x)

    def _weights(self, query: Tensor, key: Tensor, attention_mask: Tensor | None, clusters: Tensor | None) -> Tensor:
        """The attention weights, with C applied as the setting `attention` says."""
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        hidden = None if attention_mask is None else ~attention_mask
        if hidden is not None:
            scores = scores.masked_fill(hidden, MASKED_SCORE)  # finite: -inf gives NaN for an image without regions
        if clusters is not None and self.reading == "renormalized":
            scores = scores + clusters[:, None].clamp_min(torch.finfo(clusters.dtype).tiny).log()
        weights = scores.softmax(-1)
        weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
        if clusters is not None and self.reading != "renormalized":
            weights = weights * clusters[:, None]
            if self.reading == "literal":
                weights = weights if hidden is None else weights.masked_fill(hidden, MASKED_SCORE)
                weights = weights.softmax(-1)
        return weights


@dataclass
class PassState:
    """What the layers share in a pass over image tokens or captions: inputs, and results for later layers."""

    layout: Layout
    attention_mask: Tensor | None  # for (B, 1, N, N), True where a query may attend
    window: Tensor | None  # the fixed C (1, N, N) in place of an adaptive one
    stacked: State = ()  # what the next layer needs for equation 6
    matrices: list[Tensor | None] = field(default_factory=list)  # C (B or 1, N, N) of each layer so far, None without C

    def all_matrices(self, x: Tensor) -> Tensor:
        """C (layers, B, N, N) for x (B, N, ...), all 1 where a layer has none."""
        matrices = [x.new_ones(1, 1, 1) if matrix is None else matrix for matrix in self.matrices]
        return torch.stack([matrix.expand(x.shape[0], x.shape[1], x.shape[1]) for matrix in matrices])


class ClusteredLayer(Layer):
    """Layer `number` (from 1) of a `side`, "encoder" or "decoder": C, self-attention and feed-forward."""

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
        """Computes this layer's C, adds it to `shared`, and returns the self-attention with it."""
        matrix = shared.window if self.has_clusters else None
        if self.clusters is not None:
            pooled, shared.stacked = self.clusters(shared.layout.pool(x), shared.stacked)
            matrix = shared.layout.spread(pooled)
        shared.matrices.append(matrix)
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
        """`_attend` for the next token of each beam, y (R, D)."""
        row = cache.window_row if self.has_clusters else None
        if self.clusters is not None:
            row, cache.state, cache.sums[index], cache.rows[index] = self.clusters.step(
                y, cache.sums[index], cache.rows[index], cache.state
            )
        return self.attention.step(y, cache.layers[index], cache.ancestors, row)


@dataclass
class ClusterCache(TreeCache):
    """A tree of slots, and for each layer prefix sums (R, t + 1) of equation 4 and the last row (R, t) of C."""

    sums: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    window: int | None = None  # size of a fixed window that replaces C
    state: State = ()  # in the current step, what the next layer needs for equation 6
    window_row: Tensor | None = None  # the current step's row (R, t) of a fixed C

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
    """Ada-ClustFormer. `encode` returns the last encoder level, in the order of the input's tokens."""

    config: ClustFormerConfig
    encoder: Sequence[ClusteredEncoderLayer]
    decoder: Sequence[ClusteredDecoderLayer]

    def __init__(self, config: ClustFormerConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        own = config.input_dropout
        self.input_dropout = Dropout(config.dropout if own is None else own, fixed=own is not None)
        numbers = range(1, config.num_encoder_layers + 1)
        self.encoder = layer_list(ClusteredEncoderLayer(config, "encoder", number) for number in numbers)
        self.encoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(sizes.max_positions, width), persistent=False)
        numbers = range(1, config.num_decoder_layers + 1)
        self.decoder = layer_list(ClusteredDecoderLayer(config, "decoder", number) for number in numbers)
        self.decoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    def encode(self, features: Features) -> Memory:
        states, _, arrangement = self._encode(features)
        if arrangement is not None:
            states = arrangement.undo(states, features.tokens.shape[1])
        return Memory(states, features.lengths, features.boxes)

    @torch.no_grad()
    def encoder_clusters(self, features: Features) -> tuple[Tensor, Arrangement | None]:
        """C (layers, B, N, N) of every encoder layer, all 1 where a layer has none, and the arrangement of regions.

        Rows and columns of C are the cells of the grid, row by row. For grid features the arrangement is None.
        """
        states, shared, arrangement = self._encode(features)
        return shared.all_matrices(states), arrangement

    @torch.no_grad()
    def decoder_clusters(self, memory: Memory, tokens: Tensor) -> Tensor:
        """C (layers, B*K, T, T) of every decoder layer for tokens (B*K, T) with SOS; all 1 where a layer has none."""
        shared = self._start_caption_pass(tokens)
        return shared.all_matrices(super().decode(memory, tokens, shared))

    def _encode(self, features: Features) -> tuple[Tensor, PassState, Arrangement | None]:
        """The states (B, N, D) of all cells, what the layers shared, and the arrangement of regions."""
        x = self.input_dropout(F.relu(self.read_features(features)))
        arrangement, layout = self._layout(features)
        if arrangement is not None:
            x = arrangement.apply(x)
        attention_mask = None if layout.valid_mask is None else layout.valid_mask[:, None, None]
        shared = self._start_pass(layout, attention_mask, x.device)
        return self.encoder_norm(layer_outputs(self.encoder, x, shared)[-1]), shared, arrangement

    def _start_pass(self, layout: Layout, attention_mask: Tensor | None, device: torch.device) -> PassState:
        """The state before the first layer, with the matrix of a fixed window if the configuration has one."""
        window = self.config.window
        matrix = None if window is None else window_matrix(layout.rows, layout.columns, window, device)[None]
        return PassState(layout, attention_mask, window=matrix)

    def _start_caption_pass(self, tokens: Tensor) -> PassState:
        """The state before the first decoder layer for tokens (B*K, T). A word attends to itself and earlier ones."""
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        return self._start_pass(Layout(rows=1, columns=length), mask, tokens.device)

    def _layout(self, features: Features) -> tuple[Arrangement | None, Layout]:
        """The arrangement of regions in a grid (else None), and the layout that the image tokens then have."""
        config, lengths, count = self.config, features.lengths, features.tokens.shape[1]
        if config.inputs == "regions" and config.encoder_clusters != "none":
            return self._arrange(features)
        if config.encoder_clusters != "2d":
            return None, Layout(1, count, config.sampling, valid_tokens(lengths, count))
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

    def _arrange(self, features: Features) -> tuple[Arrangement, Layout]:
        """`_layout` for regions. Raises ValueError when their boxes are missing or have another shape."""
        boxes, expected, rows = features.boxes, (*features.tokens.shape[:2], 4), self.config.region_rows
        if boxes is None or boxes.shape != expected:
            given = "none" if boxes is None else f"shape {tuple(boxes.shape)}"
            raise ValueError(
                f"regions are arranged by their boxes: expected boxes {expected}, found {given}; "
                "import region features with their boxes, or set model.encoder_clusters to none"
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

    def decode(self, memory: Memory, tokens: Tensor, *context: Any) -> Tensor:
        return super().decode(memory, tokens, self._start_caption_pass(tokens))

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        cache, states = super().init_cache(memory, beams), memory.states
        zeros = states.new_zeros(cache.images * beams, 1, dtype=torch.promote_types(states.dtype, torch.float32))
        # before the first step each layer has V[0] = 0 and an empty row of C
        sums, rows = [zeros for _ in self.decoder], [zeros[:, :0] for _ in self.decoder]
        return ClusterCache(**vars(cache), sums=sums, rows=rows, window=self.config.window)

    def macs(self, image_tokens: int) -> Macs:
        """See `CaptionModel.macs`. The clustering matrix costs two products of vectors per pooled token and axis."""
        config = self.config
        tokens, pooled = image_tokens, image_tokens
        if config.inputs == "regions" and config.encoder_clusters != "none":  # dummies fill the grid
            tokens = pooled = math.ceil(image_tokens / config.region_rows) * config.region_rows
        elif config.encoder_clusters == "1d":
            pooled = math.ceil(image_tokens / config.sampling)
        elif config.encoder_clusters == "2d":
            sides = config.grid or (math.isqrt(image_tokens), math.isqrt(image_tokens))
            pooled = math.prod(math.ceil(side / config.sampling) for side in sides)
        clusters = linear_macs(*(layer.clusters for layer in self.encoder if layer.clusters is not None))
        attention = sum(layer.attention.mixing_macs(tokens) for layer in self.encoder)
        layers = tokens * (linear_macs(*self.encoder) - clusters) + attention + pooled * clusters
        return replace(super().macs(image_tokens), encoder=image_tokens * linear_macs(self.input) + layers)
