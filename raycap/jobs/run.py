"""`raycap run`: makes a scored and registered model from images. Finished parts are not repeated."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from raycap.jobs.journal_printer import JournalPrinter, format_duration
from raycap.jobs.options import Address, Config, Seeds, Set
from raycap.jobs.seeds import seed_configs, summarize_runs
from raycap.jobs.sync import register
from raycap.models.config import Values
from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.cluster.start import (
    Stage,
    check_address,
    check_resources,
    start_extraction,
    start_ray,
    with_processors,
)
from raycap.pipeline.config.languages import metric_tokenizer
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig, total_steps
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import CONTENT_FILES, bundle_digests
from raycap.pipeline.evaluation.evaluate import Options, SplitCaptions, evaluate, keep_results
from raycap.pipeline.evaluation.reports.page import report_html
from raycap.pipeline.evaluation.reports.report import report, score_table
from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.evaluation.results import Scores, write_captions
from raycap.pipeline.evaluation.scores.metrics import why_unavailable
from raycap.pipeline.features.extraction import describe_features, extract_features
from raycap.pipeline.features.precision import extraction_precision
from raycap.pipeline.runs.delivery import (
    bundle_place,
    bundle_run,
    local_bundle,
    run_page,
    stored_captions,
    validation_by_stage,
)
from raycap.pipeline.runs.folder import RunFolder, try_lock
from raycap.pipeline.runs.preflight import check_files, check_storage, require_possible
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.log import Decorations, log_file
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.atomic import write_json, write_text
from raycap.pipeline.storage.digests import DIGESTS
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError
from raycap.pipeline.tracking.mlflow_client import public_uri
from raycap.pipeline.tracking.run_tracker import Tracker

logger = logging.getLogger(__name__)


def run(config: RunConfig, address: str | None = None, data: tuple[Dataset, dict[str, str]] | None = None) -> RunFolder:
    """Checks, extracts features, trains every stage, evaluates, reports and registers. Returns the run's folder.

    data: the result of `find_data`, for a command that makes several runs on the same data. If it is None, the
    data are read.

    Raises UserError for mistakes in the configuration before anything long starts.
    """
    begin = time.monotonic()
    folder = prepare(config, data)
    folder = replace(folder, config=with_processors(folder.config, address))
    try:
        summary = folder.summary
    except DamagedError as error:
        logger.warning(f"damaged   {str(error).partition(';')[0]}; the captions are scored again")
        summary = None
    missing: list[str] = []
    if summary is not None:
        # A complete run may lack scores, pictures or pages that this machine can make, so these are made now.
        missing = [name for name in summary.get("missing", {}) if why_unavailable(name) is None]
        if not missing:
            _show_complete(folder, summary)
            return folder
    with alone(folder.path), run_log(folder):
        driver = RunDriver(folder, address)
        try:
            if summary is None:
                driver.train()
            else:
                logger.info(f"{folder.run_id} is complete except for {', '.join(missing)}")
                driver.durations |= summary["durations"]
            if summary is None or not (local_bundle(folder) / DIGESTS).is_file():
                bundle_run(driver.folder)
            driver.evaluate()
        except BaseException as error:
            failure = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            driver.tracker.close(failure if summary is None else "FINISHED")
            raise
        logger.info(f"finished in {format_duration(time.monotonic() - begin)}")
    return folder


def _show_complete(folder: RunFolder, summary: Values) -> None:
    """Shows the summary of a complete run. Registers the run if an earlier attempt could not."""
    if folder.config.tracking.enabled and not summary["tracked"]:
        decorations = Decorations()
        with decorations.making("the registration"):
            register(folder)
        decorations.log_failed()
    logger.info(f"{folder.run_id} is complete; nothing to do")
    logger.info(summary["table"])


@contextmanager
def run_log(folder: RunFolder) -> Iterator[None]:
    """Writes log/run.log during the context. At the end of a run on S3, uploads the file if S3 can be reached."""
    can_upload = True
    try:
        with log_file(folder.path / "log" / "run.log"):
            yield
    except StorageError:
        can_upload = False  # S3 did not answer, so that an upload would only delay the end
        raise
    finally:
        if can_upload:
            with suppress(OSError):  # a failed upload does not matter, because the log is also on this machine
                folder.push("log/run.log")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the lock of a run or search in the context. Raises UserError if another process has it."""
    with try_lock(folder) as has_lock:
        if not has_lock:
            raise UserError(f"another process is working on {folder.name}; wait for it or stop it")
        yield


def stage_groups(stages: Sequence[StageSection]) -> list[list[StageSection]]:
    """Groups consecutive stages that one call of `jobs.train.fit` can run. Features are extracted before each group.

    A frozen stage after one that trains the backbone begins a new group, because it needs the new backbone's features.
    """
    groups: list[list[StageSection]] = [[]]
    for stage in stages:
        needs_new_features = not stage.train_backbone and any(earlier.train_backbone for earlier in groups[-1])
        if needs_new_features:
            groups.append([])
        groups[-1].append(stage)
    return groups


class RunDriver:
    """One attempt at a run, from the prepared folder to the summary."""

    def __init__(self, folder: RunFolder, address: str | None) -> None:
        self.folder, self.address = folder, address
        self.driver_token = self.folder.new_token("driver_token")
        self.durations: dict[str, float] = {}
        self.excluded: set[str] = set()  # the content keys of images without features
        self.tracker = Tracker(self.folder)
        self.tracker.start()

    @property
    def config(self) -> RunConfig:
        """The configuration of this attempt, with the decisions that have replaced `auto` so far."""
        return self.folder.config

    def _decide_precision(self) -> None:
        """Decides `features.compute_dtype` if it is `auto`. Without a decision in the storage, an actor measures it."""
        config = self.config
        if config.has_backbone and config.features.compute_dtype == "auto":
            backbone = replace(config.backbone, weights="none")  # the weights do not decide which precision is faster
            start = partial(start_extraction, config, self.address)
            precision = extraction_precision(backbone, config.features, config.storage_place / "precision", start)
            self.folder = self.tracker.folder = replace(self.folder, config=config.with_compute_dtype(precision))

    def train(self) -> None:
        """Runs the stages that are not finished."""
        self._decide_precision()
        self._log_plan()
        is_resumed = any(self.folder.path.glob("stages/*/step-*"))
        is_pending = any(self.folder.result(stage.name) is None for stage in self.config.stages)
        if self.config.workers.dry_run and is_pending and not is_resumed:
            self._dry_run()
        self.folder.write_config()  # before training, so that a resumed run keeps the decisions
        for group in stage_groups(self.config.stages):
            if not all(self.folder.result(stage.name) for stage in group):
                self._train(group)

    def evaluate(self) -> None:
        """Evaluates the bundle on all splits, writes report and summary, and registers the model.

        Captions of an earlier attempt are used again if they are those of the same bundle.
        """
        self._decide_precision()
        self.folder.write_config()
        folder, decorations = self.folder, Decorations()
        with self._timed("evaluation"):
            by_stage = validation_by_stage(folder)
            scores = self._score(by_stage)
            keep_results(scores, {key: round(value, 4) for key, value in scores.flat().items()}, decorations)
        with self._timed("report"), decorations.making("the report"):
            options, name, pictured = self.config.storage.options, self.config.name, self.config.data.test_splits
            page = report(scores, options, title=name, run_id=folder.run_id, pictured=pictured)
            write_text(folder.path / "report.html", report_html(run_page(page, folder, by_stage, self.durations)))
            folder.push("report.html")
        with self._timed("registration"):
            registered = self.tracker.finish(scores.flat(), local_bundle(folder))
        self._complete(scores, by_stage, registered, decorations)

    def _score(self, by_stage: Mapping[str, float]) -> Scores:
        """The scores of the run's bundle. Writes the scores to scores.json, and the captions to predictions/.

        by_stage: from `validation_by_stage`.
        """
        folder, data = self.folder, self.config.data
        location, file = bundle_place(folder), self.config.evaluation.constraints
        images = {split: folder.dataset.split(split) for split in dict.fromkeys((*data.test_splits, data.val_split))}
        digests = bundle_digests(local_bundle(folder), CONTENT_FILES)
        options = Options(
            constraints=None if file is None else Path(file),
            unconstrained=(data.val_split,),  # as during training, to be comparable
            captions=stored_captions(folder, images, digests),
            keep=partial(self._keep_captions, digests),
        )
        scores = evaluate([location], images, self.config, self.address, options)
        content = scores.to_json() | {"digests": digests, "validation_by_stage": by_stage}
        write_json(folder.path / "scores.json", content)
        folder.push("scores.json")
        return scores

    def _keep_captions(self, digests: Mapping[str, str], captions: SplitCaptions) -> None:
        """Writes captions before they are scored, so that a later attempt can use them. digests: of the bundle's files.

        Raises UserError if too many images could not be captioned.
        """
        folder, most = self.folder, self.config.data.max_bad_fraction
        reasons = {}  # by split and image id
        for split, part in captions.items():
            reasons[split] = {image: caption.error for image, caption in part.items() if caption.error}
        unreadable = [reason for part in reasons.values() for reason in part.values()]
        num_images = sum(map(len, captions.values()))
        if len(unreadable) > most * num_images:
            raise UserError(
                f"{len(unreadable)} of {num_images} images cannot be captioned, more than data.max_bad_fraction = "
                f"{most} (first: {unreadable[0]})"
            )
        for split, part in captions.items():
            write_captions(folder.path / "predictions", split, part, f"{split}.json")
        splits = {split: {"unreadable": reasons[split]} for split in reasons}
        write_json(folder.path / "scores.json", {"digests": digests, "splits": splits})
        folder.push("predictions", "scores.json")

    def _log_plan(self) -> None:
        """Logs the folder, data, model and stages of the run before it starts."""
        folder, config, metadata = self.folder, self.config, self.folder.metadata
        logger.info(f"run       {folder.run_id}  in {folder.path}")
        counts = ", ".join(f"{split} {count}" for split, count in metadata.splits.items())
        logger.info(f"data      {counts} images; {metadata.sizes.vocabulary_size} words")
        source = describe_features(config, metadata.num_tokens, metadata.parameters["backbone"])
        logger.info(f"model     {config.model.name}, {metadata.parameters['model']:,} parameters; {source}")
        workers = config.workers
        logger.info(f"workers   {workers.num_workers}; of each: CPUs {workers.cpus:g}, threads {workers.threads}")
        for number, stage in enumerate(config.stages, 1):
            features = "end to end" if stage.train_backbone else "frozen features"
            samples = "pairs" if stage.samples_are_pairs else "images"
            num_steps = total_steps(stage, folder.num_samples(stage))
            work = "done" if folder.result(stage.name) else f"{num_steps} steps of {stage.batch_size} {samples}"
            logger.info(f"stage {number}   {stage.name}: {stage.objective}, {features}, {work}")
        if metadata.unreadable:
            logger.warning(f"{len(metadata.unreadable)} images cannot be read and are left out (run.json lists them)")

    def _dry_run(self) -> None:
        """Makes one step of every stage with its real batch size on a worker. Raises UserError if a step fails."""
        from raycap.pipeline.training.dry_run import dry_run

        self._start_ray("dry run")
        workers, watch = self.config.workers, StallWatch("the dry run", self.config.workers)
        with self._timed("dry run"), watch:
            for result in watch.stream(dry_run, [(self.folder,)], workers.task_options):
                if result.error is not None:
                    raise UserError(f"a dry run of stage {result.stage} fails: {result.error}")
                seconds, memory = f"{result.seconds:.1f} s", f"{result.memory_mb:.0f} MiB"
                logger.info(f"check     one step of {result.stage}: {seconds}, {memory}")

    def _start_ray(self, stage: Stage) -> None:
        """Starts or joins Ray, and waits until a cluster can place the processes of `stage`."""
        with self._timed("starting ray"):
            start_ray(self.config, self.address, stage)

    def _extract(self, part: Dataset, stage: StageSection) -> StoragePath:
        """Extracts the features of a part of the data for a stage. Returns the location of the store."""

        def start() -> StallWatch:
            self._start_ray("features")
            return StallWatch("extraction", self.config.workers)

        weights = self.folder.weights_before(stage, "backbone") if self.config.has_backbone else None
        with self._timed("features"):
            extracted = extract_features(self.config, part, weights, start)
        extracted.require_enough(len(part), self.config)
        if extracted.missing:
            quarantine = extracted.store / "quarantine.parquet"
            logger.info(f"features  {len(extracted.missing)} images in quarantine: {quarantine}")
        self.excluded |= extracted.missing.keys()
        return extracted.store

    def _train(self, group: list[StageSection]) -> None:
        """Extracts features for a group of stages, and trains them on the cluster. Meanwhile, prints their journal."""
        from raycap.jobs.train import fit
        from raycap.pipeline.training.loop import StageJob

        store, data = None, self.config.data
        frozen = [stage for stage in group if not stage.train_backbone]
        if frozen:
            stored = data.train_splits if self.config.features.store == "always" else ()
            store = self._extract(self.folder.dataset.split(*stored, data.val_split), frozen[0])
        self._start_ray("training")
        names = tuple(stage.name for stage in group)
        job = StageJob(self.folder, names, store, tuple(sorted(self.excluded)), self.driver_token)
        watch = StallWatch("training", self.config.workers)
        with self._timed(" + ".join(names)), watch, JournalPrinter(self.folder, watch.progressed):
            fit(job, lambda: self._start_ray("training"))
        self.folder.pull("stages")

    def _complete(
        self, scores: Scores, by_stage: Mapping[str, float], registered: str | None, decorations: Decorations
    ) -> None:
        """Prints the summary and marks the run as complete.

        registered: name/version of the registered model, or None if the tracker is off or did not accept everything.
        COMPLETE.json records what failed and which scores are missing, so that the next attempt can add them.
        """
        folder = self.folder
        summary = {
            "table": without_secrets(self._table(scores, by_stage, registered)),
            "durations": self.durations,
            "bundle": without_secrets(str(scores.bundles[0])),
            "scores": scores.flat(),
            "tracked": registered is not None,
            "missing": scores.unavailable | decorations.failed,
        }
        # Workers that were killed at the end of a stage have left its checkpoints.
        left_checkpoints = list(folder.path.glob("stages/*/step-*"))
        if left_checkpoints:
            for checkpoint in left_checkpoints:
                shutil.rmtree(checkpoint, ignore_errors=True)
            folder.push("stages")
        write_json(folder.path / "COMPLETE.json", summary)
        folder.push("COMPLETE.json")
        logger.info(summary["table"])
        decorations.log_failed()

    def _table(self, scores: Scores, by_stage: Mapping[str, float], registered: str | None) -> str:
        """The lines of the summary: scores, locations and durations. The arguments are those of `_complete`."""
        folder, config, stage = self.folder, self.config, self.folder.delivered()
        tracking = "off"
        if config.tracking.enabled and registered:
            tracking = f"{public_uri(config)}, model {registered}"
        elif config.tracking.enabled:
            tracking = f"{public_uri(config)} did not take everything; `raycap sync CONFIG` sends the rest"
        report_place = folder.root / "report.html" if (folder.path / "report.html").is_file() else "not made"
        # Validations during training use the vocabulary's tokens. These scores use the metrics' words, to be comparable
        # with the table.
        validation = ", ".join(f"{name} {value:.4f}" for name, value in by_stage.items())
        delivered = f" (stage {stage.name})" if stage is not None and len(config.stages) > 1 else ""
        return f"""
{format_table(*score_table(scores.splits))}

validation CIDEr-D ({metric_tokenizer(config.data.language)} tokens)  {validation}

report       {report_place}
predictions  {folder.root / "predictions"}
model        {scores.bundles[0]}{delivered}
tracking     {tracking}
features     {scores.inputs.stores[0] or "computed from the images"}
times        {", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.durations.items())}"""

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of the context to the entry `name` of `durations`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.durations[name] = self.durations.get(name, 0.0) + time.monotonic() - begin


def run_seeds(config: RunConfig, count: int, address: str | None) -> None:
    """Runs the configuration with several seeds, one after the other, on the same data, and summarizes the scores.

    Runs that are complete are not repeated.
    """
    configs, data = seed_configs(config, count), find_data(config)
    folders = []
    for number, each in enumerate(configs, 1):
        logger.info(f"seed {each.seed}    run {number} of {count}")
        folders.append(run(each, address, data))
    summarize_runs(configs, folders)


def command(config: Config, set_: Set = None, address: Address = None, seeds: Seeds = 1) -> None:
    """Train, evaluate and register a model.

    The run is resumed where an earlier attempt ended; finished stages are not repeated. With --seeds, each seed has a
    run of its own, as if started alone with --set seed=SEED, and the last lines are their mean scores with the standard
    deviation. The same command resumes all of them.

    Example: raycap run demo --seeds 5 --set data.min_count=3
    """
    run_config = load_config(config, set_ or ())
    place = run_config.storage_place
    # A complete run needs no resources and no model. On S3, complete runs are not searched here.
    may_be_complete = not place.is_remote and any(place.path.glob(f"runs/{run_config.name}-*/COMPLETE.json"))
    if may_be_complete or place.is_remote:
        check_address(address)
    else:
        check_resources(run_config, address)
    check_storage(run_config)
    check_files(run_config)
    if not may_be_complete:
        require_possible(run_config)
    if seeds > 1:
        run_seeds(run_config, seeds, address)
    else:
        run(run_config, address)
