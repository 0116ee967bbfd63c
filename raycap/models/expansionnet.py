"""ExpansionNet v2 (Hu, Cavicchioli, Capotondi), with an encoder and a decoder whose mixers the configuration chooses.

Layers are pre-norm, x + dropout(sublayer(norm(x))). The last layer is followed by x + dropout(Linear(outputs of all
layers)) and a LayerNorm, as in the reference. PAD after a caption needs no mask, because the output at a token depends
only on the tokens up to it.

Static and dynamic expansion (section III) are computed in a factorized form, which needs no expanded sequence in
memory. The positive stream has A = relu(M), and the negative one A = relu(-M). Forward weights F are A normalized over
the input tokens. Backward weights R are A normalized over the expanded vectors. A stream of equations 5 and 7 is then

    R (F V + bias) = (R F) V + R bias

so that an (L, L) product replaces an (E, D) one. The factorized form is exact in evaluation. In training the reference
drops single elements of the expanded vectors, which needs the long form (`ExpansionNetConfig.expansion_dropout`).

Equation 2 divides M by sqrt(D). Here M is not divided, because the normalization cancels the factor if epsilon is
sqrt(D) times as large (`Expansion.epsilon`).

The weights F and R (equations 3, 4 and 6) and their gradient are written by hand at the end of this file, because
autograd would keep five tensors of the size of M per stream and pass over them about thirty times. Our gradient keeps
only the results and needs half of the passes. With y = a r and r = 1 / (sum a + eps), the gradient is

    da = r (dy - sum(dy y)),   dM = da+ where M > 0, -da- where M < 0.

Shapes: B sequences, N image tokens, R caption rows, T caption tokens, L tokens of a mixer, D width, V vocabulary, E
expanded vectors, N_E expanded vectors per token. A leading 2 counts the streams, positive and negative. In the dynamic
expansion s, t and u have size L: s counts the tokens as owners of expanded vectors, t as their readers, u as sources of
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from raycap.models.base import Features, Memory, valid_tokens
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.models.decoding.cache import RowSlots, TreeCache, TreeSlots
from raycap.models.dropout import CaptionMasks, Dropout
from raycap.models.layers import (
    DecoderLayer,
    EncoderDecoder,
    Layer,
    SelfAttention,
    full_precision,
    layer_list,
    layer_outputs,
    lm_head,
    position_rows,
    token_embedding,
    xavier_blocks_,
)

EPSILON = 1e-9  # of equation 4, as in the reference; sums are float32, because float16 would round it to 0
EXPORT_SCALE = 2.0**30  # a power of 2, because products with it are exact
Dims = int | tuple[int, ...]


def gated(gate: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Joins two streams (..., D) by equation 8. As in the reference, the gate is the weight of the positive stream."""
    return torch.lerp(negative, positive, torch.sigmoid(gate).to(positive.dtype))


class Expansion(nn.Module):
    """The base of both expansions, with E_Q (`queries`), E_B (`biases`), dropout, and the choice between two forms."""

    def __init__(self, d_model: int, vectors: int, projections: int, dropout: float, factorized_dropout: bool) -> None:
        super().__init__()
        self.epsilon = EPSILON * math.sqrt(d_model)
        self.queries = nn.Parameter(torch.empty(vectors, d_model))
        self.biases = nn.Parameter(torch.empty(vectors, d_model))
        self.in_proj = nn.Linear(d_model, projections * d_model)  # one product for all linear maps of the input
        self.dropout = Dropout(dropout)  # for M, the expanded vectors and both streams, as in the reference
        self.factorized_dropout = factorized_dropout

    def init_weights(self) -> None:
        """Draws each linear map Xavier-uniform on its own, as the reference does."""
        for vectors in (self.queries, self.biases):
            nn.init.xavier_uniform_(vectors)
        xavier_blocks_(self.in_proj.weight, self.in_proj.out_features // self.in_proj.in_features)

    @property
    def long_form(self) -> bool:
        """True if dropout of single elements needs the expanded sequence in memory."""
        return self.dropout.active and not self.factorized_dropout

    def drop_vectors(self, backward: Tensor) -> Tensor:
        """Drops whole expanded vectors (the last dimension of `backward`), the same ones for all tokens."""
        if not self.dropout.active:
            return backward
        return backward * self.dropout(backward.new_ones(*backward.shape[:-2], 1, backward.shape[-1]), self._of_vectors)

    def _of_vectors(self, masks: CaptionMasks, p: float) -> Tensor:
        """Returns the shared mask (2, R, T, N_E) for dropout of whole expanded vectors in both streams."""
        return masks.of_tokens((2, len(self.queries)), p).permute(2, 0, 1, 3)  # from (R, T, 2, N_E)


class StaticExpansion(Expansion):
    """Bidirectional block static expansion (paper III-A4) over the groups G of expanded vectors."""

    def __init__(self, d_model: int, groups: tuple[int, ...], dropout: float, factorized_dropout: bool) -> None:
        super().__init__(d_model, sum(groups), projections=4, dropout=dropout, factorized_dropout=factorized_dropout)
        self.groups = tuple(groups)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        """Mixes the tokens x (B, L, D). valid_mask: (B, L), True at valid tokens; None if all are valid."""
        key, value_positive, value_negative, gate = self.in_proj(x).chunk(4, -1)
        m = torch.matmul(key, self.queries.t())  # (B, L, E), the paper's M transposed, so that groups are contiguous
        mask = None if valid_mask is None else valid_mask[:, :, None].to(m.dtype)
        weights = StaticWeights.apply(self.dropout(m), mask, self.groups, self.epsilon)  # (B, L, E) each
        biases = self.biases.to(value_positive.dtype)
        streams = []
        for value, forward, backward in ((value_positive, *weights[:2]), (value_negative, *weights[2:])):
            if self.long_form:
                expanded = torch.bmm(forward.mT, value).add_(biases)  # (B, E, D)
                streams.append(torch.bmm(backward, self.dropout(expanded)))
            else:
                backward = self.drop_vectors(backward)
                across = torch.bmm(backward, forward.mT)  # (B, L, L)
                streams.append(torch.matmul(backward, biases).baddbmm_(across, value))
        return gated(gate, self.dropout(streams[0]), self.dropout(streams[1]))


class DynamicExpansion(Expansion):
    """Dynamic expansion (paper III-A1), causal or bidirectional, with N_E expanded vectors per token.

    c_s is the condition of token s, k_t is the key of token t, and e_n and b_n are rows of E_Q and E_B. Queries are
    c_s + e_n, so that M[(s, n), t] = c_s k_t + e_n k_t is an (L, L) product plus an (N_E, L) product, by broadcasting.
    In the same way, the biases c_s + b_n contribute (R summed over n) C + (R summed over s) E_B.
    """

    def __init__(self, d_model: int, vectors: int, causal: bool, dropout: float, factorized_dropout: bool) -> None:
        super().__init__(d_model, vectors, projections=5, dropout=dropout, factorized_dropout=factorized_dropout)
        self.causal = causal
        self.vectors = vectors

    def forward(self, x: Tensor, valid_mask: Tensor | None = None) -> Tensor:
        """Mixes the tokens x (B, L, D). valid_mask: (B, L), True at valid tokens; None if all are valid.

        A causal expansion ignores the mask, because no token reads later ones, and padding comes last.
        """
        # Autocast is off: early positions are normalized over few keys, so that their weights jump where M crosses 0,
        # and a sign that bfloat16 rounds wrong changes logits by 0.1 and more. The small products would gain no speed.
        with full_precision(x):
            return self._expand(self._project(x), valid_mask)

    def _expand(self, projected: Tensor, valid_mask: Tensor | None) -> Tensor:
        """Computes equations 1 to 8, (B, L, D). projected: C, K, V1, V2 and the gate side by side, (B, L, 5 D)."""
        condition, key, value_positive, value_negative, gate = projected.chunk(5, -1)
        by_condition = torch.bmm(condition, key.mT)  # (B, s, t)
        by_vector = torch.matmul(key, self.queries.t()).mT  # (B, N_E, t)
        m = self.dropout(by_condition[:, :, None] + by_vector[:, None], self._of_m)  # (B, s, N_E, t)
        forward_mask, backward_mask = self._masks(m, valid_mask)
        forward, backward = DynamicWeights.apply(m, forward_mask, backward_mask, self.epsilon)  # (2, B, s, N_E, t)
        condition_weights = backward.sum(3).mT  # (2, B, t, s)
        biases = torch.matmul(backward.sum(2).mT, self.biases)  # (2, B, t, D)
        rows = backward.flatten(2, 3).mT  # (2, B, t, s N_E)
        if not self.long_form:
            rows = self.drop_vectors(rows)
        columns = forward.flatten(2, 3)  # (2, B, s N_E, u)
        parts = zip(biases, condition_weights, rows, columns, (value_positive, value_negative), strict=True)
        streams = []
        for bias, condition_weight, row, column, value in parts:
            stream = torch.baddbmm(bias, condition_weight, condition)
            if self.long_form:
                expanded = self.dropout(torch.bmm(column, value), self._of_expanded)  # (B, s N_E, D), before its bias
                streams.append(torch.baddbmm(stream, row, expanded))
            else:
                streams.append(torch.baddbmm(stream, torch.bmm(row, column), value))
        return gated(gate, self.dropout(streams[0]), self.dropout(streams[1]))

    def _of_m(self, masks: CaptionMasks, p: float) -> Tensor:
        """Returns the shared mask for M, (R, s, N_E, t) in a pass, and (2, R, N_E, t) for its two parts in a step."""
        return masks.of_pairs((self.vectors,), p).mT

    def _of_expanded(self, masks: CaptionMasks, p: float) -> Tensor:
        """Returns the shared mask (R, T, N_E, D) for dropout of single elements in one stream's expanded vectors."""
        return masks.of_tokens(tuple(self.queries.shape), p)

    def _project(self, x: Tensor) -> Tensor:
        """Computes C, K, V1, V2 and the gate, side by side: (..., 5 D)."""
        return self.in_proj(x.to(self.in_proj.weight.dtype))

    def _masks(self, m: Tensor, valid_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns a mask that is 1 where the vectors of s read token t, and one that is 1 where token t reads them.

        If everything is read, both masks are None.
        """
        if self.causal:
            length = m.shape[-1]
            reads = torch.ones(length, length, dtype=m.dtype, device=m.device).tril_()  # [s, t]: 1 where t <= s
            return reads[:, None], reads[:, None].transpose(0, 2)
        if valid_mask is None:
            return None, None
        return valid_mask[:, None, None].to(m.dtype), valid_mask[:, :, None, None].to(m.dtype)  # over t, over s

    def step(self, x: Tensor, slots: TreeSlots, ancestors: Tensor) -> Tensor:
        """Mixes the next token of each beam, x (B*K, D) -> (B*K, D), in a causal expansion.

        ancestors: (B, K, t), the slots on each beam's path, the new one last. Vectors of earlier tokens never change,
        so their forward weights are cached. If dropout drops single elements, the expanded vectors are cached instead.
        Products are computed for all slots of an image, and each beam picks the results of its ancestors. Leading
        dimensions of size 2 count the streams, and then the directions: first the new vectors read past tokens, then
        the new token reads past vectors.
        """
        with full_precision(x):
            if isinstance(slots, RowSlots):
                return self._step_rows(self._project(x), slots)
            images, beams, _ = ancestors.shape
            paths = ancestors.expand(2, -1, -1, -1)  # (2, B, K, t), indices for both directions
            new_slots, cached = slots.allocate("in_proj", (4, images, beams, x.shape[-1]), self.in_proj.weight)
            maps = self._project(x).view(images, beams, 5, -1)
            new_slots.copy_(maps[:, :, :4].permute(2, 0, 1, 3))  # C, K, V1 and V2 (4, B, K, D)
            gate = maps[:, :, 4].flatten(0, 1)
            m = self.dropout(self._step_products(new_slots, cached, slots, paths), self._of_m)
            parts = signed_parts(m)  # (2, 2, B, K, N_E, t): streams, directions
            sums = total(parts, -1)
            forward_scale = inverse(sums[:, 0], m.dtype, self.epsilon)  # (2, B, K, N_E, 1)
            if self.long_form:
                columns = self._step_expanded(parts[:, 0] * forward_scale, cached[2:], slots, paths)
            else:
                columns = self._store_forward(parts[:, 0], forward_scale, slots)
            backward_scale = inverse(total(sums[:, 1], -2), m.dtype, self.epsilon)  # (2, B, K, 1, 1)
            by_vector = (sums[:, 1] * backward_scale).flatten(0, 2)[..., 0].to(m.dtype)  # (2 B K, N_E): R summed over s
            backward = parts[:, 1] * backward_scale  # (2, B, K, N_E, s)
            return self._step_streams(by_vector, backward, columns, cached, gate, paths)

    def _step_rows(self, maps: Tensor, slots: RowSlots) -> Tensor:
        """Does what `step` does in evaluation, for captions that share no slots. Returns (R, D).

        maps: C, K, V1, V2 and the gate of the new tokens, (R, 5 D). In this method, dimension 1 counts the streams.
        """
        width = maps.shape[-1] // 5
        condition, key, gate = maps[:, :width], maps[:, width : 2 * width], maps[:, 4 * width :]
        conditions, keys, *values = slots.append_rows("in_proj", maps[:, : 4 * width]).chunk(4, -1)  # (R, t, D)
        by_vector = torch.matmul(key, self.queries.t())  # (R, N_E): e_n k
        over_tokens = torch.bmm(keys, condition[..., None]).mT + slots.append_rows("by_vector", by_vector).mT
        over_vectors = torch.bmm(conditions, key[..., None]).mT + by_vector[..., None]  # (R, N_E, s)
        forward, backward = (torch.stack((m.relu(), (-m).relu()), 1) for m in (over_tokens, over_vectors))
        forward = forward * inverse(total(forward, -1), maps.dtype, self.epsilon)  # (R, 2, N_E, t)
        columns = slots.append_by_position("forward", forward).transpose(1, 2).flatten(2, 3)  # (R, 2, s N_E, u)
        backward = backward * inverse(total(backward, (2, 3)), maps.dtype, self.epsilon)  # (R, 2, N_E, s)
        value_weights = torch.matmul(backward.mT.flatten(2)[:, :, None], columns)  # (R, 2, 1, u)
        condition_weights = total(backward, 2).to(maps.dtype)  # (R, 2, 1, s)
        streams = torch.matmul(value_weights, torch.stack(values, 1))
        streams = streams + torch.matmul(condition_weights, conditions[:, None])  # (R, 2, 1, D)
        biases = torch.matmul(total(backward, -1)[..., 0].to(maps.dtype), self.biases)  # (R, 2, D)
        positive, negative = (streams[:, :, 0] + biases).unbind(1)
        return gated(gate, positive, negative)

    def _step_products(self, new: Tensor, cached: Tensor, slots: TreeSlots, paths: Tensor) -> Tensor:
        """Returns M (2, B, K, N_E, t) of the new vectors over the path's tokens, and of the path's over the new token.

        new: C, K, V1 and V2 of the new tokens, (4, B, K, D). cached: the same of all slots, (4, B, slots, D).
        """
        _, images, beams, length = paths.shape
        condition, key = new[0], new[1]  # (B, K, D)
        new_slots, by_vector = slots.allocate("by_vector", (1, images, beams, self.vectors), new)
        new_slots.copy_(torch.matmul(key, self.queries.t()))  # e_n k
        products = new.new_empty(2, images, beams, cached.shape[2])
        torch.bmm(condition, cached[1].mT, out=products[0])
        torch.bmm(key, cached[0].mT, out=products[1])
        over_tokens, over_vectors = products.gather(3, paths)[:, :, :, None]  # (B, K, 1, t) each: c k'
        path = paths[0].flatten(1)[..., None].expand(-1, -1, self.vectors)
        m = new.new_empty(2, images, beams, self.vectors, length)
        torch.add(over_tokens, by_vector[0].gather(1, path).view(images, beams, length, -1).mT, out=m[0])
        torch.add(over_vectors, new_slots[0][..., None], out=m[1])
        return m

    def _store_forward(self, a: Tensor, scale: Tensor, slots: TreeSlots) -> Tensor:
        """Stores the forward weights of the new vectors, a * scale (2, B, K, N_E, t). Returns those of all slots.

        A slot's weights are stored by the position u on its path, so that beams need no lookup.
        """
        shape = a.shape[:-1]
        new_slots, all_slots = slots.allocate("forward", tuple(shape), a, length=a.shape[-1])
        torch.mul(a, scale, out=new_slots)
        if self.dropout.active:
            new_slots.mul_(self.dropout(a.new_ones(shape), self._of_vectors)[..., None])
        return all_slots

    def _step_expanded(self, forward: Tensor, values: Tensor, slots: TreeSlots, paths: Tensor) -> Tensor:
        """Returns the expanded vectors of all slots, (2, B, slots, N_E, D), after dropout, but without their bias.

        forward: F of the new vectors, (2, B, K, N_E, t). values: V1 and V2, (2, B, slots, D).
        """
        width = values.shape[-1]
        on_path = values.gather(2, paths.flatten(2)[..., None].expand(-1, -1, -1, width)).view(*paths.shape, width)
        expanded = [self.dropout(stream, self._of_expanded) for stream in forward @ on_path]  # (B, K, N_E, D)
        return slots.append("expanded", torch.stack(expanded))

    def _step_streams(
        self, by_vector: Tensor, backward: Tensor, columns: Tensor, cached: Tensor, gate: Tensor, paths: Tensor
    ) -> Tensor:
        """Computes equations 7 and 8 for the new tokens. Returns (B*K, D).

        backward: R, (2, B, K, N_E, s). by_vector: R summed over s, (2 B K, N_E). columns: F, (2, B, slots, N_E, u), or
        in the long form the expanded vectors without their bias, (2, B, slots, N_E, D).
        """
        _, images, beams, length = paths.shape
        count, width = cached.shape[2:]
        rows = backward.new_zeros(2, images, beams, count, self.vectors)  # R of all slots, 0 outside of a beam's path
        rows.scatter_(3, paths[..., None].expand(-1, -1, -1, -1, self.vectors), backward.mT)
        products = torch.bmm(rows.flatten(3).flatten(0, 1), columns.flatten(2, 3).flatten(0, 1))
        products = products.view(2, images, beams, -1)  # (2, B, K, u), or in the long form (2, B, K, D)
        streams = torch.mm(by_vector, self.biases).view(2, images, beams, width)
        if self.long_form:
            streams += products
        # weights of the tokens on a path: first those of their values, then of their conditions, each (2, B, K, t)
        value_weights = backward.new_zeros(2, images, beams, length) if self.long_form else products
        path_weights = torch.stack((value_weights, backward.sum(3)))
        weights = backward.new_zeros(2, 2, images, beams, count)
        weights.scatter_(4, paths.expand(2, -1, -1, -1, -1), path_weights)
        for stream, value, value_weight, condition_weight in zip(streams, cached[2:], *weights, strict=True):
            stream.baddbmm_(value_weight, value).baddbmm_(condition_weight, cached[0])
        positive, negative = streams.flatten(1, 2)
        return gated(gate, self.dropout(positive), self.dropout(negative))


def dynamic_mixer(config: ExpansionNetConfig, vectors: int | None, causal: bool) -> DynamicExpansion | SelfAttention:
    """Builds dynamic expansion with `vectors` per token, or attention if `vectors` is None."""
    if vectors is None:
        return SelfAttention(config.d_model, config.num_heads, causal)
    factorized = config.expansion_dropout == "factorized"
    return DynamicExpansion(config.d_model, vectors, causal, config.dropout, factorized)


class ExpansionEncoderLayer(Layer):
    def __init__(self, config: ExpansionNetConfig) -> None:
        super().__init__(config, pre_norm=True)
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer: StaticExpansion | DynamicExpansion | SelfAttention
        if config.static_expansion is not None:
            factorized = config.expansion_dropout == "factorized"
            self.mixer = StaticExpansion(config.d_model, config.static_expansion, config.dropout, factorized)
        else:
            self.mixer = dynamic_mixer(config, config.encoder_dynamic_expansion, causal=False)
        self.add_feed_forward(config)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        return self.transform(self.residual(x, self.mixer_norm, self.mixer, valid_mask))


class ExpansionDecoderLayer(DecoderLayer):
    def __init__(self, config: ExpansionNetConfig) -> None:
        super().__init__(config, pre_norm=True)
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer = dynamic_mixer(config, config.dynamic_expansion, causal=True)
        self.add_cross_attention(config)
        self.add_feed_forward(config)

    def mix(self, y: Tensor, *context: object) -> Tensor:
        return self.residual(y, self.mixer_norm, self.mixer)

    def mix_step(self, y: Tensor, cache: TreeCache, index: int) -> Tensor:
        return self.residual(y, self.mixer_norm, self.mixer.step, cache.layers[index], cache.ancestors)


class LayerSum(nn.Module):
    """Computes LayerNorm(x + dropout(Linear(concatenated outputs of all layers))), where x is the last output."""

    def __init__(self, d_model: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.map = nn.Linear(layers * d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.norm(outputs[-1] + self.dropout(self.map(torch.cat(outputs, -1))))


class ExpansionNet(EncoderDecoder):
    """The captioner ExpansionNet v2."""

    config: ExpansionNetConfig

    encoder: Sequence[ExpansionEncoderLayer]
    decoder: Sequence[ExpansionDecoderLayer]

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        self.input_dropout = Dropout(config.dropout)
        self.encoder = layer_list(ExpansionEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.encoder_sum = LayerSum(width, config.num_encoder_layers, config.dropout)
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.positions = nn.Embedding(sizes.max_positions, width)
        self.decoder = layer_list(ExpansionDecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.decoder_sum = LayerSum(width, config.num_decoder_layers, config.dropout)
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    @property
    def plain_maps(self) -> tuple[nn.Linear | nn.Embedding, ...]:
        words = (self.token_embedding, self.positions)
        return self.input, self.encoder_sum.map, *words, self.decoder_sum.map, self.lm_head

    def encode(self, features: Features) -> Memory:
        x = self.input_dropout(self.read_features(features))
        valid_mask = valid_tokens(features.lengths, x.shape[1])
        return Memory(self.encoder_sum(layer_outputs(self.encoder, x, valid_mask)), features.lengths)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """See `EncoderDecoder.embed`. As in the reference, dropout comes before the scale."""
        positions = position_rows(self.positions.weight, position, tokens.shape[1])
        return self.word_dropout(self.token_embedding(tokens)) * math.sqrt(self.config.d_model) + positions

    def logits(self, outputs: list[Tensor]) -> Tensor:
        return self.lm_head(self.decoder_sum(outputs))

    def paper_macs(self, image_tokens: int, caption_tokens: float) -> float:
        """See `CaptionModel.paper_macs`. Table VI counts a teacher-forced pass in the long form.

        Self-attention counts with three projections, and cross-attention with four.
        """
        config, n, t = self.config, image_tokens, caption_tokens
        d = config.d_model

        def dynamic(vectors: int, length: float) -> float:
            return 5 * length * d * d + 5 * vectors * length * length * d

        def attention(length: float) -> float:
            return 3 * length * d * d + 2 * length * length * d

        if config.static_expansion is not None:
            encoder_mixer = 4.0 * n * d * d + 5 * sum(config.static_expansion) * n * d
        elif config.encoder_dynamic_expansion is not None:
            encoder_mixer = dynamic(config.encoder_dynamic_expansion, n)
        else:
            encoder_mixer = attention(n)
        decoder_mixer = attention(t) if config.dynamic_expansion is None else dynamic(config.dynamic_expansion, t)
        cross = 2 * t * d * d + 2 * n * d * d + 2 * t * n * d
        encoder_layers = config.num_encoder_layers * (encoder_mixer + 2 * n * d * config.d_ff)
        decoder_layers = config.num_decoder_layers * (decoder_mixer + cross + 2 * t * d * config.d_ff + t * d * d)
        encoder = encoder_layers + n * self.sizes.feature_width * d
        return encoder + decoder_layers + t * (d * self.sizes.vocabulary_size)


class Transformer(ExpansionNet):
    """The papers' baseline: self-attention in place of all expansions. The authors' code for it is not public."""

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        attention = replace(config, static_expansion=None, encoder_dynamic_expansion=None, dynamic_expansion=None)
        super().__init__(attention, sizes)


def signed_parts(m: Tensor) -> Tensor:
    """Returns relu(m) and relu(-m) as one tensor (2, ...)."""
    parts = m.new_empty(2, *m.shape)
    torch.clamp_min(m, 0.0, out=parts[0])
    torch.sub(parts[0], m, out=parts[1])
    return parts


def total(a: Tensor, dims: Dims) -> Tensor:
    """Sums over `dims`, which keep size 1. The result is float32, or float64 for float64 values."""
    if a.dtype == torch.bfloat16 and a.device.type == "cpu":
        # torch accumulates this sum in float32, too; with dtype=float32, it would first convert a copy of `a`
        return a.sum(dims, keepdim=True).float()
    return a.sum(dims, keepdim=True, dtype=torch.promote_types(a.dtype, torch.float32))


def inverse(sums: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    """Returns 1 / (sums + epsilon) in `dtype`, and overwrites `sums`, which must be float32 or float64.

    In float16, epsilon would be 0.
    """
    if torch.compiler.is_exporting():  # scaled, because optimizers of ONNX graphs replace an addend below 1e-8 by 0
        sums, epsilon = sums * EXPORT_SCALE, epsilon * EXPORT_SCALE
        result = sums.add(epsilon).reciprocal().mul(EXPORT_SCALE)
    else:
        result = sums.add_(epsilon).reciprocal_()
    if dtype == torch.float16:  # limited, because an all-zero row would give inf, and inf * 0 = nan
        result = result.clamp_(max=6e4)  # float16 ends at 65504
    return result.to(dtype)


def _normalized_gradient(gradient: Tensor, y: Tensor, inverse: Tensor, dims: Dims) -> Tensor:
    """Returns the gradient r (dy - sum(dy y)) of a, where y = a r, dy is `gradient`, and r is `inverse`.

    The sum is over `dims`.
    """
    product = gradient * y
    return torch.sub(gradient, total(product, dims).to(y.dtype), out=product).mul_(inverse)


def _signed_gradient(positive: Tensor, above: Tensor, negative: Tensor, below: Tensor) -> Tensor:
    """Returns the gradient of M: `positive` where `above` > 0, minus `negative` where `below` > 0."""
    relu_gradient = torch.ops.aten.threshold_backward  # takes one pass over memory, not a comparison and a product
    return relu_gradient(positive, above, 0).sub_(relu_gradient(negative, below, 0))


class StaticWeights(torch.autograd.Function):
    """Computes forward and backward weights of the positive stream, then of the negative one, from M: all (B, L, E).

    Forward weights are normalized over the tokens L where the mask (B, L, 1) is 1. Elsewhere the weights are 0.
    Backward weights are normalized in each group of E and divided by the number of groups. As in the reference,
    backward weights are not masked. Each stream has tensors of its own, because they are large and their gradients
    arrive separately.
    """

    @staticmethod
    def forward(
        ctx: Any, m: Tensor, valid_mask: Tensor | None, groups: tuple[int, ...], epsilon: float
    ) -> tuple[Tensor, ...]:
        results, saved = [], []
        for part in (m.clamp_min(0.0), m.clamp_max(0.0).neg_()):  # (B, L, E)
            # masked before it is multiplied by the inverse, because float16 could overflow at padding
            masked = part if valid_mask is None else part * valid_mask
            forward_inverse = inverse(total(masked, 1), m.dtype, epsilon)
            forward = masked * forward_inverse
            group_inverses = []
            for group in part.split(groups, -1):  # in place: `part` becomes the backward weights
                group_inverses.append(inverse(total(group, -1), m.dtype, epsilon).div_(len(groups)))
                group *= group_inverses[-1]
            results += [forward, part]
            saved += [forward, part, forward_inverse, *group_inverses]
        ctx.save_for_backward(valid_mask, *saved)
        ctx.groups = groups
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        valid_mask, *saved = ctx.saved_tensors
        half = len(saved) // 2
        signed = []
        for stream_gradients, stream_saved in ((gradients[:2], saved[:half]), (gradients[2:], saved[half:])):
            forward_gradient, backward_gradient = stream_gradients
            forward, backward, forward_inverse, *group_inverses = stream_saved
            da = _normalized_gradient(forward_gradient, forward, forward_inverse, 1)
            if valid_mask is not None:
                da *= valid_mask
            by_group = (x.split(ctx.groups, -1) for x in (da, backward_gradient, backward))
            for part, gradient, y, group_inverse in zip(*by_group, group_inverses, strict=True):
                # y is a r / count here, where `count` is the number of groups, so that the sum is taken over count * y
                product = gradient * y
                shift = total(product, -1).to(y.dtype)
                part += torch.sub(gradient, shift, alpha=len(ctx.groups), out=product).mul_(group_inverse)
            signed += [da, backward]
        return _signed_gradient(*signed), None, None, None


class DynamicWeights(torch.autograd.Function):
    """Computes forward and backward weights (2, B, s, N_E, t) from M (B, s, N_E, t).

    Forward weights are normalized over t where `forward_mask` is 1. Backward weights are normalized over (s, N_E) where
    `backward_mask` is 1. Elsewhere both are 0. The masks broadcast to M, and are either both given or both None. Both
    streams are in one tensor, because these tensors are small, so that fewer operations take less time.
    """

    @staticmethod
    def forward(
        ctx: Any, m: Tensor, forward_mask: Tensor | None, backward_mask: Tensor | None, epsilon: float
    ) -> tuple[Tensor, ...]:
        a = signed_parts(m)  # (2, B, s, N_E, t)
        results, inverses = [], []
        for mask, dims in ((forward_mask, (4,)), (backward_mask, (2, 3))):  # the sums are over t, and over s and N_E
            masked = a if mask is None else a * mask
            inverses.append(inverse(total(masked, dims), m.dtype, epsilon))
            results.append(masked * inverses[-1])
        ctx.save_for_backward(m, forward_mask, backward_mask, *results, *inverses)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        m, forward_mask, backward_mask, forward, backward, forward_inverse, backward_inverse = ctx.saved_tensors
        da = _normalized_gradient(gradients[0], forward, forward_inverse, 4)
        backward_da = _normalized_gradient(gradients[1], backward, backward_inverse, (2, 3))
        if forward_mask is not None:
            da *= forward_mask
            backward_da *= backward_mask
        da += backward_da
        return _signed_gradient(da[0], m, da[1], -m), None, None, None
