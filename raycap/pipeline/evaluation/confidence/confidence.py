"""The confidence in a caption: a calibrated probability that it is good, and its expected CIDEr-D.

Both are linear in a few standardized numbers of the caption, its signals (`SIGNALS`). A logistic regression gives the
probability and a ridge regression the CIDEr-D (`evaluation.confidence.fit`). The numbers are in the bundle's file
confidence.json, for each search that they were fitted with. A bundle may come from a stranger, so that all numbers are
bounded when they are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from raycap.models.values import NUMBER
from raycap.pipeline.config.load import parse_section
from raycap.pipeline.storage.untrusted.documents import parse_json

FORMAT = 1
NUM_LOWEST = 4
NUM_FIRST = 4  # tokens, which name the main object
# Of a caption's log-probabilities in nats, EOS included: the mean over its tokens (SOS included, as beams are ranked),
# the sum, the number of tokens, and the lowest ones. A caption with fewer tokens than NUM_LOWEST has zeros in place of
# the missing ones. Of the first NUM_FIRST tokens after SOS, or of all if there are fewer: the mean, and the mean energy
# (`explain.measures`), which is higher on images unlike those of the training. Others improved nothing (BENCHMARKS.md).
SIGNALS = (
    *("mean", "sum", "length"),
    *(f"lowest {rank}" for rank in range(1, NUM_LOWEST + 1)),
    *("first mean", "first energy"),
)
MAX_CIDER = 10.0  # the largest CIDEr-D
logger = logging.getLogger(__name__)

MAX_FITS = 16  # searches of one model; of more, the oldest are removed

Number = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False), NUMBER]
Numbers = Annotated[tuple[Number, ...], Field(min_length=len(SIGNALS), max_length=len(SIGNALS))]
Scales = Annotated[
    tuple[Annotated[float, Field(ge=1e-6, le=1e6), NUMBER], ...],
    Field(min_length=len(SIGNALS), max_length=len(SIGNALS)),
]


class Judgement(NamedTuple):
    """confidence: the probability that the caption is good, in [0, 1]. expected_ciderd: in [0, MAX_CIDER]."""

    confidence: float
    expected_ciderd: float

    def to_json(self) -> dict[str, float]:
        return {key: round(value, 4) for key, value in self._asdict().items()}


@dataclass(frozen=True)
class Linear:
    """weights: one for each standardized signal."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weights: Numbers
    bias: Number

    def __call__(self, standardized: np.ndarray) -> float:
        return float(np.dot(self.weights, standardized) + self.bias)


@dataclass(frozen=True)
class Confidence:
    """The confidence in the best captions of one model and one search.

    search: the settings of the search as text. good_ciderd: a caption is good from this CIDEr-D on; None for the
    synthetic data set, where it is good if it names the main object. num_images: of the fit. mean, scale: of the
    signals of these images, which standardize a caption's signals. log_odds: of a good caption. ciderd: the expected
    CIDEr-D.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    search: Annotated[str, Field(max_length=4096)]
    good_ciderd: Annotated[float, Field(ge=0, le=MAX_CIDER), NUMBER] | None
    num_images: Annotated[int, Field(gt=0, le=10**9), NUMBER]
    mean: Numbers
    scale: Scales
    log_odds: Linear
    ciderd: Linear

    @property
    def good(self) -> str:
        """What a good caption is, in words."""
        return "the main object is named" if self.good_ciderd is None else f"CIDEr-D of {self.good_ciderd:g} or more"

    @property
    def digest(self) -> str:
        """Tells fits apart."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def judge(self, signals: Sequence[float]) -> Judgement | None:
        """The confidence in a caption; None for a caption without signals."""
        if not signals:
            return None
        standardized = (np.asarray(signals, np.float64) - self.mean) / self.scale
        probability = (1 + math.tanh(self.log_odds(standardized) / 2)) / 2  # the logistic function
        return Judgement(probability, min(max(self.ciderd(standardized), 0.0), MAX_CIDER))


def caption_signals(log_probs: np.ndarray, lengths: np.ndarray, energies: np.ndarray) -> list[tuple[float, ...]]:
    """The signals of n captions in the order of SIGNALS; () for a caption that the search did not find.

    log_probs: (n, T) of each token in nats, 0 at SOS and after the end. lengths: (n,) with SOS and EOS, 2 or
    more. energies: (n,), the mean energy of the first NUM_FIRST tokens (`models.explain.measures`).
    """
    sums = log_probs.sum(1, dtype=np.float64)
    padded = np.pad(log_probs, ((0, 0), (0, NUM_LOWEST)))
    lowest = np.sort(padded, axis=1)[:, :NUM_LOWEST]
    firsts = log_probs[:, 1 : NUM_FIRST + 1].sum(1, dtype=np.float64) / np.minimum(lengths - 1, NUM_FIRST)
    table = np.column_stack((sums / lengths, sums, lengths, lowest, firsts, energies))
    return [tuple(row.tolist()) if np.isfinite(row).all() else () for row in table.round(6)]


def find_fit(fits: Sequence[Confidence], search: str) -> Confidence | None:
    """The confidence that was fitted with this search; None if there is none."""
    return next((fit for fit in fits if fit.search == search), None)


def with_fit(fits: Sequence[Confidence], fit: Confidence) -> tuple[Confidence, ...]:
    """The confidences of a model with a further one, which replaces that of the same search."""
    return (*(each for each in fits if each.search != fit.search), fit)[-MAX_FITS:]


def dump_confidences(fits: Sequence[Confidence]) -> str:
    """The text of confidence.json."""
    return json.dumps({"format": FORMAT, "signals": SIGNALS, "fits": [asdict(fit) for fit in fits]}, indent=1)


@dataclass(frozen=True)
class _Content:
    """The content of confidence.json."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    format: Literal[1]
    signals: tuple[str, ...]
    fits: Annotated[tuple[Confidence, ...], Field(max_length=MAX_FITS)]


def parse_confidences(data: bytes, name: str) -> tuple[Confidence, ...]:
    """The content of confidence.json; () if its signals are those of another version. Raises UserError.

    name: the file, for messages.
    """
    content = parse_json(data, name)
    if isinstance(content, dict) and content.get("signals", [*SIGNALS]) != [*SIGNALS]:
        _log_other_signals(name)
        return ()
    return parse_section(_Content, content, name).fits


@lru_cache(maxsize=128)
def _log_other_signals(name: str) -> None:
    """Names a file in the log once, because a command reads the file of a bundle several times."""
    logger.info(f"{name} is not used: it was fitted with other signals than {', '.join(SIGNALS)}")
