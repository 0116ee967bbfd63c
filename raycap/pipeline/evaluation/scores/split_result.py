"""The result of captioning one split: the captions, their values from the beam search, and their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a served model has no Java and not all packages that the metrics need
    from raycap.pipeline.evaluation.scores.metrics import Scores


class Hypothesis(NamedTuple):
    """A caption found by beam search.

    alignment: agreement of words and image tokens (`explain.measures`); only for the best caption of a single model.
    num_satisfied: number of its image's constraints that it satisfies; None for an image without constraints.
    signals: the numbers from which the confidence follows (`evaluation.confidence`); only for the best caption.
    """

    caption: str
    log_prob: float  # sum of the log-probabilities of its tokens, EOS included
    alignment: float | None = None
    num_satisfied: int | None = None
    tokens: tuple[int, ...] = ()  # with padding, and with EOS unless the length limit cut the caption off
    signals: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """One entry of an n-best file, without the values that were not computed."""
        values = {"caption": self.caption, "log_prob": self.log_prob, "alignment": self.alignment}
        return {key: value for key, value in (values | {"held": self.num_satisfied}).items() if value is not None}


class ConstraintCounts(NamedTuple):
    """The number of images with constraints, and of those whose caption satisfies all that it must, fewer, or none."""

    images: int
    all: int
    some: int
    none: int
    not_held: list[int]  # the images whose caption satisfies fewer constraints than it must

    @classmethod
    def tally(cls, satisfied: Mapping[int, tuple[int, int]]) -> ConstraintCounts:
        """Counts images. satisfied: {image id: (number of satisfied constraints, number of required ones)}."""
        constrained = {image: counts for image, counts in satisfied.items() if counts[1]}
        incomplete = [image for image, (num_satisfied, required) in constrained.items() if num_satisfied < required]
        num_none = sum(num_satisfied <= 0 for num_satisfied, _ in constrained.values())
        num_all, num_some = len(constrained) - len(incomplete), len(incomplete) - num_none
        return cls(len(constrained), num_all, num_some, num_none, incomplete)

    def __str__(self) -> str:
        return (
            f"{self.all} of {self.images} captions hold the required constraints, {self.some} fewer, {self.none} none"
        )


@dataclass(frozen=True)
class SplitResult:
    """The captions of a split by image id, and their scores if the split has references."""

    split: str
    captions: Mapping[int, str]
    unreadable: Mapping[int, str] = field(default_factory=dict)  # {image id: reason} of images without a caption
    alignment: float | None = None  # mean over the captions that have one
    constraints: ConstraintCounts | None = None  # None if no image has any
    scores: Scores | None = None
    several: Mapping[int, Sequence[str]] = field(default_factory=dict)  # all captions of each image, if there are more
    # whether the main object is named, by image id; only for the synthetic data set
    main_object_hits: Mapping[int, bool] = field(default_factory=dict)
    signals: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # by image id, as in `Hypothesis`

    @property
    def values(self) -> dict[str, float | None]:
        """Score by metric; None for a metric that is unavailable."""
        return {} if self.scores is None else self.scores.values

    @property
    def main_object(self) -> float | None:
        """The share of images whose main object is named; None for other data sets than the synthetic one."""
        hits = self.main_object_hits.values()
        return sum(hits) / len(hits) if hits else None

    @property
    def signature(self) -> str:
        """The signature of the scores; "" without scores."""
        return "" if self.scores is None else self.scores.signature

    @property
    def cider_by_image(self) -> dict[int, float]:
        """CIDEr-D by image id; empty when it is unavailable."""
        score = None if self.scores is None else self.scores.by_name.get("CIDEr-D")
        if self.scores is None or score is None or score.per_image is None:
            return {}
        return dict(zip(self.scores.image_ids, score.per_image, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The split's entry in scores.json."""
        return {
            "images": len(self.captions),
            "unreadable": dict(self.unreadable),
            "alignment": self.alignment,
            "constraints": self.constraints and self.constraints._asdict(),
            "signals": dict(self.signals),
            **self.scores_to_json(),
        }

    def scores_to_json(self) -> dict[str, Any]:
        """The part of the entry that needs references; {} without scores."""
        of_images = {"main_object": self.main_object, "per_image_CIDEr-D": self.cider_by_image}
        return {} if self.scores is None else self.scores.to_json() | of_images

    def flat(self) -> dict[str, float]:
        """The scores as the tracker and the model registry store them, with keys like "test_CIDEr-D"."""
        values = self.values | {"main_object": self.main_object, "alignment": self.alignment}
        return {f"{self.split}_{name}": value for name, value in values.items() if value is not None}


def mean_alignment(hypotheses: Iterable[Hypothesis]) -> float | None:
    """Mean over the hypotheses that have an alignment; None when none has one."""
    values = [hypothesis.alignment for hypothesis in hypotheses if hypothesis.alignment is not None]
    return sum(values) / len(values) if values else None
