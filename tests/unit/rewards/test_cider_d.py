"""The reward: CIDEr-D against its definition and recorded values, and the EOS rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from benchmarks.reference_cider import PlainCiderD
from raycap.pipeline.data.language.tokenizers import tokenize
from raycap.pipeline.data.vocabulary import EOS, SPECIALS, Vocabulary
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.training.rewards import cider
from raycap.pipeline.training.rewards.cider import build_index
from raycap.pipeline.training.rewards.reward import CiderDReward
from tests.support.scripts import scene_texts

GOLDEN = Path(__file__).resolve().parents[2] / "parity" / "golden"


@pytest.mark.parametrize("pairs", [1 << 22, 100], ids=["at once", "in parts"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_cider_d_equals_its_definition(pairs: int, data: st.DataObject) -> None:
    words = st.integers(0, 9)
    sentence = st.lists(words, min_size=0, max_size=9)
    references = data.draw(st.lists(st.lists(sentence, min_size=1, max_size=3), min_size=2, max_size=5))
    images = data.draw(st.lists(st.integers(0, len(references) - 1), min_size=1, max_size=6))
    candidates = [data.draw(st.lists(st.integers(0, 12), max_size=9)) for _ in images]
    width = max([len(candidate) for candidate in candidates] + [1])
    rows = torch.tensor([candidate + [0] * (width - len(candidate)) for candidate in candidates])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cider, "_PAIRS", pairs)
        scorer = build_index(references)
        scores = scorer.score(rows, torch.tensor([len(c) for c in candidates]), torch.tensor(images)).tolist()
    text = [[[str(word) for word in caption] for caption in image] for image in references]
    plain = PlainCiderD(text)
    slow = [plain.score([str(w) for w in c], text[image]) for c, image in zip(candidates, images, strict=True)]
    assert scores == pytest.approx(slow, rel=1e-9, abs=1e-12)


def test_reward_baseline_and_loss_are_the_references(shared: Path) -> None:
    record = json.loads((GOLDEN / "ciderd_reward.json").read_text())
    entries = json.loads((shared / "data" / "coco_subset" / "dataset.json").read_text())["images"]
    captions = {entry["cocoid"]: [sentence["raw"] for sentence in entry["sentences"]] for entry in entries}
    references = {image: captions[image] for image in record["reference_image_ids"]}
    samples = [caption for image in record["predictions"] for caption in image]
    words = {word for caption in samples for word in caption} | set(SPECIALS)
    words |= {word for texts in references.values() for text in texts for word in tokenize(text)}
    vocabulary = Vocabulary(tuple(sorted(words)))
    width = max(map(len, samples))
    tokens = torch.tensor([[vocabulary.ids[w] for w in c] + [vocabulary.pad] * (width - len(c)) for c in samples])
    images = [image for image in record["picked_image_ids"] for _ in range(5)]
    reward = CiderDReward(references.values(), vocabulary, eos=True)
    found = reward(tokens, torch.tensor([list(references).index(image) for image in images])).view(-1, 5)
    assert np.allclose(found, record["reward"], rtol=0, atol=1e-6)
    baseline = (found.sum(1, keepdim=True) - found) / 4
    assert np.allclose(baseline, record["leave_one_out_baseline"], rtol=0, atol=1e-6)
    log_probs = torch.tensor([[sum(p) for p in image] for image in record["log_probs"]], dtype=torch.float64)
    assert float(-((found - baseline) * log_probs).mean()) == pytest.approx(record["loss"], abs=1e-6)


def test_without_eos_the_end_does_not_count() -> None:
    vocabulary = Vocabulary(tuple(sorted({"a", "b", "c", *SPECIALS})))
    references = {1: ["a b", "a b c"], 2: ["c c"]}
    ended = torch.tensor([[vocabulary.sos, vocabulary.ids["a"], vocabulary.ids["b"], vocabulary.eos]])
    cut = torch.tensor([[vocabulary.sos, vocabulary.ids["a"], vocabulary.ids["b"], vocabulary.pad]])
    with_eos, without = (CiderDReward(references.values(), vocabulary, eos=eos) for eos in (True, False))
    image = torch.tensor([0])
    assert with_eos(ended, image) > with_eos(cut, image)
    assert without(ended, image) == without(cut, image)


def test_documents_may_be_captions() -> None:
    """As in the recipe of meshed memory. A word then counts if every image has it but only few captions do."""
    references = [[[1, 2], [3]], [[1, 4], [5]]]
    by_image, by_caption = (build_index(references, caption_documents=flag) for flag in (False, True))
    rows, lengths, image = torch.tensor([[1]]), torch.tensor([1]), torch.tensor([0])
    assert by_image.score(rows, lengths, image)[0] == 0.0
    assert by_caption.score(rows, lengths, image)[0] > 0.0


@pytest.mark.parametrize("language", ["en", "hi", "zh"])
@pytest.mark.parametrize("eos", [False, True])
def test_the_reward_of_subwords_is_of_the_metrics_words(language: str, eos: bool) -> None:
    """This includes words that no reference has, and repeated captions."""
    references = {index: scene_texts(5, index, language) for index in range(12)}
    texts = [caption for captions in references.values() for caption in captions]
    vocabulary = Vocabulary.train_subwords(texts, 400, 2)
    captions = [scene_texts(5, 1 + index % 15, language)[0] for index in range(24)] + [
        "xyz xyz zyx",
        "",
        texts[0],
        f"{texts[12]} xyz zyx zyx",
    ]
    images = [index % 12 for index in range(len(captions))]
    rows = [torch.tensor(vocabulary.encode(vocabulary.tokenize(caption))) for caption in captions]
    tokens = pad_sequence(rows, batch_first=True, padding_value=vocabulary.pad)
    reward = CiderDReward(references.values(), vocabulary, eos=eos, language=language)
    found = reward(tokens, torch.tensor(images)).tolist()
    words = [[[*metric_words(c, language), *[EOS] * eos] for c in image] for image in references.values()]
    plain = PlainCiderD(words)
    slow = [
        plain.score([*metric_words(caption, language), *[EOS] * eos], words[image])
        for caption, image in zip(captions, images, strict=True)
    ]
    assert found == pytest.approx(slow, rel=1e-9, abs=1e-12)
    if not eos:
        first = {image: captions[image] for image in range(12)}
        scores = score_captions(references, first, metrics=("CIDEr-D",), language=language)
        assert found[:12] == pytest.approx(scores.by_name["CIDEr-D"].per_image, rel=1e-9)
