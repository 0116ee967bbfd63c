"""Integrated gradients: complete, exact where the answer is known, for all systems."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.captioner import build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.models.decoding.cache import TreeCache
from raycap.models.explain.attribution import integrated_gradients, shares

SIZES = ModelSizes(feature_width=6, vocabulary_size=11, max_positions=9, sos=0, eos=1, pad=2)
SMALL = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
SYSTEMS: dict[str, ModelConfig] = {
    "expansionnet_v2": ExpansionNetConfig(**SMALL, static_expansion=(3, 5), dynamic_expansion=2),  # type: ignore[arg-type]
    "transformer": ExpansionNetConfig(name="transformer", **SMALL),  # type: ignore[arg-type]
    "meshed_memory": MeshedMemoryConfig(**SMALL, num_memory_slots=3),  # type: ignore[arg-type]
    "clustformer": ClustFormerConfig(**SMALL, sampling=1),  # type: ignore[arg-type]
    "mask_token": ClustFormerConfig(**SMALL, sampling=1, decoder="mask_token"),  # type: ignore[arg-type]
    "regions": ClustFormerConfig(**SMALL, sampling=1, inputs="regions", region_rows=2),  # type: ignore[arg-type]
}
TOKENS = torch.tensor([0, 4, 7, 4, 1])


class Linear(CaptionModel):
    """log p is linear in the features up to its normalizer, which is constant: the words' logits cancel in pairs."""

    def __init__(self) -> None:
        super().__init__(ModelConfig(), SIZES)
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))  # of image token n and channel c

    def init_weights(self) -> None: ...

    def encode(self, features: Features) -> Memory:
        return Memory((features.tokens * self.weight).sum((1, 2))[:, None, None], features.lengths)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """The log-odds of word 4 against all others are the score times the position from 1."""
        score = memory.states[:, 0] * torch.arange(1.0, tokens.shape[1] + 1, dtype=torch.float64)
        logits = torch.zeros(*score.shape, 11, dtype=torch.float64)
        logits[..., 4] = score
        return logits

    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        raise NotImplementedError

    def step(self, tokens: Tensor, cache: TreeCache) -> tuple[Tensor, TreeCache]:
        raise NotImplementedError


def inputs(name: str) -> tuple[CaptionModel, Features]:
    torch.manual_seed(1)
    model = build_model(SYSTEMS[name], SIZES).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases too
    tokens = torch.randn(1, 9, 6, dtype=torch.float64)
    if name != "regions":
        return model, Features(tokens)
    low = torch.rand(1, 9, 2)
    return model, Features(tokens, torch.tensor([7]), torch.cat((low, low + torch.rand(1, 9, 2)), 2))


def test_a_linear_score_is_attributed_exactly() -> None:
    """log p(4) = log sigmoid(s - log 10) is a function of the linear score s alone, so that every token's and
    channel's part of the change is its part of s."""
    torch.manual_seed(0)
    model, features = Linear(), Features(torch.randn(1, 4, 6, dtype=torch.float64))
    found = integrated_gradients(model, features, TOKENS, 40)
    parts = (features.tokens[0] * model.weight.detach()).sum(1)
    for word, position in ((0, 1.0), (2, 3.0)):  # those where word 4 follows
        score = position * parts.sum()
        change = torch.log(score.exp() / (score.exp() + 10)) - torch.log(torch.tensor(1 / 11))
        torch.testing.assert_close(found[word], parts / parts.sum() * change, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(shares(found)[0] * found[0].sum().sign(), parts / parts.sum(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "expansionnet_v2"])  # see the module's head
def test_attributions_add_up_to_the_change_of_the_log_probability(name: str) -> None:
    model, features = inputs(name)
    found = integrated_gradients(model, features, TOKENS, 512)
    ends = []
    for scale in (1.0, 0.0):
        logits = model(replace(features, tokens=scale * features.tokens), TOKENS[None, :-1])
        ends.append(logits.log_softmax(-1)[0].gather(1, TOKENS[1:, None])[:, 0])
    assert found.shape == (4, 9)
    # kinks of the ReLUs cost a Gauss sum its exactness: 0.005 nats is 0.5 % of a probability
    torch.testing.assert_close(found.sum(1), (ends[0] - ends[1]).detach(), rtol=0, atol=5e-3)
    assert bool((found.abs().amax(1) > 1e-3).all()), "the words do depend on the image"
    if features.lengths is not None:
        assert bool((found[:, 7:] == 0).all()), "padding says nothing"
    sums = shares(found).sum(1)
    torch.testing.assert_close(sums.abs(), torch.ones_like(sums))
    assert torch.equal(sums.sign(), found.sum(1).sign())


def test_the_model_is_left_as_it_was_and_inference_mode_is_no_obstacle() -> None:
    model, features = inputs("transformer")
    model.train()
    with torch.inference_mode():
        found = integrated_gradients(model, Features(features.tokens * 1.0), TOKENS, 4)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(found, integrated_gradients(model, features, TOKENS, 4)), "dropout was on"
