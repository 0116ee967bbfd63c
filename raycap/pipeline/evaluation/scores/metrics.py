"""Scores captions. `TABLE` lists all metrics, and `score_captions` computes them.

BLEU, ROUGE-L and CIDEr-D have the values of pycocoevalcap and run in this process (`ngrams.py`, on words from
`words.py`). METEOR and SPICE run in Java (`java.py`). If a metric cannot run, its score is the reason, and never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raycap.models.config import Values
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.sections import DataSection, ScoreInputsSection
from raycap.pipeline.errors import UnavailableError, UserError
from raycap.pipeline.evaluation.scores import java, ngrams
from raycap.pipeline.evaluation.scores.grounding import (
    CLIP_WEIGHT,
    PAC_WEIGHT,
    PROMPT,
    Objects,
    bert_score,
    hallucinations,
    image_similarity,
    with_references,
)
from raycap.pipeline.evaluation.scores.words import caption_stats, words_of_all, words_signature
from raycap.pipeline.runtime.names import shorten
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.version import version_of

if TYPE_CHECKING:  # not at run time, because the module imports torch
    from raycap.pipeline.evaluation.scores.encoders import BertEncoder, ClipEncoder

Input = Literal["objects", "several", "clip", "pac", "bert"]
_ENCODERS = ("clip", "pac", "bert")  # the signature of scores names these inputs, because other weights change scores
# For messages about a missing input: what it is, and how to give it
_INPUTS: dict[Input, str] = {
    "objects": "the words for objects; name their file as evaluation.inputs.objects",
    "several": "several captions per image; set evaluation.num_results to 2 or more, or give `raycap score` --n-best",
    "clip": "the weights of a CLIP; name its files as evaluation.inputs.clip",
    "pac": "the weights of a CLIP trained for PAC-S; name its files as evaluation.inputs.pac",
    "bert": "the files of a BERT or RoBERTa; name their folder as evaluation.inputs.bert.folder",
}
BLEU = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")


@dataclass(frozen=True)
class Score:
    """The value of a metric over all images and for each image. If there is none, `unavailable` gives the reason."""

    value: float | None = None
    per_image: list[float] | None = None
    unavailable: str | None = None


@dataclass(frozen=True)
class ScoreInputs:
    """What some metrics need besides one caption per image and its references. A field is None if it is not given.

    objects: for CHAIR. several: two or more raw captions of each image, by image id, for the metrics of diversity.
    clip, pac: encoders of images and texts, for CLIPScore and for PAC-S. bert: an encoder of tokens, for BERTScore.
    """

    objects: Objects | None = None
    several: Mapping[Any, Sequence[str]] | None = None
    clip: ClipEncoder | None = None
    pac: ClipEncoder | None = None
    bert: BertEncoder | None = None

    @classmethod
    def read(
        cls,
        section: ScoreInputsSection,
        language: str,
        data: DataSection | None = None,
        *,
        several: Mapping[Any, Sequence[str]] | None = None,
        uris: Mapping[Any, str] | None = None,
        options: StorageOptions = StorageOptions(),
    ) -> ScoreInputs:
        """The inputs that the section `evaluation.inputs` names. The files of encoders are read at their first use.

        several: as the field. uris: {image id: URI}. Raises UserError if a file of objects cannot be read.
        """
        objects = Objects.read(section, language, data)
        if not (section.clip or section.pac or section.bert):
            return cls(objects, several or None)
        # here, because the module imports torch, which checking a configuration must not load
        from raycap.pipeline.evaluation.scores.encoders import BertEncoder, ClipEncoder

        max_pixels = DataSection.model_fields["max_pixels"].default if data is None else data.max_pixels
        clip, pac = (
            ClipEncoder(files, uris or {}, max_pixels, options) if files else None
            for files in (section.clip, section.pac)
        )
        return cls(objects, several or None, clip, pac, BertEncoder(section.bert) if section.bert else None)


def _needed(inputs: ScoreInputs, field: Input) -> Any:
    """The value of a field of `inputs`. Raises UnavailableError if the field is not given."""
    if (value := getattr(inputs, field)) is None:
        raise UnavailableError(f"it needs {_INPUTS[field]}")
    return value


@dataclass(frozen=True)
class CaptionWords:
    """The tokens of one prediction and of one or more references per image, in the same order of images."""

    predictions: list[list[str]]
    references: list[list[list[str]]]

    @cached_property
    def corpus(self) -> ngrams.Corpus:
        """The captions as word ids for BLEU and CIDEr-D. A PTB token with white space ("1 1/2") gives several words."""

        def words(captions: list[list[str]]) -> list[list[str]]:
            return [" ".join(tokens).split() for tokens in captions]

        return ngrams.Corpus.build(words(self.predictions), list(map(words, self.references)))


@dataclass(frozen=True)
class TokenizedCaptions(CaptionWords):
    """The captions of the images `image_ids`, and what some metrics need besides their words."""

    image_ids: list[Any]
    language: str
    inputs: ScoreInputs
    raw: tuple[list[str], list[Sequence[str]]]  # predictions and references as texts, before they were tokenized

    @cached_property
    def several(self) -> list[list[list[str]]]:
        """The tokens of two or more captions per image. Raises UnavailableError if an image has fewer captions."""
        given: Mapping[Any, Sequence[str]] = _needed(self.inputs, "several")
        if lacking := [image for image in self.image_ids if len(given.get(image, ())) < 2]:
            count = f"{len(lacking)} of {len(self.image_ids)} images"
            raise UnavailableError(f"{count} have fewer than two captions (ids {shorten(lacking)})")
        return _words_by_image([given[image] for image in self.image_ids], self.language)

    @cached_property
    def hallucinations(self) -> tuple[np.ndarray, np.ndarray]:
        """The result of `grounding.hallucinations`. Raises UnavailableError if no objects are given."""
        objects: Objects = _needed(self.inputs, "objects")
        in_images = map(objects.in_image, self.image_ids, self.references)
        return hallucinations(self.predictions, list(in_images), objects)


@dataclass(frozen=True)
class Metric:
    """A row of `TABLE`. compute: raises UnavailableError if the metric has no value."""

    names: tuple[str, ...]
    compute: Callable[[TokenizedCaptions], Sequence[Score]]  # returns one score per name
    by_default: bool = True  # if True, the metric is computed without being named
    test_only: bool = False  # if True, a run computes the metric on its test splits only
    compare_by_image: bool = True  # if True, two models are compared by a paired bootstrap of scores per image
    less_is_better: bool = False
    needs: Input | None = None  # a field of `ScoreInputs`. If it is not given, the metric is unavailable.
    jar: str | None = None  # the name in the signature, for a metric that runs in Java
    english_only: bool = False  # if True, the metric is unavailable for captions in other languages
    check: Callable[[], None] = lambda: None  # raises UnavailableError if the machine lacks what the metric needs


def _mean(per_image: np.ndarray) -> Score:
    """The score of a metric whose value is the mean over the images. per_image: (images,)."""
    return Score(float(per_image.mean()), per_image.tolist())


def _bleu(captions: TokenizedCaptions) -> list[Score]:
    values, per_image = ngrams.bleu(captions.corpus)
    return [Score(float(value), scores.tolist()) for value, scores in zip(values, per_image, strict=True)]


def _meteor(captions: TokenizedCaptions) -> list[Score]:
    return [Score(*java.meteor(captions.predictions, captions.references))]


def _cider_d(captions: TokenizedCaptions) -> list[Score]:
    if len(captions.image_ids) == 1:  # all tf-idf weights would be 0
        raise UnavailableError("one image only: document frequencies have no meaning; score two images or more")
    return [_mean(ngrams.cider_d(captions.corpus))]


def _spice(captions: TokenizedCaptions) -> list[Score]:
    values = java.spice(captions.predictions, captions.references)
    return [Score(sum(values) / len(values), values)]


def _chair_i(captions: TokenizedCaptions) -> list[Score]:
    wrong, mentions = captions.hallucinations
    if not mentions.any():
        raise UnavailableError("no caption names an object")
    return [Score(float(wrong.sum() / mentions.sum()))]


def _chair_s(captions: TokenizedCaptions) -> list[Score]:
    return [_mean((captions.hallucinations[0] > 0).astype(float))]


def _distinct(captions: TokenizedCaptions) -> list[Score]:
    return [_mean(ngrams.distinct_ngrams(captions.several, order)) for order in (1, 2)]


def _mutual_bleu(captions: TokenizedCaptions) -> list[Score]:
    return [_mean(ngrams.mutual_bleu(captions.several))]


def _similarity(captions: TokenizedCaptions, field: Input, weight: float) -> list[Score]:
    """Two scores: the similarity of captions and images, and its version with references. field: of the encoder."""
    encoder: ClipEncoder = _needed(captions.inputs, field)
    images = encoder.images(captions.image_ids)
    predictions, references = captions.raw
    texts = encoder.texts([PROMPT + text for text in predictions])
    others = encoder.texts([PROMPT + text for image in references for text in image])
    similarity = image_similarity(images, texts, weight)
    return [_mean(similarity), _mean(with_references(similarity, texts, others, [len(image) for image in references]))]


_CLIP_SCORE = partial(_similarity, field="clip", weight=CLIP_WEIGHT)
_PAC_SCORE = partial(_similarity, field="pac", weight=PAC_WEIGHT)


def _bert_score(captions: TokenizedCaptions) -> list[Score]:
    encoder: BertEncoder = _needed(captions.inputs, "bert")
    precision, recall, f1 = bert_score(encoder, *captions.raw).T
    return [_mean(f1), _mean(precision), _mean(recall)]


TABLE = (
    Metric(BLEU, _bleu, compare_by_image=False),  # because BLEU over all images is not the mean over images
    Metric(("METEOR",), _meteor, jar="meteor-1.5", english_only=True, check=java.check_meteor),
    Metric(("ROUGE-L",), lambda captions: [_mean(ngrams.rouge_l(captions.predictions, captions.references))]),
    Metric(("CIDEr-D",), _cider_d),
    Metric(  # for tests only, because SPICE is slow and needs 3 GB
        ("SPICE",), _spice, test_only=True, jar="spice-1.0", english_only=True, check=java.check_spice
    ),
    Metric(  # not compared by image, because the value is a share of mentions and not a mean over images
        ("CHAIR-i",), _chair_i, by_default=False, less_is_better=True, needs="objects", compare_by_image=False
    ),
    Metric(("CHAIR-s",), _chair_s, by_default=False, less_is_better=True, needs="objects"),
    Metric(("Div-1", "Div-2"), _distinct, by_default=False, needs="several"),
    Metric(("mBLEU-4",), _mutual_bleu, by_default=False, less_is_better=True, needs="several"),
    Metric(("CLIPScore", "RefCLIPScore"), _CLIP_SCORE, by_default=False, needs="clip", english_only=True),
    Metric(("PAC-S", "RefPAC-S"), _PAC_SCORE, by_default=False, needs="pac", english_only=True),
    Metric(("BERTScore", "BERTScore-P", "BERTScore-R"), _bert_score, by_default=False, needs="bert"),
)
METRICS = tuple(name for metric in TABLE for name in metric.names)
DEFAULT_METRICS = tuple(name for metric in TABLE if metric.by_default for name in metric.names)
LESS_IS_BETTER = tuple(name for metric in TABLE if metric.less_is_better for name in metric.names)
_TEST_ONLY = frozenset(name for metric in TABLE if metric.test_only for name in metric.names)
JAVA_METRICS = tuple(name for metric in TABLE if metric.jar for name in metric.names)
COMPARED_BY_IMAGE = tuple(name for metric in TABLE if metric.compare_by_image for name in metric.names)


def metrics_of_split(further: Iterable[str], *, is_test: bool) -> tuple[str, ...]:
    """The metrics of a run's split. further: metrics that the configuration names besides the default ones."""
    return tuple(name for name in (*DEFAULT_METRICS, *further) if is_test or name not in _TEST_ONLY)


@dataclass(frozen=True)
class MetricScores:
    """The result of `score_captions`. Lists of scores per image have the order of `image_ids`.

    extras: the number of images without a prediction, and the values of `caption_stats`.
    """

    by_name: dict[str, Score]
    image_ids: list[Any]
    signature: str
    extras: Values

    @property
    def values(self) -> dict[str, float | None]:
        """{metric: score}, with None for a metric that is unavailable."""
        return {name: score.value for name, score in self.by_name.items()}

    def repairable(self, language: str) -> dict[str, str]:
        """{metric: reason} for Java metrics that failed now and may succeed later or on another machine."""
        if language != ENGLISH:  # the Java metrics have no values for other languages
            return {}
        reasons = {name: score.unavailable for name, score in self.by_name.items() if name in JAVA_METRICS}
        return {name: reason for name, reason in reasons.items() if reason}

    def to_json(self) -> Values:
        """The values, the reasons of unavailable metrics, the signature and the extras."""
        unavailable = {name: score.unavailable for name, score in self.by_name.items() if score.unavailable}
        return {"scores": self.values, "unavailable": unavailable, "signature": self.signature, "extras": self.extras}


def score_captions(
    references: Mapping[Any, Sequence[str]],
    predictions: Mapping[Any, str],
    *,
    metrics: Iterable[str] = DEFAULT_METRICS,
    language: str = ENGLISH,
    inputs: ScoreInputs = ScoreInputs(),
) -> MetricScores:
    """Scores one raw caption per image against the raw reference captions of the image.

    references, predictions: by image id. Images have the order of `references`, as in coco-caption. Images without a
    prediction are left out, also from the document frequencies. `extras["references_without_prediction"]` counts them.
    An empty caption matches nothing. language: of all captions. Metrics for English only are unavailable for other
    languages. inputs: metrics whose inputs are not given are unavailable.

    Raises UserError (a ValueError) if a metric is unknown, a prediction has no references, or there are no predictions.
    """
    metrics = tuple(metrics)
    _check_input(references, predictions, metrics)
    image_ids = [image for image in references if image in predictions]
    raw = [predictions[image] for image in image_ids], [references[image] for image in image_ids]
    predicted, words = words_of_all(raw[0], language), _words_by_image(raw[1], language)
    captions = TokenizedCaptions(predicted, words, image_ids, language, inputs, raw)
    by_name: dict[str, Score] = {}
    for metric in TABLE:
        if not set(metric.names).isdisjoint(metrics):
            by_name |= zip(metric.names, _computed(metric, captions), strict=True)
    extras: Values = {"references_without_prediction": len(references) - len(image_ids)}
    extras |= caption_stats(predicted, language)
    signature = _signature(by_name, captions, language)
    return MetricScores({name: by_name[name] for name in metrics}, image_ids, signature, extras)


def _words_by_image(captions: Sequence[Sequence[str]], language: str) -> list[list[list[str]]]:
    """The tokens of each image's raw captions."""
    lines = iter(words_of_all([caption for image in captions for caption in image], language))
    return [[next(lines) for _ in image] for image in captions]


def _computed(metric: Metric, captions: TokenizedCaptions) -> Sequence[Score]:
    """The score of each name of a metric. If the metric cannot be computed, the scores give the reason."""
    try:
        _check_language(metric, captions.language)
        return metric.compute(captions)
    except UnavailableError as error:
        reason = str(error)
    except Exception as error:
        if metric.jar is None:
            raise
        reason = f"{type(error).__name__}: {error}"
    return [Score(unavailable=reason)] * len(metric.names)


def _check_input(
    references: Mapping[Any, Sequence[str]], predictions: Mapping[object, str], metrics: Sequence[str]
) -> None:
    """Raises UserError if a metric is unknown, there are no predictions, or a prediction has no references."""
    if unknown := [name for name in metrics if name not in METRICS]:
        raise UserError(f"unknown metric {unknown[0]!r}; the metrics are {', '.join(METRICS)}")
    if not predictions:
        raise UserError("there are no predictions to score; give a caption for at least one image")
    if unpaired := [image for image in predictions if not references.get(image)]:
        # if one side has numbers as ids and the other side has text, the hint says so
        kinds = {type(image).__name__ for image in references} ^ {type(image).__name__ for image in unpaired}
        hint = "; ids are numbers on one side and text on the other" if kinds == {"int", "str"} else ""
        problem = f"{len(unpaired)} of {len(predictions)} predictions have no reference captions"
        remedy = "score them against the references of their own images"
        raise UserError(f"{problem} (image ids {shorten(unpaired)}){hint}; {remedy}")


def _signature(scores: Mapping[str, Score], captions: TokenizedCaptions, language: str) -> str:
    """The signature of scores. Two scores can be compared only if their signatures are equal.

    A signature names tokenizer, language, document frequencies, EOS rule, data and versions.
    """
    counts = {len(image) for image in captions.references}
    available = {name for name, score in scores.items() if score.unavailable is None}
    jars = [metric.jar for metric in TABLE if metric.jar and available.issuperset(metric.names)]
    used = [metric.needs for metric in TABLE if available.issuperset(metric.names)]
    encoders = [f"|{field}:{getattr(captions.inputs, field).name}" for field in used if field in _ENCODERS]
    refs = "-".join(map(str, sorted({min(counts), max(counts)})))
    return (
        f"{words_signature(language)}|df:corpus({len(captions.references)} images)|eos:none|refs:{refs}"
        f"|as:{'+'.join(['pycocoevalcap-1.2', *jars])}{''.join(encoders)}|raycap:{version_of('raycap')}"
    )


def _check_language(metric: Metric, language: str) -> None:
    """Raises UnavailableError if a metric has no value for captions in a language."""
    if metric.english_only and language != ENGLISH:
        raise UnavailableError(
            f"{metric.names[0]} is defined for English captions only, and the language is {language}"
        )


def why_unavailable(name: str, language: str = ENGLISH, inputs: ScoreInputs | None = None) -> str | None:
    """Why a score cannot be computed on this machine or for captions in a language, or None if it can be.

    name: a metric, or a cost such as macs, for which nothing is checked. inputs: if they are given, they must have what
    the metric needs.
    """
    metric = next((metric for metric in TABLE if name in metric.names), None)
    if metric is None:
        return None
    try:
        _check_language(metric, language)
        metric.check()
        if inputs is not None and metric.needs is not None:
            _needed(inputs, metric.needs)
    except UnavailableError as error:
        return str(error)
    return None
