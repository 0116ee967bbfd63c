"""Batches of a stage: which samples a worker sees at a step, and their features (or pixels) and caption ids.

A sample is an image with `captions_per_image` captions, or an (image, caption) pair when that is 1: the paper's
sampling. What is at global position p is a function of the seed alone (`pipeline.training.sample_order`), so a stage
continues at any step with any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.base import Features
from pipeline.config.sections import StageSection
from pipeline.data.dataset import Dataset
from pipeline.data.vocabulary import Vocabulary
from pipeline.features.model_inputs import Images
from pipeline.training.sample_order import samples_at, seed_of


class Captions:
    """Caption ids of a data set, flat: SOS words EOS, all captions of image i in rows first[i] to first[i + 1]."""

    def __init__(self, dataset: Dataset, vocabulary: Vocabulary) -> None:
        ids: list[int] = []
        ends, first = [0], [0]
        for captions in dataset.column("captions"):
            for caption in captions:
                ids.extend(vocabulary.encode(vocabulary.tokenize(caption)))
                ends.append(len(ids))
            first.append(len(ends) - 1)
        self.ids = np.array(ids, np.int32)
        self.ends = np.array(ends, np.int64)
        self.first = np.array(first, np.int64)
        self.image_of = np.repeat(np.arange(len(first) - 1), np.diff(self.first))
        self.pad = vocabulary.pad

    def rows(self, captions: np.ndarray) -> Tensor:
        """Token ids (len(captions), T), padded with PAD to the longest; int64."""
        lengths = self.ends[captions + 1] - self.ends[captions]
        columns = np.arange(lengths.max())
        inside = columns < lengths[:, None]
        places = np.where(inside, self.ends[captions][:, None] + columns, 0)
        return torch.from_numpy(np.where(inside, self.ids[places], self.pad).astype(np.int64))

    def target_counts(self, captions: np.ndarray) -> np.ndarray:
        """Target tokens (words and EOS) of each caption."""
        return self.ends[captions + 1] - self.ends[captions] - 1


@dataclass(frozen=True)
class Batch:
    """One worker's part of one micro-step."""

    features: Features
    tokens: Tensor  # (B * K, T) with SOS, EOS and PAD
    images: np.ndarray  # (B,) rows of the data set
    global_targets: int  # target tokens of the whole optimizer step, over all workers
    global_images: int  # images of the whole optimizer step


class Batches:
    """The batches of one stage for one worker; `at(step)` is a function of its arguments alone."""

    def __init__(
        self, images: Images, captions: Captions, stage: StageSection, *, seed: int, rank: int, world_size: int
    ) -> None:
        self.images, self.captions, self.stage = images, captions, stage
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.pairs = stage.captions_per_image == 1 and stage.objective == "cross_entropy"
        self.num_samples = len(captions.image_of) if self.pairs else len(images)

    def stream(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps start..stop-1, each prepared while the step before it is computed."""
        if start >= stop:
            return
        with ThreadPoolExecutor(1) as ahead:
            following = ahead.submit(self.at, start)
            for step in range(start, stop):
                current = following.result()
                if step + 1 < stop:
                    following = ahead.submit(self.at, step + 1)
                yield current

    def at(self, step: int) -> list[Batch]:
        """This worker's micro-batches of a step: `gradient_accumulation_steps` of them."""
        stage = self.stage
        samples = samples_at(np.arange(stage.batch_size) + step * stage.batch_size, self.num_samples, self.seed)
        images, captions = self._chosen(samples, step)
        targets = int(self.captions.target_counts(captions).sum())
        share = stage.batch_size // (self.world_size * stage.gradient_accumulation_steps)
        batches = []
        for part in range(stage.gradient_accumulation_steps):
            low = (part * self.world_size + self.rank) * share
            mine = images[low : low + share]
            tokens = self.captions.rows(captions[low : low + share].reshape(-1))
            batches.append(Batch(self.images.load(mine), tokens, mine, targets, stage.batch_size))
        return batches

    def _chosen(self, samples: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Image rows (S,) and caption rows (S, K) of samples.

        With K captions an image, a random run of K of its captions in cyclic order, so that images with more show
        all of them over the epochs and images with fewer repeat some.
        """
        if self.pairs:
            return self.captions.image_of[samples], samples[:, None]
        first, count = self.captions.first[samples], np.diff(self.captions.first)[samples]
        generator = np.random.default_rng(seed_of(self.seed, step, 1))
        start = generator.integers(0, 2**31, len(samples))[:, None]
        return samples, first[:, None] + (start + np.arange(self.stage.captions_per_image)) % count[:, None]
