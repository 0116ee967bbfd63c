"""The results of captioning and evaluation: captions of images, the scores of one split, and the scores of all splits.

Every way to caption images (evaluations, `raycap caption`, the Python API, `raycap serve`, MLflow) returns an
`ImageCaption`. A served model has few packages, so this module imports neither torch nor packages that only metrics
need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter

from raycap.models.config import Values
from raycap.pipeline.data.caption_files import N_BEST, write_n_best, write_predictions
from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.untrusted.documents import parse_json, read_document, require_mapping

if TYPE_CHECKING:
    import numpy as np

    from raycap.models.decoding.constraints import ConstraintAutomaton
    from raycap.pipeline.config.sections import EvaluationSection
    from raycap.pipeline.data.dataset import Dataset
    from raycap.pipeline.evaluation.comparison.protocol import Protocol
    from raycap.pipeline.evaluation.comparison.published import FinalRow
    from raycap.pipeline.evaluation.confidence import Confidence, Quality
    from raycap.pipeline.evaluation.scores.metrics import MetricScores
    from raycap.pipeline.storage.path import StoragePath


@dataclass(frozen=True)
class RankedCaption:
    """One caption that a search found, with the values that were computed for it.

    log_prob: the sum of the log-probabilities of its tokens in nats, EOS included. tokens: the texts of its tokens,
    words or pieces of words, without EOS. ids: the ids of its tokens with padding, and with EOS unless the length limit
    cut the caption off. num_satisfied: how many of its image's constraints the caption satisfies, or None if the image
    has no constraints. signals: the numbers from which the confidence is computed (`evaluation.confidence`), only for
    the best caption.
    """

    caption: str
    log_prob: float
    tokens: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    num_satisfied: int | None = None
    signals: tuple[float, ...] = ()

    def to_json(self) -> Values:
        """The caption's entry in an n-best file, without tokens and without values that were not computed."""
        entry: Values = {"caption": self.caption, "log_prob": self.log_prob}
        computed = {"num_satisfied": self.num_satisfied, "signals": self.signals or None}
        return entry | {key: value for key, value in computed.items() if value is not None}


@dataclass(frozen=True)
class ImageCaption:
    """The captions of one image, best first, or the reason why it has none.

    n_best: () if the image cannot be read. confidence: the probability that the best caption is good, in [0, 1].
    expected_ciderd: the expected CIDEr-D of the best caption. Both are None if the model has no confidence for this
    search. error: why the image has no caption, or None if it has one.
    """

    n_best: tuple[RankedCaption, ...] = ()
    confidence: float | None = None
    expected_ciderd: float | None = None
    error: str | None = None

    @property
    def caption(self) -> str | None:
        """The best caption, or None if the image cannot be read."""
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
        """The image's values in a line of `raycap caption --json`. Values that the image does not have are left out."""
        if self.error is not None:
            return {"error": self.error}
        entries = [{"caption": each.caption, "log_prob": round(each.log_prob, 6)} for each in self.n_best]
        judged = {"confidence": self.confidence, "expected_ciderd": self.expected_ciderd}
        rounded = {key: round(value, 4) for key, value in judged.items() if value is not None}
        return entries[0] | rounded | ({"n_best": entries} if len(entries) > 1 else {})


@dataclass(frozen=True)
class Explanation:
    """Where a model looked for each of the W words of a caption, on the grid of N = rows x columns image tokens.

    grid: (rows, columns). attention: (W, N), the cross-attention of the last decoder layer. Each row sums to 1 if the
    tokens before the grid are added. attribution: (W, N), the share of each image token in the change of the word's
    log-probability, by integrated gradients, or None if it was not computed.
    """

    caption: str
    words: tuple[str, ...]
    grid: tuple[int, int]
    attention: np.ndarray
    attribution: np.ndarray | None = None


class ConstraintCounts(NamedTuple):
    """The number of images with constraints, and the ids of the images whose caption satisfies too few of them."""

    images: int
    not_held: list[ImageId]

    @classmethod
    def of(
        cls, captions: Mapping[ImageId, ImageCaption], automata: Mapping[ImageId, ConstraintAutomaton]
    ) -> ConstraintCounts | None:
        """Counts the images by their best captions. Returns None if no image has constraints."""
        num_images, not_held = 0, list[ImageId]()
        for image, each in captions.items():
            num_required = automata[image].num_required if image in automata else 0
            if num_required and each.n_best:
                num_images += 1
                if (each.n_best[0].num_satisfied or 0) < num_required:
                    not_held.append(image)
        return cls(num_images, not_held) if num_images else None

    def __str__(self) -> str:
        return f"{self.images - len(self.not_held)} of {self.images} captions satisfy the required constraints"


@dataclass(frozen=True)
class SplitScores:
    """The captions of a split, and their scores if the split has references.

    images: by id in the annotation file, like everything below. An image that cannot be read has the reason in place of
    a caption. constraints: None if no image has constraints. main_object_hits: {image id: True if its caption names the
    main object}, only for the synthetic data set. quality: the quality of the confidence, or None if there is no
    confidence or it was fitted on this split. published: scores that papers print, each with the reason why our scores
    cannot be compared with it, or "" if they can.
    """

    split: str
    images: Mapping[ImageId, ImageCaption]
    constraints: ConstraintCounts | None = None
    scores: MetricScores | None = None
    main_object_hits: Mapping[ImageId, bool] = field(default_factory=dict)
    quality: Quality | None = None
    published: Sequence[tuple[FinalRow, str]] = ()

    @cached_property
    def captions(self) -> dict[ImageId, str]:
        """The best caption of each image that has one."""
        return {image: each.n_best[0].caption for image, each in self.images.items() if each.n_best}

    @cached_property
    def unreadable(self) -> dict[ImageId, str]:
        """{image id: reason} for the images without a caption."""
        return {image: each.error for image, each in self.images.items() if each.error is not None}

    @cached_property
    def several(self) -> dict[ImageId, list[str]]:
        """All captions of each image, or {} if the search found only one caption per image."""
        several = {image: [one.caption for one in each.n_best] for image, each in self.images.items() if each.n_best}
        return several if any(len(captions) > 1 for captions in several.values()) else {}

    @cached_property
    def signals(self) -> dict[ImageId, tuple[float, ...]]:
        """The signals of the best captions, by image id. Captions without signals are left out."""
        best = {image: each.n_best[0] for image, each in self.images.items() if each.n_best}
        return {image: each.signals for image, each in best.items() if each.signals}

    @property
    def values(self) -> dict[str, float | None]:
        """{metric: score}, with None for a metric that is unavailable."""
        return {} if self.scores is None else self.scores.values

    @property
    def main_object(self) -> float | None:
        """The share of images whose caption names the main object, or None if the data set is not the synthetic one."""
        hits = self.main_object_hits.values()
        return sum(hits) / len(hits) if hits else None

    @property
    def signature(self) -> str:
        """The signature of the scores, or "" if the split has no scores."""
        return "" if self.scores is None else self.scores.signature

    @cached_property
    def cider_by_image(self) -> dict[ImageId, float]:
        """{image id: CIDEr-D}, or {} if CIDEr-D is unavailable."""
        if self.scores is None:
            return {}
        score = self.scores.by_name.get("CIDEr-D")
        if score is None or score.per_image is None:
            return {}
        return dict(zip(self.scores.image_ids, score.per_image, strict=True))

    def scored_uris(self, uris: Mapping[ImageId, str]) -> list[str]:
        """The URIs of the scored images, or of the captioned images if the split has no scores. uris: by image id."""
        scored = set(self.captions) if self.scores is None else set(self.scores.image_ids)
        return [uri for image, uri in uris.items() if image in scored]

    def to_json(self) -> Values:
        """The split's entry in scores.json."""
        entry: Values = {
            "images": len(self.captions),
            "unreadable": self.unreadable,
            "constraints": None if self.constraints is None else self.constraints._asdict(),
            "published": [
                {"name": row.name, "table": row.table, "scores": row.scores, "difference": difference}
                for row, difference in self.published
            ],
        }
        if self.scores is not None:
            entry |= self.scores.to_json()
            entry |= {"main_object": self.main_object, "per_image_CIDEr-D": self.cider_by_image}
        if self.quality is not None:
            entry["confidence"] = self.quality.to_json()
        return entry

    def flat(self) -> dict[str, float]:
        """The scores as the tracker and the model registry store them, with keys like "test_CIDEr-D"."""
        values = self.values | {"main_object": self.main_object}
        return {f"{self.split}_{name}": value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Inputs:
    """The inputs of an evaluation.

    images: the images of each split that can be captioned. image_ids: {id in the annotation file: number in the data
    set} for all images of each split, in the order of the split. unreadable: {number: reason} for images that cannot be
    captioned, as known before the search begins. stores: for each bundle the feature store that it captions, or None if
    it captions pixels.
    """

    images: Mapping[str, Dataset]
    image_ids: Mapping[str, Mapping[ImageId, int]]
    unreadable: Mapping[int, str]
    stores: tuple[StoragePath | None, ...]


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation.

    bundles: one bundle, or the bundles of an ensemble. search: the settings with which the images were captioned.
    confidence: the confidence that was fitted on the validation split, or None if this split was not evaluated or the
    fit was not possible. seconds_per_image: a worker's time per image, without the loading of models, or None if the
    captions come from an earlier attempt.
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
        """The scores of these splits only."""
        return replace(self, splits=tuple(self[split] for split in splits))

    @property
    def unreadable(self) -> dict[ImageId, str]:
        """{image id: reason} for the images without a caption, over all splits."""
        return {image: reason for each in self.splits for image, reason in each.unreadable.items()}

    @property
    def unavailable(self) -> dict[str, str]:
        """{metric: reason} for metrics that failed now and may succeed later or on another machine."""
        scores = [each.scores.repairable(self.protocol.language) for each in self.splits if each.scores is not None]
        return {name: reason for each in scores for name, reason in each.items()}

    def flat(self) -> dict[str, float]:
        """The scores of all splits with keys like "test_CIDEr-D", as the tracker and the model registry store them."""
        return {name: value for each in self.splits for name, value in each.flat().items()}

    def to_json(self) -> Values:
        """The content of scores.json."""
        return {
            "models": [without_secrets(str(bundle)) for bundle in self.bundles],
            "protocol": asdict(self.protocol),
            "signature": self.protocol.signature,
            "splits": {each.split: each.to_json() for each in self.splits},
        }


def write_captions(
    folder: StoragePath | Path, split: str, images: Mapping[ImageId, ImageCaption], predictions: str
) -> None:
    """Writes the best captions as a COCO result file named `predictions`, and all captions as an n-best file."""
    write_predictions(folder / predictions, SplitScores(split, images).captions)
    ranked = {image: [one.to_json() for one in each.n_best] for image, each in images.items() if each.n_best}
    write_n_best(folder / N_BEST.format(split), ranked)


def read_captions(path: Path) -> dict[ImageId, ImageCaption]:
    """Reads the captions in an n-best file of `write_captions`, by image id.

    Raises UserError, ValueError or KeyError if the file does not have the content of such a file.
    """
    found, ranked = dict[ImageId, ImageCaption](), TypeAdapter(tuple[RankedCaption, ...])
    for number, line in enumerate(read_document(path).splitlines(), 1):  # bytes, because text has more line ends
        name = f"{path}: line {number}"
        row = require_mapping(parse_json(line, name), name)
        found[row["image_id"]] = ImageCaption(ranked.validate_python(row["n_best"]))
    return found
