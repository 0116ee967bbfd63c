"""`raycap evaluate`: captions splits on the cluster with models or an ensemble, and stores and scores the captions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.named_files import check_output_place, open_bundle
from raycap.jobs.options import Address, Config, Seeds, Set
from raycap.jobs.seeds import group_id, seed_configs
from raycap.pipeline.cluster.start import check_resources, with_processors
from raycap.pipeline.config.load import load_config, with_data
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import split_name
from raycap.pipeline.config.shipped import named_data
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import data_root, find_data, read_annotations
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.constraints import read_constraints
from raycap.pipeline.evaluation.comparison.protocol import common_protocol
from raycap.pipeline.evaluation.evaluate import Options, common_settings, find_automata, images_by_split
from raycap.pipeline.evaluation.evaluate import evaluate as evaluate_bundles
from raycap.pipeline.evaluation.reports.report import keep_captions, write_results, write_summary
from raycap.pipeline.evaluation.reports.tables import SeedScores
from raycap.pipeline.evaluation.results import Scores
from raycap.pipeline.runs.delivery import bundle_place, bundle_run
from raycap.pipeline.runs.folder import with_decisions_of
from raycap.pipeline.runs.preflight import check_score_inputs, check_storage
from raycap.pipeline.runs.prepare import open_run
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.path import StoragePath, join, storage_path

logger = logging.getLogger(__name__)

# Options of the command
Splits = Annotated[list[str] | None, typer.Option("--split", help="A split, or all. The default is data.test_splits.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model bundle in place of the run's; several form an ensemble, or --seeds models."),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Other images: a YAML file with data, and maybe features and evaluation.", callback=named_data),
]


def evaluate(
    config: Config,
    set_: Set = None,
    splits: Splits = None,
    models: Models = None,
    seeds: Seeds = 1,
    ensemble: Annotated[bool, typer.Option("--ensemble", help="Score the ensemble of all seeds' models.")] = False,
    stage: Annotated[str | None, typer.Option(help="The run's model as it was after this stage.")] = None,
    data: Data = None,
    constraints: Annotated[Path | None, typer.Option(help="Words that each image's caption must contain.")] = None,
    out: Annotated[str | None, typer.Option(help="The output folder, also on S3.")] = None,
    address: Address = None,
) -> int:
    """Caption splits of a data set and score them.

    The model is the configuration's run, or the bundles given. With --seeds, the models of several runs are scored one
    by one, and the last lines are the mean scores with the standard deviation. The exit code is 1 when an image cannot
    be read.

    Example: raycap evaluate demo --stage xe_finetune --split test
    """
    if ensemble and seeds == 1:
        raise UserError("--ensemble joins the models of several seeds; give --seeds with a number above 1")
    _check_models(models or (), seeds, stage)
    run_config = with_processors(load_config(config, set_ or ()), address)
    data_config = run_config if data is None else with_data(run_config, data)
    if out is not None:
        check_output_place("--out", storage_path(out, run_config.storage.options))
    check_resources(run_config, address)
    options = find_options(data_config, constraints)
    named = find_bundles("--model", models or (), data_config)
    if not named:
        _require_run(run_config, stage)
    images = find_images(data_config, [*map(split_name, splits or data_config.data.test_splits)])
    if named:
        by_label, evaluated_config = {f"model {number}": bundle for number, bundle in enumerate(named, 1)}, data_config
    else:
        by_label, kept_config = _run_bundles(seed_configs(run_config, seeds), stage)
        evaluated_config = with_decisions_of(data_config, kept_config)
    bundles, one_by_one = [*by_label.values()], seeds > 1 and not ensemble
    if one_by_one or len(bundles) == 1:
        systems = {label: [bundle] for label, bundle in by_label.items()}
    else:
        systems = {f"ensemble of {len(bundles)}": bundles}
    title, name = _title_and_name(run_config, bundles, one_by_one=one_by_one)
    name = name if data is None else f"{name}-{data.stem}"
    place = storage_path(out or run_config.storage_place / f"evaluations/{name}", run_config.storage.options)
    settings = common_settings(evaluated_config, bundles)
    evaluator = Evaluator(settings, images, options, address)
    evaluator.check([*systems.values()])
    if one_by_one:
        found = evaluator.evaluate_each(systems, place)
        summarize_seeds(place, found)
        return exit_code([*found.values()])
    scores = evaluator.evaluate(bundles, place)
    write_results(place, scores, settings, label=title)
    return exit_code([scores])


def _check_models(models: Sequence[str], seeds: int, stage: str | None) -> None:
    """Raises UserError if bundles are given together with a stage, or not one for each of several seeds."""
    if models and seeds > 1 and len(models) != seeds:
        raise UserError(
            f"--seeds {seeds}: {len(models)} bundles are given; give --model once for each seed, or leave it out"
        )
    if stage is not None and models:
        raise UserError("--stage names a stage of the configuration's run; leave --model out, or give its bundle there")


def find_options(config: RunConfig, constraints: Path | None = None) -> Options:
    """The options of an evaluation. Raises UserError if the storage or a file that the evaluation reads is unusable.

    constraints: the option --constraints. If it is None, the configuration's file is used, except on the validation
    split.
    """
    check_storage(config)
    file = constraints or config.evaluation.constraints
    if file is not None:
        read_constraints(Path(file))
    check_score_inputs(config)
    # Training captions the validation split without constraints, so only this gives a score that can be compared.
    unconstrained = () if constraints else (config.data.val_split,)
    return Options(constraints=None if file is None else Path(file), unconstrained=unconstrained)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates several models on the same images. settings: `common_settings` of all of them."""

    settings: RunConfig
    images: Mapping[str, Dataset]
    options: Options
    address: str | None

    def check(self, systems: Sequence[Sequence[StoragePath]]) -> None:
        """Logs the models and the data. Raises UserError if the constraints do not fit the search or a vocabulary."""
        if self.options.constraints is not None:
            self.settings.evaluation.check_takes_constraints(f"--constraints {self.options.constraints}")
        for bundles in systems:
            find_automata(bundles[0], self.images, self.options)
        logger.info(f"models    {', '.join(' + '.join(map(str, bundles)) for bundles in systems)}")
        logger.info(f"data      {', '.join(f'{split} {len(part)}' for split, part in self.images.items())} images")

    def evaluate(self, bundles: Sequence[StoragePath], place: StoragePath) -> Scores:
        """The scores of a bundle or of an ensemble. place: the folder that gets the captions before they are scored."""
        options = replace(self.options, keep=partial(keep_captions, place))
        return evaluate_bundles(bundles, self.images, self.settings, self.address, options)

    def evaluate_each(self, systems: Mapping[str, Sequence[StoragePath]], place: StoragePath) -> dict[str, Scores]:
        """Evaluates each model, and writes its results to the subfolder of `place` with the model's label."""
        found = {}
        for label, bundles in systems.items():
            logger.info(f"\n{label}: {', '.join(map(str, bundles))}")
            part = place / label.replace(" ", "-")
            found[label] = self.evaluate(bundles, part)
            title = "+".join(bundle.name for bundle in bundles)
            write_results(part, found[label], self.settings, label=title)
        return found


def summarize_seeds(place: StoragePath, models: Mapping[str, Scores]) -> None:
    """Prints and writes the mean scores of one model per seed, with their spread. models: by label.

    Splits without references are left out.
    """
    protocol = common_protocol([each.protocol for each in models.values()])
    names = {label: str(each.bundles[0]) for label, each in models.items()}
    scores = SeedScores.of(
        {label: {part.split: part.to_json() for part in each.splits} for label, each in models.items()}
    )
    write_summary(place, scores, protocol, {"models": names}, {"models": ", ".join(names.values())})


def exit_code(every: Sequence[Scores]) -> int:
    """1 if an image could not be read, otherwise 0. Logs the number of such images."""
    num_failed = len({image for scores in every for image in scores.unreadable})
    if num_failed:
        logger.info(f"{num_failed} images could not be read; scores.json lists them with the reasons")
    return 1 if num_failed else 0


def find_bundles(option: str, models: Sequence[str], config: RunConfig) -> list[StoragePath]:
    """The bundles that an option names. Raises UserError if one cannot be loaded, or if its features are missing."""
    found = []
    for model in models:
        opened = open_bundle(option, model, config.storage.options)
        if opened.bundle.transform is None and config.has_backbone:
            raise UserError(
                f"{option} {model}: this bundle has no backbone; give its regions as features.hdf5, or, for grid "
                "features, import it again with --backbone"
            )
        found.append(opened.location)
    return found


def find_images(config: RunConfig, splits: Sequence[str]) -> dict[str, Dataset]:
    """The images of each split, also those without references. Raises UserError if annotations cannot be read."""
    dataset = read_annotations(config.data, data_root(config), config.storage.options).dataset
    return images_by_split(dataset, splits)


def _title_and_name(config: RunConfig, bundles: Sequence[StoragePath], *, one_by_one: bool) -> tuple[str, str]:
    """The title of the evaluated models' report, and the name of the folder of their results.

    The folder's name ends with a hash of the bundles outside of the storage, because such bundles can have equal names.
    one_by_one: False if the bundles form an ensemble.
    """
    names = [bundle.name for bundle in bundles]
    title = "+".join(names)
    if one_by_one:
        title = group_id(f"{config.name}-{len(names)}-seeds", names)
    elif len(title) > 120:  # a folder's name must be short
        title = group_id(f"{config.name}-{len(names)}-ensemble", names)
    storage = join(config.storage_place.uri, "")
    outside = [str(bundle) for bundle in bundles if not str(bundle).startswith(storage)]
    return title, group_id(title, outside) if outside else title


def _require_run(config: RunConfig, stage: str | None) -> None:
    """Raises UserError for an unknown stage, or if a local storage has no run of this name.

    The run with the configuration's data may still be missing. `_run_bundles` finds this out, after reading the data.
    """
    names = [section.name for section in config.stages]
    if stage is not None and stage not in names:
        raise UserError(f"--stage {shown(stage)}: the configuration has the stages {', '.join(names)}")
    if config.home("") is None and not any(config.working_path.glob(f"runs/{config.name}-*")):
        raise _unfinished(config.name, stage, config)


def _unfinished(run: str, stage: str | None, config: RunConfig) -> UserError:
    subject = f"run {run}" if stage is None else f"stage {stage} of run {run}"
    return UserError(f"{subject} is not finished in {config.storage.uri}; `raycap run` it, or give --model")


def _run_bundles(configs: Sequence[RunConfig], stage_name: str | None) -> tuple[dict[str, StoragePath], RunConfig]:
    """The bundles of the configurations' runs by seed, and the first run's configuration. Writes missing bundles.

    stage_name: the stage after which the models are taken. If it is None, the final models are taken. Raises UserError
    if a run or the stage is not finished.
    """
    dataset, _ = find_data(configs[0])
    fingerprint = dataset.readable().fingerprint()
    folders = [open_run(config, fingerprint) for config in configs]
    bundles = {}
    for config, folder in zip(configs, folders, strict=True):
        stage = None if stage_name is None else config.stage(stage_name)
        if stage is None:
            is_finished = (folder.path / "COMPLETE.json").is_file()
        else:
            is_finished = folder.result(stage.name) is not None
        if not is_finished or not (folder.path / "run.json").is_file():
            raise _unfinished(f"{folder.run_id} (seed {config.seed})", stage_name, config)
        bundle = bundles[f"seed {config.seed}"] = bundle_place(folder, stage)
        if not (bundle / "config.yaml").exists():
            bundle_run(folder, stage)
    return bundles, folders[0].config
