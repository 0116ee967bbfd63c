"""Batches and the order of their samples: workers share the global batch, an epoch contains every sample once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.models.base import Features
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.sections import DataSection, StageSection
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.store import FeatureStore, write_shard
from raycap.pipeline.training.batches import Batch, Batches, CaptionTokens, samples_at, target_positions
from tests.conftest import write_karpathy
from tests.support.caption_tokens import PlainCaptionTokens


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Images, CaptionTokens]:
    root = write_karpathy(tmp_path / "set", {"train": 13})
    dataset = read_annotations(DataSection(root=str(root)), root).dataset
    keys = [f"key{number}" for number in range(13)]
    write_shard(tmp_path / "store", keys, np.arange(13, dtype=np.float32)[:, None, None].repeat(2, 1))
    table = dataset.table.set_column(4, "key", [keys])
    dataset = type(dataset)(table)
    vocabulary = Vocabulary.build(dataset.tokens(), 1)
    images = Images(dataset, FeatureStore(tmp_path / "store"), 10**6, 1)
    return images, CaptionTokens.of(dataset, vocabulary)


def stage(**values: object) -> StageSection:
    base = {"name": "s", "objective": "cross_entropy", "epochs": 1, "batch_size": 4, "lr": 1e-3}
    return StageSection.model_validate(base | values)


def test_an_epoch_of_pairs_holds_every_caption_once(parts: tuple[Images, CaptionTokens]) -> None:
    batches = Batches(*parts, stage(batch_size=5), seed=1, rank=0, world_size=1)
    epoch = Counter(tuple(row) for group in batches.stream(0, 13) for batch in group for row in batch.tokens.tolist())
    captions = Counter(tuple(row) for row in parts[1].padded(np.arange(65)).tolist())
    assert sum(epoch.values()) == 65 and epoch == captions


def test_an_image_gives_other_captions_in_other_steps(parts: tuple[Images, CaptionTokens]) -> None:
    """Each image has five captions and gives two. Over many epochs it gives all of them about equally often."""
    batches = Batches(*parts, stage(batch_size=13, captions_per_image=2), seed=1, rank=0, world_size=1)
    steps = [batch for group in batches.stream(0, 60) for batch in group]
    given = Counter(tuple(row) for batch in steps for row in batch.tokens.tolist())
    everything = {tuple(row) for row in parts[1].padded(np.arange(65)).tolist()}
    assert {tuple(int(token) for token in row) for row in given} == everything and min(given.values()) > 20


def test_a_batch_moves_as_a_whole() -> None:
    """Features are converted, region lengths and tokens keep their types, pixels become channels-last."""
    regions = Features(torch.ones(2, 3, 4), torch.tensor([1, 3]), torch.ones(2, 3, 4))
    tokens = torch.ones(2, 5, dtype=torch.int64)
    batch = Batch(regions, tokens, target_positions(tokens, 0), torch.tensor([0, 1]), 8, 2)
    moved = batch.to(torch.device("meta"), torch.float64)
    tensors = (moved.features.tokens, moved.features.lengths, moved.features.boxes, moved.tokens)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert moved.features.tokens.dtype == torch.float64 and moved.tokens.dtype == torch.int64
    assert (moved.global_targets, moved.global_images) == (8, 2)
    assert moved.target_positions.shape == (8,) and moved.target_positions.device == moved.images.device
    zeros = Features(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))
    transform = ImageTransform(8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    pixels = replace(batch, features=zeros, transform=transform).to(torch.device("cpu"))
    assert (pixels.features.tokens == -1).all(), "normalized by the transform of the images"
    assert pixels.features.tokens.shape == (2, 3, 8, 8)
    assert pixels.features.tokens.is_contiguous(memory_format=torch.channels_last)


def test_caption_tokens_equal_the_plain_form() -> None:
    """Captions are random, and those of some images are left out."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 60):
        for _ in range(3):
            ids = [
                [[1, *rng.integers(3, 99, rng.integers(0, 6)).tolist(), 2] for _ in range(rng.integers(0, 4))]
                for _ in range(size)
            ]
            ids[0].append([1, 2])  # a caption without a word, and at least one caption
            rows = np.union1d(0, np.flatnonzero(rng.random(size) < 0.7))
            plain = PlainCaptionTokens([ids[row] for row in rows], pad=0)
            captions = CaptionTokens([ids[row] for row in rows], pad=0)
            every = np.arange(len(plain.image_of))
            assert len(captions) == len(every) and np.array_equal(captions.first, plain.first)
            for numbers in (every, rng.permutation(every), every[:1], rng.choice(every, 9)):
                assert np.array_equal(captions.images_of(numbers), plain.image_of[numbers])
                assert np.array_equal(captions.target_counts(numbers), plain.target_counts(numbers))
                padded = captions.padded(numbers)
                assert torch.equal(padded, plain.padded(numbers)) and padded.dtype == torch.int64
            longest = np.argsort(-plain.target_counts(every), kind="stable")
            for count in (1, 3, len(every) + 1):
                assert np.array_equal(captions.longest(count), longest[:count])


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(samples_at(np.arange(size) + epoch * size, size, seed)) == list(range(size))


def test_the_order_is_as_recorded() -> None:
    """Another order would change every training run."""
    recorded = "8 6 7 5 2 4 11 3 10 1 9 0 10 7 4 3 8 5 2 1 6 11 9 0"
    assert samples_at(np.arange(24), 12, 7).tolist() == [*map(int, recorded.split())]


def test_an_order_has_no_structure() -> None:
    """Position and sample are independent, and the step from one sample to the next is irregular.

    The chi-squared statistic of a 10 x 10 table has 81 degrees of freedom: mean 81, variance 162. A shift or an affine
    map, which no correlation may show, gives a table that is far too uneven or far too even.
    """
    for seed in range(5):
        order = samples_at(np.arange(1000), 1000, seed)
        table, _, _ = np.histogram2d(np.arange(1000), order, bins=10)
        statistic = ((table - 10) ** 2 / 10).sum()
        assert 81 - 5 * 162**0.5 < statistic < 81 + 5 * 162**0.5
        assert len(np.unique(np.diff(order))) > 500
