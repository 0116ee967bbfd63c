"""`raycap soup`: joins model bundles by the weighted sum of their weights, or scores many such sums."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from raycap.jobs.evaluate import feature_store, find_bundles, find_images
from raycap.jobs.named_files import OpenedBundle, check_output_place, open_bundle
from raycap.jobs.options import Address, Set
from raycap.jobs.soup_front import Front
from raycap.pipeline.cluster.start import check_resources
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.soup import check_weights, mixed, save_soup
from raycap.pipeline.evaluation.comparison.front import grid_size, weight_grid
from raycap.pipeline.evaluation.evaluate import Options, common_settings, language_of
from raycap.pipeline.evaluation.scores.metrics import TEXT_METRICS, why_unavailable
from raycap.pipeline.runs.preflight import check_score_inputs, check_storage
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.digests import file_digest
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)

MAX_POINTS = 1000  # of a front; each captions the whole split
SHORT_NAMES = {"cider": "CIDEr-D", "rouge": "ROUGE-L"}  # in addition to the names without their hyphens


def soup(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE", help="Model bundles of one recipe.")],
    weights: Annotated[
        str | None, typer.Option(metavar="W,W...", help="One for each bundle, with the sum 1. The default is equal.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The folder of the new bundle, or of the front's results.")
    ] = None,
    front: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_POINTS, help="Score all weights that are multiples of 1/N."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="With --front: the YAML file that names the images.", callback=named_config)
    ] = None,
    set_: Set = None,
    split: Annotated[str | None, typer.Option(help="With --front: its images. The default is data.val_split.")] = None,
    metrics: Annotated[str, typer.Option(help="With --front: the names of two metrics.")] = "cider,bleu4",
    features: Annotated[str | None, typer.Option(help="A feature store, for bundles without a backbone.")] = None,
    address: Address = None,
) -> int:
    """Join models by the weighted sum of their weights.

    The bundles must have one architecture, vocabulary and language, and should have been trained from the same weights,
    for example with different rewards. With --front, each sum of their weights captions a split; the results are a
    table, JSON, and a picture of two metrics with the Pareto front. The same command continues after an interruption.
    The exit code is 1 when an image cannot be read.

    Example: raycap soup models/cider models/bleu --weights 0.3,0.7 -o models/soup

    Example: raycap soup models/cider models/bleu --front 10 --config demo --metrics cider,bleu4
    """
    if len(bundles) < 2:
        raise UserError(f"{len(bundles)} bundle is given; a soup needs two or more")
    if front is not None:
        if weights is not None:
            raise UserError("--weights is for one new bundle and --front for many points; leave one of them out")
        if config is None:
            raise UserError("--front needs --config, the configuration whose images are captioned")
        run_config = load_config(config, set_ or ())
        if grid_size(len(bundles), front) > MAX_POINTS:
            raise UserError(f"--front {front} has more than {MAX_POINTS} points for {len(bundles)} bundles; give less")
        if out is not None:
            check_output_place("-o", storage_path(out, run_config.storage.options))
        check_resources(run_config, address)
        check_storage(run_config)
        check_score_inputs(run_config)
        options = Options(features=feature_store(run_config, features))
        members = find_bundles("--model", bundles, run_config, options)
        settings, split = common_settings(run_config, members), split or run_config.data.val_split
        options = replace(options, metrics=_metrics(metrics, language_of(settings, members)))
        images, _ = find_images(run_config, [split])
        points = Front(members, images[split], settings, options, split, out)
        return points.score(weight_grid(len(bundles), front), address)
    if out is None:
        raise UserError("give the folder of the new bundle as -o, or --front N to score many weights")
    if config is not None or split is not None or set_:
        raise UserError("--config, --set and --split are for --front; leave them out, or add --front N")
    _write_soup([open_bundle("BUNDLE", bundle) for bundle in bundles], weights, storage_path(out))
    return 0


def _write_soup(opened: Sequence[OpenedBundle], weights: str | None, place: StoragePath) -> None:
    """Writes the joined bundle to a folder that is empty or does not exist."""
    shares = [1 / len(opened)] * len(opened) if weights is None else _numbers(weights)
    names = [str(each.location) for each in opened]
    check_weights(shares, len(opened))
    if place.exists() or next(iter(place.walk()), None) is not None:
        raise UserError(f"-o {place} exists and is not empty; choose another folder or remove it")
    check_output_place("-o", place)
    joined = mixed([each.bundle for each in opened], shares, names)
    digests = [file_digest(each.folder / "model.safetensors") for each in opened]
    sources = list(zip(names, shares, digests, strict=True))
    if place.is_remote:
        with TemporaryDirectory(prefix="raycap-") as scratch:
            save_soup(Path(scratch) / "bundle", joined, sources)
            Mirror(place, Path(scratch) / "bundle").push()
    else:
        save_soup(place.path, joined, sources)
    for name, share, _ in sources:
        logger.info(f"source    {share:g} of {name}")
    logger.info(f"bundle    {place}")


def _numbers(text: str) -> list[float]:
    """The numbers of --weights. Raises UserError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--weights {shown(text)}: give numbers with commas between them, such as 0.3,0.7") from error


def _metrics(text: str, language: str) -> tuple[str, str]:
    """The two metrics of --metrics. Raises UserError for others and for metrics that cannot be computed."""
    known = {name.lower().replace("-", ""): name for name in TEXT_METRICS} | SHORT_NAMES
    words = [word.strip().lower().replace("-", "").replace("_", "") for word in text.split(",")]
    names = [known[word] for word in words if word in known]
    if len(names) != 2 or len(words) != 2 or names[0] == names[1]:
        raise UserError(f"--metrics {shown(text)}: give two of {', '.join(known)} with a comma between them")
    for name in names:
        if reason := why_unavailable(name, language):
            raise UserError(f"--metrics: {name} is unavailable: {reason}; name another metric")
    return names[0], names[1]
