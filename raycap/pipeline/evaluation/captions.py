"""The captions of one image with their values, the confidence in the best one, and what explains its words.

Every way to caption images (evaluations, `raycap caption`, the Python API, `raycap serve`, MLflow) gives these classes.
This module imports neither torch nor numpy, so that `import raycap` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from raycap.models.config import Values

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RankedCaption:
    """One caption that a search found, with the values that were computed.

    log_prob: the sum of the log-probabilities of its tokens in nats, EOS included. tokens: the texts of its tokens,
    words or pieces of words, without EOS. ids: the ids of its tokens with padding, and with EOS unless the length limit
    cut the caption off. alignment: the agreement of words and image tokens (`explain.alignment`), only for the best
    caption of a single model. num_satisfied: the number of its image's constraints that it satisfies; None for an image
    without constraints. signals: the numbers from which the confidence follows (`evaluation.confidence`), only for the
    best caption.
    """

    caption: str
    log_prob: float
    tokens: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    alignment: float | None = None
    num_satisfied: int | None = None
    signals: tuple[float, ...] = ()

    def to_json(self) -> Values:
        """One entry of an n-best file, without its tokens and without values that were not computed."""
        values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("tokens", "ids")
        }
        return {key: value for key, value in values.items() if value is not None and value != ()}


@dataclass(frozen=True)
class ImageCaption:
    """The captions of one image, best first, or the reason why it has none.

    n_best: () for an image that cannot be read. confidence: the probability that the best caption is good, in [0, 1];
    expected_ciderd: its expected CIDEr-D. Both are None if the model has no confidence for this search. error: why the
    image has no caption; None if it has one.
    """

    n_best: tuple[RankedCaption, ...] = ()
    confidence: float | None = None
    expected_ciderd: float | None = None
    error: str | None = None

    @property
    def caption(self) -> str | None:
        """The best caption; None for an image that cannot be read."""
        return self.n_best[0].caption if self.n_best else None

    @property
    def log_prob(self) -> float | None:
        """The log-probability of the best caption in nats."""
        return self.n_best[0].log_prob if self.n_best else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the best caption."""
        return self.n_best[0].tokens if self.n_best else ()

    def to_json(self) -> Values:
        """The values of a line of `raycap caption --json`, without those that the image does not have."""
        if self.error is not None:
            return {"error": self.error}
        entries = [{"caption": each.caption, "log_prob": round(each.log_prob, 6)} for each in self.n_best]
        judged = {"confidence": self.confidence, "expected_ciderd": self.expected_ciderd}
        rounded = {key: round(value, 4) for key, value in judged.items() if value is not None}
        return entries[0] | rounded | ({"n_best": entries} if len(entries) > 1 else {})


@dataclass(frozen=True)
class Explanation:
    """Where a model looked for each of the W words of a caption, on the grid of N = rows x columns image tokens.

    attention: (W, N), the cross-attention of the last decoder layer; a row sums to 1 with the tokens before the grid.
    attribution: (W, N), the share of each image token in the change of the word's log-probability, by integrated
    gradients; None if it was not computed. steps: of the integration. gap: the largest difference, in nats, between
    the change and the sum of a word's attributions.
    """

    caption: str
    words: tuple[str, ...]
    grid: tuple[int, int]
    attention: np.ndarray
    attribution: np.ndarray | None = None
    steps: int = 0
    gap: float = 0.0
