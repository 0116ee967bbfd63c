"""The alignment score: counted by hand, and which states it reads."""

from __future__ import annotations

import math

import pytest
import torch

from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.pipeline.evaluation.captioning.search import aligned_words, alignment_scores

SIZES = ModelSizes(feature_width=6, vocabulary_size=11, max_positions=6, sos=0, eos=1, pad=2)
SMALL = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
SYSTEMS: list[ModelConfig] = [
    ExpansionNetConfig(**SMALL, static_expansion=(4,)),  # type: ignore[arg-type]
    MeshedMemoryConfig(**SMALL),  # type: ignore[arg-type]
    ClustFormerConfig(**SMALL),  # type: ignore[arg-type]
    ClustFormerConfig(**SMALL, decoder="mask_token"),  # type: ignore[arg-type]
]


def test_a_tiny_case_counted_by_hand() -> None:
    """Products of tokens v0 .. v2 with words t0 .. t3, in columns:

          t0 t1 t2 t3
      v0   5  4  0  1
      v1   1  0  3  2
      v2   0  1  2  1

    t0 -> v0 -> t0 agrees; t1 -> v0 -> t0 does not; t2 -> v1 -> t2 agrees; t3 -> v1 -> t2 does not.
    """
    products = torch.tensor([[5.0, 4, 0, 1], [1, 0, 3, 2], [0, 1, 2, 1]])
    image, words = torch.eye(3)[None], products.T[None]
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert aligned_words(image, words, None, everything).tolist() == [[True, False, True, False]]
    # without t0, v0 is nearest to t1
    counted = torch.tensor([[False, True, True, True]])
    assert aligned_words(image, words, None, counted).tolist() == [[False, True, True, False]]
    # without v0: t0 -> v1 -> t2 no; t1 -> v2 -> t2 no; t2 -> v1 -> t2 agrees; t3 -> v1 -> t2 no
    real = torch.tensor([[False, True, True]])
    assert aligned_words(image, words, real, everything).tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("config", SYSTEMS, ids=lambda config: config.name)
def test_scores_are_of_the_states_behind_the_words(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = build_model(config, SIZES).double().eval()
    memory = model.encode(Features(torch.randn(3, 4, 6, dtype=torch.float64)))
    tokens = torch.tensor([[0, 4, 5, 1, 2, 2], [0, 7, 8, 9, 10, 3], [0, 1, 2, 2, 2, 2]])
    found = alignment_scores(model, memory, tokens)
    # recovers the states from the logits, by solving with the output weights
    weight = model.lm_head.weight.double()  # type: ignore[union-attr, operator]
    bias = model.lm_head.bias  # type: ignore[union-attr]
    logits = model.decode(memory, tokens) - (0 if bias is None else bias)
    states = torch.linalg.lstsq(weight, logits.reshape(-1, 11).T).solution.T.view(3, 6, 8)
    image = memory.states[:, -1] if memory.states.ndim == 4 else memory.states
    for row, words in ((0, [1, 2]), (1, [1, 2, 3, 4, 5])):
        products = image[row] @ states[row, words].T
        nearest = products.argmax(0)
        expected = sum(int(products[v].argmax()) == t for t, v in enumerate(nearest.tolist())) / len(words)
        assert float(found[row]) == pytest.approx(expected)
    assert math.isnan(float(found[2])), "a caption without words has no score"
