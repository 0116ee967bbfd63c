"""Constrained beam search: its automaton and its captions, compared with brute force over all captions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycap.models.base import CaptionModel, Features
from raycap.models.captioner import build_model
from raycap.models.config import ClustFormerConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.models.decoding.constraints import build_automaton, constrained_beam_search
from raycap.models.decoding.search import ScoreRules
from tests.support.models import (
    every_caption,
    features_for,
    follow,
    log_probabilities,
    select_images,
    texts,
    tiny,
)

Constraints = list[list[tuple[int, ...]]]


def holds(words: Sequence[int], alternatives: list[tuple[int, ...]]) -> bool:
    return any(tuple(words[at : at + len(phrase)]) == phrase for phrase in alternatives for at in range(len(words)))


def number_held(words: Sequence[int], constraints: Constraints) -> int:
    return sum(holds(words, alternatives) for alternatives in constraints)


PHRASES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
CONSTRAINTS = st.lists(st.lists(PHRASES, min_size=1, max_size=3), max_size=3)


@given(CONSTRAINTS, st.lists(st.integers(0, 5), max_size=12))
@settings(max_examples=200, deadline=None)
def test_the_machine_knows_what_a_caption_holds(constraints: Constraints, words: list[int]) -> None:
    """Alternatives may overlap, be repeated, or be part of each other."""
    machine = build_automaton(constraints, 6)
    assert machine.num_satisfied[follow(machine, words)] == number_held(words, constraints)
    assert machine.num_required == len(constraints)


SHORT = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)
FEW = st.lists(st.lists(SHORT, min_size=1, max_size=2), max_size=3)
REQUIRED = st.one_of(st.none(), st.integers(1, 3))


@given(st.integers(0, 10**6), FEW, FEW, st.tuples(REQUIRED, REQUIRED), st.booleans())
@example(0, [[(0,)], [(2,)], [(3,)]], [[(0,)], [(3,)]], (2, 1), True)
@settings(max_examples=6, deadline=None)
def test_a_beam_as_wide_as_the_tree_is_brute_force(
    seed: int, first: Constraints, second: Constraints, at_least: tuple[int | None, int | None], normalized: bool
) -> None:
    """Two images have their own constraints. If no caption can hold all required ones, the search finds one that holds
    most."""
    model = tiny(seed, vocabulary=4, positions=4)
    features = features_for(2)
    captions = every_caption(4, 4)
    both = [first, second]
    machines = [build_automaton(constraints, 4, required) for constraints, required in zip(both, at_least, strict=True)]
    found = constrained_beam_search(
        model, model.encode(Features(features)), machines, beam_size=len(captions), max_length=4, num_results=3,
        rules=ScoreRules(length_normalization=normalized),
    )  # fmt: skip
    for image, constraints in enumerate(both):
        sums = log_probabilities(model, features[image : image + 1], captions)
        value = {c: s / len(c) if normalized else s for c, s in sums.items()}
        required = len(constraints) if at_least[image] is None else at_least[image]
        held = {caption: number_held(caption[1:], constraints) for caption in captions}
        most = max(min(number, required) for number in held.values())
        fit = [caption for caption in captions if held[caption] >= most]
        best = sorted(fit, key=lambda caption: -value[caption])[:3]
        for place, caption in enumerate(best):
            assert float(found.scores[image, place]) == pytest.approx(value[caption], abs=1e-5)
            tokens = texts(found, image)[place]
            assert int(found.num_satisfied[image, place]) == held[tuple(tokens)]
            assert value[tuple(tokens)] == pytest.approx(value[caption], abs=1e-9)
            assert float(found.log_probs[image, place].sum()) == pytest.approx(sums[tuple(tokens)], abs=1e-5)
        assert bool(found.scores[image, len(best) :].isneginf().all())
        assert bool((found.num_satisfied[image, len(best) :] == -1).all())


def systems() -> list[CaptionModel]:
    sizes = ModelSizes(5, 30, 14, sos=0, eos=1, pad=2)
    values = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2}
    configs: list[ModelConfig] = [
        MeshedMemoryConfig(num_memory_slots=2, **values),  # type: ignore[arg-type]
        ClustFormerConfig(**values),  # type: ignore[arg-type]
        ClustFormerConfig(**values, decoder="mask_token"),  # type: ignore[arg-type]
    ]
    return [build_model(config, sizes).double().eval() for config in configs]


def test_any_model_and_an_ensemble_hold_their_constraints() -> None:
    """Images with one to three constraints leave the batch at different times. Each is decoded as if it were alone."""
    torch.manual_seed(0)
    features = features_for(4)
    wanted: list[Constraints] = [[[(7,)]], [[(8, 9), (10,)], [(11,)]], [[(12,)], [(13,)], [(14, 15, 16)]], []]
    machines = [build_automaton(constraints, 30) for constraints in wanted]
    models = systems()
    for chosen in (*([model] for model in models), models):
        with torch.no_grad():
            memories = [model.encode(Features(features)) for model in chosen]
        found = constrained_beam_search(chosen, memories, machines, beam_size=3, max_length=12, num_results=2)
        for image, constraints in enumerate(wanted):
            for place in range(2):
                words = texts(found, image)[place][1:]
                assert number_held(words, constraints) == len(constraints) == int(found.num_satisfied[image, place])
            index = torch.tensor([image])
            alone = constrained_beam_search(
                chosen,
                [select_images(m, index) for m in memories],
                [machines[image]],
                beam_size=3,
                max_length=12,
                num_results=2,
            )
            assert texts(alone, 0) == texts(found, image)


def test_where_none_fits_the_most_is_returned_and_said() -> None:
    model = tiny(2, vocabulary=6)
    memory = model.encode(Features(features_for(1)))
    wanted: Constraints = [[(3,)], [(4,)], [(5, 3, 4)]]
    machine = build_automaton(wanted, 6)
    found = constrained_beam_search(model, memory, [machine], beam_size=3, max_length=3)
    assert int(found.num_satisfied[0, 0]) == 2 == number_held(texts(found, 0)[0][1:], wanted)
    fewer = constrained_beam_search(model, memory, [build_automaton(wanted, 6, at_least=1)], beam_size=3, max_length=8)
    every = constrained_beam_search(model, memory, [machine], beam_size=3, max_length=8)
    assert int(every.num_satisfied[0, 0]) == 3 and int(fewer.num_satisfied[0, 0]) >= 1
    assert float(fewer.scores[0, 0]) >= float(every.scores[0, 0])
