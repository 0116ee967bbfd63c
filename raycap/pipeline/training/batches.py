"""The batches of a stage: the samples that a worker gets at a step, with features (or pixels) and caption tokens.

A sample is an image with `captions_per_image` captions. If cross entropy uses one caption per image, a sample is an
(image, caption) pair instead, as in the paper. The sample at a global position depends on the seed alone, so a stage
can resume at any step with any number of workers.

The order of samples is a permutation that depends on seed and epoch. A keyed Feistel network over the next power of
four computes each position of the permutation alone, without a table. Values outside the data set are permuted again
until they are inside (cycle walking).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from raycap.models.base import Features, map_tensors
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.features.model_inputs import Images, on_device
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runtime.names import shown

NUM_PREFETCHED = 3  # number of steps whose batches are prepared while the current step is computed
CAPTION_SEEDS, VIEW_SEEDS = 1, 2  # the last part of seeds, so that captions, views and samples have different seeds
_ROUNDS = 6  # of the Feistel network
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


def share(size: int, index: int, count: int) -> slice:
    """The share number `index`, if `size` samples are divided into `count` contiguous shares of nearly equal size."""
    return slice(index * size // count, (index + 1) * size // count)


class CaptionTokens:
    """Token ids (SOS words EOS) of the captions of images, in three arrays. A caption of 12 words takes 64 bytes.

    Image i has the captions first[i] to first[i + 1] - 1, and caption c has ids[offsets[c] : offsets[c + 1]].
    """

    def __init__(self, images: Iterable[Sequence[Sequence[int]]], pad: int) -> None:
        """images: for each image the ids of each of its captions. pad: the id of PAD."""
        ids, offsets, first = array("i"), array("q", [0]), array("q", [0])
        for captions in images:
            for caption in captions:
                ids.extend(caption)
                offsets.append(len(ids))
            first.append(len(offsets) - 1)
        self.ids, self.offsets, self.first, self.pad = np.array(ids), np.array(offsets), np.array(first), pad

    @classmethod
    def of(cls, images: Dataset, vocabulary: Vocabulary) -> CaptionTokens:
        """Encodes the captions of images. A million captions take about 10 s."""
        lists = images.texts_by_image(vocabulary.tokenizer)
        encoded = ([vocabulary.encode(words) for words in map(vocabulary.tokenize, texts)] for texts in lists)
        return cls(encoded, vocabulary.pad)

    def __len__(self) -> int:
        return int(self.first[-1])

    def images_of(self, captions: np.ndarray) -> np.ndarray:
        """The number of each caption's image. captions: caption numbers."""
        return np.searchsorted(self.first, captions, side="right") - 1

    def padded(self, captions: np.ndarray) -> Tensor:
        """Token ids (len(captions), T), int64, of the captions with these numbers, padded with PAD to the longest."""
        starts, ends = self.offsets[captions], self.offsets[captions + 1]
        tokens = np.full((len(captions), int((ends - starts).max())), self.pad, np.int64)
        for row, start, end in zip(tokens, starts, ends, strict=True):
            row[: end - start] = self.ids[start:end]
        return torch.from_numpy(tokens)

    def target_counts(self, captions: np.ndarray) -> np.ndarray:
        """Number of target tokens (words and EOS) of each caption."""
        return self.offsets[captions + 1] - self.offsets[captions] - 1

    def longest(self, count: int) -> np.ndarray:
        """The numbers of the `count` longest captions, the longest first."""
        return np.argsort(-self.target_counts(np.arange(len(self))), kind="stable")[:count]


def captions_by_stage(
    folder: RunFolder, stages: Sequence[StageSection], excluded: Sequence[str] = ()
) -> dict[str, CaptionTokens]:
    """The captions on which each stage trains, by stage name. Stages with the same images share an object.

    excluded: content keys of images that are left out.
    """
    by_splits: dict[tuple[str, ...], CaptionTokens] = {}
    for splits in {folder.training_splits(stage) for stage in stages}:
        by_splits[splits] = CaptionTokens.of(folder.dataset.split(*splits).without(excluded), folder.vocabulary)
    return {stage.name: by_splits[folder.training_splits(stage)] for stage in stages}


@dataclass(frozen=True)
class Batch:
    """One worker's part of one micro-step: B images with K captions each."""

    features: Features
    tokens: Tensor  # (B * K, T) with SOS, EOS and PAD
    target_positions: Tensor  # (P,) positions of the target tokens, words and EOS, in tokens[:, 1:].flatten()
    images: Tensor  # (B,) rows of the data set, int64
    global_targets: int  # target tokens of the whole optimizer step, over all workers
    global_images: int  # images of the whole optimizer step
    transform: ImageTransform | None = None  # if the features are pixels, how they become model inputs

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        """The batch on `device`. The features get the type `dtype`."""
        features = on_device(self.features, device, dtype, self.transform)
        return self._mapped(features, lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """The batch in page-locked memory, so that the copy to a GPU does not block the processor."""
        return self._mapped(map_tensors(self.features, Tensor.pin_memory), Tensor.pin_memory)

    def _mapped(self, features: Features, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with these features, and with `change` applied to the other tensors."""
        tokens, positions, images = map(change, (self.tokens, self.target_positions, self.images))
        return replace(self, features=features, tokens=tokens, target_positions=positions, images=images)


def target_positions(tokens: Tensor, pad: int) -> Tensor:
    """`Batch.target_positions` for tokens (R, T) on the CPU. On a GPU, `nonzero` would wait for all queued kernels."""
    return (tokens[:, 1:].flatten() != pad).nonzero()[:, 0]


class Batches:
    """The batches of one stage for one worker. `at(step)` does not depend on earlier calls.

    The samples of a step are divided among its micro-steps and among the workers. The shares need not be equal,
    because a loss is divided by the counts of the whole step (`Batch.global_targets`, `Batch.global_images`).
    """

    def __init__(
        self,
        images: Images,
        captions: CaptionTokens,
        stage: StageSection,
        *,
        seed: int,
        rank: int,
        world_size: int,
        pins: bool = False,
    ) -> None:
        """pins: if true, batches are in page-locked memory, for a GPU."""
        self.images, self.captions, self.stage = images, captions, stage
        self.seed, self.rank, self.world_size, self.pins = seed, rank, world_size, pins
        self.num_samples = len(captions) if stage.samples_are_pairs else len(images)

    def stream(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """Yields the micro-batches of each step from start to stop - 1.

        A thread prepares the batches of the next NUM_PREFETCHED steps while the caller computes the current step.
        """
        with ThreadPoolExecutor(1) as pool:
            submitted = (pool.submit(self.at, step) for step in range(start, stop))  # lazily, step by step
            upcoming = deque(islice(submitted, NUM_PREFETCHED))
            try:
                while upcoming:
                    current = upcoming.popleft().result()
                    upcoming.extend(islice(submitted, 1))
                    yield current
            finally:  # if the caller has stopped early, steps are pending
                pool.shutdown(cancel_futures=True)

    def at(self, step: int) -> list[Batch]:
        """This worker's `gradient_accumulation_steps` micro-batches of a step."""
        stage = self.stage
        positions = np.arange(stage.batch_size) + step * stage.batch_size
        images, captions = self._rows(samples_at(positions, self.num_samples, self.seed), step)
        seeds = view_seeds(images, positions // self.num_samples, self.seed)
        targets = int(self.captions.target_counts(captions).sum())
        num_shares = self.world_size * stage.gradient_accumulation_steps
        batches = []
        for part in range(stage.gradient_accumulation_steps):
            samples = share(stage.batch_size, part * self.world_size + self.rank, num_shares)
            rows, tokens = images[samples], self.captions.padded(captions[samples].reshape(-1))
            batch = Batch(
                features=self._load(rows, seeds[samples]),
                tokens=tokens,
                target_positions=target_positions(tokens, self.captions.pad),
                images=torch.from_numpy(rows),
                global_targets=targets,
                global_images=stage.batch_size,
                transform=self.images.transform,
            )
            batches.append(batch.pinned() if self.pins else batch)
        return batches

    def _load(self, rows: np.ndarray, seeds: np.ndarray) -> Features:
        """Calls `Images.load`. If an image cannot be decoded, raises ValueError with the image's URI."""
        try:
            return self.images.load(rows, seeds)
        except BadImage:  # does not name the image, so each image is loaded alone to find the bad one
            for row, seed in zip(rows, seeds, strict=True):
                try:
                    self.images.load(np.array([row]), np.array([seed]))
                except BadImage as error:
                    image = f"training cannot use the image {shown(self.images.uri(row))}: {error}"
                    raise ValueError(f"{image}; take it out of the data (`raycap check` lists such images)") from error
            raise

    def _rows(self, samples: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Image rows (S,) and caption rows (S, K) of S samples.

        An image gives K consecutive captions, from a random start and in cyclic order. So all of its captions are used
        over the epochs. An image with fewer than K captions repeats some.
        """
        if self.stage.samples_are_pairs:
            return self.captions.images_of(samples), samples[:, None]
        first = self.captions.first[samples]
        count = self.captions.first[samples + 1] - first
        generator = np.random.default_rng(seed_of(self.seed, step, CAPTION_SEEDS))
        start = generator.integers(0, 2**31, len(samples))[:, None]
        return samples, first[:, None] + (start + np.arange(self.stage.captions_per_image)) % count[:, None]


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 whose values look random: splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """One 63-bit seed from several numbers (run seed, stage, step, rank, ...)."""
    state = np.array([0x9E3779B97F4A7C15], np.uint64)  # the increment of splitmix64
    for part in parts:
        state = mix(state ^ np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64))  # the mask makes the number unsigned
    return int(state[0] >> np.uint64(1))


def samples_at(positions: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Sample numbers at global positions (int64, any shape). Position p belongs to epoch p // num_samples.

    Every epoch contains every sample once, in another order. The expected time is proportional to the number of
    positions.
    """
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), num_samples)
    result = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        permuted = _permute(offsets[mask].astype(np.uint64), num_samples, seed_of(seed, int(epoch)))
        result[mask] = permuted.astype(np.int64)
    return result


def view_seeds(images: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """The seeds (S,) uint64 for the random views of images. images, epochs: integers (S,)."""
    seeds = np.empty(len(images), np.uint64)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        seeds[mask] = mix(images[mask].astype(np.uint64) ^ np.uint64(seed_of(seed, int(epoch), VIEW_SEEDS)))
    return seeds


def _permute(values: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Applies the seed's permutation of the numbers from 0 to size - 1 to values (n,), which are uint64."""
    shift = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = mix(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(seed))
    permuted = _feistel(values, shift, keys)
    outside = np.flatnonzero(permuted >= size)
    while len(outside):  # cycle walking ends inside [0, size), and the result is still a bijection
        again = _feistel(permuted[outside], shift, keys)
        permuted[outside] = again
        outside = outside[again >= size]
    return permuted


def _feistel(values: np.ndarray, shift: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Permutes the numbers of 2 * `shift` bits by one Feistel round per key."""
    mask = (np.uint64(1) << shift) - np.uint64(1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << shift) | right
