"""Ada-ClustFormer with the decoder of its published code, which predicts each word at a mask token.

Shapes: B images, N image tokens, K captions per image, R = B*K rows, T caption tokens, D width, H heads, V vocabulary.

To predict the word after t tokens, the decoder reads these tokens and then a mask token. Self-attention is not causal:
all t + 1 tokens attend to each other, so that the states of the earlier tokens differ from word to word and no keys can
be cached. The logits are those at the mask token. It is PAD, whose embedding no other input uses.

Cost: teacher forcing runs the T prefixes of a caption as T rows of T + 1 tokens, where tokens after the mask are
hidden. The decoder's layers take T + 1 times the work and the memory of the causal decoder's, and the output layer the
same. A decoding step runs the whole prefix of each beam again, t + 1 tokens in place of one; only the keys and values
of cross-attention are computed once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raycap.models.base import Cache, Macs, Memory, check_positions
from raycap.models.clusters import Layout
from raycap.models.clustformer import ClustFormer, PassState
from raycap.models.config import ClustFormerConfig, ModelSizes
from raycap.models.decoding.cache import TreeCache
from raycap.models.encoder_decoder import EncoderDecoder, check_captions
from raycap.models.layers import sinusoids
from raycap.models.token_embeddings import token_macs


class MaskTokenClustFormer(ClustFormer):
    """Ada-ClustFormer whose decoder reads the prefix and a mask token for every word."""

    steps_compute_prefix = True

    def __init__(self, config: ClustFormerConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        # the mask token follows the longest caption
        self.register_buffer("positions", sinusoids(sizes.max_positions + 1, config.d_model), persistent=False)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        check_captions(rows, memory.batch_size)
        check_positions(length, self.sizes.max_positions)
        if self.masks is not None:
            self.masks.begin_pass(length)
        # row t of a caption has the tokens up to t, and the mask token at t + 1 and (hidden) after it
        is_visible = torch.ones(length, length + 1, dtype=torch.bool, device=tokens.device).tril(1)
        prefixes = self._with_mask(tokens)[:, None].expand(-1, length, -1)
        prefixes = prefixes.masked_fill(~is_visible.tril(), self.sizes.pad).flatten(0, 1)
        shared = self._start_prefix_pass(prefixes, is_visible.repeat(rows, 1)[:, None, None])
        outputs = self.decoder_outputs(memory, prefixes, shared)
        return self.logits([self.predicting(outputs[-1])])

    def predicting(self, values: Tensor) -> Tensor:
        length = values.shape[1] - 1
        return values.unflatten(0, (-1, length)).diagonal(offset=1, dim1=1, dim2=2).movedim(-1, 1)

    @torch.no_grad()
    def decoder_clusters(self, memory: Memory, tokens: Tensor) -> Tensor:
        """See `ClustFormer.decoder_clusters`: those of the pass that predicts the word after the whole caption."""
        prefixes = self._with_mask(tokens)
        shared = self._start_prefix_pass(prefixes, None)
        outputs = self.decoder_outputs(memory, prefixes, shared)
        return shared.all_matrices(outputs[-1])[:, :, :-1, :-1]

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        return EncoderDecoder.init_cache(self, memory, beams)  # without the sums and rows of the causal decoder

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, TreeCache]:
        assert isinstance(cache, TreeCache)
        check_positions(cache.length + 1, self.sizes.max_positions)
        cache.advance()
        consumed = cache.layers[0].append("tokens", tokens.view(1, cache.images, cache.beams))[0]  # (B, slots)
        paths = consumed[:, None].expand(-1, cache.beams, -1).gather(2, cache.ancestors)  # (B, K, t)
        prefixes = self._with_mask(paths.flatten(0, 1))
        shared = self._start_prefix_pass(prefixes, None)
        y = self.embed(prefixes, position=0)
        for layer, cross in zip(self.decoder, cache.cross, strict=True):
            y = layer.read_image(layer.mix(y, shared), cross, cache.bias)
        return self.logits([y[:, -1]]), cache

    def macs(self, image_tokens: int) -> Macs:
        causal = super().macs(image_tokens)
        embedding = (self.config.word_vector_width or 0) * self.config.d_model
        output = token_macs(self.config, self.sizes) - embedding

        def one_pass(length: float) -> float:
            """The cost of predicting one word after `length` tokens, without the output layer."""
            return (length + 1) * (causal.token - output) + causal.mixing(length + 1)

        return replace(
            causal,
            token=output,
            mixing=lambda length: length * one_pass(length),
            step=lambda slots, length: one_pass(length),
        )

    def _with_mask(self, tokens: Tensor) -> Tensor:
        """The tokens (R, T) and the mask token, (R, T + 1)."""
        return F.pad(tokens, (0, 1), value=self.sizes.pad)

    def _start_prefix_pass(self, prefixes: Tensor, attention_mask: Tensor | None) -> PassState:
        """The state before the first decoder layer for prefixes with their mask token (rows, T + 1)."""
        return self._start_pass(Layout(rows=1, columns=prefixes.shape[1]), attention_mask, prefixes.device)
