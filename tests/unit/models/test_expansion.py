"""The expansions and the model in factorized form against the materialized form, in float64, and their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.reference_expansionnet import MaterializedModel, dynamic_expansion, static_expansion
from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.models.dropout import Dropout, dropout
from raycap.models.expansionnet import DynamicExpansion, DynamicWeights, ExpansionNet, StaticExpansion, StaticWeights
from tests.support.models import (
    MIXERS,
    SIZES,
    exact,
    select_images,
    small_model,
)


@given(st.integers(0, 10**6), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.data())
@settings(max_examples=25, deadline=None)
def test_static_is_the_materialized_form(seed: int, groups: list[int], batch: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 7))
    real_counts = data.draw(st.lists(st.integers(1, length), min_size=batch, max_size=batch))
    torch.manual_seed(seed)
    layer = StaticExpansion(6, tuple(groups), 0.0, False).double()
    layer.init_weights()
    x = torch.randn(batch, length, 6, dtype=torch.float64)
    real = torch.arange(length) < torch.tensor(real_counts)[:, None]
    exact(layer(x, real), static_expansion(layer, x, real))
    exact(layer(x, None), static_expansion(layer, x, None))


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
@settings(max_examples=25, deadline=None)
def test_dynamic_is_the_materialized_form(
    seed: int, vectors: int, batch: int, causal: bool, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, 7))
    real_counts = data.draw(st.lists(st.integers(1, length), min_size=batch, max_size=batch))
    torch.manual_seed(seed)
    layer = DynamicExpansion(6, vectors, causal, 0.0, False).double()
    layer.init_weights()
    x = torch.randn(batch, length, 6, dtype=torch.float64)
    real = torch.arange(length) < torch.tensor(real_counts)[:, None]
    if causal:
        mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1)
        exact(layer(x), dynamic_expansion(layer, x, mask))
    else:
        exact(layer(x, real)[real], dynamic_expansion(layer, x, real[:, None] & real[:, :, None])[real])
        exact(layer(x, None), dynamic_expansion(layer, x, torch.ones(batch, length, length, dtype=torch.bool)))


@pytest.mark.parametrize("mixers", MIXERS)
def test_whole_models_equal_their_materialized_form_and_its_gradient(mixers: dict[str, object]) -> None:
    model = small_model(3, **mixers)
    features = torch.randn(3, 5, 7, dtype=torch.float64)
    lengths = torch.tensor([5, 2, 4])
    tokens = torch.randint(3, 11, (6, 6))
    slow = MaterializedModel(model)
    memory = slow.encode(Features(features, lengths))
    rows = select_images(memory, torch.arange(3).repeat_interleave(2))
    gradients = []
    for logits in (model(Features(features, lengths), tokens), slow.decode(rows, tokens)):
        model.zero_grad()
        logits.square().sum().backward()
        gradients.append((logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]))  # type: ignore[union-attr]
    exact(gradients[0][0], gradients[1][0])
    for ours, theirs in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [True, False])
def test_hand_written_gradients(masked: bool) -> None:
    torch.manual_seed(0)
    m = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    real = (torch.arange(4) < torch.tensor([[4], [2]]))[:, :, None].double() if masked else None
    assert torch.autograd.gradcheck(lambda m: StaticWeights.apply(m, real, (2, 3), 1e-9), (m,))
    m = torch.randn(2, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(3, 3, dtype=torch.float64).tril()[:, None] if masked else None
    reached = None if seen is None else seen.transpose(0, 2)
    assert torch.autograd.gradcheck(lambda m: DynamicWeights.apply(m, seen, reached, 1e-9), (m,))


@pytest.mark.parametrize("mixers", MIXERS)
@pytest.mark.parametrize("expansion_dropout", ["reference", "factorized"])
def test_training_reaches_every_parameter(mixers: dict[str, object], expansion_dropout: str) -> None:
    """DDP demands it. The state has parameters only."""
    model = small_model(2, dropout=0.4, expansion_dropout=expansion_dropout, **mixers).train()
    names = {name for name, _ in model.named_parameters()}
    assert model.state_dict().keys() == names and not list(model.buffers())
    features, tokens = torch.randn(4, 5, 7, dtype=torch.float64), torch.randint(3, 11, (8, 6))
    torch.manual_seed(1)
    first = model(Features(features), tokens)
    assert not torch.equal(first, model(Features(features), tokens))
    torch.manual_seed(1)
    assert torch.equal(first, model(Features(features), tokens))
    first.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


class RecordedDropout(Dropout):
    """Drops at random and keeps its masks."""

    def __init__(self) -> None:
        super().__init__(0.4)
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor, shared: object = None) -> Tensor:
        self.drawn.append((torch.rand_like(x) > 0.4) / 0.6)
        return x * self.drawn[-1]


def normalized(x: Tensor) -> Tensor:
    return x / (x.sum(-1, keepdim=True) + 1e-9)


def test_static_dropout_stands_where_the_reference_has_it() -> None:
    """The reference drops M before ReLU, the expanded vectors with their bias, and both streams."""
    layer = StaticExpansion(6, (3, 2), 0.4, False).double().train()
    layer.init_weights()
    layer.dropout = RecordedDropout()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    ours = layer(x, None)
    on_m, *others = layer.dropout.drawn
    on_expanded, on_streams = others[:2], others[2:]
    key, *values, gate = layer.in_proj(x).chunk(4, -1)
    m = layer.queries @ key.mT / 6**0.5 * on_m.mT
    streams = []
    for index, signed in enumerate((m, -m)):
        expanded = (normalized(signed.relu()) @ values[index] + layer.biases) * on_expanded[index]
        backward = torch.cat([normalized(part) for part in signed.relu().mT.split((3, 2), -1)], -1) / 2
        streams.append(backward @ expanded * on_streams[index])
    opened = gate.sigmoid()
    exact(ours, opened * streams[0] + (1 - opened) * streams[1])


def test_dynamic_dropout_stands_where_the_reference_has_it() -> None:
    """As for the static expansion, but the expanded vectors are dropped before their bias."""
    batch, length, vectors, width = 2, 4, 3, 6
    layer = DynamicExpansion(width, vectors, True, 0.4, False).double().train()
    layer.init_weights()
    layer.dropout = RecordedDropout()
    x = torch.randn(batch, length, width, dtype=torch.float64)
    ours = layer(x)
    on_m, *others = layer.dropout.drawn
    on_expanded, on_streams = others[:2], others[2:]
    condition, key, *values, gate = layer.in_proj(x).chunk(5, -1)
    queries = (condition[:, :, None] + layer.queries).flatten(1, 2)
    biases = (condition[:, :, None] + layer.biases).flatten(1, 2)
    m = queries @ key.mT / width**0.5 * on_m.flatten(1, 2)  # (B, s N_E, t)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = causal.repeat_interleave(vectors, 0)  # (s N_E, t)
    streams = []
    for index, signed in enumerate((m, -m)):
        expanded = normalized(signed.relu() * seen) @ values[index] * on_expanded[index] + biases
        backward = normalized(signed.relu().mT * causal.repeat_interleave(vectors, 1))
        streams.append(backward @ expanded * on_streams[index])
    opened = gate.sigmoid()
    exact(ours, opened * streams[0] + (1 - opened) * streams[1])


def test_dropout_is_exact_in_distribution() -> None:
    torch.manual_seed(0)
    x = torch.ones(200, 5003)
    for p in (0.1, 0.3, 0.5):
        kept = dropout(x, p)
        real = round(256 * p) / 256
        assert abs((kept == 0).double().mean().item() - real) < 5 * (real * (1 - real) / x.numel()) ** 0.5
        assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - real)], rel=1e-6)
        pairs = ((kept[:, 1:] == 0) & (kept[:, :-1] == 0)).double().mean().item()
        assert abs(pairs - real**2) < 6 * (real**2 / x.numel()) ** 0.5
    gradient_input = torch.ones(64, 64, requires_grad=True)
    kept = dropout(gradient_input, 0.3)
    kept.sum().backward()
    assert torch.equal(gradient_input.grad, kept.detach())  # type: ignore[arg-type]


def test_initial_weights_are_the_references() -> None:
    """Each map is Xavier uniform by itself, even if several are fused. LayerNorm starts with 1 and 0."""
    model = build_model(ExpansionNetConfig(d_model=64, d_ff=96, num_heads=4, static_expansion=(20, 30)), SIZES)
    assert isinstance(model, ExpansionNet)
    bound = (6 / (64 + 64)) ** 0.5
    mixer = model.decoder[0].mixer
    assert isinstance(mixer, DynamicExpansion)
    for block in mixer.in_proj.weight.chunk(5):
        assert bound * 0.97 < block.abs().max() <= bound
    vectors = (6 / (50 + 64)) ** 0.5
    assert vectors * 0.95 < model.encoder[0].mixer.queries.abs().max() <= vectors  # type: ignore[union-attr]
    assert model.token_embedding.weight.abs().max() <= (6 / (11 + 64)) ** 0.5
    assert bool((model.encoder[0].mixer_norm.weight == 1).all())


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = small_model(0)
    memory = model.encode(Features(torch.randn(2, 5, 7, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"expected \(images, tokens, 7\)"):
        model.encode(Features(torch.randn(2, 5, 8, dtype=torch.float64)))
    with pytest.raises(ValueError, match="13 input tokens is longer than the positional table of 12"):
        model.decode(memory, torch.zeros(2, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match="id of EOS is 11"):
        ModelSizes(7, 11, 12, sos=0, eos=11, pad=2)
