"""The weighted sum of rewards that `scst.reward` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.training.rewards.cider_d import CiderDReward
from raycap.pipeline.training.rewards.references import References
from raycap.pipeline.training.rewards.words import Bleu, Length, Repetition, RougeL, SampledWords, WordReward

CIDER_D = "ciderd"  # the name of `CiderDReward`, which reads token ids, so that its EOS can count as a word
WORD_REWARDS: dict[str, WordReward] = {
    "bleu1": Bleu(1),
    "bleu2": Bleu(2),
    "bleu3": Bleu(3),
    "bleu4": Bleu(4),
    "rouge_l": RougeL(),
    "length": Length(),
    "repetition": Repetition(),
}
REWARDS = (CIDER_D, *WORD_REWARDS)


class WeightedReward:
    """The sum of weights times rewards of `REWARDS`.

    Captions are split into words only if a reward needs them. This reads the token ids from the device and takes the
    time that `SampledWords` states; the rewards of `WORD_REWARDS` then take less than 0.1 ms per caption.

    references, language: see `SampledWords`; cider_d has the same images in the same order.
    """

    def __init__(
        self,
        weights: Mapping[Any, float],
        cider_d: CiderDReward,
        references: References,
        vocabulary: Vocabulary,
        language: str,
    ) -> None:
        self.weights = dict(sorted(weights.items()))  # so that rounding does not depend on the order in a file
        self._cider_d, self._split = cider_d, None
        if weights.keys() & WORD_REWARDS.keys():
            self._split = SampledWords(references, vocabulary, language)

    def __call__(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum (R,) for R captions, and each reward's values (R,) without its weight, by name; all float64.

        tokens, indices: see `CiderDReward`.
        """
        values = {}
        if CIDER_D in self.weights:
            values[CIDER_D] = self._cider_d(tokens, indices)
        if self._split is not None:
            captions, numbers = self._split(tokens, indices)
            for name in self.weights.keys() & WORD_REWARDS.keys():
                values[name] = torch.from_numpy(WORD_REWARDS[name](captions))[numbers].to(tokens.device)
        parts = [weight * values[name] for name, weight in self.weights.items()]
        return torch.stack(parts).sum(0), values
