"""The frame that the captioners share: layers, teacher forcing, cached steps, drawing of weights, and costs.

Shapes: B images, N image tokens, C feature width, K captions per image, R = B*K rows, T caption tokens, D width,
H heads, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from raycap.models.base import Cache, CaptionModel, Features, Macs, Memory, check_positions, linear_macs, valid_tokens
from raycap.models.config import ModelConfig
from raycap.models.decoding.cache import TreeCache, TreeSlots
from raycap.models.dropout import CaptionMasks, Dropout
from raycap.models.layers import (
    CrossAttention,
    FeedForward,
    Mixer,
    cached_for_steps,
    padding_bias,
    token_macs,
    xavier_blocks_,
)

LayerType = TypeVar("LayerType", bound="Layer")


class Layer(nn.Module):
    """The base of encoder and decoder layers: a norm before each sublayer (pre-norm), or after its residual sum."""

    feed_forward_norm: nn.LayerNorm
    feed_forward: FeedForward

    def __init__(self, config: ModelConfig, pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.dropout = Dropout(config.dropout)

    def add_feed_forward(self, config: ModelConfig, activation: str = "relu") -> None:
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout, activation)

    def residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """x plus the sublayer's output after dropout. The sublayer gets `arguments` in addition to its input."""
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x), *arguments))
        return norm(x + self.dropout(sublayer(x, *arguments)))

    def transform(self, x: Tensor) -> Tensor:
        """The feed-forward sublayer."""
        return self.residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(Layer):
    """The base of decoder layers. A subclass mixes the tokens of a caption in `mix` and `mix_step`."""

    cross_norm: nn.LayerNorm
    cross: CrossAttention

    def add_cross_attention(self, config: ModelConfig, dropout: float | None = None) -> None:
        self.cross_norm = nn.LayerNorm(config.d_model)
        self.cross = CrossAttention(config.d_model, config.num_heads, dropout=dropout)

    @abstractmethod
    def mix(self, y: Tensor, *context: Any) -> Tensor:
        """The first sublayer, y (R, T, D) -> (R, T, D); `context` are the further arguments of `forward`."""

    @abstractmethod
    def mix_step(self, y: Tensor, cache: Any, index: int) -> Tensor:
        """`mix` for the next token of each row, y (R, D) -> (R, D); `index` is the number of this layer."""

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values (B, H, N, D / H) of the encoder's states."""
        return self.cross.project(states)

    def read_image(self, y: Tensor, cross: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """Cross-attention to keys and values `cross`, and feed-forward: y (R, T, D) -> (R, T, D)."""
        return self.transform(self.residual(y, self.cross_norm, self.cross, *cross, bias))

    def forward(self, y: Tensor, states: Tensor, bias: Tensor | None, *context: Any) -> Tensor:
        """The layer's output (R, T, D) for y (R, T, D) and the encoder's states of B images."""
        return self.read_image(self.mix(y, *context), self.project(states), bias)

    def step(self, y: Tensor, cache: TreeCache, index: int) -> Tensor:
        """Passes the next token of each row, y (R, D), through this layer, whose index is `index`."""
        y = self.mix_step(y, cache, index)
        return self.read_image(y[:, None], cache.cross[index], cache.bias)[:, 0]


def layer_list(layers: Iterable[LayerType]) -> Sequence[LayerType]:
    """A ModuleList, typed by its layers."""
    return cast(Sequence[LayerType], nn.ModuleList(layers))


def layer_outputs(layers: Sequence[Layer], x: Tensor, *arguments: Any) -> list[Tensor]:
    """The outputs of all layers; each layer reads the output of the layer before it, and `arguments`."""
    outputs = []
    for layer in layers:
        x = layer(x, *arguments)
        outputs.append(x)
    return outputs


def position_rows(table: Tensor, first: int, count: int) -> Tensor:
    """The vectors (count, D) of positions from `first` on. Raises ValueError when the table has too few rows."""
    check_positions(first + count, len(table))
    return table[first : first + count]


def cross_bias(memory: Memory) -> Tensor | None:
    """The bias (B, 1, 1, N) to add to the scores of cross-attention, which hides padding; None without padding."""
    return padding_bias(valid_tokens(memory.lengths, memory.states.shape[-2]), memory.states.dtype)


def check_captions(rows: int, images: int) -> None:
    """Raises ValueError unless every image has the same number of captions, one or more."""
    if not rows or not images or rows % images:
        raise ValueError(
            f"{rows} captions do not divide by {images} images (remainder {rows % images if images else rows}); "
            f"give the same number of captions for each image, row b*K+k for caption k of image b"
        )


class EncoderDecoder(CaptionModel):
    """A captioner with layers on both sides. A subclass makes the parts, `encode` and `embed`."""

    input: nn.Linear
    encoder: Sequence[Layer]
    token_embedding: nn.Embedding
    decoder: Sequence[DecoderLayer]
    lm_head: nn.Linear
    masks: CaptionMasks | None = None  # of dropout, which steps and the teacher-forced pass share
    steps_compute_prefix: ClassVar[bool] = False  # whether a decoding step computes all tokens so far, and not only one

    @property
    def plain_maps(self) -> tuple[nn.Linear | nn.Embedding, ...]:
        """The maps outside of the layers, in the order in which `init_weights` draws them."""
        return self.input, self.token_embedding, self.lm_head

    def init_weights(self) -> None:
        """Calls every part's `init_weights` and draws `plain_maps` Xavier-uniform. Biases are as PyTorch draws them."""
        for module in list(self.modules())[1:]:  # without this module itself
            draw_weights = getattr(module, "init_weights", None)
            if draw_weights is not None:
                draw_weights()
        for plain in self.plain_maps:
            xavier_blocks_(plain.weight)

    def read_features(self, features: Features) -> Tensor:
        """The input map's output (B, N, D). Raises ValueError unless the tokens are (B, N, C) and the lengths (B,)."""
        tokens, lengths, width = features.tokens, features.lengths, self.sizes.feature_width
        if tokens.ndim != 3 or tokens.shape[-1] != width:
            raise ValueError(
                f"features have shape {tuple(tokens.shape)}; expected (images, tokens, {width}), "
                f"the width this model was built for"
            )
        if lengths is not None and lengths.shape != tokens.shape[:1]:
            raise ValueError(
                f"lengths have shape {tuple(lengths.shape)}; expected one number per image, ({len(features)},)"
            )
        return self.input(tokens.to(self.input.weight.dtype))

    @abstractmethod
    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """Embeddings (R, T, D) of tokens (R, T), of which the first is at `position`."""

    def logits(self, outputs: list[Tensor]) -> Tensor:
        """Logits (..., V) from the outputs (..., D) of all decoder layers."""
        return self.lm_head(outputs[-1])

    def decode(self, memory: Memory, tokens: Tensor, *context: Any) -> Tensor:
        """See `CaptionModel.decode`; `context` are further arguments of every decoder layer."""
        check_captions(tokens.shape[0], memory.batch_size)
        if self.masks is not None:
            self.masks.begin_pass(tokens.shape[1])
        return self.logits(self.decoder_outputs(memory, tokens, *context))

    def decoder_outputs(self, memory: Memory, tokens: Tensor, *context: Any) -> list[Tensor]:
        """The outputs (R, T, D) of all decoder layers for tokens (R, T); `context` as in `decode`."""
        y = self.embed(tokens, position=0)
        return layer_outputs(self.decoder, y, memory.states, cross_bias(memory), *context)

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        cross = [cached_for_steps(*layer.project(memory.states)) for layer in self.decoder]
        slots = [TreeSlots(beams) for _ in self.decoder]
        paths = torch.empty(memory.batch_size, beams, 0, dtype=torch.int64, device=memory.states.device)
        return TreeCache(memory.batch_size, beams, cross, cross_bias(memory), slots, paths, masks=self.masks)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, TreeCache]:
        assert isinstance(cache, TreeCache)
        cache.advance()
        y = self.embed(tokens[:, None], cache.length - 1)[:, 0]
        outputs = []
        for index, layer in enumerate(self.decoder):
            y = layer.step(y, cache, index)
            outputs.append(y)
        return self.logits(outputs), cache

    def macs(self, image_tokens: int) -> Macs:
        encoder_mixers, mixers = _mixers(self.encoder), _mixers(self.decoder)
        keys = token = 0
        for layer in self.decoder:
            (cross,) = (module for module in layer.modules() if isinstance(module, CrossAttention))
            levels = cross.levels
            keys += levels * image_tokens * linear_macs(cross.key_value)
            # all levels share the queries; the attended values and the output map are computed for each level
            token += linear_macs(layer) - linear_macs(cross.key_value) + (levels - 1) * linear_macs(cross.out_proj)
            token += levels * 2 * image_tokens * self.config.d_model  # scores and weighted sums of cross-attention
        encoder = image_tokens * linear_macs(self.input, *self.encoder)
        return Macs(
            encoder=encoder + sum(mixer.mixing_macs(image_tokens) for mixer in encoder_mixers),
            keys=keys,
            token=token + token_macs(self.config, self.sizes),
            mixing=lambda length: sum(mixer.mixing_macs(length) for mixer in mixers),
            step=lambda slots, length: sum(mixer.step_macs(slots, length) for mixer in mixers),
        )


def _mixers(layers: Sequence[Layer]) -> list[Mixer]:
    """The modules of the layers that mix the tokens of a sequence."""
    return [module for layer in layers for module in layer.modules() if isinstance(module, Mixer)]
