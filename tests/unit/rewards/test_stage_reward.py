"""Rewards over the images of some steps at a time are those over all images."""

from __future__ import annotations

import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch

from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.synthetic.scenes import make_scene
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.training.rewards.cider_d import CiderDReward, Documents, References, sampled_documents
from raycap.pipeline.training.rewards.stage_reward import Groups, StageReward, WeightedReward

NUM_IMAGES, PER_STEP, STEPS = 60, 7, 3


@pytest.mark.parametrize("counts_captions", [False, True])
def test_groups_give_the_rewards_of_all_images(counts_captions: bool) -> None:
    """Also where references have words that the vocabulary lacks. Each group is built once, of its images only."""
    rng = np.random.default_rng(0)
    texts = {number: make_scene(5, number, "en")[1] for number in range(NUM_IMAGES)}
    words = [text.split() for texts_of in texts.values() for text in texts_of]
    vocabulary = Vocabulary.build(iter(words), 20)
    assert any(word not in vocabulary.ids for text in words for word in text)
    references, built, earlier = References.of_texts(texts), [], list[weakref.ref[CiderDReward]]()
    order = np.concatenate([rng.permutation(NUM_IMAGES) for _ in range(3)])

    def make(rows: np.ndarray | None) -> tuple[WeightedReward, CiderDReward]:
        built.append(rows)
        if rows is not None:
            assert all(reward() is None for reward in earlier), "the earlier index still needs memory"
        chosen, documents = references, sampled_documents(NUM_IMAGES, 11)
        if rows is not None:
            assert documents is not None
            chosen, documents = references.selected(rows), np.searchsorted(rows, documents)
        counted = Documents(counts_captions, documents)
        cider_d = CiderDReward(chosen, vocabulary, eos=True, documents=counted)
        if rows is not None:
            earlier.append(weakref.ref(cider_d))
        weights = {"ciderd": 1.0, "bleu2": 0.5, "length": -0.5}
        return WeightedReward(weights, cider_d, chosen, vocabulary, "en"), cider_d

    groups = Groups.of(lambda start, stop: np.unique(order[start * PER_STEP : stop * PER_STEP]), STEPS, NUM_IMAGES, 11)
    whole, parts, spread = StageReward(make), StageReward(make, groups), dict[str, float]()
    for step in range(24):
        rows = torch.from_numpy(order[step * PER_STEP : (step + 1) * PER_STEP])
        captions = [vocabulary.encode(words[rng.integers(len(words))]) for _ in rows]
        tokens = torch.tensor([(ids + [vocabulary.pad] * 30)[:30] for ids in captions])
        whole.begin(step)
        parts.begin(step)
        (expected, by_name), (found, found_by_name) = whole(tokens, rows), parts(tokens, rows)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert by_name.keys() == found_by_name.keys() and expected.std() > 0
        for name, values in by_name.items():
            torch.testing.assert_close(found_by_name[name], values, rtol=1e-12, atol=1e-12)
            spread[name] = max(spread.get(name, 0.0), float(values.std()))
    assert len(spread) == 3 and all(spread.values()), "each summand differs between captions"
    assert built[0] is None and len(built) == 1 + 24 // STEPS
    assert all(rows is not None and len(rows) <= 11 + STEPS * PER_STEP for rows in built[1:])


def test_references_of_a_selection_are_read_in_place() -> None:
    """Also those of some of its images. Nothing copies the columns of the selection."""
    captions = [[f"a {number}", f"b {number}"] for number in range(9)]
    splits = ["val" if number % 3 == 1 else "train" for number in range(9)]
    table = pa.table([range(10, 19), splits, ["u"] * 9, captions, ["k"] * 9], schema=SCHEMA)
    train = Dataset(pa.concat_tables([table.slice(0, 4), table.slice(4)])).split("train")
    references, chosen = References.of(train), captions[0::3] + captions[2::3]
    assert sorted(references) == sorted(chosen) and references[2] == captions[3]
    some = references.selected(np.array([0, 2, 5]))
    assert list(some) == [captions[0], captions[3], captions[8]] and some[1] == captions[3]
    assert some.indices_of([18, 10]).tolist() == [2, 0]
    assert "table" not in vars(train)


def test_without_a_sample_there_are_no_groups() -> None:
    assert Groups.of(lambda start, stop: np.arange(stop), 2, 10, None) is None
    assert Groups.of(lambda start, stop: np.arange(stop), 2, 10, 10) is None


def test_an_image_outside_of_the_group_is_an_error() -> None:
    texts = {number: ["a b", "a c"] for number in range(6)}
    vocabulary = Vocabulary.build(iter([["a"], ["b"], ["c"]]), 1)

    def make(rows: np.ndarray | None) -> tuple[WeightedReward, CiderDReward]:
        assert rows is not None
        chosen = References.of_texts(texts).selected(rows)
        cider_d = CiderDReward(chosen, vocabulary, eos=True)
        return WeightedReward({"ciderd": 1.0}, cider_d, chosen, vocabulary, "en"), cider_d

    reward = StageReward(make, Groups(lambda start, stop: np.arange(start, stop), 1, np.array([3])))
    reward.begin(0)
    tokens = torch.tensor([vocabulary.encode(["a", "b"])])
    assert len(reward(tokens, torch.tensor([0]))[0]) == 1
    with pytest.raises(IndexError):
        reward(tokens, torch.tensor([2]))
