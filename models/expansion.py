"""Static and dynamic expansion (ExpansionNet v2, section III) in factorized form: the expanded sequence never exists.

Shapes: B sequences, L tokens, D width, E expanded vectors, N_E expanded vectors a token. A leading 2 counts the
streams, positive and negative.

With A+ = relu(M), A- = relu(-M), forward weights F (A normalized over the input tokens) and backward weights R (A
normalized over the expanded vectors), a stream of equations 5 and 7 is

    R (F V + bias) = (R F) V + R bias

so that an (L, L) product takes the place of an (E, D) one. Exact in evaluation. The reference drops single elements of
the expanded vectors in training, which forces the long form there (`ModelConfig.expansion_dropout`).

M is not divided by sqrt(D) as in equation 2: the normalization cancels the factor, with an epsilon that is sqrt(D)
times as large (`Expansion.epsilon`). The weights and their gradient are written out by hand in `expansion_weights.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.cache import TreeSlots
from models.expansion_weights import dynamic_weights, normalized, signed_parts, static_weights
from models.layers import Dropout, xavier_blocks_

EPSILON = 1e-9  # equation 4's in the reference; it vanishes in float16, hence the float32 sums


def gated(gate: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Equation 8, channel by channel; the gate multiplies the positive stream (specs item 1). All (..., D)."""
    return torch.lerp(negative, positive, torch.sigmoid(gate))


class Expansion(nn.Module):
    """What both expansions share: the vectors E_Q and E_B, the places of dropout, the choice of form."""

    def __init__(self, d_model: int, vectors: int, maps: int, dropout: float, factorized_dropout: bool) -> None:
        super().__init__()
        self.epsilon = EPSILON * math.sqrt(d_model)
        self.queries = nn.Parameter(torch.empty(vectors, d_model))
        self.biases = nn.Parameter(torch.empty(vectors, d_model))
        self.maps = nn.Linear(d_model, maps * d_model)  # one product for all linear maps of the input
        self.map_count = maps
        self.dropout = Dropout(dropout)  # of M, of the expanded vectors and of both streams (specs item 3)
        self.factorized_dropout = factorized_dropout

    def init_weights(self) -> None:
        """Xavier uniform, each map on its own, as the reference draws them."""
        nn.init.xavier_uniform_(self.queries)
        nn.init.xavier_uniform_(self.biases)
        xavier_blocks_(self.maps.weight, self.map_count)

    @property
    def long_form(self) -> bool:
        return self.dropout.active and not self.factorized_dropout

    def drop_vectors(self, backward: Tensor) -> Tensor:
        """Drops whole expanded vectors: the same for all tokens of a sequence, so that the short form stays exact."""
        if not self.dropout.active:
            return backward
        return backward * self.dropout(backward.new_ones(*backward.shape[:2], 1, backward.shape[-1]))


class StaticExpansion(Expansion):
    """Block static expansion (paper III-A4) over the groups G; bidirectional."""

    def __init__(self, d_model: int, groups: tuple[int, ...], dropout: float, factorized_dropout: bool) -> None:
        super().__init__(d_model, sum(groups), 4, dropout, factorized_dropout)
        self.groups = tuple(groups)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """x (B, L, D); real (B, L) True at real tokens, or None. -> (B, L, D)."""
        key, value_positive, value_negative, gate = self.maps(x).chunk(4, -1)
        m = torch.matmul(key, self.queries.t())  # (B, L, E): transposed against the paper, so that groups lie together
        forward, backward = static_weights(self.dropout(m), real, self.groups, self.epsilon)  # (2, B, L, E)
        streams = []
        if self.long_form:
            for stream, value in enumerate((value_positive, value_negative)):
                expanded = torch.matmul(forward[stream].mT, value) + self.biases.to(value.dtype)  # (B, E, D)
                streams.append(torch.bmm(backward[stream], self.dropout(expanded)))
        else:
            backward = self.drop_vectors(backward)
            offset = torch.matmul(backward, self.biases)  # (2, B, L, D)
            for stream, value in enumerate((value_positive, value_negative)):
                across = torch.bmm(backward[stream], forward[stream].mT)  # (B, L, L)
                streams.append(torch.baddbmm(offset[stream], across, value))
        return gated(gate, self.dropout(streams[0]), self.dropout(streams[1]))


class DynamicExpansion(Expansion):
    """Dynamic expansion (paper III-A1): N_E expanded vectors for each token; causal or bidirectional.

    Queries are c_s + e_n, so M[(s, n), t] = c_s k_t + e_n k_t: an (L, L) and an (N_E, L) product, added by
    broadcasting. The bias c_s + b_n splits in the same way, into (R summed over n) C + (R summed over s) E_B.
    """

    def __init__(self, d_model: int, vectors: int, causal: bool, dropout: float, factorized_dropout: bool) -> None:
        super().__init__(d_model, vectors, 5, dropout, factorized_dropout)
        self.causal = causal
        self.vectors = vectors

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x (B, L, D) -> (B, L, D). Causal: nothing is masked but the future, padding can only stand behind.

        Bidirectional: real (B, L) True at real tokens, or None; padding is masked in both normalizations, as the
        tokens' own expanded vectors are part of the backward one.
        """
        batch, length = x.shape[:2]
        condition, key, value_positive, value_negative, gate = self.maps(x).chunk(5, -1)
        by_condition = torch.bmm(condition, key.mT)  # (B, s, t)
        by_vector = torch.matmul(key, self.queries.t()).mT  # (B, N_E, t)
        m = self.dropout(by_condition[:, :, None] + by_vector[:, None])  # (B, s, N_E, t)
        seen = reached = None
        if self.causal:
            seen = torch.ones(length, length, dtype=m.dtype, device=m.device).tril_()[:, None]  # (s, 1, t): t <= s
            reached = seen.transpose(0, 2)
        elif real is not None:
            seen = real[:, None, None].to(m.dtype)  # (B, 1, 1, t)
            reached = real[:, :, None, None].to(m.dtype)  # (B, s, 1, 1)
        forward, backward = dynamic_weights(m, seen, reached, self.epsilon)  # (2, B, s, N_E, t)
        by_token = backward.sum(3).mT  # (2, B, t, s)
        offset = torch.matmul(backward.sum(2).mT, self.biases)  # (2, B, t, D)
        rows = backward.flatten(2, 3).mT  # (2, B, t, s N_E)
        columns = forward.flatten(2, 3)  # (2, B, s N_E, u)
        if not self.long_form:
            rows = self.drop_vectors(rows)
        streams = []
        for stream, value in enumerate((value_positive, value_negative)):
            out = torch.baddbmm(offset[stream], by_token[stream], condition)
            if self.long_form:
                expanded = self.dropout(torch.bmm(columns[stream], value))  # (B, s N_E, D), before its bias
                out = torch.baddbmm(out, rows[stream], expanded)
            else:
                out = torch.baddbmm(out, torch.bmm(rows[stream], columns[stream]), value)
            streams.append(out)
        return gated(gate, self.dropout(streams[0]), self.dropout(streams[1]))

    def start(self, images: int, beams: int) -> DynamicSlots:
        """The empty cache of this layer."""
        return DynamicSlots(images, beams)

    def step(self, x: Tensor, slots: DynamicSlots, ancestors: Tensor) -> Tensor:
        """The next token of each beam: x (B*K, D) -> (B*K, D). Causal only; without dropout.

        ancestors (B, K, t): the slots that each beam has come through, its new one last. All beams of an image share
        its slots: products run over all slots of the image, then each beam picks (or sets) those of its ancestors.
        """
        images, beams, length = ancestors.shape
        width = x.shape[-1]
        maps = self.maps(x).view(images, beams, 5, width)
        by_vector = torch.matmul(maps[:, :, 1], self.queries.t())  # (B, K, N_E): e_n k
        condition, key, value_positive, value_negative = slots.append(maps[:, :, :4], by_vector)  # (B, slots, D)
        # M of the new expanded vectors over the tokens so far, and of the expanded vectors so far over the new token
        by_condition = torch.stack((torch.bmm(maps[:, :, 0], key.mT), torch.bmm(maps[:, :, 1], condition.mT)))
        by_condition = by_condition.gather(3, ancestors.expand(2, -1, -1, -1))  # (2, B, K, t)
        picked = slots.by_vector(ancestors)  # (B, K, t, N_E)
        forward = signed_parts(by_condition[0][..., None] + picked)  # (2, B, K, u, N_E)
        forward = normalized(forward, 3, self.epsilon)
        backward = signed_parts(by_condition[1][..., None] + by_vector[:, :, None])  # (2, B, K, s, N_E)
        backward = normalized(backward, (3, 4), self.epsilon)
        columns = slots.append_forward(forward)  # (2 B, slots N_E, u)
        count = condition.shape[1]
        where = ancestors.expand(2, -1, -1, -1)
        rows = backward.new_zeros(2, images, beams, count, self.vectors)
        rows.scatter_(3, where[..., None].expand(-1, -1, -1, -1, self.vectors), backward)
        across = torch.bmm(rows.view(2 * images, beams, -1), columns).view(2, images, beams, length)
        weights = backward.new_zeros(2, 2, images, beams, count)
        weights.scatter_(4, where.expand(2, -1, -1, -1, -1), torch.stack((across, backward.sum(4))))
        offset = torch.matmul(backward.sum(3), self.biases)  # (2, B, K, D)
        streams = []
        for stream, value in enumerate((value_positive, value_negative)):
            out = torch.baddbmm(offset[stream], weights[1, stream], condition)
            streams.append(torch.baddbmm(out, weights[0, stream], value))
        return gated(maps[:, :, 4], streams[0], streams[1]).view(-1, width)


class DynamicSlots(TreeSlots):
    """What a dynamic expansion keeps of each token: C, K, V1, V2, e_n k, and its forward weights.

    The forward weights of a slot (N_E, u) are over the positions u of its own past, so they need no ancestors.
    """

    def append(self, maps: Tensor, by_vector: Tensor) -> tuple[Tensor, ...]:
        """maps (B, K, 4, D), by_vector (B, K, N_E) -> four (B, slots, D)."""
        kept = self.put("maps", maps.permute(2, 0, 1, 3))  # (4, B, slots, D)
        self.put("by_vector", by_vector[None])
        return kept.unbind(0)

    def by_vector(self, ancestors: Tensor) -> Tensor:
        """(B, K, t, N_E): e_n k of each beam's ancestors."""
        kept = self.get("by_vector")[0]  # (B, slots, N_E)
        images, beams, length = ancestors.shape
        index = ancestors.view(images, -1, 1).expand(-1, -1, kept.shape[-1])
        return kept.gather(1, index).view(images, beams, length, -1)

    def append_forward(self, forward: Tensor) -> Tensor:
        """forward (2, B, K, u, N_E) of the new slots -> (2 B, slots N_E, u) of all, 0 beyond a slot's own past."""
        ...
        raise NotImplementedError
