"""Ada-ClustFormer as a model: against a literal form, causality, cached steps, padding, ablations, inputs refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.clustformer import ClusteredAttention, ClustFormer
from raycap.models.config import ClustFormerConfig
from raycap.models.decoding.search import beam_search
from raycap.models.explain.attribution import cross_attention
from raycap.models.layers import sinusoids
from tests.support.models import (
    SIZES,
    every_caption,
    exact,
    follow_steps,
    literal_matrices,
)

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"encoder_clusters": "none", "decoder_clusters": "none"},
    {"encoder_clusters": "none"},
    {"encoder_clusters": "1d", "stacking": "none"},
    {"stacking": "conditional", "norm": "post"},
    {"window": 1, "sampling": 1},
    {"clustered_encoder_layers": (2,), "clustered_decoder_layers": (2,)},
    {"decoder": "mask_token"},
    {"decoder": "mask_token", "stacking": "conditional", "activation": "gelu", "clustered_encoder_layers": (2,)},
    {"decoder": "mask_token", "window": 1, "norm": "post"},
    {"decoder": "mask_token", "decoder_clusters": "none", "word_vector_width": 5, "train_word_vectors": True},
)
REGIONS: dict[str, Any] = {"inputs": "regions", "region_rows": 2, "sampling": 1}


def small_clustformer(seed: int, **changes: Any) -> ClustFormer:
    """A float64 model in evaluation, its maps of C drawn wide."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "d_model": 8,
        "d_ff": 12,
        "num_heads": 2,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
    }
    model = build_model(ClustFormerConfig(**(values | changes)), SIZES)
    assert isinstance(model, ClustFormer)
    for name, parameter in model.named_parameters():
        if "clusters" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return model.double().eval()


def features_for(images: int, tokens: int = 9) -> Tensor:
    return torch.randn(images, tokens, 7, dtype=torch.float64)


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.sampled_from(VARIANTS))
@settings(max_examples=24, deadline=None)
def test_cached_steps_are_the_teacher_forced_logits(
    seed: int, images: int, beams: int, variant: dict[str, Any]
) -> None:
    model = small_clustformer(seed, **variant)
    memory = model.encode(Features(features_for(images)))
    follow_steps(model, memory, beams, 7, torch.Generator().manual_seed(seed))


def literal_attention(layer: ClusteredAttention, x: Tensor, matrix: Tensor | None, seen: Tensor) -> Tensor:
    """Equation 2 head by head; x (N, D)."""
    count, width = x.shape
    size = width // layer.num_heads
    q, k, v = layer.in_proj(x).split(width, -1)
    mixed = torch.zeros(count, width, dtype=x.dtype)
    for head in range(layer.num_heads):
        part = slice(head * size, (head + 1) * size)
        for n in range(count):
            places = seen[n].nonzero()[:, 0]
            weights = (q[n, part] @ k[places][:, part].T / size**0.5).softmax(-1)
            if matrix is not None:
                weights = weights * matrix[n, places]
            mixed[n, part] = weights @ v[places][:, part]
    return layer.out_proj(mixed, x)


class Literal:
    """One image and one caption through a ClustFormer, C by loops from the inputs of all layers so far."""

    def __init__(self, model: ClustFormer) -> None:
        self.model, self.config = model, model.config

    def layer_inputs(self, layer: Any, x: Tensor, norm: Any) -> Tensor:
        return norm(x) if self.config.norm == "pre" else x

    def residual(self, x: Tensor, result: Tensor, norm: Any) -> Tensor:
        return x + result if self.config.norm == "pre" else norm(x + result)

    def matrices(self, layers: Any, inputs: list[Tensor], shape: tuple[int, int], rate: int) -> Tensor | None:
        """C of the newest layer, from the inputs (N, D) of all layers that have C."""
        if self.config.window is not None:
            cells = [divmod(n, shape[1]) for n in range(shape[0] * shape[1])]
            near = [[max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= self.config.window for b in cells] for a in cells]
            return torch.tensor(near, dtype=torch.float64)
        layers = [layer for layer in layers if layer.clusters is not None]
        if len(layers) < len(inputs) or not inputs:
            return None
        rows, columns = (-(-size // rate) for size in shape)
        grids, group = [], [0] * (shape[0] * shape[1])
        for x in inputs:
            grid = torch.zeros(rows, columns, x.shape[1], dtype=x.dtype)
            for r in range(rows):
                for c in range(columns):
                    members = [n for n in range(len(x)) if n // shape[1] // rate == r and n % shape[1] // rate == c]
                    grid[r, c] = x[members].mean(0)
                    for n in members:
                        group[n] = r * columns + c
            grids.append(grid)
        maps = [layer.clusters for layer in layers[: len(inputs)]]
        return literal_matrices(grids, maps, self.config.stacking)[-1][group][:, group]

    def encode(self, features: Tensor, shape: tuple[int, int]) -> Tensor:
        model, config = self.model, self.config
        x = torch.relu(model.input(features))
        seen = torch.ones(len(x), len(x), dtype=torch.bool)
        inputs: list[Tensor] = []
        rate = config.sampling
        for layer in model.encoder:
            normed = self.layer_inputs(layer, x, layer.attention_norm)
            matrix = None
            if config.encoder_clusters != "none" and (layer.clusters is not None or config.window is not None):
                inputs.append(normed)
                matrix = self.matrices(model.encoder, inputs, shape, rate)
            x = self.residual(x, literal_attention(layer.attention, normed, matrix, seen), layer.attention_norm)
            inside = self.layer_inputs(layer, x, layer.feed_forward_norm)
            x = self.residual(x, layer.feed_forward(inside), layer.feed_forward_norm)
        return model.encoder_norm(x)

    def decode(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Logits (T, V). With a mask token, each word has its own bidirectional pass over its prefix and PAD."""
        if self.config.decoder == "causal":
            return self.decoder_pass(states, tokens, torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril())
        rows = []
        for count in range(1, len(tokens) + 1):
            masked = torch.tensor([*tokens[:count].tolist(), SIZES.pad])
            rows.append(self.decoder_pass(states, masked, torch.ones(count + 1, count + 1, dtype=torch.bool))[-1])
        return torch.stack(rows)

    def decoder_pass(self, states: Tensor, tokens: Tensor, seen: Tensor) -> Tensor:
        model, config = self.model, self.config
        y = model.token_embedding(tokens) * config.d_model**0.5 + sinusoids(len(tokens), config.d_model)
        inputs: list[Tensor] = []
        for layer in model.decoder:
            normed = self.layer_inputs(layer, y, layer.attention_norm)
            matrix = None
            if config.decoder_clusters != "none" and (layer.clusters is not None or config.window is not None):
                inputs.append(normed)
                matrix = self.matrices(model.decoder, inputs, (1, len(y)), 1)
            y = self.residual(y, literal_attention(layer.attention, normed, matrix, seen), layer.attention_norm)
            asked = self.layer_inputs(layer, y, layer.cross_norm)
            key, value = layer.cross.project(states[None])
            y = self.residual(y, layer.cross(asked[None], key, value, None)[0], layer.cross_norm)
            inside = self.layer_inputs(layer, y, layer.feed_forward_norm)
            y = self.residual(y, layer.feed_forward(inside), layer.feed_forward_norm)
        return model.lm_head(model.decoder_norm(y))


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_its_literal_form(variant: dict[str, Any]) -> None:
    model = small_clustformer(5, **variant)
    features, tokens = features_for(2), torch.randint(0, 11, (2, 6))
    shape = (3, 3) if model.config.encoder_clusters == "2d" else (1, 9)
    memory = model.encode(Features(features))
    logits = model.decode(memory, tokens)
    literal = Literal(model)
    for image in range(2):
        states = literal.encode(features[image], shape)
        torch.testing.assert_close(memory.states[image], states, rtol=0, atol=1e-8)
        expected = literal.decode(states, tokens[image])
        torch.testing.assert_close(logits[image], expected, rtol=1e-6, atol=1e-6)  # positions are float32


def test_grids_that_are_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8 image tokens are no square grid; set model.encoder_clusters to 1d"):
        small_clustformer(6).encode(Features(features_for(1, 8)))


@torch.no_grad()
@pytest.mark.parametrize("clusters", ["2d", "1d", "none"])
def test_regions_count_as_a_set_with_boxes(clusters: str) -> None:
    """Regions in another order give the same states in that order. Padding and dummies change nothing."""
    model = small_clustformer(7, encoder_clusters=clusters, **REGIONS)
    features, boxes = features_for(2, 5), torch.rand(2, 5, 4)
    tokens = torch.randint(0, 11, (4, 6))
    memory = model.encode(Features(features, boxes=boxes))
    shuffled = torch.randperm(5)
    other = model.encode(Features(features[:, shuffled], boxes=boxes[:, shuffled]))
    exact(other.states, memory.states[:, shuffled])
    padded = torch.nn.functional.pad(features, (0, 0, 0, 4), value=3.0)
    lengths = torch.tensor([5, 5])
    longer = model.encode(Features(padded, lengths, torch.nn.functional.pad(boxes, (0, 0, 0, 4), value=0.5)))
    exact(longer.states[:, :5], memory.states)
    exact(model.decode(longer, tokens), model.decode(memory, tokens))
    assert longer.lengths is lengths
    if clusters != "none":
        assert not torch.equal(model.encode(Features(features, boxes=boxes.flip(1))).states, memory.states)
        with pytest.raises(ValueError, match="these features have none; import region features with"):
            model.encode(Features(features))


@pytest.mark.parametrize("clusters", ["1d", "none"])
def test_an_image_without_regions_spoils_nothing(clusters: str) -> None:
    model = small_clustformer(3, inputs="regions", encoder_clusters=clusters, sampling=1).train()
    features = features_for(2)
    boxes = torch.rand(2, features.shape[1], 4, generator=torch.Generator().manual_seed(1), dtype=features.dtype)
    tokens = torch.tensor([[2, 4, 5]] * 2)
    logits = model(Features(features, torch.tensor([4, 0]), boxes), tokens)
    logits[:1].sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
@pytest.mark.parametrize("decoder", ["causal", "mask_token"])
def test_beam_search_and_attention_maps(decoder: str) -> None:
    model = small_clustformer(10, decoder=decoder)
    memory = model.encode(Features(features_for(3)))
    found = beam_search(model, memory, beam_size=3, max_length=8, num_results=3)
    tokens = found.tokens[:, 0]
    again = model.decode(memory, tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    real = torch.arange(1, tokens.shape[1]) < found.lengths[:, :1]
    torch.testing.assert_close(found.log_probs[:, 0, 1:][real], again.float()[real])
    maps = cross_attention(model, memory, tokens)
    assert maps.shape == (2, 2, 3, tokens.shape[1] - 1, 9)  # layers, heads, captions, words, regions
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    for length in range(2, tokens.shape[1]):  # those of a word do not depend on later words
        exact(cross_attention(model, memory, tokens[:, :length]), maps[:, :, :, : length - 1])


def test_gradients_reach_every_parameter() -> None:
    for variant in VARIANTS:
        model = small_clustformer(11, dropout=0.0, **variant).train()
        model(Features(features_for(2)), torch.randint(0, 11, (2, 6))).square().mean().backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None and bool(gradient.isfinite().all()), name
            if not name.endswith(("token_embedding.weight", "bias")):
                assert bool((gradient != 0).any()), (variant, name)


@torch.no_grad()
@given(st.integers(0, 10**6), st.integers(2, 4))
@settings(max_examples=10, deadline=None)
def test_beam_search_with_a_mask_token_is_that_of_every_prefix_encoded_again(seed: int, length: int) -> None:
    """With as many beams as there are captions, the search finds the best one of all."""
    model = small_clustformer(seed, decoder="mask_token", num_decoder_layers=1)
    model.lm_head.bias[3:] = -100.0  # three words remain: SOS, EOS and PAD
    memory, literal = model.encode(Features(features_for(2))), Literal(model)
    found = beam_search(model, memory, beam_size=20, max_length=length)
    captions = every_caption(3, length)
    for image, states in enumerate(memory.states):

        def score(caption: tuple[int, ...], states: Tensor = states) -> float:
            tokens = torch.tensor(caption)
            log_probs = literal.decode(states, tokens[:-1]).log_softmax(-1)
            return float(log_probs.gather(1, tokens[1:, None]).sum()) / len(caption)

        best = max(captions, key=score)
        assert found.tokens[image, 0, : len(best)].tolist() == list(best)
        assert float(found.scores[image, 0]) == pytest.approx(score(best), rel=1e-5)
