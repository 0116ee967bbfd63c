"""Scores of a run: from the captions of its splits to score tables, the report and the summary.

The captions of every split are also written to the run's folder in COCO's result format, so that anyone can compute
the printed numbers again with `raycap score`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.data.caption_files import N_BEST, read_n_best, read_predictions
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.synthetic.scenes import main_object_hits
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.comparison.protocol import confidence_search, run_protocol
from raycap.pipeline.evaluation.confidence.confidence import SIGNALS, Confidence, Quality, fit_split, judged_quality
from raycap.pipeline.evaluation.scores.inputs import score_inputs
from raycap.pipeline.evaluation.scores.metrics import (
    JAVA_METRICS,
    has_meaning,
    metrics_of_split,
    score_captions,
    why_unavailable,
)
from raycap.pipeline.evaluation.scores.split_result import ConstraintCounts, Hypothesis, SplitResult, mean_alignment
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.storage.atomic import read_json, write_json

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunScores:
    """The results of a run's splits, and the validation CIDEr-D after each stage, by stage name.

    confidence: fitted on the validation split; None if that was not possible. quality: that of it, by test split.
    """

    splits: tuple[SplitResult, ...]
    validation_by_stage: dict[str, float]
    language: str = ENGLISH  # of the captions
    confidence: Confidence | None = None
    quality: Mapping[str, Quality] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """{"test_CIDEr-D": ...}: the scores as the tracker and the model registry store them."""
        return {name: value for result in self.splits for name, value in result.flat().items()}

    @property
    def unavailable(self) -> dict[str, str]:
        """{metric: reason} of the metrics that could not be computed now, but may be later or on another machine."""
        scores = [score for result in self.splits if result.scores for score in result.scores.by_name.items()]
        names = [name for name in JAVA_METRICS if has_meaning(name, self.language)]
        return {name: score.unavailable for name, score in scores if score.unavailable and name in names}


def split_result(
    split: str,
    best: Mapping[int, Hypothesis],
    automata: Mapping[int, ConstraintAutomaton],
    unreadable: Mapping[int, str],
    label: str,
) -> SplitResult:
    """A split's captions, mean alignment and counts of satisfied constraints; also logs the last two.

    best: the best caption by image id. automata: the constraints by image id, for images that have any. unreadable:
    {image id: reason}. label: the start of the log lines.
    """
    alignment = mean_alignment(best.values())
    if alignment is not None:
        logger.info(f"{label}alignment of words and patches {alignment:.3f}")
    satisfied = {
        image: (hypothesis.num_satisfied or 0, automata[image].num_required)
        for image, hypothesis in best.items()
        if image in automata
    }
    counts = ConstraintCounts.tally(satisfied) if satisfied else None
    if counts is not None:
        logger.info(f"{label}{counts}")
    captions = {image: hypothesis.caption for image, hypothesis in best.items()}
    # A confidence belongs to a search without constraints.
    signals = {} if automata else {image: each.signals for image, each in best.items() if each.signals}
    return SplitResult(split, captions, unreadable, alignment, counts, signals=signals)


def stored_results(folder: RunFolder, dataset: Dataset, splits: Sequence[str]) -> list[SplitResult]:
    """The captions that an earlier attempt has scored, without the scores; [] unless it captioned the same images.

    Damaged files are named in the log, and the result is [].
    """
    try:
        return _read_results(folder, dataset, splits)
    except (DamagedError, UserError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, DamagedError | UserError) else f"{folder.path / 'scores.json'} is damaged"
        logger.warning(f"damaged   {reason}; the images are captioned again")
        return []


def _read_results(folder: RunFolder, dataset: Dataset, splits: Sequence[str]) -> list[SplitResult]:
    """As `stored_results`, but raises various errors for damaged files."""
    path = folder.path / "scores.json"
    entries = read_json(path)["splits"] if path.is_file() else {}
    results = []
    for split in splits:
        predictions = folder.path / "predictions" / f"{split}.json"
        if split not in entries or not predictions.is_file():
            return []
        captions = {int(image): text for image, text in read_predictions(predictions).items()}
        if captions.keys() != set(dataset.split(split).column("image_id")):
            return []
        alignment, counts = entries[split]["alignment"], entries[split]["constraints"]
        constraints = None if counts is None else ConstraintCounts(**counts)
        n_best = folder.path / "predictions" / N_BEST.format(split)
        several = {int(image): texts for image, texts in read_n_best(n_best).items()} if n_best.is_file() else {}
        stored = dict(entries[split].get("signals", {}))  # runs of older versions have none
        signals = {int(image): tuple(map(float, values)) for image, values in stored.items()}
        if any(len(values) != len(SIGNALS) for values in signals.values()):
            raise ValueError(f"{path}: an image has other signals than {', '.join(SIGNALS)}")
        result = SplitResult(split, captions, alignment=alignment, constraints=constraints)
        results.append(replace(result, several=several, signals=signals))
    return results


def score_run(folder: RunFolder, dataset: Dataset, results: Sequence[SplitResult]) -> RunScores:
    """Scores the splits of a run and writes scores.json. Test splits get all metrics."""
    data, section = folder.config.data, folder.config.evaluation
    language, is_synthetic = data.language, data.synthetic is not None

    def score(result: SplitResult) -> SplitResult:
        """The result of a split with its scores added."""
        images = dataset.split(result.split)
        references = images.references()
        hits = main_object_hits(result.captions, references, language) if is_synthetic else {}
        metrics = metrics_of_split(section.metrics, is_test=result.split in data.test_splits)
        options = folder.config.storage.options
        inputs = score_inputs(
            section.inputs, language, data, several=result.several, uris=images.uris(), options=options
        )
        scores = score_captions(references, result.captions, metrics=metrics, language=language, inputs=inputs)
        return replace(result, scores=scores, main_object_hits=hits)

    # each process of SPICE takes half of the free memory, so that there must be one at a time
    max_workers = 1 if why_unavailable("SPICE") is None else None
    with ThreadPoolExecutor(max_workers) as pool:  # threads suffice: most of the work runs in Java processes
        scored = tuple(pool.map(score, results))
    confidence, quality = _confidence(folder, scored)
    run_scores = RunScores(scored, _validation_by_stage(folder, dataset), language, confidence, quality)
    splits = {result.split: result.to_json() for result in run_scores.splits}
    for split, each in quality.items():
        splits[split]["confidence"] = each.to_json()
    protocol = run_protocol(folder.config, folder.delivered())
    content = {"protocol": asdict(protocol), "signature": protocol.signature, "splits": splits}
    write_json(folder.path / "scores.json", content | {"validation_by_stage": run_scores.validation_by_stage})
    return run_scores


def _confidence(folder: RunFolder, results: Sequence[SplitResult]) -> tuple[Confidence | None, dict[str, Quality]]:
    """The confidence that fits the validation split, or None, and its quality on the test splits."""
    config = folder.config
    validation = next(result for result in results if result.split == config.data.val_split)
    if not validation.signals:
        return None, {}
    search = confidence_search(config.evaluation, folder.sizes.max_positions)
    confidence = fit_split(validation, search, config.evaluation.good_ciderd)
    others = [result for result in results if result is not validation]
    return confidence, {} if confidence is None else judged_splits(others, confidence)


def judged_splits(results: Sequence[SplitResult], confidence: Confidence) -> dict[str, Quality]:
    """The quality of a confidence by split, which the log also gets, for the splits where it can be measured."""
    quality = {}
    for result in results:
        if (measured := judged_quality(result, confidence)) is not None:
            quality[result.split] = measured
            logger.info(f"confidence   {result.split}: {measured}")
    return quality


def _validation_by_stage(folder: RunFolder, dataset: Dataset) -> dict[str, float]:
    """CIDEr-D on the validation split after each stage, from the captions of its best weights."""
    references = dataset.split(folder.config.data.val_split).references()
    values = {}
    for stage in folder.config.stages:
        path = folder.stage(stage.name) / "predictions-val.json"
        if path.is_file():
            language = folder.config.data.language
            scores = score_captions(references, read_predictions(path), metrics=("CIDEr-D",), language=language)
            if (value := scores.by_name["CIDEr-D"].value) is not None:
                values[stage.name] = value
    return values
