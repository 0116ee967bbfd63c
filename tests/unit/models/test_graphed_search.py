"""A search that never waits for values, so that a CUDA graph can capture it, and the choice of the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.captioner import build_model
from raycap.models.config import MODEL_CONFIGS
from raycap.models.decoding import graphed_search
from raycap.models.decoding.graphed_search import GraphedSearch, SearchGraph
from raycap.models.decoding.search import BEAM_TENSORS, Beams, Captions, ScoreRules, beam_search
from tests.support.models import SIZES
from tests.support.operations import counted

BEAMS, LENGTH = 3, 12
BY_SUM = ScoreRules(length_normalization=False)


def model_of(name: str) -> CaptionModel:
    """A float64 model some of whose captions end early."""
    torch.manual_seed(3)
    small: dict[str, Any] = {"d_model": 8, "d_ff": 12, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
    if name == "expansionnet_v2":
        small |= {"static_expansion": (2, 5), "dynamic_expansion": 2}
    if name == "mask_token":
        name, small["decoder"] = "clustformer", name
    model = build_model(MODEL_CONFIGS[name](name=name, **small), SIZES).double().eval()
    with torch.no_grad():
        model.lm_head.weight *= 4.0  # type: ignore[union-attr, operator]
    return model


def memory_of(model: CaptionModel, images: int, tokens: int = 4, lengths: bool = False) -> Memory:
    features = torch.randn(images, tokens, SIZES.feature_width, dtype=torch.float64)
    valid = torch.randint(1, tokens + 1, (images,)) if lengths else None
    with torch.no_grad():
        return model.encode(Features(features, valid, torch.rand(images, tokens, 4, dtype=torch.float64)))


def same(found: Captions, plain: Captions) -> None:
    assert torch.equal(found.tokens, plain.tokens) and torch.equal(found.lengths, plain.lengths)
    torch.testing.assert_close(found.log_probs, plain.log_probs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.scores, plain.scores, rtol=1e-10, atol=1e-10)


def replayed(inputs: list[Memory], run: Callable[[], Beams]) -> SearchGraph:
    """Replaces `captured` where there is no GPU. A replay computes again from the same inputs into the same results."""
    beams = run()

    def replay() -> None:
        again = run()
        for name in BEAM_TENSORS:
            getattr(beams, name).copy_(getattr(again, name))

    return SearchGraph(inputs, beams, replay)


@pytest.mark.parametrize("name", [*MODEL_CONFIGS, "mask_token"])
def test_a_search_of_all_steps_never_waits_and_finds_the_same_captions(name: str) -> None:
    """An operation that waits cannot be captured. It reads a value, or makes a shape that depends on values."""
    model = model_of(name)
    for images, lengths in ((1, False), (7, True), (12, False)):
        has_padding = lengths and model.config.name != "clustformer"  # whose grids have none
        memory = memory_of(model, images, lengths=has_padding)
        graphed = GraphedSearch([model], beam_size=BEAMS, max_length=LENGTH)
        with counted() as operations:
            beams = graphed._all_steps([memory])
        assert operations.waits == Counter()
        plain = beam_search(model, memory, beam_size=BEAMS, max_length=LENGTH, num_results=BEAMS)
        same(beams.ranked(BEAMS, length_normalization=True)[0], plain)
        assert images == 1 or plain.lengths.min() < plain.lengths.max()


def test_the_second_batch_of_a_shape_is_captured_and_later_ones_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []

    def capture(inputs: list[Memory], run: Callable[[], Beams]) -> SearchGraph:
        captures.append(inputs[0].batch_size)
        return replayed(inputs, run)

    monkeypatch.setattr(graphed_search, "captured", capture)
    model = model_of("expansionnet_v2")
    graphed = GraphedSearch([model], beam_size=BEAMS, max_length=LENGTH, num_results=2)
    results = []
    for images, tokens in ((4, 5), (4, 5), (3, 5), (4, 5), (4, 6), (3, 5), (3, 5)):
        memory = memory_of(model, images, tokens, lengths=True)
        kept = memory.states.clone()
        results.append((graphed([memory]), memory))
        assert torch.equal(memory.states, kept), "a replay wrote to its caller's memory"
    assert captures == [4, 3]
    for found, memory in results:  # also after later replays, which overwrite the graph's own results
        same(found, beam_search(model, memory, beam_size=BEAMS, max_length=LENGTH, num_results=2))
    by_sum = GraphedSearch([model], beam_size=BEAMS, max_length=LENGTH, rules=BY_SUM)
    limits: dict[str, Any] = {"beam_size": BEAMS, "max_length": LENGTH, "rules": BY_SUM}
    for _ in range(3):
        memory = memory_of(model, 9)
        same(by_sum([memory]), beam_search(model, memory, **limits))
    assert captures == [4, 3, 9]


def test_a_capture_that_fails_costs_no_caption(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(inputs: list[Memory], run: Callable[[], Beams]) -> SearchGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed_search, "captured", refuse)
    model = model_of("transformer")
    graphed = GraphedSearch([model], beam_size=2, max_length=6)
    for _ in range(4):
        memory = memory_of(model, 3)
        same(graphed([memory]), beam_search(model, memory, beam_size=2, max_length=6))
    assert caplog.text.count("searches are not captured: operation not permitted") == 1
