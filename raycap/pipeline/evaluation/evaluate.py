"""The only evaluator: captions images with a bundle or an ensemble, and scores the captions.

Every command that scores a model calls `evaluate`: a run with the bundle that it has written, and `raycap evaluate`,
`compare` and `retrain` with bundles that they are given. So a run and its bundle have equal scores. Images are
captioned from the stored features of the bundle's own backbone (`evaluation.inputs`), or from their pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.synthetic.scenes import main_object_hits
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    bundle_protocol,
    bundle_source,
    read_bundle_config,
    read_confidences,
    store_results,
)
from raycap.pipeline.evaluation.captioning.bundle_files import CONFIDENCE, fetched
from raycap.pipeline.evaluation.captioning.constraints import load_automata
from raycap.pipeline.evaluation.captioning.measured_precision import with_precision
from raycap.pipeline.evaluation.captioning.on_cluster import Captioned, SplitTask, TaskModel, caption_on_cluster
from raycap.pipeline.evaluation.captions import ImageCaption
from raycap.pipeline.evaluation.comparison.protocol import (
    SEARCH_KEYS,
    Protocol,
    confidence_search,
    ensemble_protocol,
    in_language,
    search_settings,
    searched,
)
from raycap.pipeline.evaluation.comparison.published import published_rows
from raycap.pipeline.evaluation.confidence import Confidence, find_fit, fit_split, judged_quality
from raycap.pipeline.evaluation.inputs import Inputs, find_inputs
from raycap.pipeline.evaluation.results import ConstraintCounts, Scores, SplitScores
from raycap.pipeline.evaluation.scores.inputs import score_inputs
from raycap.pipeline.evaluation.scores.metrics import (
    MetricScores,
    metrics_of_split,
    score_captions,
    why_unavailable,
)
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton

logger = logging.getLogger(__name__)

Automata = Mapping[str, Mapping[int, "ConstraintAutomaton"]]  # by split and image id
SplitCaptions = Mapping[str, Mapping[int, ImageCaption]]  # by split and image id


@dataclass(frozen=True)
class Options:
    """What an evaluation may be given besides bundles, images and settings.

    training: the images whose captions the model has learned, for the share of captions seen in training. constraints:
    a file of words that captions must contain, except in the splits `unconstrained`. features: the folder of a feature
    store, for bundles without a backbone. metrics: only these are computed, without alignment and confidence.
    captions: those of an earlier attempt. keep: is called with new captions before they are scored, which can take long
    or fail.
    """

    training: Dataset | None = None
    constraints: Path | None = None
    unconstrained: Sequence[str] = ()
    features: StoragePath | None = None
    metrics: tuple[str, ...] = ()
    captions: SplitCaptions | None = None
    keep: Callable[[SplitCaptions], None] | None = None


def evaluate(
    bundles: Sequence[StoragePath],
    images: Mapping[str, Dataset],
    settings: RunConfig,
    address: str | None,
    options: Options = Options(),
) -> Scores:
    """Captions the images of each split with one bundle, or with several as an ensemble, and scores the captions.

    settings: `common_settings` of them and the bundles are used. address: of a Ray cluster; None for this machine. A
    split without references is captioned and not scored. Raises UserError for constraints that do not fit.
    """
    automata = find_automata(bundles[0], images, options)
    settings = with_precision(common_settings(settings, bundles), address)
    protocol = protocol_of(bundles, settings, options)
    logger.info(f"protocol  {protocol.signature}")
    inputs = find_inputs(bundles, images, settings, address, options.features)
    captioned = Captioned({split: {} for split in images}, 0.0)
    if options.captions is None:
        captioned = _captioned(bundles, inputs, settings, address, automata, options)
        if options.keep is not None:
            options.keep(captioned.splits)
    by_split = captioned.splits if options.captions is None else options.captions
    evaluator = _Evaluator(settings, protocol, language_of(settings, bundles), options)

    def split_scores(split: str) -> SplitScores:
        return evaluator.scores(split, images[split], by_split[split], automata[split])

    # each process of SPICE takes half of the free memory, so that there must be one at a time
    max_workers = 1 if why_unavailable("SPICE") is None else None
    with ThreadPoolExecutor(max_workers) as pool:  # threads suffice: most of the work runs in Java processes
        splits = tuple(pool.map(split_scores, images))
    num_images = len({image for part in captioned.splits.values() for image, each in part.items() if not each.error})
    seconds = captioned.seconds / num_images if num_images else None
    search, language = settings.evaluation, evaluator.language
    scores = Scores(tuple(bundles), protocol, search, language, splits, inputs, seconds_per_image=seconds)
    return scores if options.metrics else _with_confidence(scores, settings)


def common_settings(
    settings: RunConfig, bundles: Sequence[StoragePath], compared: Sequence[StoragePath] = ()
) -> RunConfig:
    """The settings by which all of these bundles are evaluated.

    The bundles' protocols give those keys of the search that `settings` do not. `evaluation.max_length` is at most the
    number of positions of each model. compared: other models that caption with the same settings, also if they record
    others. Raises UserError for bundles that record different searches, and for a search that does not fit a bundle's
    words.
    """
    search = search_settings(settings.evaluation, [_recorded(bundle) for bundle in bundles])
    # as if the settings gave these keys, so that models that record others are searched with the same values
    search = search.model_copy(update={key: getattr(search, key) for key in SEARCH_KEYS})
    for bundle in (*bundles, *compared):
        search.require_words(_recorded(bundle).language, vocabulary_of(bundle).tokenizer)
    positions = min(max_positions(bundle) for bundle in (*bundles, *compared))
    if positions < search.max_length:
        logger.info(f"search    at most {positions} tokens, because a model has no more positions")
        search = search.model_copy(update={"max_length": positions})
    return settings.model_copy(update={"evaluation": search})


def protocol_of(bundles: Sequence[StoragePath], settings: RunConfig, options: Options = Options()) -> Protocol:
    """The protocol of the scores of a bundle, or of several as an ensemble."""
    protocol = ensemble_protocol([searched(_recorded(bundle), settings.evaluation) for bundle in bundles])
    features: Literal["grid", "regions"] = "grid" if settings.has_backbone else "regions"
    protocol = replace(protocol, features=features, constrained=options.constraints is not None)
    return in_language(protocol, language_of(settings, bundles))


def language_of(settings: RunConfig, bundles: Sequence[StoragePath]) -> str:
    """The language of the captions: that of the settings, or that of the bundles if the settings do not give one."""
    data = settings.data
    recorded = {_recorded(bundle).language for bundle in bundles}
    return recorded.pop() if len(recorded) == 1 and "language" not in data.model_fields_set else data.language


def find_automata(bundle: StoragePath, images: Mapping[str, Dataset], options: Options) -> Automata:
    """The constraints of each split's images, as word ids of a bundle's vocabulary.

    Raises UserError when the file has no constraints for these images, or a word outside of the vocabulary.
    """
    if options.constraints is None:
        return {split: {} for split in images}
    constrained = [split for split in images if split not in options.unconstrained]
    ids = [image for split in constrained for image in images[split].column("image_id")]
    automata = load_automata(options.constraints, ids, vocabulary_of(bundle))
    if constrained and not automata:
        splits = ", ".join(constrained)
        raise UserError(f"constraints {options.constraints}: none of its images is in {splits}; look at the image ids")
    return {split: automata if split in constrained else {} for split in images}


def keep_results(scores: Scores, info: Mapping[str, Any], decorations: Decorations) -> None:
    """Stores the fitted confidence and further values for the info in the bundle that was evaluated.

    A champion's bundle, whose digests are recorded elsewhere, never changes, nor does one with a signature that cannot
    be replaced. Nothing is written if the bundle has all of it.
    """
    (bundle,) = scores.bundles
    confidence = scores.confidence
    if confidence is not None and confidence in read_confidences(fetched(bundle)):
        confidence = None
    if confidence is None and not info:
        return
    if bundle.name.startswith("champion-"):
        logger.info(f"confidence   not stored: {bundle} is a champion's bundle, which is never changed")
        return
    try:
        with decorations.making("the confidence in the bundle"):
            store_results(bundle, confidence, info)
            if confidence is not None:
                logger.info(f"confidence   {bundle / CONFIDENCE}, from {confidence.num_images} images")
    except UserError as error:
        logger.warning(f"confidence   not stored: {error}")


def vocabulary_of(bundle: StoragePath) -> Vocabulary:
    """The vocabulary of a bundle."""
    return Vocabulary.load(fetched(bundle) / "vocabulary.json")


def max_positions(bundle: StoragePath) -> int:
    """The number of tokens that a caption of a bundle can have."""
    positions: int = read_bundle_config(fetched(bundle))["sizes"]["max_positions"]
    return positions


def caption_scores(
    captions: Mapping[Any, str],
    images: Dataset,
    metrics: Sequence[str],
    settings: RunConfig,
    *,
    language: str | None = None,
    several: Mapping[Any, Sequence[str]] | None = None,
    training: Dataset | None = None,
) -> MetricScores | None:
    """The scores of captions of images by these metrics; None if no image has both references and a caption.

    several, training: see `ScoreInputs` and `Options`. language: None for that of the settings.
    """
    references = {image: texts for image, texts in images.references().items() if texts and image in captions}
    if not references:
        return None
    data, language = settings.data, language or settings.data.language
    options = settings.storage.options
    inputs = score_inputs(
        settings.evaluation.inputs, language, data, several=several, uris=images.uris(), options=options
    )
    return score_captions(
        references,
        {image: captions[image] for image in references},
        metrics=metrics,
        training_captions=training.texts() if training is not None and training.num_captions else None,
        language=language,
        inputs=inputs,
    )


@dataclass(frozen=True)
class _Evaluator:
    """Scores the captions of splits. The settings have the precision and the search of the captions."""

    settings: RunConfig
    protocol: Protocol
    language: str
    options: Options

    def scores(
        self,
        split: str,
        part: Dataset,
        captions: Mapping[int, ImageCaption],
        automata: Mapping[int, ConstraintAutomaton],
    ) -> SplitScores:
        """The scores of a split. Images of `part` without a caption have not been read."""
        counts = count_constraints(captions, automata)
        if counts is not None:
            logger.info(f"search    {split}: {counts}")
        result = SplitScores(split, captions, counts)
        if result.alignment is not None:
            logger.info(f"search    {split}: alignment of words and patches {result.alignment:.3f}")
        data, settings = self.settings.data, self.settings
        is_test = split in data.test_splits or split != data.val_split
        scores = caption_scores(
            result.captions,
            part,
            self.options.metrics or metrics_of_split(settings.evaluation.metrics, is_test=is_test),
            settings,
            language=self.language,
            several=result.several,
            training=self.options.training,
        )
        hits: dict[int, bool] = {}
        if scores is not None and data.synthetic is not None:
            references = part.references()
            scored = {image: result.captions[image] for image in scores.image_ids}
            hits = main_object_hits(scored, {image: references[image] for image in scored}, data.language)
        result = replace(result, scores=scores, main_object_hits=hits)
        return replace(result, published=published_rows(self.protocol, split, result.scored_uris(part.uris())))


def count_constraints(
    captions: Mapping[int, ImageCaption], automata: Mapping[int, ConstraintAutomaton]
) -> ConstraintCounts | None:
    """How many best captions satisfy their constraints; None if no image has any."""
    satisfied = {
        image: (each.n_best[0].num_satisfied or 0, automata[image].num_required)
        for image, each in captions.items()
        if image in automata and each.n_best
    }
    return ConstraintCounts.tally(satisfied) if satisfied else None


def _captioned(
    bundles: Sequence[StoragePath],
    inputs: Inputs,
    settings: RunConfig,
    address: str | None,
    automata: Automata,
    options: Options,
) -> Captioned:
    """The captions of each split. Only a split that has all images, with the same constraints, is captioned."""
    start_ray(settings, address, "captions")
    sources = [bundle_source(bundle, settings) for bundle in bundles]
    models = [TaskModel(source, store) for source, store in zip(sources, inputs.stores, strict=True)]
    every = {image for part in inputs.images.values() for image in part.column("image_id")}
    tasks = {split: SplitTask(part, automata[split]) for split, part in inputs.images.items()}
    whole = {
        split: task
        for split, task in tasks.items()
        if len(task.images) == len(every) and all(other == automata[split] for other in automata.values())
    }
    chosen = dict([*whole.items()][:1]) or tasks
    captioned = caption_on_cluster(models, chosen, settings, with_values=not options.metrics)
    captions = {image: each for part in captioned.splits.values() for image, each in part.items()}
    captions |= {image: ImageCaption(error=reason) for image, reason in inputs.unreadable.items()}
    return Captioned(
        {split: {image: captions[image] for image in ids} for split, ids in inputs.image_ids.items()},
        captioned.seconds,
    )


def _with_confidence(scores: Scores, settings: RunConfig) -> Scores:
    """The scores with the quality of the confidence in the captions of each split. An ensemble has none.

    If the validation split is among the splits, the confidence is fitted on it.
    """
    if len(scores.bundles) > 1 or not any(each.signals for each in scores.splits):
        return scores
    (bundle,), evaluation = scores.bundles, settings.evaluation
    search = confidence_search(evaluation, max_positions(bundle))
    validation = [each for each in scores.splits if each.split == settings.data.val_split and each.signals]
    fitted = fit_split(validation[0], search, evaluation.good_ciderd) if validation else None
    confidence = fitted or find_fit(read_confidences(fetched(bundle)), search)
    if confidence is None:
        if not validation:
            logger.info("confidence   none was fitted with this search; evaluate the validation split to fit it")
        return scores
    splits = [each if each in validation else _judged(each, confidence) for each in scores.splits]
    return replace(scores, splits=tuple(splits), confidence=fitted)


def _judged(result: SplitScores, confidence: Confidence) -> SplitScores:
    """The scores with the quality of a confidence, if it can be measured."""
    quality = judged_quality(result, confidence)
    if quality is not None:
        logger.info(f"confidence   {result.split}: {quality}")
    return replace(result, quality=quality)


def _recorded(bundle: StoragePath) -> Protocol:
    """The protocol that a bundle records."""
    return bundle_protocol(read_bundle_config(fetched(bundle)))
