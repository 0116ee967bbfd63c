"""`raycap evaluate`: captions splits on the cluster with models or an ensemble, and stores and scores the captions."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raycap.jobs.cluster import check_resources
from raycap.jobs.evaluation import Evaluation
from raycap.jobs.named_files import check_output_place
from raycap.jobs.options import Address, Config, Ensemble, Seeds, Set, check_ensemble
from raycap.jobs.seeds import group_place
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.load import load_config, with_data
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.measured_precision import with_kept_precision
from raycap.pipeline.evaluation.scores.metrics import JAVA_METRICS, why_unavailable
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.preflight import check_storage
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.atomic import decode_json
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)


def evaluate(
    config: Config,
    set_: Set = None,
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="A split, or all. The default is data.test_splits.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="A model bundle in place of the run's; several form an ensemble, or --seeds models."
        ),
    ] = None,
    seeds: Seeds = 1,
    ensemble: Ensemble = False,
    stage: Annotated[str | None, typer.Option(help="The run's model as it was after this stage.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Other images: a YAML file with data, and maybe features and evaluation.", callback=named_data
        ),
    ] = None,
    compared: Annotated[
        list[str] | None,
        typer.Option("--compare", help="A bundle of another system to compare with; several are its seeds."),
    ] = None,
    features: Annotated[str | None, typer.Option(help="A feature store, for bundles without a backbone.")] = None,
    constraints: Annotated[Path | None, typer.Option(help="Words that each image's caption must contain.")] = None,
    server: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also write the file for COCO's evaluation server.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The output folder, also on S3.")] = None,
    address: Address = None,
) -> int:
    """Caption splits of a data set and score them.

    The model is the configuration's run, or the bundles given. With --seeds, the models of several runs are scored one
    by one, and the last lines are the mean scores with the standard deviation. The exit code is 1 when an image cannot
    be read.

    Example: raycap evaluate demo --stage xe_finetune --split test
    """
    begin = time.monotonic()
    check_ensemble(ensemble, seeds)
    if models and seeds > 1 and len(models) != seeds:
        raise UserError(
            f"--seeds {seeds}: {len(models)} bundles are given; give --model once for each seed, or leave it out"
        )
    if stage is not None and models:
        raise UserError("--stage names a stage of the configuration's run; leave --model out, or give its bundle there")
    if server is not None and not server.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--server {server}: letters, digits, - and _ only; it becomes part of a file's name")
    is_one_model = (seeds == 1 or ensemble) and len(compared or ()) <= 1
    if server is not None and not is_one_model:
        raise UserError(
            "--server takes the captions of one model; leave out --seeds, or add --ensemble, or compare less"
        )
    run_config = load_config(config, set_ or ())
    evaluated_config = run_config if data is None else with_data(run_config, data)
    if out is not None:
        check_output_place("--out", storage_path(out, run_config.storage.options))
    constraint_file = constraints or evaluated_config.evaluation.constraints
    check_resources(run_config, address)
    _check_inputs(evaluated_config, stage, constraint_file)
    evaluation = Evaluation(evaluated_config, models or (), features, constraint_file, data)
    others = [evaluation.find_bundle("--compare", bundle) for bundle in compared or ()]
    evaluation.find_images(splits or (), run_config, stage, seeds)
    one_by_one = seeds > 1 and not ensemble
    evaluation.choose_place(out, one_by_one=one_by_one, compared=() if is_one_model else others)
    if is_one_model:
        results = evaluation.run(address, others[0] if others else None, server)
    else:
        results = evaluation.run_systems(address, others)
    num_failed = len({image for result in results for image in result.unreadable})
    logger.info(f"finished in {time.monotonic() - begin:.0f} s")
    if num_failed:
        logger.info(f"{num_failed} images could not be read; scores.json lists them with the reasons")
    return 1 if num_failed else 0


def evaluate_ensemble(
    config: RunConfig, folders: Sequence[RunFolder], address: str | None
) -> Mapping[str, Mapping[str, Any]]:
    """Scores the ensemble of complete runs on the test splits. Returns the entries of its scores.json by split.

    The results are in the folder `ensemble` of the runs' `group_place`. An ensemble is scored again only if a report
    failed, or if a metric was unavailable that this machine can compute.
    """
    from raycap.pipeline.runs.run_bundle import bundle_place

    place = group_place(config, folders) / "ensemble"
    if not _is_scored(place):
        bundles = [str(bundle_place(folder)) for folder in folders]
        kept = with_kept_precision(config, folders[0].config)
        evaluation = Evaluation(kept, bundles, None, config.evaluation.constraints, None)
        evaluation.find_images((), kept, None)
        evaluation.choose_place(str(place))
        evaluation.run(address, None, None)
    entries: Mapping[str, Mapping[str, Any]] = _scores(place)["splits"]
    return entries


def _is_scored(place: StoragePath) -> bool:
    """Whether an evaluation's folder has all reports and scores that this machine can make."""
    if not (place / "scores.json").exists():
        return False
    content = _scores(place)
    names = {name for entry in content["splits"].values() for name in entry.get("unavailable", ())}
    unavailable = names.intersection(JAVA_METRICS)  # the others depend on the configuration and not on the machine
    language = content["protocol"].get("language", ENGLISH)
    return not content.get("missing") and all(why_unavailable(name, language) is not None for name in unavailable)


def _scores(place: StoragePath) -> dict[str, Any]:
    """The content of an evaluation's scores.json."""
    content: dict[str, Any] = decode_json((place / "scores.json").read_bytes(), str(place / "scores.json"))
    return content


def _check_inputs(config: RunConfig, stage: str | None, constraint_file: Path | str | None) -> None:
    """Raises UserError for a storage, a stage or a constraint file that cannot be used, before anything is written."""
    from raycap.pipeline.evaluation.captioning.constraints import read_constraints

    names = [section.name for section in config.stages]
    if stage is not None and stage not in names:
        raise UserError(f"--stage {shown(stage)}: the configuration has the stages {', '.join(names)}")
    check_storage(config)
    if constraint_file is not None:
        read_constraints(Path(constraint_file))
