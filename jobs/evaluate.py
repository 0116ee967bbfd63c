"""`raycap evaluate`: captions splits on the cluster with one model or an ensemble, stores the captions, scores them."""

from __future__ import annotations

import json
import logging
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

ALL = "all"


@dataclass(frozen=True)
class EvaluateOptions:
    """What `raycap evaluate` is asked for.

    splits: those of data.test_splits by default; "all" is the whole data set.
    models: bundles, several are an ensemble; the configuration's own run by default.
    stage: the run as it was after this stage.
    compare: another bundle, whose captions are shown beside these.
    features: a feature store, for bundles without a backbone.
    constraints: a file of words that captions must contain, in place of the configuration's evaluation.constraints.
    server: the name in the COCO server's file.
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
    """Captions and scores of splits, written to a folder. Returns the exit code: 1 when an image cannot be read.

    Raises UserError for mistakes of the user before anything is computed.
    """
    begin = time.monotonic()
    _check_options(options)
    evaluation = Evaluation.prepare(config, options)
    evaluation.folder.mkdir(parents=True, exist_ok=True)
    evaluation.log_plan()
    start_ray(config, address)
    models = [bundle_source(member.location, config) for member in evaluation.members]
    captioned = evaluation.caption(models, evaluation.automata)
    others: dict[str, Captioned] = {}
    if evaluation.other is not None:
        others = evaluation.caption([bundle_source(evaluation.other.location, config)], evaluation.other_automata)
    entries = {name: evaluation.finish(name, captioned[name], others.get(name), models[0]) for name in evaluation.parts}
    result = {"models": [str(member.location) for member in evaluation.members], "splits": entries}
    write_json(evaluation.folder / "scores.json", result)
    logger.info(f"scores       {evaluation.folder / 'scores.json'}")
    logger.info(f"finished in {time.monotonic() - begin:.0f} s")
    failed = sum(len(each.unreadable) for each in captioned.values())
    if failed:
        logger.info(f"{failed} images could not be read; scores.json lists them with the reasons")
    return 1 if failed else 0


def _check_options(options: EvaluateOptions) -> None:
    if options.stage is not None and options.models:
        raise UserError("--stage names a stage of the configuration's run; leave --model out, or give its bundle there")
    server = options.server
    if server is not None and not server.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--server {server}: letters, digits, - and _ only; it becomes part of a file's name")


class Member(NamedTuple):
    """A model bundle: where it is for everybody, and a local copy."""

    location: StoragePath
    folder: Path


@dataclass(frozen=True)
class Evaluation:
    """The models and images of one call; the steps from captions to the report."""

    config: RunConfig
    options: EvaluateOptions
    dataset: Dataset
    parts: Mapping[str, Dataset]
    members: Sequence[Member]
    other: Member | None
    store: StoragePath | None
    automata: Mapping[int, ConstraintAutomaton]
    other_automata: Mapping[int, ConstraintAutomaton]

    @classmethod
    def prepare(cls, config: RunConfig, options: EvaluateOptions) -> Evaluation:
        """Finds data, features, models and constraints. Raises UserError."""
        dataset = _data(config, options.features is not None)
        if options.features is None:
            dataset, store = feature_source(config).for_bundles(dataset)
        else:
            store = storage_path(options.features, config.storage.options)
        parts = {name: _part(dataset, name) for name in options.splits or config.data.test_splits}
        members = [_bundle(model, "--model", config, store) for model in options.models]
        members = members or [_run_bundle(config, options.stage)]
        other = None if options.compare is None else _bundle(options.compare, "--compare", config, store)
        file = options.constraints or config.evaluation.constraints
        automata = {} if file is None else _automata(Path(file), members[0], parts)
        other_automata = {} if file is None or other is None else _automata(Path(file), other, parts)
        return cls(config, options, dataset, parts, members, other, store, automata, other_automata)

    @property
    def label(self) -> str:
        return "+".join(member.location.name for member in self.members)[:120]

    @property
    def folder(self) -> Path:
        return self.options.out or self.config.working_path / "evaluations" / self.label

    def log_plan(self) -> None:
        models = ", ".join(str(member.location) for member in self.members)
        logger.info(f"models    {models}" + (", as an ensemble" if len(self.members) > 1 else ""))
        logger.info(f"data      {', '.join(f'{name} {len(part)}' for name, part in self.parts.items())} images")

    def caption(
        self, models: Sequence[ModelSource], automata: Mapping[int, ConstraintAutomaton]
    ) -> dict[str, Captioned]:
        """Captions by split. Ray must have been started."""
        tasks = {name: SplitTask(part, automata) for name, part in self.parts.items()}
        return caption_on_cluster(models, tasks, self.config, store=self.store)

    def finish(self, split: str, captioned: Captioned, other: Captioned | None, model: ModelSource) -> dict[str, Any]:
        """Writes a split's captions, scores and report. Returns its entry in scores.json.

        other: the captions of `--compare`. model: the one whose maps the report shows.
        """
        part = self.parts[split]
        write_captions(self.folder, split, captioned, part, self.options.server)
        result = split_result(split, captioned.best, self.automata, captioned.unreadable, f"search    {split}: ")
        result = self._scored(result)
        if result.scores is None:
            logger.info(f"{split} has no reference captions: captioned, not scored")
            return result.to_json()
        self._log_scores(result)
        entry, results = result.to_json(), [result]
        if other is not None:
            results.append(self._scored_as(result, other))
            entry["compared"] = compare(result, results[1]) | {"images": len(result.captions)}
        self._report(results, model)
        return entry

    def _scored(self, result: SplitResult) -> SplitResult:
        """With scores where the split has references."""
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

    def _scored_as(self, result: SplitResult, other: Captioned) -> SplitResult:
        """The other model's captions, scored on the same images and by the same metrics as a result."""
        captions = {image: best.caption for image, best in other.best.items()}
        references = self._references(result)
        scores = score_captions(
            references, {image: captions[image] for image in references}, metrics=tuple(result.values)
        )
        return SplitResult(f"{result.split}, the other", captions, scores=scores)

    def _references(self, result: SplitResult) -> dict[int, list[str]]:
        references = self.parts[result.split].references()
        return {image: texts for image, texts in references.items() if texts and image in result.captions}

    def _log_scores(self, result: SplitResult) -> None:
        assert result.scores is not None
        logger.info(f"\n{result.split}, {len(result.scores.image_ids)} images{format_scores(result.scores)}")
        if result.main_object is not None:
            logger.info(f"  main object named in {result.main_object:.1%} of the captions")
        config, uris = self.config, self.parts[result.split].column("uri")
        for row, difference in published_rows(config.model.name, result.split, uris, config.evaluation.beam_size):
            values = "  ".join(f"{name} {value:.3f}" for name, value in row.scores.items())
            logger.info(f"  {row.name}: {values}" + (f"  ({difference})" if difference else ""))

    def _report(self, results: Sequence[SplitResult], model: ModelSource) -> None:
        """report-SPLIT.html of the first result, with the other's scores and captions beside it."""
        from jobs.gallery import MapInputs, with_maps
        from pipeline.reports.page import Report, write_report
        from pipeline.runs.summary import published_table, report_images, score_table

        result, others = results[0], results[1:]
        config, part, label = self.config, self.parts[result.split], self.label
        columns, rows = score_table(results, with_alignment=True)
        images = [
            replace(image, alternatives={"other": others[0].captions[int(image.image_id)]} if others else {})
            for image in report_images(result, part, config.storage.options)
        ]
        report = Report(
            title=f"{label} on {result.split}",
            run_id=label,
            protocol=f"{config.evaluation.protocol}, {result.signature}",
            score_columns=columns,
            score_rows=rows + published_table(columns, config, result.split, part.column("uri")),
            stages=[],
            images=with_maps(images, MapInputs(model, config, self.store, part), label),
            metadata={"models": ", ".join(label.split("+")), "images": f"{result.split} {len(part)}"},
        )
        path = self.folder / f"report-{result.split}.html"
        write_report(path, report)
        logger.info(f"report       {path}")


def write_captions(folder: Path, split: str, captioned: Captioned, part: Dataset, server: str | None) -> None:
    """predictions-SPLIT.json, the n best captions where there are several, and the COCO server's files.

    Raises UserError when the server's file would lack an image.
    """
    best = {image: hypothesis.caption for image, hypothesis in captioned.best.items()}
    predictions = folder / f"predictions-{split}.json"
    write_predictions(predictions, best)
    logger.info(f"predictions  {predictions}")
    if any(len(ranked) > 1 for ranked in captioned.hypotheses.values()):
        lines = [
            json.dumps({"image_id": image, "n_best": [each.to_json() for each in ranked]}, ensure_ascii=False)
            for image, ranked in captioned.hypotheses.items()
        ]
        write_text(folder / f"n-best-{split}.jsonl", "\n".join(lines) + "\n")
        logger.info(f"n best       {folder / f'n-best-{split}.jsonl'}")
    if server is None:
        return
    if len(best) != len(part):
        raise UserError(
            f"--server: {len(best)} captions for the {len(part)} images of {split}; the server takes all or none"
        )
    name = f"captions_{split}_{server}_results"
    write_predictions(folder / f"{name}.json", best)
    with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / f"{name}.json", f"{name}.json")
    logger.info(f"server       {folder / f'{name}.zip'}: {len(best)} rows")


def compare(result: SplitResult, other: SplitResult) -> dict[str, Any]:
    """The other result's scores, and the paired difference of each metric that is a mean over images; also logged."""
    differences = {}
    logger.info(f"  {'':<9} {'this':>8} {'other':>8}   difference by image, 95 % interval")
    assert result.scores is not None and other.scores is not None
    for name, score in result.scores.by_name.items():
        theirs = other.scores.by_name[name]
        if score.value is None or theirs.value is None:
            continue
        text = ""
        if score.per_image is not None and theirs.per_image is not None and name in COMPARED_BY_IMAGE:
            difference = paired_difference(score.per_image, theirs.per_image)
            differences[name] = difference._asdict()
            text = f"{difference}, better in {difference.better:.1%} of resamples"
        logger.info(f"  {name:<9} {score.value:>8.4f} {theirs.value:>8.4f}   {text}")
    return other.scores_to_json() | {"differences": differences}


def _data(config: RunConfig, with_keys: bool) -> Dataset:
    """The annotations as they are: an image without a reference can be captioned, though not scored."""
    from pipeline.data.loading import data_root, snapshot_of

    dataset, _ = read_annotations(config.data, data_root(config), config.storage.options)
    return snapshot_of(dataset, config)[0].known() if with_keys else dataset


def _part(dataset: Dataset, name: str) -> Dataset:
    part = dataset.split(name)
    if not len(part) and name == ALL:
        part = dataset
    if not len(part):
        names = ", ".join(sorted(set(dataset.column("split"))))
        raise UserError(f"--split {name}: no image is in it; the splits are {names}, and {ALL} for every image")
    return part


def _automata(file: Path, member: Member, parts: Mapping[str, Dataset]) -> dict[int, ConstraintAutomaton]:
    """The constraints of the images in `parts`, for a model's vocabulary. Raises UserError when no image has any."""
    from pipeline.captioning.constraints import load_automata

    images = {image for part in parts.values() for image in part.column("image_id")}
    automata = load_automata(file, images, Vocabulary.load(member.folder / "vocabulary.json"))
    if not automata:
        raise UserError(f"constraints {file}: none of its images is in {', '.join(parts)}; look at the image ids")
    return automata


def _bundle(model: str, option: str, config: RunConfig, store: StoragePath | None) -> Member:
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
    return Member(location, folder)


def _run_bundle(config: RunConfig, stage_name: str | None) -> Member:
    """The bundle of the configuration's own run, written if it does not exist yet."""
    from pipeline.data.loading import find_data
    from pipeline.runs.prepare import open_run
    from pipeline.runs.run_bundle import bundle_place, bundle_run

    dataset, _ = find_data(config)
    folder = open_run(config, dataset.known().fingerprint())
    stage = None
    if stage_name is not None:
        names = [each.name for each in config.stages]
        if stage_name not in names:
            raise UserError(f"--stage {stage_name}: the configuration has the stages {', '.join(names)}")
        stage = config.stage(stage_name)
    finished = folder.result(stage_name) if stage_name is not None else (folder.path / "COMPLETE.json").is_file()
    if not (folder.path / "run.json").is_file() or not finished:
        run = f"stage {stage_name} of run" if stage_name is not None else "run"
        raise UserError(
            f"{run} {folder.run_id} is not finished in {config.storage.uri}; `raycap run` it, or give --model"
        )
    location = bundle_place(folder, stage)
    if not (location / "config.yaml").exists():
        bundle_run(folder, stage)
    return Member(location, fetched(location))


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
