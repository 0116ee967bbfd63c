"""The reward of a stage of SCST: over all its training images, or over those of some steps at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycap.pipeline.training.rewards.cider_d import CiderDReward, sampled_documents
from raycap.pipeline.training.rewards.weighted import WeightedReward

GROUP_IMAGES = 2**18  # of a group at most: an index of 1.2 GB with five captions per image


@dataclass(frozen=True)
class Groups:
    """The images of a worker's steps, for data sets whose captions no machine can index as a whole.

    A group has the images of `steps` consecutive steps, which `images_of` finds from the first step to before the
    second. sample: the images, ascending, that document frequencies count. They are part of each group's index, so that
    it gives the scores of an index of all images. Its documents, unlike its images, are the same in all groups.
    """

    images_of: Callable[[int, int], np.ndarray]
    steps: int
    sample: np.ndarray

    @classmethod
    def of(
        cls, images_of: Callable[[int, int], np.ndarray], steps: int, num_images: int, document_sample: int | None
    ) -> Groups | None:
        """The groups of training images; None if document frequencies count all images, which one index then has."""
        sample = sampled_documents(num_images, document_sample)
        return None if sample is None else cls(images_of, steps, sample)


class StageReward:
    """The reward of rows of the training images, which `begin` prepares.

    Without groups there is one index, which all processes of a machine share. With groups, each worker builds an index
    at the first step of each group. It has the group's images and the sample, of which CIDEr-D's index takes some 50 s
    per 100,000 images.
    """

    def __init__(
        self, make: Callable[[np.ndarray | None], tuple[WeightedReward, CiderDReward]], groups: Groups | None = None
    ) -> None:
        """make: gives the rewards of these rows of the training images, or of all, numbered in their order."""
        self._make, self._groups = make, groups
        self._group, self._rows = -1, torch.zeros(0, dtype=torch.int64)
        self._made = make(None) if groups is None else None

    @property
    def cider_d(self) -> CiderDReward:
        """The reward by CIDEr-D of the images of the last step that was begun."""
        assert self._made is not None
        return self._made[1]

    def begin(self, step: int) -> None:
        """Prepares the rewards of a step's images."""
        groups = self._groups
        if groups is None or step // groups.steps == self._group:
            return
        self._group = step // groups.steps
        first = self._group * groups.steps
        rows = np.union1d(groups.sample, groups.images_of(first, first + groups.steps))
        self._made = None  # frees the memory of the index before the next one is built
        self._made = self._make(rows)
        self._rows = torch.from_numpy(rows).to(self.cider_d.device)

    def __call__(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """As `WeightedReward`, for rows (R,) of the training images. Raises IndexError for one outside of the group."""
        assert self._made is not None
        reward, _ = self._made
        if self._groups is None:
            return reward(tokens, rows)
        numbers = torch.searchsorted(self._rows, rows).clamp(max=len(self._rows) - 1)
        if not torch.equal(self._rows[numbers], rows):
            raise IndexError("the reward has no index of an image of this step")
        return reward(tokens, numbers)
