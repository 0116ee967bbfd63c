"""The functions that are exported: the steps' log-probabilities are those of the teacher-forced pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig
from raycap.models.convert.export_graphs import EncoderGraph, StepGraph
from tests.support.exports import SIZES, SYSTEMS, make_captioner
from tests.support.models import exact

FORMS: dict[str, ModelConfig] = {
    **SYSTEMS,
    "dynamic encoder": ExpansionNetConfig(**SIZES, static_expansion=None, encoder_dynamic_expansion=2),
    "given word vectors": ExpansionNetConfig(**SIZES, static_expansion=(3,), dynamic_expansion=2, word_vector_width=5),
    "attention on attention": MeshedMemoryConfig(**SIZES, attention="on_attention"),
    "one to one": MeshedMemoryConfig(**SIZES | {"num_encoder_layers": 2}, connection="one_to_one", gates="softmax"),
    "conditional stacking": ClustFormerConfig(**SIZES, stacking="conditional"),
    "fixed window": ClustFormerConfig(**SIZES, window=2),
    "some layers": ClustFormerConfig(**SIZES, encoder_clusters="1d", clustered_decoder_layers=(2,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_steps_are_the_teacher_forced_pass(name: str) -> None:
    captioner = make_captioner(FORMS[name]).double()
    model, encoder = captioner.model, EncoderGraph(captioner)
    step = StepGraph(encoder)
    (pixels,) = (each.example for each in encoder.inputs(images=4))
    features = captioner.features(Features(pixels.double()))
    memory, values = model.encode(features), encoder(pixels)
    exact(values[1], encoder.model.decoder[0].project(memory.states)[1])
    cache = [
        each.example.new_zeros(
            [4, *(0 if dim in each.dims else each.example.shape[dim] for dim in range(1, each.example.ndim))]
        )
        for each in step.cache
    ]
    history = torch.empty(4, 1, 0, dtype=torch.int64)
    parents = torch.arange(4)[:, None]
    for _ in range(6):
        tokens = torch.randint(model.sizes.vocabulary_size, parents.shape)
        previous = history.shape[1]
        history = torch.cat((history.flatten(0, 1)[parents], tokens[..., None]), -1)
        log_probs, *cache = step(tokens, parents, *values, *cache)
        exact(log_probs, _forced(model, features, history))
        parents = torch.randint(tokens.shape[1], (4, 3)) + torch.arange(4)[:, None] * tokens.shape[1]
        assert previous in (1, 3)


def _forced(model: CaptionModel, features: Features, history: Tensor) -> Tensor:
    """Log-probabilities (B, K, V) after tokens (B, K, T)."""
    logits = model.decode(model.encode(features), history.flatten(0, 1))[:, -1]
    return logits.log_softmax(-1).unflatten(0, tuple(history.shape[:2]))
