"""`raycap evaluate`: captions splits on the cluster with a model or an ensemble, and stores and scores the captions."""

from __future__ import annotations

import json
import logging
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jobs.caption_tasks import Captioned, SplitTask, caption_on_cluster
from jobs.cluster import start_ray
from jobs.options import Address, Config, Set
from jobs.score import format_scores
from pipeline.captioning.bundle import fetched, load_bundle
from pipeline.captioning.model_sources import ModelSource, bundle_source
from pipeline.config.load import load_config
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset, read_annotations
from pipeline.data.synthetic import main_object_accuracy
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError
from pipeline.features.source import feature_source
from pipeline.runs.evaluation import split_result
from pipeline.scoring.bootstrap import paired_difference
from pipeline.scoring.metrics import COMPARED_BY_IMAGE, score_captions
from pipeline.scoring.published import published_rows
from pipeline.scoring.result_files import write_predictions
from pipeline.scoring.split_result import SplitResult
from pipeline.storage.atomic import write_json, write_text
from pipeline.storage.path import StoragePath, storage_path

if TYPE_CHECKING:
    from models.constraints import ConstraintAutomaton

logger = logging.getLogger(__name__)

ALL_IMAGES = "all"  # the name for --split that selects every image


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `raycap evaluate`.

    splits: the splits to caption, by default data.test_splits; "all" is the whole data set.
    models: model bundles, by default that of the configuration's run; several form an ensemble.
    stage: evaluate the run's model as it was after this stage.
    compare: another bundle, whose captions and scores are shown beside these.
    features: a feature store, for bundles without a backbone.
    constraints: a file of words that captions must contain, in place of the configuration's evaluation.constraints.
    server: also write the COCO server's files, with this name in their file names.
    out: the folder for the results.
    """

    splits: Sequence[str] = ()
    models: Sequence[str] = ()
    stage: str | None = None
    compare: str | None = None
    features: str | None = None
    constraints: Path | None = None
    server: str | None = None
    out: Path | None = None


def evaluate(config: RunConfig, options: EvaluateOptions, address: str | None = None) -> int:
    """Captions and scores splits and writes the results to a folder. Returns 1 when an image cannot be read, else 0.

    Raises UserError for mistakes of the user before anything is computed.
    """
    begin = time.monotonic()
    _check_options(options)
    evaluation = Evaluation.prepare(config, options)
    evaluation.folder.mkdir(parents=True, exist_ok=True)
    evaluation.log_plan()
    start_ray(config, address)
    models = [bundle_source(member.location, config) for member in evaluation.models]
    captioned = evaluation.caption(models, evaluation.automata)
    compared: dict[str, Captioned] = {}
    if evaluation.compared_model is not None:
        compared_models = [bundle_source(evaluation.compared_model.location, config)]
        compared = evaluation.caption(compared_models, evaluation.compared_automata)
    entries = {
        split: evaluation.finish(split, captioned[split], compared.get(split), models[0])
        for split in evaluation.images_by_split
    }
    result = {"models": [str(member.location) for member in evaluation.models], "splits": entries}
    write_json(evaluation.folder / "scores.json", result)
    logger.info(f"scores       {evaluation.folder / 'scores.json'}")
    logger.info(f"finished in {time.monotonic() - begin:.0f} s")
    num_failed = sum(len(split_captions.unreadable) for split_captions in captioned.values())
    if num_failed:
        logger.info(f"{num_failed} images could not be read; scores.json lists them with the reasons")
    return 1 if num_failed else 0


def _check_options(options: EvaluateOptions) -> None:
    """Raises UserError for options that contradict each other or cannot be used."""
    if options.stage is not None and options.models:
        raise UserError("--stage names a stage of the configuration's run; leave --model out, or give its bundle there")
    server = options.server
    if server is not None and not server.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--server {server}: letters, digits, - and _ only; it becomes part of a file's name")


class LocatedBundle(NamedTuple):
    """A model bundle: its location in the storage, which every node can open, and the folder of a local copy."""

    location: StoragePath
    folder: Path


@dataclass(frozen=True)
class Evaluation:
    """The models and images of one call, with the steps from captions to the report.

    models: the evaluated model, or the members of an ensemble. compared_model: the model of `--compare`.
    store: the features for models without a backbone.
    automata, compared_automata: the constraints by image id, for the vocabularies of `models` and `compared_model`.
    """

    config: RunConfig
    options: EvaluateOptions
    dataset: Dataset
    images_by_split: Mapping[str, Dataset]
    models: Sequence[LocatedBundle]
    compared_model: LocatedBundle | None
    store: StoragePath | None
    automata: Mapping[int, ConstraintAutomaton]
    compared_automata: Mapping[int, ConstraintAutomaton]

    @classmethod
    def prepare(cls, config: RunConfig, options: EvaluateOptions) -> Evaluation:
        """Finds data, features, models and constraints. Raises UserError."""
        dataset = _read_data(config, with_keys=options.features is not None)
        if options.features is None:
            dataset, store = feature_source(config).for_bundles(dataset)
        else:
            store = storage_path(options.features, config.storage.options)
        images_by_split = {split: _images_of(dataset, split) for split in options.splits or config.data.test_splits}
        models = [_find_bundle(model, "--model", config, store) for model in options.models]
        models = models or [_run_bundle(config, options.stage)]
        compared_model = None
        if options.compare is not None:
            compared_model = _find_bundle(options.compare, "--compare", config, store)
        file = options.constraints or config.evaluation.constraints
        return cls(
            config=config,
            options=options,
            dataset=dataset,
            images_by_split=images_by_split,
            models=models,
            compared_model=compared_model,
            store=store,
            automata=_load_automata(file, models[0], images_by_split),
            compared_automata=_load_automata(file, compared_model, images_by_split),
        )

    @property
    def label(self) -> str:
        """The models' names, cut because the label is also a folder's name."""
        return "+".join(model.location.name for model in self.models)[:120]

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return self.options.out or self.config.working_path / "evaluations" / self.label

    def log_plan(self) -> None:
        models = ", ".join(str(model.location) for model in self.models)
        logger.info(f"models    {models}" + (", as an ensemble" if len(self.models) > 1 else ""))
        counts = ", ".join(f"{split} {len(images)}" for split, images in self.images_by_split.items())
        logger.info(f"data      {counts} images")

    def caption(
        self, models: Sequence[ModelSource], automata: Mapping[int, ConstraintAutomaton]
    ) -> dict[str, Captioned]:
        """Captions every split with one model or an ensemble. Ray must have been started."""
        tasks = {split: SplitTask(images, automata) for split, images in self.images_by_split.items()}
        return caption_on_cluster(models, tasks, self.config, store=self.store)

    def finish(
        self, split: str, captioned: Captioned, compared: Captioned | None, model: ModelSource
    ) -> dict[str, Any]:
        """Writes a split's captions, scores and report. Returns its entry in scores.json.

        compared: the captions of the model of `--compare`. model: the report shows the attention maps of this model.
        """
        write_captions(self.folder, split, captioned, self.images_by_split[split], self.options.server)
        result = split_result(split, captioned.best, self.automata, captioned.unreadable, f"search    {split}: ")
        result = self._scored(result)
        if result.scores is None:
            logger.info(f"{split} has no reference captions: captioned, not scored")
            return result.to_json()
        self._log_scores(result)
        entry, results = result.to_json(), [result]
        if compared is not None:
            results.append(self._scored_as(result, compared))
            entry["compared"] = compare(result, results[1]) | {"images": len(result.captions)}
        self._report(results, model)
        return entry

    def _scored(self, result: SplitResult) -> SplitResult:
        """The result with scores, or unchanged if the split has no references."""
        references = self._references(result)
        if not references:
            return result
        train = self.dataset.split(*self.config.data.train_splits)
        training_captions = [caption for captions in train.column("captions") for caption in captions]
        captions = {image: result.captions[image] for image in references}
        scores = score_captions(references, captions, training_captions=training_captions or None)
        is_synthetic = self.config.data.synthetic is not None
        return replace(
            result, scores=scores, main_object=main_object_accuracy(captions, references) if is_synthetic else None
        )

    def _scored_as(self, result: SplitResult, compared: Captioned) -> SplitResult:
        """The result of the model of `--compare`, with scores for the same images and metrics as `result`."""
        captions = {image: best.caption for image, best in compared.best.items()}
        references = self._references(result)
        scores = score_captions(
            references, {image: captions[image] for image in references}, metrics=tuple(result.values)
        )
        return SplitResult(f"{result.split}, the other", captions, scores=scores)

    def _references(self, result: SplitResult) -> dict[int, list[str]]:
        """The references of the images that have both references and a caption."""
        references = self.images_by_split[result.split].references()
        return {image: texts for image, texts in references.items() if texts and image in result.captions}

    def _log_scores(self, result: SplitResult) -> None:
        """Logs the scores, and published scores on the same split to compare them with."""
        assert result.scores is not None
        logger.info(f"\n{result.split}, {len(result.scores.image_ids)} images{format_scores(result.scores)}")
        if result.main_object is not None:
            logger.info(f"  main object named in {result.main_object:.1%} of the captions")
        config, uris = self.config, self.images_by_split[result.split].column("uri")
        for row, difference in published_rows(config.model.name, result.split, uris, config.evaluation.beam_size):
            values = "  ".join(f"{name} {value:.3f}" for name, value in row.scores.items())
            logger.info(f"  {row.name}: {values}" + (f"  ({difference})" if difference else ""))

    def _report(self, results: Sequence[SplitResult], model: ModelSource) -> None:
        """Writes report-SPLIT.html of the first result. Scores and captions of a second result are shown beside it."""
        from jobs.gallery import MapInputs, with_maps
        from pipeline.reports.page import Report, write_report
        from pipeline.runs.summary import published_table, report_images, score_table

        result, others = results[0], results[1:]
        config, dataset, label = self.config, self.images_by_split[result.split], self.label
        columns, rows = score_table(results, with_alignment=True)
        images = [
            replace(image, alternatives={"other": others[0].captions[int(image.image_id)]} if others else {})
            for image in report_images(result, dataset, config.storage.options)
        ]
        report = Report(
            title=f"{label} on {result.split}",
            run_id=label,
            protocol=f"{config.evaluation.protocol}, {result.signature}",
            score_columns=columns,
            score_rows=rows + published_table(columns, config, result.split, dataset.column("uri")),
            stages=[],
            images=with_maps(images, MapInputs(model, config, self.store, dataset), label),
            metadata={"models": ", ".join(label.split("+")), "images": f"{result.split} {len(dataset)}"},
        )
        path = self.folder / f"report-{result.split}.html"
        write_report(path, report)
        logger.info(f"report       {path}")


def write_captions(folder: Path, split: str, captioned: Captioned, images: Dataset, server: str | None) -> None:
    """Writes predictions-SPLIT.json, n-best-SPLIT.jsonl if images have several captions, and the server's files.

    Raises UserError when the server's file would lack an image.
    """
    best = {image: hypothesis.caption for image, hypothesis in captioned.best.items()}
    predictions = folder / f"predictions-{split}.json"
    write_predictions(predictions, best)
    logger.info(f"predictions  {predictions}")
    if any(len(ranked) > 1 for ranked in captioned.hypotheses.values()):
        lines = [
            json.dumps(
                {"image_id": image, "n_best": [hypothesis.to_json() for hypothesis in ranked]}, ensure_ascii=False
            )
            for image, ranked in captioned.hypotheses.items()
        ]
        write_text(folder / f"n-best-{split}.jsonl", "\n".join(lines) + "\n")
        logger.info(f"n best       {folder / f'n-best-{split}.jsonl'}")
    if server is None:
        return
    if len(best) != len(images):
        raise UserError(
            f"--server: {len(best)} captions for the {len(images)} images of {split}; the server takes all or none"
        )
    name = f"captions_{split}_{server}_results"
    write_predictions(folder / f"{name}.json", best)
    with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / f"{name}.json", f"{name}.json")
    logger.info(f"server       {folder / f'{name}.zip'}: {len(best)} rows")


def compare(result: SplitResult, other: SplitResult) -> dict[str, Any]:
    """Returns and logs the other result's scores, and the paired difference of every metric that averages images."""
    differences = {}
    logger.info(f"  {'':<9} {'this':>8} {'other':>8}   difference by image, 95 % interval")
    assert result.scores is not None and other.scores is not None
    for name, score in result.scores.by_name.items():
        other_score = other.scores.by_name[name]
        if score.value is None or other_score.value is None:
            continue
        text = ""
        if score.per_image is not None and other_score.per_image is not None and name in COMPARED_BY_IMAGE:
            difference = paired_difference(score.per_image, other_score.per_image)
            differences[name] = asdict(difference)
            text = f"{difference}, better in {difference.better:.1%} of resamples"
        logger.info(f"  {name:<9} {score.value:>8.4f} {other_score.value:>8.4f}   {text}")
    return other.scores_to_json() | {"differences": differences}


def _read_data(config: RunConfig, *, with_keys: bool) -> Dataset:
    """The data set, including images without references, which are captioned and not scored.

    with_keys: leave out images that cannot be read and give the others the keys of a feature store.
    """
    from pipeline.data.loading import data_root, snapshot_of

    dataset, _ = read_annotations(config.data, data_root(config), config.storage.options)
    return snapshot_of(dataset, config)[0].known() if with_keys else dataset


def _images_of(dataset: Dataset, split: str) -> Dataset:
    """The images of a split, or all of them for `all`, unless that is a split's name. UserError if there are none."""
    images = dataset.split(split)
    if not len(images) and split == ALL_IMAGES:
        images = dataset
    if not len(images):
        splits = ", ".join(sorted(set(dataset.column("split"))))
        raise UserError(
            f"--split {split}: no image is in it; the splits are {splits}, and {ALL_IMAGES} for every image"
        )
    return images


def _load_automata(
    file: Path | str | None, model: LocatedBundle | None, images_by_split: Mapping[str, Dataset]
) -> dict[int, ConstraintAutomaton]:
    """The constraints in `file` for a model's vocabulary, by image id; {} without a file or a model.

    Raises UserError when the file has no constraints for these images.
    """
    from pipeline.captioning.constraints import load_automata

    if file is None or model is None:
        return {}
    image_ids = {image for images in images_by_split.values() for image in images.column("image_id")}
    automata = load_automata(Path(file), image_ids, Vocabulary.load(model.folder / "vocabulary.json"))
    if not automata:
        splits = ", ".join(images_by_split)
        raise UserError(f"constraints {file}: none of its images is in {splits}; look at the image ids")
    return automata


def _find_bundle(model: str, option: str, config: RunConfig, store: StoragePath | None) -> LocatedBundle:
    """The bundle `model`, given by `option`. UserError if it cannot be loaded or lacks its features."""
    location = storage_path(model, config.storage.options)
    if not location.is_remote and not location.path.is_dir():
        raise UserError(f"{option} {model}: no such folder; give a model bundle, such as results/models/NAME/RUN")
    folder = fetched(location)
    try:
        bundle = load_bundle(folder)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
    if bundle.transform is None and store is None:
        raise UserError(
            f"{option} {model}: this bundle has no backbone; give its feature store with --features, or its "
            "regions as features.hdf5"
        )
    return LocatedBundle(location, folder)


def _run_bundle(config: RunConfig, stage_name: str | None) -> LocatedBundle:
    """The bundle of the configuration's run, optionally after a stage. It is written if it does not exist yet."""
    from pipeline.data.loading import find_data
    from pipeline.runs.prepare import open_run
    from pipeline.runs.run_bundle import bundle_place, bundle_run

    dataset, _ = find_data(config)
    folder = open_run(config, dataset.known().fingerprint())
    stage = None
    if stage_name is not None:
        names = [section.name for section in config.stages]
        if stage_name not in names:
            raise UserError(f"--stage {stage_name}: the configuration has the stages {', '.join(names)}")
        stage = config.stage(stage_name)
    if stage_name is not None:
        is_finished = folder.result(stage_name) is not None
    else:
        is_finished = (folder.path / "COMPLETE.json").is_file()
    if not (folder.path / "run.json").is_file() or not is_finished:
        run = f"stage {stage_name} of run" if stage_name is not None else "run"
        raise UserError(
            f"{run} {folder.run_id} is not finished in {config.storage.uri}; `raycap run` it, or give --model"
        )
    location = bundle_place(folder, stage)
    if not (location / "config.yaml").exists():
        bundle_run(folder, stage)
    return LocatedBundle(location, fetched(location))


def command(
    config: Config,
    set_: Set = None,
    split: Annotated[list[str] | None, typer.Option(help="A split, or all. The default is data.test_splits.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model bundle in place of the run's; several form an ensemble.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="The run's model as it was after this stage.")] = None,
    compare: Annotated[str | None, typer.Option(help="Another bundle to compare with, caption by caption.")] = None,
    features: Annotated[str | None, typer.Option(help="A feature store, for bundles without a backbone.")] = None,
    constraints: Annotated[Path | None, typer.Option(help="Words that each image's caption must contain.")] = None,
    server: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also write the COCO server's result file and zip.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The output folder.")] = None,
    address: Address = None,
) -> int:
    """Caption splits of a data set and score them.

    The model is the configuration's run, or the bundles given. The exit code is 1 when an image cannot be read.

    Example: raycap evaluate configs/demo.yaml --stage xe_finetune --split test
    """
    options = EvaluateOptions(split or (), model or (), stage, compare, features, constraints, server, out)
    return evaluate(load_config(config, set_ or ()), options, address)
