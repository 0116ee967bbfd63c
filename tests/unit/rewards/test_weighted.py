"""Weighted rewards: each summand is its metric, the sum is that of the values, and CIDEr-D alone is unchanged."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from raycap.pipeline.config.sections import RewardName
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.evaluation.scores.metrics import CaptionWords, score_captions
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.training.rewards.reward import REWARDS, WORD_REWARDS, CiderDReward, WeightedReward
from tests.support.scripts import scene_texts

METRICS = {"bleu1": "BLEU-1", "bleu2": "BLEU-2", "bleu3": "BLEU-3", "bleu4": "BLEU-4", "rouge_l": "ROUGE-L"}
FORMS = [("en", "expansionnet"), ("hi", "unicode"), ("zh", "characters"), ("zh", "subword")]


class Case:
    """Twelve images with references, a vocabulary, and sampled captions (R, T) of them with their images (R,)."""

    def __init__(self, language: str, tokenizer: str) -> None:
        self.language = language
        self.references = {100 + index: scene_texts(5, index, language) for index in range(12)}
        texts = [text for captions in self.references.values() for text in captions]
        if tokenizer == "subword":
            self.vocabulary = Vocabulary.train_subwords(texts, 400, 2)
        else:
            self.vocabulary = Vocabulary.build(map(TOKENIZERS[tokenizer].split, texts), 1, tokenizer)
        captions = [scene_texts(5, 1 + index % 14, language)[index % 3] for index in range(24)]
        captions += ["", f"{texts[0]} {texts[0]}", texts[7], texts[7]]
        rows = [torch.tensor(self.vocabulary.encode(self.vocabulary.tokenize(caption))) for caption in captions]
        rows[3] = rows[3][:-1]  # cut off before EOS
        self.tokens = pad_sequence(rows, batch_first=True, padding_value=self.vocabulary.pad)
        self.indices = torch.tensor([index % 12 for index in range(24)] + [0, 0, 2, 3])

    def reward(self, weights: dict[str, float]) -> WeightedReward:
        references = list(self.references.values())
        cider_d = CiderDReward(references, self.vocabulary, eos=True, language=self.language)
        return WeightedReward(weights, cider_d, references.__getitem__, self.vocabulary, self.language)


@pytest.mark.parametrize(("language", "tokenizer"), FORMS)
def test_every_summand_is_its_metric(language: str, tokenizer: str) -> None:
    """On the texts that the captions are decoded to, for every tokenizer and language."""
    case = Case(language, tokenizer)
    weights = dict.fromkeys(REWARDS, 0.3)
    total, values = case.reward(weights)(case.tokens, case.indices)
    assert values.keys() == set(REWARDS) and total.dtype == torch.float64
    expected = torch.zeros(len(total), dtype=torch.float64)
    decoded = [case.vocabulary.decode(row) for row in case.tokens.tolist()]
    for row, (caption, index) in enumerate(zip(decoded, case.indices.tolist(), strict=True)):
        # the metric needs two images, and the last one changes no value of the first one
        references = {"this": list(case.references.values())[index], "other": ["x"]}
        captions = {"this": caption, "other": "x"}
        scores = score_captions(references, captions, metrics=METRICS.values(), language=language).by_name
        for name, metric in METRICS.items():
            per_image = scores[metric].per_image
            assert per_image is not None
            assert values[name][row].item() == pytest.approx(per_image[0], rel=1e-9, abs=1e-12), (name, caption)
        assert values["length"][row] == len(metric_words(caption, language))
    for name, weight in weights.items():
        expected += weight * values[name]
    assert torch.allclose(total, expected, rtol=1e-12)
    assert (values["bleu4"] > 0.3).any() and values["repetition"][25] > 2 and len(values["rouge_l"].unique()) > 5


def test_cider_d_alone_is_bit_equal() -> None:
    case = Case("en", "expansionnet")
    cider_d = CiderDReward(case.references.values(), case.vocabulary, eos=True)
    plain = cider_d(case.tokens, case.indices)
    total, values = case.reward({"ciderd": 1.0})(case.tokens, case.indices)
    assert torch.equal(total, plain) and values.keys() == {"ciderd"}
    mixed, values = case.reward({"rouge_l": 0.5, "ciderd": 2.0})(case.tokens, case.indices)
    assert torch.equal(values["ciderd"], plain) and torch.allclose(mixed, 2 * plain + 0.5 * values["rouge_l"])
    weights = {"ciderd": 0.7, "rouge_l": 0.3, "bleu1": 1 / 3, "length": -0.01}
    orders = (weights, dict(reversed(weights.items())))
    first, second = (case.reward(order)(case.tokens, case.indices)[0] for order in orders)
    assert torch.equal(first, second), "the order in a file changes nothing"


def captions_of(*texts: str) -> CaptionWords:
    return CaptionWords([text.split() for text in texts], [[["x"]] for _ in texts])


def test_length_and_repetition_are_counts() -> None:
    texts = ("", "dog", "a dog", "a dog and a dog", "dog dog dog dog", "a cat in a box in a room")
    assert WORD_REWARDS["length"](captions_of(*texts)).tolist() == [0, 1, 2, 5, 4, 8]
    assert WORD_REWARDS["repetition"](captions_of(*texts)).tolist() == [0, 0, 0, 1, 2, 1]


def test_configurations_name_all_rewards() -> None:
    assert get_args(RewardName) == REWARDS
