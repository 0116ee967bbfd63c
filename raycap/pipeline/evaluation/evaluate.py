"""The only evaluator: captions images with a bundle or an ensemble, and scores the captions.

Every command that scores a model calls `evaluate`. A run evaluates the bundle that it has written, so the run and its
bundle have equal scores. `raycap evaluate`, `compare` and `retrain` evaluate the bundles that they are given. Images
are captioned from the stored features of the bundle's own backbone, or from their pixels (`find_inputs`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.cluster.start import start_extraction, start_ray
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset, ImageId
from raycap.pipeline.data.reading import snapshot_of
from raycap.pipeline.data.synthetic.scenes import main_object_hits
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    CONFIDENCE,
    bundle_protocol,
    bundle_source,
    fetched,
    load_bundle,
    read_bundle_config,
    read_confidences,
    store_results,
)
from raycap.pipeline.evaluation.captioning.constraints import load_automata
from raycap.pipeline.evaluation.captioning.on_cluster import SplitTask, TaskModel, caption_on_cluster
from raycap.pipeline.evaluation.comparison.protocol import (
    SEARCH_KEYS,
    Protocol,
    common_protocol,
    confidence_search,
    in_language,
    search_settings,
    searched,
)
from raycap.pipeline.evaluation.comparison.published import published_rows
from raycap.pipeline.evaluation.confidence import find_fit, fit_split, judged_quality
from raycap.pipeline.evaluation.results import ConstraintCounts, ImageCaption, Inputs, Scores, SplitScores
from raycap.pipeline.evaluation.scores.metrics import (
    MetricScores,
    ScoreInputs,
    metrics_of_split,
    score_captions,
    why_unavailable,
)
from raycap.pipeline.features.extraction import Extracted, extract_features
from raycap.pipeline.features.regions import import_regions
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import keep_weights

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton

logger = logging.getLogger(__name__)

ALL_IMAGES = "all"  # as the name of a split, it selects every image
Automata = Mapping[str, Mapping[ImageId, "ConstraintAutomaton"]]  # by split and id in the annotation file
SplitCaptions = Mapping[str, Mapping[ImageId, ImageCaption]]  # by split and id in the annotation file


@dataclass(frozen=True)
class Options:
    """The optional arguments of `evaluate`.

    constraints: a file of words that captions must contain, except in the splits `unconstrained`. metrics: if any are
    given, only these metrics are computed, without a confidence. captions: the captions of an earlier attempt, which
    are scored instead of new ones. keep: a function that is called with new captions before they are scored, so that
    they can be saved in case scoring fails.
    """

    constraints: Path | None = None
    unconstrained: Sequence[str] = ()
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

    settings: the configuration. Search keys that it does not set come from the bundles (`common_settings`). address:
    the address of a Ray cluster. If it is None, Ray is started on this machine. A split without references is captioned
    but not scored. Raises UserError if the constraints do not fit the images or the vocabulary.
    """
    automata = find_automata(bundles[0], images, options)
    settings = common_settings(settings, bundles)
    protocol = protocol_of(bundles, settings, options)
    logger.info(f"protocol  {protocol.signature}")
    inputs = find_inputs(bundles, images, settings, address)
    if options.captions is None:
        by_split, seconds_per_image = _new_captions(bundles, inputs, settings, address, automata, options)
        if options.keep is not None:
            options.keep(by_split)
    else:
        by_split, seconds_per_image = options.captions, None

    def split_scores(split: str) -> SplitScores:
        found = SplitScores(split, by_split[split], ConstraintCounts.of(by_split[split], automata[split]))
        return _scored(found, images[split], settings, protocol, options)

    # SPICE takes half of the free memory, so splits are scored one after another if SPICE can run
    max_workers = 1 if why_unavailable("SPICE") is None else None
    with ThreadPoolExecutor(max_workers) as pool:  # threads are enough, because most of the work is in Java processes
        splits = tuple(pool.map(split_scores, images))
    scores = Scores(tuple(bundles), protocol, settings.evaluation, splits, inputs, seconds_per_image=seconds_per_image)
    return scores if options.metrics else _with_confidence(scores, settings)


def common_settings(settings: RunConfig, bundles: Sequence[StoragePath]) -> RunConfig:
    """The settings with which all of these bundles are evaluated.

    Search keys that `settings` do not set come from the bundles' protocols. `evaluation.max_length` is lowered to the
    smallest number of positions of the models. Raises UserError if the bundles record different searches, and if the
    search does not fit the language or the tokenizer of a bundle.
    """
    search = search_settings(settings.evaluation, [_recorded(bundle) for bundle in bundles])
    # the update marks these keys as set, so that each model does not use the values of its own protocol
    search = search.model_copy(update={key: getattr(search, key) for key in SEARCH_KEYS})
    for bundle in bundles:
        search.require_words(_recorded(bundle).language, vocabulary_of(bundle).tokenizer)
    positions = min(max_positions(bundle) for bundle in bundles)
    if positions < search.max_length:
        logger.info(f"search    at most {positions} tokens, because a model has no more positions")
        search = search.model_copy(update={"max_length": positions})
    return settings.model_copy(update={"evaluation": search})


def protocol_of(bundles: Sequence[StoragePath], settings: RunConfig, options: Options = Options()) -> Protocol:
    """The protocol by which a bundle, or an ensemble of several bundles, is scored."""
    protocol = common_protocol([searched(_recorded(bundle), settings.evaluation) for bundle in bundles])
    features: Literal["grid", "regions"] = "grid" if settings.has_backbone else "regions"
    constrained = options.constraints is not None
    protocol = replace(protocol, num_models=len(bundles), features=features, constrained=constrained)
    # If the settings set no language, the bundles decide. `common_protocol` has ensured that they share one language.
    is_given = "language" in settings.data.model_fields_set
    return in_language(protocol, settings.data.language if is_given else protocol.language)


def find_automata(bundle: StoragePath, images: Mapping[str, Dataset], options: Options) -> Automata:
    """The constraints of each split's images as automata over the word ids of a bundle's vocabulary.

    Raises UserError if the file has no constraints for these images, or contains a word outside the vocabulary.
    """
    if options.constraints is None:
        return {split: {} for split in images}
    constrained = [split for split in images if split not in options.unconstrained]
    ids = [image for split in constrained for image in images[split].source_ids()]
    automata = load_automata(options.constraints, ids, vocabulary_of(bundle))
    if constrained and not automata:
        splits = ", ".join(constrained)
        raise UserError(f"constraints {options.constraints}: none of its images is in {splits}; look at the image ids")
    return {split: automata if split in constrained else {} for split in images}


def keep_results(scores: Scores, info: Mapping[str, object], decorations: Decorations) -> None:
    """Stores the fitted confidence in the bundle that was evaluated, and adds `info` to the bundle's info.

    Nothing is written if there is no new confidence and `info` is empty. A champion's bundle is never changed, because
    its digests are recorded elsewhere. If writing fails, a warning is logged.
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
    """The number of positions of a bundle's model, which is the largest number of tokens in a caption."""
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
) -> MetricScores | None:
    """Scores captions with these metrics. Returns None if no image has both references and a caption.

    captions: one per image, by image id. several: see `ScoreInputs`. language: the language of the captions. If it is
    None, the settings decide.
    """
    references = {image: texts for image, texts in images.references().items() if texts and image in captions}
    if not references:
        return None
    language, options = language or settings.data.language, settings.storage.options
    inputs = ScoreInputs.read(
        settings.evaluation.inputs, language, settings.data, several=several, uris=images.uris(), options=options
    )
    return score_captions(
        references,
        {image: captions[image] for image in references},
        metrics=metrics,
        language=language,
        inputs=inputs,
    )


def _scored(
    result: SplitScores, part: Dataset, settings: RunConfig, protocol: Protocol, options: Options
) -> SplitScores:
    """Scores the captions of a split. part: its images, of which those that cannot be read have no caption."""
    split = result.split
    if result.constraints is not None:
        logger.info(f"search    {split}: {result.constraints}")
    data = settings.data
    is_test = split in data.test_splits or split != data.val_split  # a validation split may also be a test split
    scores = caption_scores(
        result.captions,
        part,
        options.metrics or metrics_of_split(settings.evaluation.metrics, is_test=is_test),
        settings,
        language=protocol.language,
        several=result.several,
    )
    hits: dict[ImageId, bool] = {}
    if scores is not None and data.synthetic is not None:
        references = part.references()
        scored = {image: result.captions[image] for image in scores.image_ids}
        hits = main_object_hits(scored, {image: references[image] for image in scored}, data.language)
    scored_split = replace(result, scores=scores, main_object_hits=hits)
    return replace(scored_split, published=published_rows(protocol, split, scored_split.scored_uris(part.uris())))


def images_by_split(dataset: Dataset, splits: Sequence[str]) -> dict[str, Dataset]:
    """The images of each split. The name `all` selects every image, unless a split has this name.

    Raises UserError for a split without images.
    """
    found = {}
    for split in splits:
        images = dataset.split(split)
        if not len(images) and split == ALL_IMAGES:
            images = dataset
            images.require_distinct_ids()
        if not len(images):
            names = ", ".join(sorted(dataset.split_sizes()))
            raise UserError(
                f"--split {split}: no image is in it; the splits are {names}, and {ALL_IMAGES} for every image"
            )
        found[split] = images
    return found


def find_inputs(
    bundles: Sequence[StoragePath], images: Mapping[str, Dataset], settings: RunConfig, address: str | None
) -> Inputs:
    """Finds what the bundles caption, and computes or imports the features that the storage lacks.

    A bundle with a backbone captions the stored features of its backbone, or pixels if `features.store` is `never`. A
    bundle without a backbone captions the regions of `features.hdf5`. If an image lacks the features of one bundle, no
    bundle captions it, because an ensemble needs all of them.
    """
    table = pa.concat_tables([part.table for part in images.values()])
    _, first = np.unique(table["image_id"].to_numpy(), return_index=True)  # because `all` repeats images of splits
    every = Dataset(table.take(np.sort(first)))
    has_backbone = [read_bundle_config(fetched(bundle)).get("backbone") is not None for bundle in bundles]
    stores: list[StoragePath | None] = [None] * len(bundles)
    unreadable, missing = dict[str, str](), dict[str, str]()  # {URI: reason} and {content key: reason}
    if not settings.has_backbone:
        every = every.keyed_by_id()
        if not all(has_backbone):
            regions, missing = import_regions(every, settings)
            stores = [None if has else regions for has in has_backbone]
    elif settings.features.store != "never":
        for number in np.flatnonzero(has_backbone).tolist():
            every, extracted = _extracted(bundles[number], every, settings, address, unreadable)
            stores[number] = extracted.store
            missing |= extracted.missing
    usable = (every.readable() if any(stores) else every).without([*missing])
    usable_ids = usable.table["image_id"]
    by_split, reasons = {}, {}
    for split, part in images.items():
        by_split[split] = Dataset(usable.table.filter(pc.is_in(usable_ids, part.table["image_id"])))
    left_out = Dataset(every.table.filter(pc.invert(pc.is_in(every.table["image_id"], usable_ids))))
    for image, uri, key in zip(*(left_out.column(name) for name in ("image_id", "uri", "key")), strict=True):
        reasons[image] = unreadable.get(uri) or missing.get(key) or "it has no features"
    ids = {split: dict(zip(part.source_ids(), part.column("image_id"), strict=True)) for split, part in images.items()}
    return Inputs(by_split, ids, reasons, tuple(stores))


def _extracted(
    place: StoragePath, every: Dataset, settings: RunConfig, address: str | None, unreadable: dict[str, str]
) -> tuple[Dataset, Extracted]:
    """Extracts the features of a bundle's backbone. Returns the images with content keys, and the features.

    Adds {URI: reason} of images that cannot be read to `unreadable`.
    """
    bundle = load_bundle(fetched(place))
    backbone = bundle.captioner.backbone
    assert backbone is not None
    features = settings.features.model_copy(update={"views": 0})
    config = settings.model_copy(update={"backbone": backbone.config, "features": features})
    start, transform = partial(start_extraction, config, address), bundle.transform
    weights = keep_weights(backbone, config.working_path / "backbones")
    if every.table["key"].null_count == len(every):
        every, reasons = snapshot_of(every, config)
        unreadable |= reasons
    return every, extract_features(config, every, weights, start, unreadable, transform)


def _new_captions(
    bundles: Sequence[StoragePath],
    inputs: Inputs,
    settings: RunConfig,
    address: str | None,
    automata: Automata,
    options: Options,
) -> tuple[SplitCaptions, float | None]:
    """Captions the images of each split. Returns the captions, and a worker's seconds per image if there are images.

    If one split has all images, and all splits have the same constraints, only this split is captioned. The other
    splits share its captions.
    """
    start_ray(settings, address, "captions")
    sources = [bundle_source(bundle, settings) for bundle in bundles]
    models = [TaskModel(source, store) for source, store in zip(sources, inputs.stores, strict=True)]
    tasks = {}
    for split, part in inputs.images.items():
        ids = inputs.image_ids[split]
        tasks[split] = SplitTask(part, {ids[image]: each for image, each in automata[split].items() if image in ids})
    num_images = len({image for part in inputs.images.values() for image in part.column("image_id")})
    largest = max(tasks, key=lambda split: len(tasks[split].images))
    has_every_image = len(tasks[largest].images) == num_images
    if has_every_image and all(each == automata[largest] for each in automata.values()):
        tasks = {largest: tasks[largest]}
    found, seconds = caption_on_cluster(models, tasks, settings, with_signals=not options.metrics)
    captions = {image: each for part in found.values() for image, each in part.items()}
    num_captioned = sum(not each.error for each in captions.values())
    captions |= {image: ImageCaption(error=reason) for image, reason in inputs.unreadable.items()}
    by_split = {split: {image: captions[n] for image, n in ids.items()} for split, ids in inputs.image_ids.items()}
    return by_split, seconds / num_captioned if num_captioned else None


def _with_confidence(scores: Scores, settings: RunConfig) -> Scores:
    """The scores with the quality of the confidence on each split. An ensemble has no confidence.

    If the validation split is among the splits, the confidence is fitted on it, and this split gets no quality.
    If nothing was fitted, the confidence is the one that the bundle stores for this search.
    """
    if len(scores.bundles) > 1 or not any(each.signals for each in scores.splits):
        return scores
    (bundle,), evaluation, val_split = scores.bundles, settings.evaluation, settings.data.val_split
    search = confidence_search(evaluation, max_positions(bundle))
    confidence = fitted = None
    has_validation = any(each.split == val_split and each.signals for each in scores.splits)
    if has_validation:
        confidence = fitted = fit_split(scores[val_split], search, evaluation.good_ciderd)
    if confidence is None:
        confidence = find_fit(read_confidences(fetched(bundle)), search)
    if confidence is None:
        if not has_validation:
            logger.info("confidence   none was fitted with this search; evaluate the validation split to fit it")
        return scores
    splits = []
    for each in scores.splits:
        quality = None if each.split == val_split else judged_quality(each, confidence)
        if quality is not None:
            logger.info(f"confidence   {each.split}: {quality}")
        splits.append(replace(each, quality=quality))
    return replace(scores, splits=tuple(splits), confidence=fitted)


def _recorded(bundle: StoragePath) -> Protocol:
    """The protocol that a bundle records."""
    return bundle_protocol(read_bundle_config(fetched(bundle)))
