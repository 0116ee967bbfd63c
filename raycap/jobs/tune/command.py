"""`raycap tune`: a search over configuration keys with Ray Tune, whose experiment is in the search's folder."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.extract import initial_weights
from raycap.jobs.journal_printer import format_duration
from raycap.jobs.options import Address, Set
from raycap.jobs.run import alone
from raycap.pipeline.cluster.stalls import StallWatch, wait_for
from raycap.pipeline.cluster.start import check_address, connect, require_resources, with_processors
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.metrics import ScoreInputs, why_unavailable
from raycap.pipeline.features.extraction import StartRay, extract_features
from raycap.pipeline.runs.identity import RESULTS_VERSION
from raycap.pipeline.runs.preflight import check_before_writing
from raycap.pipeline.runs.prepare import open_run, readable
from raycap.pipeline.search.records import SearchFolder, SearchPlan
from raycap.pipeline.search.results import selection_note
from raycap.pipeline.search.spec import Search, load_search
from raycap.pipeline.storage.lease import Lease, take_lease
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import weights_file_digest

logger = logging.getLogger(__name__)

LEASE_S = 120.0  # how long a killed search keeps other machines out


def tune(path: Path, overrides: Sequence[str], address: str | None = None, *, retry_failed: bool = False) -> int:
    """Runs or resumes a search; returns the exit code, 1 when every trial failed."""
    begin = time.monotonic()
    search = load_search(path, overrides)
    check_address(address)
    check_before_writing(search.base)
    inputs = ScoreInputs.read(search.base.evaluation.inputs, search.base.data.language, search.base.data)
    for name in search.config.objectives:
        if reason := why_unavailable(name, search.base.data.language, inputs):
            raise UserError(f"the objective {name} cannot be computed here: {reason}")

    dataset, unreadable = find_data(search.base)
    dataset = readable(dataset, unreadable, search.base)
    if unreadable:
        logger.warning(f"{len(unreadable)} images cannot be read and are left out")
    weights = find_backbone(search, dataset)
    digest = "" if weights is None else weights_file_digest(weights)
    name = search.identity(dataset.fingerprint(), str(RESULTS_VERSION), digest)
    folder = SearchFolder(search.base.working_path / "searches" / name, search.base.home(f"searches/{name}"))
    folder.path.mkdir(parents=True, exist_ok=True)

    def start_extraction() -> StallWatch:
        _start_ray(search, address)
        return StallWatch("extraction", search.base.workers)

    from raycap.jobs.tune.tuner import run_trials
    from raycap.pipeline.search.outcome import write_outcome

    with alone(folder.path), _lease(folder) as lease:
        config = with_processors(search.base, address)
        store, excluded = extract_once(search, config, dataset, weights, start_extraction)
        backbone = None if weights is None else share_backbone(search, weights)
        plan = SearchPlan(search.without_tracker(), backbone, store, excluded, str(Path.cwd()))
        if lease is not None:
            lease.check()  # the extraction may have taken hours
        _log_plan(search, folder)
        _start_ray(search, address)
        code = write_outcome(search, folder, run_trials(search, plan, folder, lease, retry=retry_failed))
    logger.info(f"finished in {format_duration(time.monotonic() - begin)}")
    return code


def find_backbone(search: Search, dataset: Dataset) -> Path | None:
    """The file with the backbone that the key `backbone` names, or None if the base configuration has none.

    Raises UserError if it is that of a run of the base configuration and no such run has trained it.
    """
    base = search.base
    if not base.has_backbone:
        return None
    if search.config.backbone == "run":
        run = open_run(base, dataset.fingerprint())
        trained = [stage for stage in base.stages if stage.train_backbone]
        if not all(run.result(stage.name) for stage in trained):
            raise UserError(
                f"backbone is run, and no run of {search.config.base} in {base.storage.uri} has trained its backbone; "
                "train it first with `raycap run`, with --set for what the search sets, or set backbone to base"
            )
        logger.info(f"backbone  from the run {run.run_id}")
        return run.weights_after(trained[-1], "backbone")
    return initial_weights(base, base.working_path / "backbones")


def share_backbone(search: Search, weights: Path) -> str:
    """The path or URI of the backbone's file for trials on all machines. Uploads the file to a storage on S3."""
    place = search.base.storage_place
    if not place.is_remote:
        return str(weights)
    stored = place / f"backbones/{weights_file_digest(weights)[:20]}.safetensors"
    if not stored.exists():
        stored.upload(weights)
    return str(stored)


def extract_once(
    search: Search, config: RunConfig, dataset: Dataset, weights: Path | None, start_ray: StartRay
) -> tuple[str | None, list[str]]:
    """The folder with the features of all images whose features trials read, and the keys of images without features.

    config: the search's base configuration, with the processors that an extraction uses. The folder is None when every
    stage of a trial reads images. UserError when too many images have no features.
    """
    if all(config.stage(name).train_backbone for name in search.stages):
        return None, []
    stored = config.data.train_splits if config.features.store == "always" else ()
    part = dataset.split(*stored, config.data.val_split, search.score_split)
    extracted = extract_features(config, part, weights, start_ray)
    extracted.require_enough(len(part), config)
    return str(extracted.store), sorted(extracted.missing)


def _lease(folder: SearchFolder) -> AbstractContextManager[Lease | None]:
    """Keeps other machines out of a search on S3; None for a local storage. Raises UserError if one works on it."""
    if folder.home is None:
        return nullcontext()
    # beside the folder, because a push of the folder would replace a renewed lease by an older copy
    lease = take_lease(StoragePath(f"{folder.home}.lease.json", folder.home.options), LEASE_S)
    if not isinstance(lease, Lease):
        raise UserError(f"{lease} works on {folder.home.name}; wait for it, or until its lease expires")
    return lease


def _log_plan(search: Search, folder: SearchFolder) -> None:
    """Logs the size of the search."""
    config = search.config
    logger.info(f"search    {folder.path.name}  in {folder.root}")
    size = "infinitely many" if math.isinf(search.space.size) else f"{search.space.size:.0f}"
    trials = "" if config.budget.trials is None else f", {config.budget.trials} trials"
    seeds = f" with {len(config.seeds)} seeds" if len(config.seeds) > 1 else ""
    logger.info(f"space     {', '.join(search.space.keys)}: {size} points; {config.algorithm}{trials}{seeds}")
    scheduler = f"; scheduler {config.scheduler.name}" if config.scheduler else ""
    logger.info(f"trial     {', '.join(search.stages)}, {search.total_epochs():g} epochs{scheduler}")
    logger.info(f"scores    {selection_note(search)}")
    if config.scheduler and len(config.seeds) > 1:
        logger.warning("a scheduler stops single seeds of a point, so that means over the other seeds are too high")


def _start_ray(search: Search, address: str | None) -> None:
    """Joins or starts Ray. Raises UserError when a trial needs more than Ray has."""
    import ray

    bundles = [search.bundle] * search.config.resources.workers
    if connect(address):  # a cluster may have no worker yet
        wait_for(bundles, "a trial", limit_s=60 * search.base.workers.max_wait_minutes)
    else:
        require_resources(bundles, "a trial", ray.cluster_resources())


def command(
    config: Annotated[
        Path,
        typer.Argument(
            help="The search's YAML file, or the name of a shipped one.", metavar="CONFIG", callback=named_config
        ),
    ],
    set_: Set = None,
    retry_failed: Annotated[bool, typer.Option(help="Also repeat the trials that failed.")] = False,
    address: Address = None,
) -> int:
    """Search over configuration keys.

    The YAML names the keys, such as the expansion coefficients. A killed search resumes with the same command.

    Example: raycap tune search_demo --set budget.trials=16
    """
    return tune(config, set_ or (), address, retry_failed=retry_failed)
