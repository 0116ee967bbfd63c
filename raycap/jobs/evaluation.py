"""An evaluation: the models and images of one call, and the steps from captions to scores and reports."""

from __future__ import annotations

import logging
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raycap.jobs.cluster import start_ray, with_precision
from raycap.jobs.cluster_captions import Captioned, SplitTask, caption_on_cluster
from raycap.jobs.named_files import open_bundle
from raycap.jobs.score import format_scores
from raycap.jobs.seeds import group_id, seed_configs
from raycap.jobs.systems import OTHER_IMAGES, EvaluatedModel, compare, summarize_systems
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.caption_files import N_BEST, write_predictions
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import data_root, find_data, planned_data, read_annotations, snapshot_of
from raycap.pipeline.data.synthetic.scenes import main_object_hits
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    bundle_protocol,
    bundle_source,
    read_bundle_config,
    read_confidences,
    store_confidence,
)
from raycap.pipeline.evaluation.captioning.bundle_files import CONFIDENCE, fetched
from raycap.pipeline.evaluation.captioning.measured_precision import with_kept_precision
from raycap.pipeline.evaluation.comparison.protocol import (
    Protocol,
    confidence_search,
    ensemble_protocol,
    in_language,
    search_settings,
    searched,
)
from raycap.pipeline.evaluation.comparison.published import FinalRow, published_rows
from raycap.pipeline.evaluation.confidence.confidence import Confidence, Quality, find_fit, fit_split
from raycap.pipeline.evaluation.scores.inputs import score_inputs
from raycap.pipeline.evaluation.scores.metrics import ScoreInputs, Scores, metrics_of_split, score_captions
from raycap.pipeline.evaluation.scores.split_result import SplitResult
from raycap.pipeline.features.extraction import features_for_bundles
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.preflight import check_score_inputs
from raycap.pipeline.runs.run_scores import judged_splits, split_result
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.atomic import atomic_path, write_json
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, cache_folder, join, storage_path

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton

logger = logging.getLogger(__name__)

# Writes what several evaluated models have in common to a folder. The second list has those of another system.
Summarize = Callable[[StoragePath, Sequence[EvaluatedModel], Sequence[EvaluatedModel]], None]

ALL_IMAGES = "all"  # the name for --split that selects every image
SERVER_IMAGES = {"test2014": 40_775, "val2014": 40_504}  # the images that COCO's evaluation server scores


def output_folder(config: RunConfig, label: str, out: str | None) -> tuple[StoragePath, Path]:
    """Where the results of an evaluation go, and the local folder in which they are written.

    The folders differ if the results go to S3; the local one is then a new one. label: the name of the default folder,
    which is in the storage. out: the option --out.
    """
    default = config.storage_place / f"evaluations/{label}"
    place = storage_path(default if out is None else out, config.storage.options)
    if not place.is_remote:
        return place, place.path
    return place, cache_folder() / "evaluations" / uuid.uuid4().hex[:16] / "results"


@contextmanager
def writing_results(place: StoragePath, folder: Path) -> Iterator[None]:
    """Makes the local folder of `output_folder`, and removes it when its results are on S3.

    After an error, results that are not on S3 remain, and the log names the folder: the captions can take hours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_done = not place.is_remote
    try:
        yield
        is_done = True
    finally:
        if not is_done and any(folder.iterdir()):
            logger.warning(f"results      {folder}: they are not all in {place}; copy them, or remove this folder")
        elif place.is_remote:
            shutil.rmtree(folder.parent, ignore_errors=True)  # with the mirror's record


class Evaluation:
    """The models and images of one call, with the steps from captions to the report.

    bundles: those of all evaluated models. models: the bundles of each model that is evaluated by itself; those of
    an ensemble are one model. labels: the names of the models, such as "seed 0". label: a name for all of them. place,
    folder: see `output_folder`. store: the features for models without a backbone. seconds_per_image: that a worker
    took for the last captions, without the loading of models; None before.
    """

    seconds_per_image: float | None = None

    def __init__(
        self,
        config: RunConfig,
        models: Sequence[str],
        features: str | None,
        constraints: Path | str | None,
        data: Path | None,
    ) -> None:
        """Opens the bundles `models` (the option --model). Their protocol gives the settings that `config` does not.

        config: with the images of the data file `data`, if there is one. features: a feature store. constraints: a file
        of words that captions must contain; None for no constraints. Raises UserError.
        """
        check_score_inputs(config)
        self.config = config
        self.constraints = constraints
        self.data_suffix = "" if data is None else f"-{data.stem}"
        self.store = None if features is None else storage_path(features, config.storage.options)
        if self.store is not None and next(iter(self.store.walk()), None) is None:
            raise UserError(f"--features {features}: no files are there; give the folder of a feature store")
        self.bundles = [self.find_bundle("--model", model) for model in models]
        if self.bundles:  # a run's own bundle has the settings of its configuration
            search = search_settings(config.evaluation, [_recorded(bundle) for bundle in self.bundles])
            self.config = config.model_copy(update={"evaluation": search})
        for bundle in self.bundles:
            self.config.evaluation.require_words(_recorded(bundle).language, _vocabulary(bundle).tokenizer)
        if constraints is not None:
            self.config.evaluation.require_constraints(f"--constraints {constraints}")
        self.labels = [f"model {number}" for number in range(1, len(models) + 1)]

    def find_images(self, splits: Sequence[str], run_config: RunConfig, stage: str | None, seeds: int = 1) -> None:
        """Finds the data, the features and, without --model, the runs' bundles. Raises UserError.

        run_config: identifies the run. The other parameters are options of `raycap evaluate`.
        """
        config, splits = self.config, splits or self.config.data.test_splits
        if (planned := planned_data(config)) is not None:
            _images_by_split(planned, splits)  # refuses a wrong split before images are drawn
            if not self.bundles and config.home("") is None:
                _require_any_run(run_config, stage)
        # These data include images without references, which are captioned and not scored.
        dataset, _ = read_annotations(config.data, data_root(config), config.storage.options)
        _images_by_split(dataset, splits)
        names = dataset.split_sizes().keys()
        captioned = dataset.split(*splits) if names >= set(splits) else dataset
        if self.store is None:
            captioned, self.store = features_for_bundles(config, captioned)
        else:  # a feature store needs content keys, which images that cannot be read do not have
            captioned = snapshot_of(captioned, config)[0].readable()
        self.images_by_split, self.dataset = _images_by_split(captioned, splits), dataset
        if not self.bundles:
            configs = seed_configs(run_config, seeds)
            self.bundles, kept_config = _run_bundles(configs, stage)
            self.labels = [f"seed {each.seed}" for each in configs]
            self.config = with_kept_precision(config, kept_config)

    def choose_place(self, out: str | None, *, one_by_one: bool = False, compared: Sequence[StoragePath] = ()) -> None:
        """Sets the label and the places of the results.

        one_by_one: the bundles do not form an ensemble. compared: the bundles of another system with several seeds.
        """
        names = [bundle.name for bundle in self.bundles]
        self.models, self.label = [[bundle] for bundle in self.bundles], "+".join(names)
        if not one_by_one and len(names) > 1:
            self.models, self.labels = [self.bundles], [f"ensemble of {len(names)}"]
        if one_by_one or len(self.label) > 120:  # the label is also a folder's name
            kind = "seeds" if one_by_one else "ensemble"
            self.label = group_id(f"{self.config.name}-{len(names)}-{kind}", names)
        if compared:
            self.label = group_id(f"{self.label}-compared", [str(bundle) for bundle in compared])
        self.place, self.folder = output_folder(self.config, f"{self._folder_name()}{self.data_suffix}", out)

    def _folder_name(self) -> str:
        """The label, and a hash of the bundles outside of the storage, because these can have equal names."""
        storage = join(self.config.storage_place.uri, "")
        outside = [str(bundle) for bundle in self.bundles if not str(bundle).startswith(storage)]
        return group_id(self.label, outside) if outside else self.label

    def part(self, name: str, bundles: Sequence[StoragePath]) -> Evaluation:
        """The evaluation of these bundles on the same images, with its results in a folder of this one's."""
        part = copy(self)
        part.bundles, part.label = list(bundles), "+".join(bundle.name for bundle in bundles)
        part.place, part.folder = self.place / name, self.folder / name
        part.folder.mkdir(parents=True, exist_ok=True)
        return part

    @property
    def protocol(self) -> Protocol:
        """The protocol of these results."""
        return self.protocol_of(self.bundles)

    def protocol_of(self, bundles: Sequence[StoragePath]) -> Protocol:
        """The protocol of the results of a bundle, or of several as an ensemble."""
        search = self.config.evaluation
        protocol = ensemble_protocol([searched(_recorded(bundle), search) for bundle in bundles])
        features: Literal["grid", "regions"] = "grid" if self.config.has_backbone else "regions"
        constrained = self.constraints is not None
        return replace(in_language(protocol, self.language), features=features, constrained=constrained)

    @property
    def language(self) -> str:
        """The language of the captions: that of the configuration, or that of the bundles if it does not set one."""
        data = self.config.data
        recorded = {_recorded(bundle).language for bundle in self.bundles}
        return recorded.pop() if len(recorded) == 1 and "language" not in data.model_fields_set else data.language

    def find_bundle(self, option: str, model: str) -> StoragePath:
        """The bundle that an option names. Raises UserError if it cannot be loaded or its features are missing."""
        opened = open_bundle(option, model, self.config.storage.options)
        if opened.bundle.transform is None and self.store is None and self.config.has_backbone:
            raise UserError(
                f"{option} {model}: this bundle has no backbone; give its feature store with --features, or its "
                "regions as features.hdf5"
            )
        return opened.location

    def tasks(self, model: StoragePath) -> dict[str, SplitTask]:
        """The images of each split with their constraints.

        The constraints contain word ids of the vocabulary of `model`, which is a bundle's folder.

        Raises UserError when the file has no constraints for these images.
        """
        from raycap.pipeline.evaluation.captioning.constraints import load_automata

        automata: dict[int, ConstraintAutomaton] = {}
        if self.constraints is not None:
            image_ids = [image for images in self.images_by_split.values() for image in images.column("image_id")]
            automata = load_automata(Path(self.constraints), image_ids, _vocabulary(model))
            if not automata:
                splits = ", ".join(self.images_by_split)
                raise UserError(
                    f"constraints {self.constraints}: none of its images is in {splits}; look at the image ids"
                )
        return {split: SplitTask(images, automata) for split, images in self.images_by_split.items()}

    def run(self, address: str | None, compared: StoragePath | None, server: str | None) -> list[SplitResult]:
        """Captions the images with one model or ensemble, and writes and uploads all results.

        compared, server: the options. Returns the results by split.
        """
        tasks = self.tasks(self.bundles[0])
        compared_tasks = {} if compared is None else self.tasks(compared)
        self.fit_length([] if compared is None else [compared])
        self._log_plan()
        with writing_results(self.place, self.folder):
            self._start(address)
            others: dict[str, Captioned] = {}
            if compared is not None:
                others = self._caption([compared], compared_tasks)
            return self._score_all(tasks, others, server)

    def run_systems(
        self, address: str | None, compared: Sequence[StoragePath], summarize: Summarize = summarize_systems
    ) -> list[SplitResult]:
        """Captions the images with each of several models, and writes all results with a summary of their scores.

        compared: bundles of another system, one per seed. Returns the results of all models.
        """
        others = [[bundle] for bundle in compared]
        for bundles in (*self.models, *others):
            self.tasks(bundles[0])  # raises UserError for constraints that do not fit a vocabulary
        self.fit_length(compared)
        self._log_plan()
        with writing_results(self.place, self.folder):
            self._start(address)
            ours = [self._evaluated(*model) for model in zip(self.labels, self.models, strict=True)]
            theirs = [self._evaluated(f"other {number}", bundles) for number, bundles in enumerate(others, 1)]
            summarize(self.place, ours, theirs)
        return [result for model in (*ours, *theirs) for result in model.results]

    def _evaluated(self, label: str, bundles: Sequence[StoragePath]) -> EvaluatedModel:
        """Captions and scores all splits with a model or an ensemble. Its results are in a folder of this one's."""
        logger.info(f"\n{label}: {', '.join(map(str, bundles))}")
        part = self.part(label.replace(" ", "-"), bundles)
        return EvaluatedModel(label, part, part._score_all(part.tasks(bundles[0]), {}, None))

    def fit_length(self, compared: Sequence[StoragePath]) -> None:
        """Lowers `evaluation.max_length` to the positions of the models, which all caption with the same settings."""
        search = self.config.evaluation
        positions = min(_bundle_config(bundle)["sizes"]["max_positions"] for bundle in (*self.bundles, *compared))
        if positions < search.max_length:
            logger.info(f"search    at most {positions} tokens, because a model has no more positions")
            search = search.model_copy(update={"max_length": positions})
            self.config = self.config.model_copy(update={"evaluation": search})

    def _log_plan(self) -> None:
        logger.info(f"models    {', '.join(' + '.join(map(str, bundles)) for bundles in self.models)}")
        counts = ", ".join(f"{split} {len(images)}" for split, images in self.images_by_split.items())
        logger.info(f"data      {counts} images")

    def _start(self, address: str | None) -> None:
        """Starts or joins Ray. `evaluation.precision: auto` is replaced by the faster precision."""
        self.config = with_precision(self.config, address)
        logger.info(f"protocol  {self.protocol_of(self.models[0]).signature}")
        start_ray(self.config, address, "captions")

    def _score_all(
        self, tasks: Mapping[str, SplitTask], others: Mapping[str, Captioned], server: str | None
    ) -> list[SplitResult]:
        """Captions, scores and reports all splits. others: the captions of the model of `--compare`; {} without it."""
        entries, reported, results = {}, [], []
        captioned = self._caption(self.bundles, tasks)
        for split, captions in captioned.items():
            self._write_captions(split, captions)
            automata = tasks[split].constraints
            result = split_result(split, captions.best, automata, captions.unreadable, label=f"search    {split}: ")
            result = replace(result, several=captions.several)
            entries[split], scored = self.score(result, others.get(split))
            reported += [scored] if scored else []
            results.append(scored[0] if scored else result)
        decorations = Decorations()
        quality = self._judge([scored[0] for scored in reported], decorations)
        for split, each in quality.items():
            entries[split]["confidence"] = each.to_json()
        self.write_scores(entries, missing={})
        for scored in reported:
            with decorations.making(f"the report of {scored[0].split}"):
                self.report(scored, quality.get(scored[0].split), decorations)
        if server is not None:
            self._write_server_files(captioned, server)
        self.write_scores(entries, decorations.failed)
        logger.info(f"scores       {self.place / 'scores.json'}")
        decorations.log_failed()
        return results

    def _caption(self, bundles: Sequence[StoragePath], tasks: Mapping[str, SplitTask]) -> dict[str, Captioned]:
        """Captions the images of each split, and each image once if one of the splits is every image."""
        sources = [bundle_source(bundle, self.config) for bundle in bundles]
        every = {image for task in tasks.values() for image in task.images.column("image_id")}
        whole = {split: task for split, task in tasks.items() if len(task.images) == len(every)}
        split = next(iter(whole), None)
        chosen = tasks if split is None else {split: whole[split]}
        captioned = caption_on_cluster(sources, chosen, self.config, store=self.store)
        self.seconds_per_image = sum(each.seconds for each in captioned.values()) / len(every)
        if split is None:
            return captioned
        return {name: captioned[split].of(task.images.column("image_id")) for name, task in tasks.items()}

    def _write_captions(self, split: str, captioned: Captioned) -> None:
        """Writes predictions-SPLIT.json, and n-best-SPLIT.jsonl if images have several captions."""
        best = {image: hypothesis.caption for image, hypothesis in captioned.best.items()}
        predictions = f"predictions-{split}.json"
        write_predictions(self.folder / predictions, best)
        logger.info(f"predictions  {self.place / predictions}")
        if captioned.several:
            n_best = N_BEST.format(split)
            captioned.write_n_best(self.folder / n_best)
            logger.info(f"n best       {self.place / n_best}")

    def _write_server_files(self, captioned: Mapping[str, Captioned], server: str) -> None:
        """Writes captions_NAME_results.zip for COCO's evaluation server: a captions_SPLIT_NAME_results.json per split.

        server: NAME in these names. Warns of images that are not the server's. UserError for images without a caption.
        """
        for split, captions in captioned.items():
            num_captions, num_images = len(captions.best), len(_images_of(self.dataset, split))
            if num_captions != num_images:
                raise UserError(
                    f"--server: {num_captions} captions for the {num_images} images of {split}; the server takes all "
                    "or none"
                )
        archive_file = self.folder / f"captions_{server}_results.zip"
        with (
            atomic_path(archive_file) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for split in captioned:
                predictions = self.folder / f"predictions-{split}.json"
                archive.write(predictions, f"captions_{split}_{server}_results.json")
        counts = {split: len(captions.best) for split, captions in captioned.items()}
        logger.info(f"server       {self.place / archive_file.name}: {_counts(counts)}")
        if counts != SERVER_IMAGES:
            logger.warning(f"server       COCO's server takes {_counts(SERVER_IMAGES)} in one file")

    def write_scores(self, entries: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        """Writes scores.json and uploads the results. entries: by split. missing: {report: reason}, of failed ones."""
        content = {
            "models": list(map(str, self.bundles)),
            "protocol": asdict(self.protocol),
            "signature": self.protocol.signature,
            "splits": entries,
        }
        write_json(self.folder / "scores.json", content | ({"missing": missing} if missing else {}))
        if self.place.is_remote:
            Mirror(self.place, self.folder).push()

    def score(self, result: SplitResult, compared: Captioned | None) -> tuple[dict[str, Any], list[SplitResult]]:
        """Computes the scores of a split. Returns its entry in scores.json, and the results for its report.

        compared: the captions of the model of `--compare`; None without it. A split without references has no report.
        """
        result = self._with_scores(result)
        published = self._published(result)
        rows = [
            {"name": row.name, "table": row.table, "scores": row.scores, "difference": difference}
            for row, difference in published
        ]
        entry = result.to_json() | {"published": rows}
        if result.scores is None:
            logger.info(f"{result.split} has no reference captions: captioned, not scored")
            self._log_published(published)
            return entry, []
        self._log_scores(result, result.scores)
        self._log_published(published)
        results = [result]
        if compared is not None:
            results.append(self._compared_result(result, compared))
            differences = {name: asdict(each) for name, each in compare([result], [results[1]]).items()}
            entry["compared"] = results[1].scores_to_json() | {
                "differences": differences,
                "images": len(result.captions),
            }
        return entry, results

    def _judge(self, results: Sequence[SplitResult], decorations: Decorations) -> dict[str, Quality]:
        """The quality, by split, of the confidence in the captions. An ensemble has none.

        If the validation split is among the results, the confidence is fitted on it and stored in the bundle.
        """
        if len(self.bundles) > 1 or not any(result.signals for result in results):
            return {}
        (bundle,), evaluation = self.bundles, self.config.evaluation
        search = confidence_search(evaluation, _bundle_config(bundle)["sizes"]["max_positions"])
        validation = [result for result in results if result.split == self.config.data.val_split]
        confidence = find_fit(read_confidences(fetched(bundle)), search)
        for result in validation:
            fitted = fit_split(result, search, evaluation.good_ciderd)
            if fitted is not None and fitted != confidence:
                confidence = fitted
                self._store(bundle, fitted, decorations)
        if confidence is None:
            if not validation:
                logger.info("confidence   none was fitted with this search; evaluate the validation split to fit it")
            return {}
        return judged_splits([result for result in results if result not in validation], confidence)

    def _store(self, bundle: StoragePath, confidence: Confidence, decorations: Decorations) -> None:
        """Stores a confidence in a bundle, except in a champion's, whose digests are recorded elsewhere."""
        if bundle.name.startswith("champion-"):
            logger.info(f"confidence   not stored: {bundle} is a champion's bundle, which is never changed")
            return
        try:
            with decorations.making("the confidence in the bundle"):
                store_confidence(bundle, confidence)
                logger.info(f"confidence   {bundle / CONFIDENCE}, from {confidence.num_images} images")
        except UserError as error:
            logger.warning(f"confidence   not stored: {error}")

    def _references(self, result: SplitResult) -> dict[int, list[str]]:
        """The references of the images that have both references and a caption."""
        references = self.images_by_split[result.split].references()
        return {image: texts for image, texts in references.items() if texts and image in result.captions}

    def _with_scores(self, result: SplitResult) -> SplitResult:
        """A copy of the result with scores; the result itself if the split has no references."""
        references = self._references(result)
        if not references:
            return result
        train = self.dataset.split(*self.config.data.train_splits)
        captions = {image: result.captions[image] for image in references}
        language = self.language
        metrics = metrics_of_split(self.config.evaluation.metrics, is_test=True)
        scores = score_captions(
            references,
            captions,
            metrics=metrics,
            training_captions=train.texts() if train.num_captions else None,
            language=language,
            inputs=self._score_inputs(result.split, result.several),
        )
        is_synthetic = self.config.data.synthetic is not None
        hits = main_object_hits(captions, references, self.config.data.language) if is_synthetic else {}
        return replace(result, scores=scores, main_object_hits=hits)

    def _score_inputs(self, split: str, several: Mapping[int, Sequence[str]]) -> ScoreInputs:
        """The inputs of metrics of a split. several: all captions of each image, if there are more than one."""
        config, uris = self.config, self.images_by_split[split].uris()
        return score_inputs(
            config.evaluation.inputs,
            self.language,
            config.data,
            several=several,
            uris=uris,
            options=config.storage.options,
        )

    def _compared_result(self, result: SplitResult, compared: Captioned) -> SplitResult:
        """The result of the model of `--compare`, with scores for the same images and metrics as `result`."""
        captions = {image: best.caption for image, best in compared.best.items()}
        references = self._references(result)
        if not references.keys() <= captions.keys():
            raise JobFailedError(OTHER_IMAGES)
        scored_captions = {image: captions[image] for image in references}
        metrics, language = tuple(result.values), self.language
        inputs = self._score_inputs(result.split, compared.several)
        scores = score_captions(references, scored_captions, metrics=metrics, language=language, inputs=inputs)
        return SplitResult(f"{result.split}, the other", captions, scores=scores)

    def _published(self, result: SplitResult) -> list[tuple[FinalRow, str]]:
        """The printed scores for the split, each with why ours cannot be compared, or ""."""
        from raycap.pipeline.runs.run_report import scored_uris

        return published_rows(self.protocol, result.split, scored_uris(result, self.images_by_split[result.split]))

    def _log_scores(self, result: SplitResult, scores: Scores) -> None:
        """Logs the scores."""
        logger.info(f"\n{result.split}, {len(scores.image_ids)} images{format_scores(scores)}")
        if result.main_object is not None:
            logger.info(f"  main object named in {result.main_object:.1%} of the captions")

    def _log_published(self, published: Sequence[tuple[FinalRow, str]]) -> None:
        """Logs printed scores, each with why ours cannot be compared."""
        for row, difference in published:
            values = "  ".join(f"{name} {value:.3f}" for name, value in row.scores.items())
            logger.info(f"  {row.name}: {values}" + (f"  ({difference})" if difference else ""))

    def report(self, results: Sequence[SplitResult], quality: Quality | None, decorations: Decorations) -> None:
        """Writes report-SPLIT.html of the first result. Scores and captions of a second result are shown beside it.

        quality: of the confidence in the first result's captions. The report shows the maps of the first bundle.
        """
        from raycap.jobs.gallery import add_maps
        from raycap.pipeline.evaluation.reports.page import Report, write_report
        from raycap.pipeline.runs.run_report import published_table, report_images, score_table

        result, others = results[0], results[1:]
        config, dataset, label = self.config, self.images_by_split[result.split], self.label
        columns, rows = score_table(results, with_alignment=True)
        images = [
            replace(image, alternatives={"other": others[0].captions[int(image.image_id)]} if others else {})
            for image in report_images(result, dataset, config.storage.options)
        ]
        with decorations.making(f"the heat maps of {result.split}"):
            model = bundle_source(self.bundles[0], config)
            images = add_maps(images, model, config, self.store, dataset, seed=label)
        report = Report(
            title=f"{label} on {result.split}",
            run_id=label,
            protocol=f"{self.protocol.signature}, {result.signature}",
            score_columns=columns,
            score_rows=rows + published_table(columns, self._published(result)),
            stages=[],
            images=images,
            metadata={"models": ", ".join(label.split("+")), "images": f"{result.split} {len(dataset)}"},
            language=self.language,
            confidence={} if quality is None else {result.split: quality},
        )
        name = f"report-{result.split}.html"
        write_report(self.folder / name, report)
        logger.info(f"report       {self.place / name}")


def _counts(images: Mapping[str, int]) -> str:
    return " and ".join(f"{count:,} captions of {split}" for split, count in images.items())


def _recorded(bundle: StoragePath) -> Protocol:
    """The protocol that a bundle records."""
    return bundle_protocol(_bundle_config(bundle))


def _vocabulary(bundle: StoragePath) -> Vocabulary:
    return Vocabulary.load(fetched(bundle) / "vocabulary.json")


def _bundle_config(bundle: StoragePath) -> dict[str, Any]:
    """The content of a bundle's config.yaml."""
    return read_bundle_config(fetched(bundle))


def _images_by_split(dataset: Dataset, splits: Sequence[str]) -> dict[str, Dataset]:
    """The images of each split. Raises UserError for a split without images."""
    return {split: _images_of(dataset, split) for split in splits}


def _images_of(dataset: Dataset, split: str) -> Dataset:
    """The images of a split; `all` means every image if no split is called so. Raises UserError if there are none."""
    images = dataset.split(split)
    if not len(images) and split == ALL_IMAGES:
        images = dataset
    if not len(images):
        splits = ", ".join(sorted(dataset.split_sizes()))
        raise UserError(
            f"--split {split}: no image is in it; the splits are {splits}, and {ALL_IMAGES} for every image"
        )
    return images


def _require_any_run(config: RunConfig, stage: str | None) -> None:
    """Raises UserError if the local storage has no run of this name. The data decide which of several it is."""
    if not any(config.working_path.glob(f"runs/{config.name}-*")):
        raise _unfinished("run" if stage is None else f"stage {stage} of run", config.name, config)


def _unfinished(subject: str, run: str, config: RunConfig) -> UserError:
    return UserError(f"{subject} {run} is not finished in {config.storage.uri}; `raycap run` it, or give --model")


def _run_bundles(configs: Sequence[RunConfig], stage_name: str | None) -> tuple[list[StoragePath], RunConfig]:
    """The bundles of the configurations' runs, which are written if they do not exist yet, and the first run's values.

    stage_name: selects the models as they were after this stage; None for the final models. Raises UserError if a run
    or the stage is not finished.
    """
    from raycap.pipeline.runs.prepare import open_run

    dataset, _ = find_data(configs[0])
    fingerprint = dataset.readable().fingerprint()
    folders = [open_run(config, fingerprint) for config in configs]
    bundles = [_run_bundle(config, folder, stage_name) for config, folder in zip(configs, folders, strict=True)]
    return bundles, folders[0].config


def _run_bundle(config: RunConfig, folder: RunFolder, stage_name: str | None) -> StoragePath:
    """The bundle of one run. See `_run_bundles`."""
    from raycap.pipeline.runs.run_bundle import bundle_place, bundle_run

    if stage_name is None:
        stage, subject = None, "run"
        is_finished = (folder.path / "COMPLETE.json").is_file()
    else:
        stage, subject = config.stage(stage_name), f"stage {stage_name} of run"
        is_finished = folder.result(stage_name) is not None
    if not is_finished or not (folder.path / "run.json").is_file():
        raise _unfinished(subject, f"{folder.run_id} (seed {config.seed})", config)
    location = bundle_place(folder, stage)
    if not (location / "config.yaml").exists():
        bundle_run(folder, stage)
    return location
