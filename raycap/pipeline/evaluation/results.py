"""The results of an evaluation: the captions of each split with their scores, and the scores of all splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.evaluation.captions import ImageCaption
from raycap.pipeline.evaluation.scores.metrics import JAVA_METRICS, MetricScores, has_meaning
from raycap.pipeline.runtime.secrets import without_secrets

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton
    from raycap.pipeline.config.sections import EvaluationSection
    from raycap.pipeline.evaluation.comparison.protocol import Protocol
    from raycap.pipeline.evaluation.comparison.published import FinalRow
    from raycap.pipeline.evaluation.confidence import Confidence, Quality
    from raycap.pipeline.evaluation.evaluate import Inputs
    from raycap.pipeline.storage.path import StoragePath


class ConstraintCounts(NamedTuple):
    """The number of images with constraints, and of those whose caption satisfies all that it must, fewer, or none."""

    images: int
    all: int
    some: int
    none: int
    not_held: list[int]  # the images whose caption satisfies fewer constraints than it must

    @classmethod
    def of(
        cls, captions: Mapping[int, ImageCaption], automata: Mapping[int, ConstraintAutomaton]
    ) -> ConstraintCounts | None:
        """Counts the images by their best captions; None if no image has constraints."""
        required = {
            image: automata[image].num_required
            for image, each in captions.items()
            if image in automata and each.n_best and automata[image].num_required
        }
        if not required:
            return None
        held = {image: captions[image].n_best[0].num_satisfied or 0 for image in required}
        incomplete = [image for image, number in required.items() if held[image] < number]
        num_none = sum(number <= 0 for number in held.values())
        num_all, num_some = len(required) - len(incomplete), len(incomplete) - num_none
        return cls(len(required), num_all, num_some, num_none, incomplete)

    def __str__(self) -> str:
        return (
            f"{self.all} of {self.images} captions hold the required constraints, {self.some} fewer, {self.none} none"
        )


@dataclass(frozen=True)
class SplitScores:
    """The captions of a split, and their scores if the split has references.

    images: by image id; an image that cannot be read has the reason in place of a caption. constraints: None if no
    image has any. main_object_hits: whether the main object is named, by image id; only for the synthetic data set.
    quality: of the confidence; None if there is none, and for the split on which it was fitted. published: printed
    scores, each with why ours cannot be compared, or "".
    """

    split: str
    images: Mapping[int, ImageCaption]
    constraints: ConstraintCounts | None = None
    scores: MetricScores | None = None
    main_object_hits: Mapping[int, bool] = field(default_factory=dict)
    quality: Quality | None = None
    published: Sequence[tuple[FinalRow, str]] = ()

    @cached_property
    def captions(self) -> dict[int, str]:
        """The best caption of each image that has one."""
        return {image: each.n_best[0].caption for image, each in self.images.items() if each.n_best}

    @cached_property
    def unreadable(self) -> dict[int, str]:
        """{image id: reason} of images without a caption."""
        return {image: each.error for image, each in self.images.items() if each.error is not None}

    @cached_property
    def several(self) -> dict[int, list[str]]:
        """All captions of each image; {} if the search gave one caption per image."""
        several = {image: [one.caption for one in each.n_best] for image, each in self.images.items() if each.n_best}
        return several if any(len(captions) > 1 for captions in several.values()) else {}

    @cached_property
    def signals(self) -> dict[int, tuple[float, ...]]:
        """The signals of each best caption that has some."""
        best = {image: each.n_best[0] for image, each in self.images.items() if each.n_best}
        return {image: each.signals for image, each in best.items() if each.signals}

    @property
    def alignment(self) -> float | None:
        """The mean over the best captions that have an alignment; None when none has one."""
        best = [each.n_best[0].alignment for each in self.images.values() if each.n_best]
        values = [value for value in best if value is not None]
        return sum(values) / len(values) if values else None

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

    @cached_property
    def cider_by_image(self) -> dict[int, float]:
        """CIDEr-D by image id; empty when it is unavailable."""
        score = None if self.scores is None else self.scores.by_name.get("CIDEr-D")
        if self.scores is None or score is None or score.per_image is None:
            return {}
        return dict(zip(self.scores.image_ids, score.per_image, strict=True))

    def scored_uris(self, uris: Mapping[int, str]) -> list[str]:
        """The URIs of the images that were scored; without scores, of those that were captioned. uris: by image id."""
        scored = set(self.captions) if self.scores is None else set(self.scores.image_ids)
        return [uri for image, uri in uris.items() if image in scored]

    def to_json(self) -> Values:
        """The split's entry in scores.json."""
        rows = [
            {"name": row.name, "table": row.table, "scores": row.scores, "difference": difference}
            for row, difference in self.published
        ]
        entry = {
            "images": len(self.captions),
            "unreadable": self.unreadable,
            "alignment": self.alignment,
            "constraints": self.constraints and self.constraints._asdict(),
            **self.scores_to_json(),
            "published": rows,
        }
        return entry if self.quality is None else entry | {"confidence": self.quality.to_json()}

    def scores_to_json(self) -> Values:
        """The part of the entry that needs references; {} without scores."""
        of_images = {"main_object": self.main_object, "per_image_CIDEr-D": self.cider_by_image}
        return {} if self.scores is None else self.scores.to_json() | of_images

    def flat(self) -> dict[str, float]:
        """The scores as the tracker and the model registry store them, with keys like "test_CIDEr-D"."""
        values = self.values | {"main_object": self.main_object, "alignment": self.alignment}
        return {f"{self.split}_{name}": value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation.

    bundles: of the model, or several of an ensemble. search: by which the images were captioned. confidence: the one
    that was fitted on the validation split; None without this split, and if none could be fitted. seconds_per_image: of
    a worker, without the loading of models; None for captions of an earlier attempt.
    """

    bundles: tuple[StoragePath, ...]
    protocol: Protocol
    search: EvaluationSection
    splits: tuple[SplitScores, ...]
    inputs: Inputs
    confidence: Confidence | None = None
    seconds_per_image: float | None = None

    def __getitem__(self, split: str) -> SplitScores:
        return next(each for each in self.splits if each.split == split)

    def of(self, *splits: str) -> Scores:
        """The part of these splits."""
        return replace(self, splits=tuple(self[split] for split in splits))

    @property
    def language(self) -> str:
        """That of the captions."""
        return self.protocol.language

    @property
    def unreadable(self) -> dict[int, str]:
        """{image id: reason} of images without a caption."""
        return {image: reason for each in self.splits for image, reason in each.unreadable.items()}

    @property
    def unavailable(self) -> dict[str, str]:
        """{metric: reason} of the metrics that could not be computed now, but may be later or on another machine."""
        scores = [score for each in self.splits if each.scores for score in each.scores.by_name.items()]
        names = [name for name in JAVA_METRICS if has_meaning(name, self.language)]
        return {name: score.unavailable for name, score in scores if score.unavailable and name in names}

    def flat(self) -> dict[str, float]:
        """{"test_CIDEr-D": ...}: the scores as the tracker and the model registry store them."""
        return {name: value for each in self.splits for name, value in each.flat().items()}

    def to_json(self) -> Values:
        """The content of scores.json."""
        return {
            "models": [without_secrets(str(bundle)) for bundle in self.bundles],
            "protocol": asdict(self.protocol),
            "signature": self.protocol.signature,
            "splits": {each.split: each.to_json() for each in self.splits},
        }
