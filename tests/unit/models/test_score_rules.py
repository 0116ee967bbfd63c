"""Rules for words, diverse beams and restricted samples, each against a plain version in Python."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycap.models.base import CaptionModel, Features
from raycap.models.captioner import build_model
from raycap.models.config import MODEL_CONFIGS, Decoding, ModelSizes
from raycap.models.decoding.constraints import build_automaton, constrained_beam_search
from raycap.models.decoding.search import (
    ScoreRules,
    beam_search,
    by_score,
    image_draws,
    length_divisor,
    most_probable,
    nucleus,
    sample,
)
from tests.support.models import SIZES, features_for, log_probabilities, select_images, texts, tiny

SOS, EOS = 0, 1
CPU = torch.device("cpu")
WORD_RULES = st.builds(
    Decoding,
    suppress_unk=st.booleans(),
    min_length=st.integers(2, 6),
    no_repeat_ngram=st.none() | st.integers(1, 3),
    no_open_endings=st.booleans(),
)


def allowed_words(tokens: list[int], rules: ScoreRules, vocabulary: int, max_length: int) -> set[int]:
    """The words that rules allow after the tokens of a caption that has not ended."""
    decoding, words = rules.decoding, set(range(vocabulary))
    if decoding.suppress_unk:
        words -= {rules.unk}
    if len(tokens) + 1 < decoding.min_length:
        words -= {EOS}
    if (n := decoding.no_repeat_ngram) is not None:
        ngrams = {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}
        words = {word for word in words if tuple([*tokens, word][-n:]) not in ngrams}
    if decoding.no_open_endings and tokens[-1] in rules.open_endings:
        words -= {EOS}
    if decoding.no_open_endings and len(tokens) + 1 == max_length:
        words -= set(rules.open_endings)
    return words or {EOS}


def captions_of(rules: ScoreRules, vocabulary: int, max_length: int) -> list[tuple[int, ...]]:
    """All captions that rules allow."""
    found, open_captions = [], [[SOS]]
    while open_captions:
        tokens = open_captions.pop()
        if tokens[-1] == EOS or len(tokens) == max_length:
            found.append(tuple(tokens))
        else:
            open_captions += [[*tokens, word] for word in allowed_words(tokens, rules, vocabulary, max_length)]
    return found


@given(st.integers(0, 10**6), WORD_RULES, st.integers(1, 4), st.integers(1, 9), st.integers(5, 8))
@settings(max_examples=60, deadline=None)
def test_a_restriction_forbids_what_the_rules_say(
    seed: int, decoding: Decoding, rows: int, length: int, vocabulary: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocabulary, (rows, length), generator=generator)
    log_probs = torch.randn(rows, vocabulary, generator=generator).log_softmax(-1)
    rules = ScoreRules(decoding, unk=3, open_endings=(2, 4))
    sizes = ModelSizes(5, vocabulary, 20, sos=SOS, eos=EOS, pad=2)
    for max_length in (length + 1, length + 3):
        found = rules.restriction(sizes, max_length, CPU)(log_probs.clone(), tokens)
        for row in range(rows):
            words = allowed_words(tokens[row].tolist(), rules, vocabulary, max_length)
            for word in range(vocabulary):
                assert found[row, word] == (log_probs[row, word] if word in words else -torch.inf)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 14), st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_most_probable_words_and_the_nucleus_are_those_of_a_sorted_list(
    seed: int, vocabulary: int, count: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(1, vocabulary, dtype=torch.float64, generator=generator)).log_softmax(-1) - 2.0
    order = sorted(range(vocabulary), key=lambda word: -float(log_probs[0, word]))
    total, kept = 0.0, set[int]()
    for word in order:
        if total < share:
            kept.add(word)
        total += math.exp(float(log_probs[0, word]) + 2.0)
    for found, expected in ((most_probable(log_probs, count), set(order[:count])), (nucleus(log_probs, share), kept)):
        for word in range(vocabulary):
            assert found[0, word] == (log_probs[0, word] if word in expected else -torch.inf)


def test_the_length_penalty_is_equation_14() -> None:
    lengths = torch.tensor([2, 9, 21])  # with SOS
    assert length_divisor(lengths, True).tolist() == [2, 9, 21]
    assert length_divisor(lengths, False).tolist() == length_divisor(lengths, 0.0).tolist() == [1, 1, 1]
    for alpha in (0.2, 0.6, 1.0):
        expected = [(5 + n) ** alpha / (5 + 1) ** alpha for n in (1, 8, 20)]
        assert length_divisor(lengths, alpha).tolist() == pytest.approx(expected)


@given(st.integers(0, 10**6), WORD_RULES, st.sampled_from([True, False, 0.6]))
@settings(max_examples=10, deadline=None)
def test_a_beam_as_wide_as_the_tree_is_brute_force(seed: int, decoding: Decoding, normalization: bool | float) -> None:
    """It finds the best caption that the rules allow. So do an ensemble and the constrained search."""
    model, rules = tiny(seed, vocabulary=5), ScoreRules(decoding, 3, (4,), normalization)
    features = features_for(1)
    captions = captions_of(rules, 5, 5)
    sums = log_probabilities(model, features, captions)
    value = {c: s / float(length_divisor(torch.tensor(len(c)), normalization)) for c, s in sums.items()}
    best = sorted(captions, key=lambda caption: -value[caption])[:5]
    memory = model.encode(Features(features))
    options: dict[str, Any] = {"beam_size": 4**4, "max_length": 5, "num_results": len(best), "rules": rules}
    for found in (
        beam_search(model, memory, **options),
        beam_search([model, model], [memory, memory], **options),
        constrained_beam_search(model, memory, [build_automaton([], 5)], **options),
    ):
        assert list(map(tuple, texts(found, 0))) == best
        assert found.scores[0].tolist() == pytest.approx([value[caption] for caption in best], abs=1e-5)
        assert found.log_probs[0].sum(-1).tolist() == pytest.approx([sums[caption] for caption in best], abs=1e-5)


def literal_diverse_search(
    model: CaptionModel, features: Tensor, beam_size: int, decoding: Decoding, max_length: int
) -> list[tuple[list[int], float]]:
    """The beams of all groups, in the order of the groups, for one image and with whole prefixes."""
    size = beam_size // decoding.beam_groups
    groups: list[list[tuple[list[int], float]]] = [[([SOS], 0.0)] for _ in range(decoding.beam_groups)]
    for _ in range(1, max_length):
        chosen = Counter[int]()
        for number, beams in enumerate(groups):
            offers = []
            for tokens, total in beams:
                if tokens[-1] == EOS:
                    offers.append((total, tokens, total))
                    continue
                scores = model(Features(features), torch.tensor([tokens]))[0, -1].log_softmax(-1).tolist()
                for word, log_prob in enumerate(scores):
                    preference = total + log_prob - decoding.diversity * chosen[word]
                    offers.append((preference, [*tokens, word], total + log_prob))
            best = sorted(offers, key=lambda offer: -offer[0])[:size]
            ended = {tuple(tokens) for tokens, _ in beams if tokens[-1] == EOS}
            chosen.update(tokens[-1] for _, tokens, _ in best if tuple(tokens) not in ended)
            groups[number] = [(tokens, total) for _, tokens, total in best]
    return [beam for group in groups for beam in group]


@given(st.integers(0, 10**6), st.sampled_from([(2, 2), (4, 2), (6, 3), (6, 2)]), st.sampled_from([0.1, 0.5, 3.0]))
@settings(max_examples=12, deadline=None)
def test_groups_of_beams_follow_the_papers_rules(seed: int, sizes: tuple[int, int], diversity: float) -> None:
    (beam_size, groups), model, features = sizes, tiny(seed, vocabulary=7), features_for(2)
    decoding = Decoding(beam_groups=groups, diversity=diversity)
    options: dict[str, Any] = {"beam_size": beam_size, "max_length": 6, "num_results": beam_size}
    rules = ScoreRules(decoding, length_normalization=False)
    found = beam_search(model, model.encode(Features(features)), **options, rules=rules)
    for image in range(2):
        expected = literal_diverse_search(model, features[image : image + 1], beam_size, decoding, 6)
        expected.sort(key=lambda beam: -beam[1])
        assert sorted(texts(found, image)) == sorted(tokens for tokens, _ in expected)
        assert found.scores[image].tolist() == pytest.approx([total for _, total in expected], abs=1e-5)


@pytest.mark.parametrize("name", [*MODEL_CONFIGS, "mask_token"])
def test_every_system_keeps_the_rules_in_beams_constraints_and_samples(name: str) -> None:
    """Images leave the batch at different times. Each is decoded as if it were alone."""
    torch.manual_seed(1)
    small: dict[str, Any] = {"d_model": 8, "d_ff": 12, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2}
    if name == "mask_token":
        name, small["decoder"] = "clustformer", name
    model = build_model(MODEL_CONFIGS[name](name=name, **small), SIZES).double().eval()
    features = torch.randn(4, 4, SIZES.feature_width, dtype=torch.float64)
    memory = model.encode(Features(features, boxes=torch.rand(4, 4, 4, dtype=torch.float64)))
    decoding = Decoding(min_length=5, no_repeat_ngram=2, no_open_endings=True)
    rules, drawn = (
        ScoreRules(each, 3, (4, 5, 6)) for each in (decoding, Decoding(**vars(decoding) | {"sampling": True}))
    )
    options: dict[str, Any] = {"beam_size": 4, "max_length": 10, "num_results": 3}
    automata = [build_automaton([[(7,)]] if image % 2 else [], SIZES.vocabulary_size) for image in range(4)]
    every = [
        beam_search(model, memory, **options, rules=rules),
        beam_search(
            model, memory, **options, rules=ScoreRules(Decoding(**vars(decoding) | {"beam_groups": 2}), 3, (4, 5, 6))
        ),
        constrained_beam_search(model, memory, automata, **options, rules=rules),
        sample(model, memory, num_samples=3, max_length=10, rules=drawn, draws=image_draws(range(4), 3, 10)),
    ]
    for captions in every:
        for tokens in itertools.chain.from_iterable(texts(captions, image) for image in range(4)):
            for length in range(1, len(tokens)):
                assert tokens[length] in allowed_words(tokens[:length], rules, SIZES.vocabulary_size, 10)
    for image in range(4):
        alone = select_images(memory, torch.tensor([image]))
        assert texts(beam_search(model, alone, **options, rules=rules), 0) == texts(every[0], image)
        again = sample(model, alone, num_samples=3, max_length=10, rules=drawn, draws=image_draws([image], 3, 10))
        assert texts(again, 0) == texts(every[3], image)


def test_samples_follow_the_restricted_distribution() -> None:
    model, features, number = tiny(3, vocabulary=6), features_for(1), 400
    memory = model.encode(Features(features))
    with torch.no_grad():
        log_probs = model(Features(features), torch.tensor([[SOS]]))[0].log_softmax(-1)
    rules = ScoreRules(Decoding(sampling=True, temperature=1.5, top_k=4, top_p=0.9), unk=3)
    expected = log_probs.clone()
    expected[0, 3] = -torch.inf
    weights = nucleus(most_probable(expected / 1.5, 4), 0.9).softmax(-1)[0].tolist()
    drawn = sample(model, memory, num_samples=number, max_length=2, rules=rules, draws=image_draws([7], number, 2))
    counts = Counter(tokens[1] for tokens in texts(drawn, 0))
    assert sum(weight == 0 for weight in weights) >= 2
    for word, weight in enumerate(weights):
        assert abs(counts[word] / number - weight) < 5 * (weight * (1 - weight) / number) ** 0.5 + 1e-9
    # the log-probabilities are those of the model
    for place in range(20):
        assert drawn.log_probs[0, place, 1] == pytest.approx(float(log_probs[0, texts(drawn, 0)[place][1]]))


def test_samples_are_ranked_as_beams_are() -> None:
    model = tiny(2, vocabulary=6)
    memory = model.encode(Features(features_for(3)))
    drawn = sample(model, memory, num_samples=6, max_length=8, draws=image_draws([5, 6, 7], 6, 8))
    sums = drawn.log_probs.sum(-1)
    for normalization, divisor in ((True, drawn.lengths), (False, 1), (0.5, ((drawn.lengths + 4) / 6).sqrt())):
        ranked = by_score(drawn, normalization)
        torch.testing.assert_close(ranked.scores, (sums / divisor).sort(1, descending=True).values)
        for image in range(3):
            assert sorted(texts(ranked, image)) == sorted(texts(drawn, image))
            for place in range(6):
                assert (
                    ranked.log_probs[image, place].sum()
                    == sums[image, texts(drawn, image).index(texts(ranked, image)[place])]
                )


def test_draws_of_an_image_depend_on_its_seed_only() -> None:
    both, one = image_draws([3, 4], 2, 5), image_draws([4], 2, 5)
    assert torch.equal(both[2:], one) and not torch.equal(both[:2], one)
    assert bool((both >= 0).all()) and bool((both < 1).all())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"diversity": 0.3}, "diversity is for groups of beams, and evaluation.decoding.beam_groups is 1"),
        ({"sampling": True, "beam_groups": 2}, "beam_groups is 2; set one of them only"),
        ({"top_k": 5}, "top_k is for drawn captions, and evaluation.decoding.sampling is false"),
        ({"temperature": 0.5}, "temperature is for drawn captions"),
    ],
)
def test_settings_without_sense_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Decoding(**values)
