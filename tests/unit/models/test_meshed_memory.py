"""The Meshed-Memory Transformer beyond its golden values: ablations against a literal form, initial weights, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.config import MeshedMemoryConfig, ModelSizes
from raycap.models.explain.attribution import cross_attention
from raycap.models.layers import sinusoids
from raycap.models.meshed_memory import MeshedMemoryTransformer
from tests.support.models import (
    SIZES,
    exact,
    follow_steps,
)

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_memory_slots": 0, "connection": "last"},
    {"connection": "one_to_one", "num_encoder_layers": 2},
    {"gates": "softmax", "num_encoder_layers": 3},
    {"attention": "on_attention", "num_encoder_layers": 1},
)


def small_meshed(seed: int, **changes: Any) -> MeshedMemoryTransformer:
    """A float64 model in evaluation, its norms and biases drawn too."""
    torch.manual_seed(seed)
    values = {
        "d_model": 8,
        "d_ff": 12,
        "num_heads": 2,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_memory_slots": 3,
    }
    model = build_model(MeshedMemoryConfig(**(values | changes)), SIZES)
    assert isinstance(model, MeshedMemoryTransformer)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.sampled_from(VARIANTS), st.booleans())
@settings(max_examples=20, deadline=None)
def test_cached_steps_are_the_teacher_forced_logits(
    seed: int, images: int, beams: int, variant: dict[str, Any], padded: bool
) -> None:
    model = small_meshed(seed, **variant)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, 5, 7, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, 6, (images,), generator=generator) if padded else None
    follow_steps(model, model.encode(Features(features, lengths)), beams, 7, generator)


def literal_attention(layer: Any, x: Tensor, keys: Tensor, values: Tensor, query: Tensor, mask: Tensor) -> Tensor:
    """Head by head; x (T, D) the queries' input, query (T, D), keys and values (N, D), mask (T, N) True where seen."""
    width = x.shape[1] // layer.num_heads
    mixed = []
    for head in range(layer.num_heads):
        part = slice(head * width, (head + 1) * width)
        scores = query[:, part] @ keys[:, part].T / width**0.5
        mixed.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, part])
    v, weight, bias = torch.cat(mixed, 1), layer.out_proj.weight, layer.out_proj.bias
    if layer.out_proj.blocks == 1:
        return v @ weight.T + bias
    d = x.shape[1]
    both = torch.cat((v, x), 1)
    return (both @ weight[:d].T + bias[:d]) * torch.sigmoid(both @ weight[d:].T + bias[d:])


def literal_logits(model: MeshedMemoryTransformer, features: Tensor, tokens: Tensor) -> Tensor:
    """One image and one caption, as the equations and the reference's notes read."""
    config, d, heads = model.config, model.config.d_model, model.config.num_heads
    x = model.input_norm(torch.relu(model.input(features)))
    levels = []
    for layer in model.encoder:
        q, k, v = layer.attention.in_proj(x).split(d, -1)
        if config.num_memory_slots:
            k = torch.cat((k, (d / heads) ** 0.5 * layer.attention.memory_keys))
            v = torch.cat((v, config.num_memory_slots**0.5 * layer.attention.memory_values))
        sees = torch.ones(len(q), len(k), dtype=torch.bool)
        x = layer.attention_norm(x + literal_attention(layer.attention, x, k, v, q, sees))
        x = layer.feed_forward_norm(x + layer.feed_forward(x))
        levels.append(x)
    y = model.token_embedding.weight[tokens] + sinusoids(len(tokens), d, first=1)
    for index, layer in enumerate(model.decoder):
        q, k, v = layer.attention.in_proj(y).split(d, -1)
        sees = torch.ones(len(y), len(y), dtype=torch.bool).tril()
        s = layer.attention_norm(y + literal_attention(layer.attention, y, k, v, q, sees))
        c, cross = [], layer.meshed.attention
        for states in levels:
            k, v = cross.key_value(states).split(d, -1)
            sees = torch.ones(len(y), len(states), dtype=torch.bool)
            c.append(layer.meshed.norm(s + literal_attention(cross, s, k, v, cross.query(s), sees)))
        if config.connection == "one_to_one":
            z = c[index]
        elif config.connection == "last":
            z = c[-1]
        else:
            gates = torch.stack([g(torch.cat((s, one), 1)) for g, one in zip(layer.meshed.gates, c, strict=True)])
            gates = gates.softmax(0) if config.gates == "softmax" else gates.sigmoid()
            z = sum(gate * one for gate, one in zip(gates, c, strict=True)) / len(c) ** 0.5
        y = layer.feed_forward_norm(z + layer.feed_forward(z))
    return y @ model.lm_head.weight.T


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_ablations_are_their_literal_form(variant: dict[str, Any]) -> None:
    model = small_meshed(1, **variant)
    features, tokens = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(0, 11, (4, 6))
    logits = model(Features(features), tokens)
    for row in range(4):
        expected = literal_logits(model, features[row // 2], tokens[row])
        torch.testing.assert_close(logits[row], expected, rtol=1e-6, atol=1e-6)  # positions are float32


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_is_masked(variant: dict[str, Any]) -> None:
    model = small_meshed(2, **variant)
    features, tokens = torch.randn(2, 4, 7, dtype=torch.float64), torch.randint(0, 11, (2, 6))
    expected = model(Features(features[:, :3]), tokens)
    lengths = torch.tensor([3, 3])
    exact(model(Features(features, lengths), tokens), expected)
    features[:, 3] = 1e6
    exact(model(Features(features, lengths), tokens), expected)


def test_initial_weights_are_the_references() -> None:
    model = build_model(MeshedMemoryConfig(), ModelSizes(64, 30, 20, sos=2, eos=3, pad=1))
    assert isinstance(model, MeshedMemoryTransformer)
    attention = model.encoder[0].attention
    for memory in (attention.memory_keys, attention.memory_values):
        assert memory.shape == (40, 512) and 0.0165 < memory.abs().max() <= 0.01692
        assert float(memory.detach().std()) == pytest.approx(0.0098, abs=1e-4)
    assert attention.in_proj.weight.abs().max() <= (6 / 1024) ** 0.5  # each of the three maps by itself
    meshed = model.decoder[0].meshed
    zero = [attention.in_proj.bias, attention.out_proj.bias, meshed.attention.key_value.bias, meshed.gates[2].bias]
    assert all(bool((bias == 0).all()) for bias in zero)
    assert bool((model.input.bias != 0).any()) and bool((model.encoder[0].feed_forward.inner.bias != 0).any())
    assert bool((model.token_embedding.weight[1] != 0).any())
    assert not any(name.startswith("positions") for name, _ in model.named_parameters())


@torch.no_grad()
def test_attention_maps_are_means_over_levels() -> None:
    model = small_meshed(3)
    memory = model.encode(Features(torch.randn(2, 5, 7, dtype=torch.float64), torch.tensor([5, 3])))
    maps = cross_attention(model, memory, torch.randint(0, 11, (4, 6)))
    heads = model.config.num_heads
    assert maps.shape == (2, heads, 4, 5, 5)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, heads, 4, 5))
    assert bool((maps[:, :, 2:, :, 3:] == 0).all()) and bool((maps[:, :, :2] > 0).all())
