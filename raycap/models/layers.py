"""Layers that the captioners share, and `EncoderDecoder`, the base of captioners with encoder and decoder layers.

Word vectors are either learned or given, for example GloVe's. Given vectors are used as in the Meshed-Memory paper's
section "Novel object captioning". A linear map takes them from their width G to D before the first decoder layer. The
output of the last layer is mapped back to G, and its dot products with all word vectors are the logits. The model can
therefore write a word that no training caption has, if the vector of this word is near the vectors of training words.

Shapes: B images, N image tokens, K captions per image, T caption tokens, D width, G width of given vectors, H heads,
V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Features, Memory, check_positions, valid_tokens
from raycap.models.config import ModelConfig, ModelSizes
from raycap.models.decoding.cache import RowSlots, TreeCache, TreeSlots
from raycap.models.dropout import CaptionMasks, Dropout

MASKED_SCORE = -1e4  # of masked tokens in attention, as in the reference, because it is finite in float16
LayerType = TypeVar("LayerType", bound="Layer")


def xavier_blocks_(weight: Tensor, blocks: int = 1) -> None:
    """Draws a weight of `blocks` stacked linear maps: each map's rows are Xavier-uniform for the map's own size."""
    for block in weight.chunk(blocks):
        nn.init.xavier_uniform_(block)


class FeedForward(nn.Module):
    """The feed-forward sublayer: Linear, ReLU or GELU, dropout, Linear."""

    def __init__(self, d_model: int, d_ff: int, dropout: float, activation: str = "relu") -> None:
        super().__init__()
        # relu_ overwrites its input to save memory, which is safe because no gradient needs the input
        self.activation = {"relu": F.relu_, "gelu": F.gelu}[activation]
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)

    def init_weights(self) -> None:
        xavier_blocks_(self.inner.weight)
        xavier_blocks_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(self.activation(self.inner(x))))


def padding_bias(valid_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the bias (B, 1, 1, N) to add to attention scores: 0 at valid tokens, -1e4 at padding.

    valid_mask: (B, N), True at valid tokens. If it is None, the result is None.
    """
    if valid_mask is None:
        return None
    bias = torch.zeros(valid_mask.shape, dtype=dtype, device=valid_mask.device)
    return bias.masked_fill_(~valid_mask, MASKED_SCORE)[:, None, None]


def full_precision(x: Tensor) -> torch.autocast:
    """Returns a context that turns autocast off on the device of `x`."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Splits the width into heads: (B, T, D) -> (B, H, T, D / H)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Joins the heads to the full width: (B, H, T, D / H) -> (B, T, D)."""
    return x.transpose(1, 2).flatten(2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scaled dot-product attention of Q queries (B, H, Q, d) to N keys and values (B, H, N, d), where d is D / H.

    bias: added to the scores (B, H, Q, N) with broadcasting. dropout: applied to the weights (B, H, Q, N).

    In a decoding step on a CPU, the two products are written out, because torch's fused kernel is slower for few
    queries. The keys' memory layout (`cached_for_steps`) marks such a step. Dropout needs the written-out weights, too.
    """
    query = query.to(key.dtype)
    if bias is not None:
        bias = bias.to(key.dtype)
    is_cpu_step = key.device.type == "cpu" and key.mT.is_contiguous()
    if dropout is None and not is_cpu_step:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    with full_precision(query):
        scores = torch.matmul(query * query.shape[-1] ** -0.5, key.mT)
        if bias is not None:
            scores = scores + bias
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        if dropout is not None:
            weights = dropout(weights)
        return torch.matmul(weights.to(value.dtype), value)


def cached_for_steps(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Copies keys and values (..., N, d) to the layout in which `attend` is fast. On a CPU, keys are transposed."""
    key = key.mT.contiguous().mT if key.device.type == "cpu" else key.contiguous()
    return key, value.contiguous()


def sinusoids(count: int, width: int, first: int = 0) -> Tensor:
    """Returns sinusoidal vectors (count, width) of the positions from `first` on (Vaswani et al. 2017).

    Sines and cosines alternate along the width. The base is 10000.
    """
    positions = torch.arange(first, first + count, dtype=torch.float64)[:, None]
    angles = positions / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width].float()


class OutputProjection(nn.Linear):
    """The linear map after the heads, or attention on attention (Huang et al. 2019) in its place.

    Attention on attention is (W_i [v, q] + b_i) * sigmoid(W_g [v, q] + b_g), where v are the attended values and q is
    the input of the queries.
    """

    def __init__(self, d_model: int, attention_on_attention: bool) -> None:
        self.blocks = 2 if attention_on_attention else 1  # row blocks of the weight: W_i and W_g, or a single map
        super().__init__(self.blocks * d_model, self.blocks * d_model)

    def forward(self, mixed: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        """Maps the attended values `mixed` (..., D) to (..., D). x: the input of the queries (..., D)."""
        if self.blocks == 1:
            return super().forward(mixed)
        return F.glu(super().forward(torch.cat((mixed, x.to(mixed.dtype)), -1)))


class CrossAttention(nn.Module):
    """Multi-head attention from caption tokens to image tokens.

    dropout: the rate of dropout on the attention weights. If it is None, the weights have no dropout.
    """

    dropout: Dropout | None

    def __init__(
        self, d_model: int, num_heads: int, attention_on_attention: bool = False, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = None if dropout is None else Dropout(dropout)
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.out_proj = OutputProjection(d_model, attention_on_attention)

    def init_weights(self) -> None:
        xavier_blocks_(self.query.weight)
        xavier_blocks_(self.key_value.weight, blocks=2)
        xavier_blocks_(self.out_proj.weight, self.out_proj.blocks)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes keys and values (B, H, N, D / H) of image tokens (B, N, D), once per image."""
        key, value = self.key_value(states).chunk(2, -1)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Attends from x (B*K, T, D) to the keys and values of B images. Returns (B*K, T, D).

        bias: (B, 1, 1, N), which hides padding, or None.
        """
        # the K captions of an image become one long sequence of queries, so that the image's keys are read only once
        rows, length, width = x.shape
        query = split_heads(self.query(x).view(key.shape[0], -1, width), self.num_heads)
        drops = self.dropout is not None and self.dropout.active
        mixed = attend(query, key, value, bias, self._drop_weights if drops else None)
        return self.out_proj(merge_heads(mixed).reshape(rows, length, width), x)

    def _drop_weights(self, weights: Tensor) -> Tensor:
        """Applies dropout to the attention weights (B, H, K*T, N)."""
        assert self.dropout is not None
        images, heads, queries, tokens = weights.shape

        def of_captions(masks: CaptionMasks, p: float) -> Tensor:
            return masks.of_tokens((heads, tokens), p).reshape(images, queries, heads, tokens).transpose(1, 2)

        return self.dropout(weights, of_captions)


class SelfAttention(nn.Module):
    """Multi-head self-attention, causal or bidirectional, as in the papers' baseline Transformer."""

    def __init__(self, d_model: int, num_heads: int, causal: bool, attention_on_attention: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = OutputProjection(d_model, attention_on_attention)

    def init_weights(self) -> None:
        xavier_blocks_(self.in_proj.weight, blocks=3)
        xavier_blocks_(self.out_proj.weight, self.out_proj.blocks)

    def project(self, x: Tensor) -> list[Tensor]:
        """Computes queries, keys and values (B, H, L, D / H) of x (B, L, D)."""
        return [split_heads(part, self.num_heads) for part in self.in_proj(x).chunk(3, -1)]

    def forward(self, x: Tensor, valid_mask: Tensor | None = None) -> Tensor:
        """Mixes the tokens x (B, L, D). valid_mask: (B, L), True at valid tokens; None if all are valid."""
        query, key, value = self.project(x)
        bias = padding_bias(valid_mask, query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=self.causal)
        return self.out_proj(merge_heads(mixed), x)

    def project_step(self, x: Tensor, slots: TreeSlots, ancestors: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys, values and a mask for the attention of one decoding step.

        The queries (B, H, K, D / H) belong to the new tokens x (B*K, D). The keys and values (B, H, slots, D / H)
        belong to all slots of an image. The mask (B, K, slots) is True at the slots on a beam's path.
        ancestors: (B, K, t), the numbers of the slots on each beam's path.
        """
        images, beams, _ = ancestors.shape
        maps = self.in_proj(x).view(images, beams, 3, -1)
        query = split_heads(maps[:, :, 0], self.num_heads)
        cached = slots.append("key_value", maps[:, :, 1:].permute(2, 0, 1, 3))  # (2, B, slots, D)
        key, value = (split_heads(part, self.num_heads) for part in cached.unbind())
        path = torch.zeros(images, beams, cached.shape[2], dtype=torch.bool, device=x.device)
        return query, key, value, path.scatter_(2, ancestors, True)

    def project_rows(self, x: Tensor, slots: RowSlots) -> tuple[Tensor, ...]:
        """Returns queries (R, H, 1, D / H), keys and values (R, H, t, D / H) for a step of rows that share no slots.

        x: the next token (R, D) of each row.
        """
        query, key_value = self.in_proj(x).split((x.shape[-1], 2 * x.shape[-1]), -1)
        key, value = slots.append_rows("key_value", key_value).chunk(2, -1)
        return tuple(split_heads(part, self.num_heads) for part in (query[:, None], key, value))

    def step(self, x: Tensor, slots: TreeSlots, ancestors: Tensor) -> Tensor:
        """Mixes the next token of each beam, x (B*K, D) -> (B*K, D). ancestors: (B, K, t), the slots on its path."""
        if isinstance(slots, RowSlots):
            query, key, value = self.project_rows(x, slots)
            mixed = F.scaled_dot_product_attention(query, key, value)
            return self.out_proj(merge_heads(mixed)[:, 0], x)
        query, key, value, path = self.project_step(x, slots, ancestors)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=path[:, None])
        return self.out_proj(merge_heads(mixed).flatten(0, 1), x)


class WordVectors(nn.Embedding):
    """An embedding with given word vectors (V, G), and a linear map to D.

    The vectors are random until `fill_word_vectors` sets them.
    """

    def __init__(self, count: int, width: int, d_model: int, trained: bool) -> None:
        super().__init__(count, width)
        self.weight.requires_grad_(trained)
        self.to_model = nn.Linear(width, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.to_model(super().forward(tokens))


class TiedOutput(nn.Linear):
    """Maps states (..., D) to G. The dot products with all word vectors are the logits (..., V)."""

    def __init__(self, words: WordVectors, d_model: int) -> None:
        super().__init__(d_model, words.embedding_dim)
        self.tied = (words,)  # a tuple, because PyTorch would register the module here, too, and store it twice

    def forward(self, y: Tensor) -> Tensor:
        return F.linear(super().forward(y), self.tied[0].weight)


def token_embedding(config: ModelConfig, sizes: ModelSizes) -> nn.Embedding:
    """Builds the layer that maps tokens (...) to embeddings (..., D)."""
    if config.word_vector_width is None:
        return nn.Embedding(sizes.vocabulary_size, config.d_model)
    return WordVectors(sizes.vocabulary_size, config.word_vector_width, config.d_model, config.train_word_vectors)


def lm_head(config: ModelConfig, sizes: ModelSizes, embedding: nn.Embedding, bias: bool = True) -> nn.Linear:
    """Builds the layer that maps states (..., D) to logits (..., V). If `embedding` has given vectors, it uses them."""
    if isinstance(embedding, WordVectors):
        return TiedOutput(embedding, config.d_model)
    return nn.Linear(config.d_model, sizes.vocabulary_size, bias=bias)


@torch.no_grad()
def fill_word_vectors(model: CaptionModel, vectors: Tensor, given: Tensor) -> None:
    """Sets the word vectors of a model whose embedding is `WordVectors`.

    A word gets its row of `vectors` (V, G) where `given` (V,) is True. The vectors of all other words, such as special
    tokens, are drawn from a normal distribution by torch's default generator. In each channel, this distribution has
    the mean and the standard deviation of the given vectors.
    """
    words = cast(WordVectors, model.token_embedding)
    given_vectors = vectors[given].double()
    drawn = given_vectors.mean(0) + given_vectors.std(0, correction=0) * torch.randn(vectors.shape, dtype=torch.float64)
    words.weight.copy_(torch.where(given[:, None], vectors.double(), drawn))


class Layer(nn.Module):
    """The base of encoder and decoder layers.

    pre_norm: If it is True, the norm comes before each sublayer. Otherwise the norm comes after the sum of the
    sublayer's input and output.
    """

    feed_forward_norm: nn.LayerNorm
    feed_forward: FeedForward

    def __init__(self, config: ModelConfig, pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.dropout = Dropout(config.dropout)

    def add_feed_forward(self, config: ModelConfig, activation: str = "relu") -> None:
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout, activation)

    def residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[..., Tensor], *arguments: object) -> Tensor:
        """Returns x + dropout(sublayer(norm(x))) with pre-norm, else norm(x + dropout(sublayer(x))).

        arguments: what the sublayer gets after its input.
        """
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x), *arguments))
        return norm(x + self.dropout(sublayer(x, *arguments)))

    def transform(self, x: Tensor) -> Tensor:
        """Applies the feed-forward sublayer, with its residual connection and norm."""
        return self.residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(Layer):
    """The base of decoder layers. A subclass mixes the tokens of captions in `mix`, and step by step in `mix_step`."""

    cross_norm: nn.LayerNorm
    cross: CrossAttention

    def add_cross_attention(self, config: ModelConfig, dropout: float | None = None) -> None:
        self.cross_norm = nn.LayerNorm(config.d_model)
        self.cross = CrossAttention(config.d_model, config.num_heads, dropout=dropout)

    @abstractmethod
    def mix(self, y: Tensor, *context: Any) -> Tensor:
        """Mixes the tokens of each caption, y (R, T, D) -> (R, T, D). context: the further arguments of `forward`."""

    @abstractmethod
    def mix_step(self, y: Tensor, cache: Any, index: int) -> Tensor:
        """Does what `mix` does for the next token of each row, y (R, D) -> (R, D). index: this layer's, from 0."""

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the keys and values (B, H, N, D / H) of cross-attention from the encoder's `states`."""
        return self.cross.project(states)

    def read_image(self, y: Tensor, cross: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """Applies cross-attention and feed-forward, y (R, T, D) -> (R, T, D). cross: the keys and values."""
        return self.transform(self.residual(y, self.cross_norm, self.cross, *cross, bias))

    def forward(self, y: Tensor, states: Tensor, bias: Tensor | None, *context: object) -> Tensor:
        """Returns the layer's output (R, T, D) for y (R, T, D).

        states: the encoder's output for B images. bias: from `cross_bias`. context: further arguments of `mix`.
        """
        return self.read_image(self.mix(y, *context), self.project(states), bias)

    def step(self, y: Tensor, cache: TreeCache, index: int) -> Tensor:
        """Returns the layer's output (R, D) for the next token of each row, y (R, D). index: this layer's, from 0."""
        y = self.mix_step(y, cache, index)
        return self.read_image(y[:, None], cache.cross[index], cache.bias)[:, 0]


def layer_list(layers: Iterable[LayerType]) -> Sequence[LayerType]:
    """Makes a ModuleList, and keeps the class of the layers for type checkers."""
    return cast(Sequence[LayerType], nn.ModuleList(layers))


def layer_outputs(layers: Sequence[Layer], x: Tensor, *arguments: object) -> list[Tensor]:
    """Returns the outputs of all layers. A layer reads the output of the layer before it, and gets `arguments`."""
    outputs = []
    for layer in layers:
        x = layer(x, *arguments)
        outputs.append(x)
    return outputs


def at_positions(outputs: list[Tensor], positions: Tensor | None) -> list[Tensor]:
    """Selects outputs (R, T, D) at positions (P,) of R*T, which gives (P, D). Without positions all are returned."""
    return outputs if positions is None else [y.flatten(0, 1).index_select(0, positions) for y in outputs]


def position_rows(table: Tensor, first: int, count: int) -> Tensor:
    """Returns the vectors (count, D) of positions from `first` on. Raises ValueError if the table has too few rows."""
    check_positions(first + count, len(table))
    return table[first : first + count]


def cross_bias(memory: Memory) -> Tensor | None:
    """Returns the bias (B, 1, 1, N) that hides padding in cross-attention, or None if there is no padding."""
    return padding_bias(valid_tokens(memory.lengths, memory.states.shape[-2]), memory.states.dtype)


class EncoderDecoder(CaptionModel):
    """A captioner with encoder and decoder layers. A subclass builds the parts, and defines `encode` and `embed`."""

    input: nn.Linear
    encoder: Sequence[Layer]
    token_embedding: nn.Embedding
    decoder: Sequence[DecoderLayer]
    lm_head: nn.Linear
    masks: CaptionMasks | None = None  # dropout masks that decoding steps share with the teacher-forced pass
    steps_compute_prefix: ClassVar[bool] = False  # True if each step computes all tokens so far again

    @property
    def plain_maps(self) -> tuple[nn.Linear | nn.Embedding, ...]:
        """The linear maps and embeddings outside of the layers, in the order in which `init_weights` draws them."""
        return self.input, self.token_embedding, self.lm_head

    def init_weights(self) -> None:
        """Calls `init_weights` of every part that has this method, then draws `plain_maps` Xavier-uniform.

        Biases that no part draws stay as PyTorch has drawn them.
        """
        for module in list(self.modules())[1:]:  # the first is this model, whose `init_weights` would call itself
            draw_weights = getattr(module, "init_weights", None)
            if draw_weights is not None:
                draw_weights()
        for plain in self.plain_maps:
            xavier_blocks_(plain.weight)

    def read_features(self, features: Features) -> Tensor:
        """Maps the image tokens from (B, N, C) to (B, N, D). Raises ValueError if they have another shape."""
        tokens, width = features.tokens, self.sizes.feature_width
        if tokens.ndim != 3 or tokens.shape[-1] != width:
            raise ValueError(
                f"features have shape {tuple(tokens.shape)}; expected (images, tokens, {width}), "
                f"the width this model was built for"
            )
        return self.input(tokens.to(self.input.weight.dtype))

    @abstractmethod
    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """Returns the embeddings (R, T, D) of tokens (R, T). position: that of the first token."""

    def logits(self, outputs: list[Tensor]) -> Tensor:
        """Computes logits (..., V) from the outputs (..., D) of all decoder layers."""
        return self.lm_head(outputs[-1])

    def decode(self, memory: Memory, tokens: Tensor, *context: object, positions: Tensor | None = None) -> Tensor:
        """See `CaptionModel.decode`. context: further arguments of every decoder layer."""
        if self.masks is not None:
            self.masks.begin_pass(tokens.shape[1])
        return self.logits(at_positions(self.decoder_outputs(memory, tokens, *context), positions))

    def decoder_outputs(self, memory: Memory, tokens: Tensor, *context: object) -> list[Tensor]:
        """Returns the outputs (R, T, D) of all decoder layers for tokens (R, T). context: as in `decode`."""
        y = self.embed(tokens, position=0)
        return layer_outputs(self.decoder, y, memory.states, cross_bias(memory), *context)

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        cross = [cached_for_steps(*layer.project(memory.states)) for layer in self.decoder]
        slots = [TreeSlots(beams) for _ in self.decoder]
        paths = torch.empty(memory.batch_size, beams, 0, dtype=torch.int64, device=memory.states.device)
        return TreeCache(memory.batch_size, beams, cross, cross_bias(memory), slots, paths, masks=self.masks)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: TreeCache) -> tuple[Tensor, TreeCache]:
        cache.advance()
        y = self.embed(tokens[:, None], cache.length - 1)[:, 0]
        outputs = []
        for index, layer in enumerate(self.decoder):
            y = layer.step(y, cache, index)
            outputs.append(y)
        return self.logits(outputs), cache
