"""Decoding: cached steps against teacher forcing, beams against brute force, samples against their distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycap.models.base import CaptionModel, Features
from raycap.models.captioner import build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelSizes
from raycap.models.decoding.cache import TreeSlots
from raycap.models.decoding.search import (
    Captions,
    Decoder,
    beam_search,
    best_words,
    draw_by_inversion,
    greedy,
    sample,
)
from raycap.models.expansionnet import DynamicExpansion
from tests.support.models import (
    MIXERS,
    SIZES,
    every_caption,
    exact,
    features_for,
    follow_steps,
    log_probabilities,
    small_model,
    texts,
    tiny,
)


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(MIXERS),
    st.integers(1, 12),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_cached_steps_are_the_teacher_forced_logits(
    seed: int, images: int, beams: int, mixers: dict[str, object], steps: int, padded: bool
) -> None:
    """Beams are chosen anew at each step, and images leave half way."""
    model = small_model(seed, **mixers)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, 5, 7, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, 6, (images,), generator=generator) if padded else None
    follow_steps(model, model.encode(Features(features, lengths)), beams, steps, generator)


def plain_step(layer: DynamicExpansion, x: Tensor, slots: TreeSlots, ancestors: Tensor) -> Tensor:
    """`DynamicExpansion.step` in a simple form: each beam expands its whole path again, as teacher forcing does."""
    images, beams, length = ancestors.shape
    (cached,) = slots.append("projected", layer._project(x).view(1, images, beams, -1))  # (B, slots, 5 D)
    path = ancestors.flatten(1)[:, :, None].expand(-1, -1, cached.shape[-1])
    return layer._expand(cached.gather(1, path).view(images * beams, length, -1), None)[:, -1]


@pytest.mark.parametrize("seed", range(4))
def test_the_fast_step_of_the_dynamic_expansion_is_the_plain_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both match teacher forcing on random trees of beams, and give the same beams."""
    model = small_model(seed, dynamic_expansion=3)
    generator = torch.Generator().manual_seed(seed)
    memory = model.encode(Features(torch.randn(3, 5, 7, dtype=torch.float64, generator=generator)))
    fast = beam_search(model, memory, beam_size=3, max_length=9)
    monkeypatch.setattr(DynamicExpansion, "step", plain_step)
    follow_steps(model, memory, 3, 8, generator)
    plain = beam_search(model, memory, beam_size=3, max_length=9)
    assert torch.equal(plain.tokens, fast.tokens)
    torch.testing.assert_close(plain.log_probs, fast.log_probs)


def test_caches_grow_past_their_first_capacity() -> None:
    torch.manual_seed(0)
    sizes = ModelSizes(7, 11, 60, sos=0, eos=1, pad=2)
    config = ExpansionNetConfig(d_model=8, d_ff=8, num_heads=2, static_expansion=(4,), dynamic_expansion=2)
    model = build_model(config, sizes).double().eval()
    memory = model.encode(Features(torch.randn(2, 3, 7, dtype=torch.float64)))
    tokens = torch.randint(0, 11, (4, 60))
    cache, expected = model.init_cache(memory, 2), model.decode(memory, tokens)
    for position in range(60):
        logits, cache = model.step(tokens[:, position], cache)
        exact(logits, expected[:, position])
    with pytest.raises(ValueError, match="61 input tokens"):
        model.step(tokens[:, 0], cache)


def literal_beam_search(model: CaptionModel, features: Tensor, beam_size: int, max_length: int) -> list[list[int]]:
    """The reference's rules for one image, one beam after the other, with whole prefixes."""
    beams: list[tuple[list[int], float]] = [([0], 0.0)]
    for _ in range(1, max_length):
        offers = []
        for tokens, total in beams:
            if tokens[-1] == 1:
                offers.append((tokens, total))
                continue
            scores = model(Features(features), torch.tensor([tokens]))[0, -1].log_softmax(-1)
            best = scores.topk(min(beam_size, len(scores)))
            offers += [
                ([*tokens, w], total + v) for v, w in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        beams = sorted(offers, key=lambda offer: -offer[1])[:beam_size]
    return [tokens for tokens, total in sorted(beams, key=lambda beam: -beam[1] / len(beam[0]))]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 8))
@settings(max_examples=10, deadline=None)
def test_beam_search_follows_the_references_rules(seed: int, beam_size: int, max_length: int) -> None:
    model = tiny(seed, vocabulary=7)
    features = features_for(3)
    found = beam_search(
        model, model.encode(Features(features)), beam_size=beam_size, max_length=max_length, num_results=beam_size
    )
    for image in range(3):
        assert texts(found, image) == literal_beam_search(model, features[image : image + 1], beam_size, max_length)


def test_samples_follow_the_models_distribution() -> None:
    model = tiny(3, vocabulary=3)
    features = features_for(1)
    number = 600
    drawn = sample(
        model,
        model.encode(Features(features)),
        num_samples=number,
        max_length=4,
        generator=torch.Generator().manual_seed(0),
    )
    counts = Counter(map(tuple, texts(drawn, 0)))
    captions = every_caption(3, 4)
    expected = log_probabilities(model, features, captions)
    assert set(counts) <= set(captions)
    for caption, value in expected.items():
        p = 2.718281828459045**value
        assert abs(counts[caption] / number - p) < 5 * (p * (1 - p) / number) ** 0.5 + 1e-9
    for place in range(20):
        caption = texts(drawn, 0)[place]
        assert float(drawn.log_probs[0, place].sum()) == pytest.approx(expected[tuple(caption)], abs=1e-5)
        assert float(drawn.scores[0, place]) == pytest.approx(expected[tuple(caption)] / len(caption), abs=1e-5)


def test_samples_are_reproducible_and_do_not_depend_on_when_others_end() -> None:
    model = tiny(6, vocabulary=9)
    features = features_for(4)
    memory = model.encode(Features(features))

    def draw(seed: int, **options: float) -> Captions:
        generator = torch.Generator().manual_seed(seed)
        return sample(model, memory, num_samples=3, max_length=8, generator=generator, **options)  # type: ignore[arg-type]

    first = draw(1)
    assert torch.equal(first.tokens, draw(1).tokens) and not torch.equal(first.tokens, draw(2).tokens)
    assert first.tokens.shape[:2] == (4, 3) and bool((first.tokens[:, :, 0] == SIZES.sos).all())
    # the same draws in a longer form, with one uniform number for each row and step
    generator = torch.Generator().manual_seed(1)
    tokens = torch.zeros(12, 1, dtype=torch.int64)
    for _ in range(first.tokens.shape[-1] - 1):
        logits = model.decode(memory, tokens)[:, -1]
        uniform = torch.rand(12, dtype=torch.float64, generator=generator)
        chosen = draw_by_inversion(logits.softmax(-1), uniform).masked_fill((tokens == 1).any(1), 2)
        tokens = torch.cat((tokens, chosen[:, None]), 1)
    assert torch.equal(tokens.view(4, 3, -1), first.tokens)


def test_a_word_of_probability_zero_is_never_drawn() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.5, 0.999999999999, 0.25], dtype=torch.float64)
    assert draw_by_inversion(probabilities, uniform).tolist() == [1, 3, 3, 1]


def test_what_cannot_be_decoded_is_refused() -> None:
    model = tiny(0)
    memory = model.encode(Features(features_for(2)))
    with pytest.raises(ValueError, match="longer than the positional table of 8 rows"):
        greedy(model, memory, max_length=10)
    with pytest.raises(ValueError, match="max_length is 1"):
        greedy(model, memory, max_length=1)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_words_are_topks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, count = (int(torch.randint(1, 8, (1,), generator=generator)) for _ in range(2))
    words = int(torch.randint(count, 500, (1,), generator=generator))
    log_probs = torch.randn(rows, words, generator=generator).log_softmax(-1)
    log_probs[:, : words // 4] = -torch.inf
    best, where = best_words(log_probs, count)
    expected, places = log_probs.topk(count, -1)
    assert torch.equal(best, expected) and torch.equal(log_probs.gather(1, where), best)
    finite = best > -torch.inf
    assert torch.equal(where[finite], places[finite])
    assert all(len(set(row)) == count for row in where.tolist())


@torch.no_grad()
@pytest.mark.parametrize("system", ["expansionnet_v2", "transformer", "meshed_memory", "clustformer"])
def test_bfloat16_steps_match_teacher_forcing(system: str) -> None:
    torch.manual_seed(0)
    sizes = ModelSizes(16, 50, 20, sos=0, eos=1, pad=2)
    values = {"d_model": 64, "d_ff": 96, "num_heads": 4}
    if system in ("expansionnet_v2", "transformer"):
        values |= {"static_expansion": (8,), "dynamic_expansion": 4} if system == "expansionnet_v2" else {}
        model = build_model(ExpansionNetConfig(name=system, **values), sizes)  # type: ignore[arg-type]
    else:
        model = build_model((MeshedMemoryConfig if system == "meshed_memory" else ClustFormerConfig)(**values), sizes)
    model.eval().init_weights()
    with torch.autocast("cpu", torch.bfloat16):
        memory = model.encode(Features(torch.randn(8, 16, 16)))
        decoder = Decoder(model, memory, 4, 12)
        tokens = torch.randint(3, 50, (32, 12))
        tokens[:, 0] = sizes.sos
        expected = model.decode(memory, tokens).float().log_softmax(-1)
        for position in range(12):
            found = decoder.step(tokens[:, position])
            error = (found - expected[:, position]).abs().amax(-1)
            assert error.median() < 2e-2, position
