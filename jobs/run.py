"""`raycap run`: from images to a scored, registered model. What is complete is not done again."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.cluster import start_ray
from models.constraints import ConstraintAutomaton
from pipeline.config.run import RunConfig, dump_config, total_steps
from pipeline.config.sections import StageSection
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.runs.folder import JOURNAL, RunFolder, is_alone, read_json, write_json, write_text
from pipeline.runs.journal import JOURNAL_EVERY_S, Follower
from pipeline.runtime.log import log_file
from pipeline.storage.path import StoragePath
from pipeline.tracking.mlflow_client import public_uri
from pipeline.tracking.run_tracker import Tracker

logger = logging.getLogger(__name__)


def run(config: RunConfig, address: str | None = None) -> RunFolder:
    """All of it: checks, features, every stage, evaluation, report, registration. Returns the run's folder.

    Raises UserError for what the user can mend before anything long starts.
    """
    from jobs.sync import register
    from pipeline.runs.prepare import prepare

    begin = time.monotonic()
    folder = prepare(config)
    done = folder.path / "COMPLETE.json"
    if done.is_file():
        summary = read_json(done)
        if config.tracking.enabled and not summary["tracked"]:
            register(folder, config)
        logger.info(f"{folder.run_id} is complete; nothing to do")
        logger.info(summary["table"])
        return folder
    with alone(folder.path), log_file(folder.path / "log" / "run.log"):
        job = _Run(config, folder, address)
        try:
            job.execute()
        except BaseException as error:
            job.tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        logger.info(f"finished in {_minutes(time.monotonic() - begin)}")
    return folder


def train(config: RunConfig, address: str | None = None) -> RunFolder:
    """The stages of a run without evaluation and registration; `run` goes on from there."""
    from pipeline.runs.prepare import prepare

    folder = prepare(config)
    if not all(folder.result(stage.name) for stage in config.stages):
        with alone(folder.path):
            _Run(config, folder, address).train()
    return folder


class _Run:
    """One attempt at a run: the state that its steps share."""

    def __init__(self, config: RunConfig, folder: RunFolder, address: str | None) -> None:
        # What does not decide the result (workers, tracking...) is as this call says, not as a former one did.
        if folder.config != config:
            write_text(folder.path / "config.yaml", dump_config(config))
            folder.push("config.yaml")
        self.folder = RunFolder(folder.path, folder.home)
        self.config, self.address = config, address
        self.attempt = self.folder.begin_attempt()
        self.durations: dict[str, float] = {}
        self.excluded: set[str] = set()
        self.tracker = Tracker(self.folder, config)
        self.tracker.start()

    def execute(self) -> None:
        self.train()
        self._evaluate()

    def train(self) -> None:
        self._print_plan()
        self._check()
        for group in _groups(self.config.stages):
            if all(self.folder.result(stage.name) for stage in group):
                continue
            store = self._features(group)
            self._train(group, store)

    def _print_plan(self) -> None:
        folder, config = self.folder, self.config
        facts = folder.facts
        counts = facts["parameters"]
        logger.info(f"run       {folder.run_id}  in {folder.path}")
        logger.info(
            f"data      {', '.join(f'{split} {count}' for split, count in facts['splits'].items())} images; "
            f"{facts['sizes']['vocabulary_size']} words"
        )
        source = (
            f"{config.backbone.name} at {config.backbone.image_size} px, {counts['backbone']:,} parameters, "
            f"{facts['num_tokens']} tokens"
        )
        if config.features.hdf5 is not None:
            source = f"regions of {config.features.hdf5}, at most {facts['num_tokens']}"
        logger.info(f"model     {config.model.name}, {counts['model']:,} parameters; {source}")
        for number, stage in enumerate(config.stages, 1):
            logger.info(f"stage {number}   {self._describe(stage)}")
        if facts["unreadable"]:
            logger.warning(f"{len(facts['unreadable'])} images cannot be read and are left out (run.json lists them)")

    def _describe(self, stage: StageSection) -> str:
        workers = self.config.workers.num_workers
        unit = "pairs" if stage.captions_per_image == 1 and stage.objective == "cross_entropy" else "images"
        extra = f" x {stage.captions_per_image} captions" if stage.captions_per_image > 1 else ""
        if stage.objective == "scst":
            extra = f" x {stage.sampling.num_samples} samples"
        share = stage.batch_size // (workers * stage.gradient_accumulation_steps)
        state = "done" if self.folder.result(stage.name) else f"{total_steps(stage, self._num_samples(stage))} steps"
        return (
            f"{stage.name}: {stage.objective}, {'end to end' if stage.train_backbone else 'frozen features'}, {state} "
            f"of {stage.batch_size} {unit}{extra} = {workers} workers x {share}"
            + (f" x {stage.gradient_accumulation_steps} accumulated" if stage.gradient_accumulation_steps > 1 else "")
        )

    def _num_samples(self, stage: StageSection) -> int:
        train = self.folder.dataset.split(*self.config.data.train_splits)
        if stage.captions_per_image == 1 and stage.objective == "cross_entropy":
            return sum(len(captions) for captions in train.column("captions"))
        return len(train)

    def _check(self) -> None:
        """Disk, Java, and one step of every stage at its real batch size on a worker."""
        self._check_disk()
        self._machines(self.folder.dataset)  # refused now, not after the training
        if shutil.which("java") is None:
            logger.info("check     java is not on the PATH: METEOR will be reported as unavailable")
        pending = [stage for stage in self.config.stages if self.folder.result(stage.name) is None]
        if not self.config.workers.dry_run or not pending or any(self.folder.path.glob("stages/*/step-*")):
            return
        import ray

        from pipeline.training.dry_run import dry_run

        self._start_ray()
        with self._timed("trial steps"):
            workers = self.config.workers
            task = ray.remote(dry_run).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
            for row in ray.get(task.remote(self.folder)):
                if "error" in row:
                    raise UserError(f"a trial step of stage {row['stage']} fails: {row['error']}")
                logger.info(f"check     one step of {row['stage']}: {row['seconds']:.1f} s, {row['memory_mb']:.0f} MiB")

    def _check_disk(self) -> None:
        facts = self.folder.facts
        width = 2 if self.config.features.stored_dtype == "float16" else 4
        pending = [stage for stage in self.config.stages if self.folder.result(stage.name) is None]
        stores = sum(not stage.train_backbone for stage in pending[:1]) + sum(stage.train_backbone for stage in pending)
        stores = 0 if self.folder.home else stores  # on S3 features go there
        features = len(self.folder.dataset) * facts["num_tokens"] * facts["sizes"]["feature_width"] * width * stores
        weights = 6 * 4 * sum(facts["parameters"].values())
        free = shutil.disk_usage(self.folder.path).free
        if features + weights > free:
            raise UserError(
                f"{self.folder.path} has {free / 2**30:.1f} GiB free, and features "
                f"({features / 2**30:.1f} GiB) and checkpoints ({weights / 2**30:.1f} GiB) need more; "
                f"free some or set another {'RAYCAP_CACHE' if self.folder.home else 'storage'}"
            )
        logger.info(f"check     disk: {free / 2**30:.0f} GiB free, about {(features + weights) / 2**30:.1f} GiB needed")

    def _start_ray(self) -> None:
        with self._timed("starting ray"):
            start_ray(self.config, self.address)

    def _features(self, group: list[StageSection]) -> StoragePath | None:
        """The store for a group's frozen stages: all images that training and validation read."""
        frozen = [stage for stage in group if not stage.train_backbone]
        if not frozen:
            return None
        data = self.config.data
        part = self.folder.dataset.split(*data.train_splits, data.val_split)
        return self._extract(part, frozen[0])

    def _extract(self, part: Dataset, before: StageSection | None) -> StoragePath:
        """Features as a stage (None: the evaluation) reads them."""
        with self._timed("features"):
            store, bad = self._stored(part, before)
        if len(bad) > self.config.data.max_bad_fraction * len(part):
            reason = next(iter(bad.values()))
            raise UserError(
                f"{len(bad)} of {len(part)} images give no features, more than data.max_bad_fraction = "
                f"{self.config.data.max_bad_fraction}; {store / 'quarantine.parquet'} lists them (first: {reason})"
            )
        if bad:
            logger.info(f"features  {len(bad)} images in quarantine: {store / 'quarantine.parquet'}")
        self.excluded |= bad.keys()
        return store

    def _stored(self, part: Dataset, before: StageSection | None) -> tuple[StoragePath, dict[str, str]]:
        """The store, and {key: reason} of images that gave no features."""
        if self.config.features.hdf5 is not None:
            from pipeline.features.regions import import_regions

            return import_regions(part, self.config)
        from pipeline.features.extraction import Extractor, extract

        backbone = replace(self.config.backbone, weights="none")
        weights = self.folder.weights_before(before, "backbone")
        options = self.config.storage.options
        extractor = Extractor(backbone, weights, self.config.features, self.config.data.max_pixels, options)
        return extract(part, self.config.storage_place / "features", extractor, self._start_ray)

    def _train(self, group: list[StageSection], store: StoragePath | None) -> None:
        from jobs.train import fit
        from pipeline.training.loop import StageJob

        self._start_ray()
        names = tuple(stage.name for stage in group)
        job = StageJob(self.folder.path, names, store, tuple(sorted(self.excluded)), self.attempt, self.folder.home)
        with self._timed(" + ".join(names)), _Printer(self.folder):
            fit(job, self.config)
        self.folder.pull("stages")

    def _evaluate(self) -> None:
        from jobs.caption_tasks import caption_splits
        from jobs.gallery import with_attention
        from pipeline.runs.evaluation import evaluate_run, flat_scores, summarize_search, write_predictions
        from pipeline.runs.run_bundle import bundle_place, bundle_run
        from pipeline.runs.summary import format_table, make_report, report_images, score_table

        folder, config = self.folder, self.config
        splits = (*config.data.test_splits, config.data.val_split)
        store = self._extract(folder.dataset.split(*splits), None)
        dataset = folder.dataset.without(sorted(self.excluded))
        with self._timed("evaluation"):
            self._start_ray()
            logger.info(f"evaluate  {', '.join(splits)} with beam {config.evaluation.beam_size}")
            machines, searched = self._machines(dataset), {}
            excluded = tuple(sorted(self.excluded))
            for split, found in caption_splits(folder, splits, store, excluded, machines).items():
                captions = {image: each.caption for image, each in found.items()}
                write_predictions(folder.path / "predictions" / f"{split}.json", captions)
                own = machines if split != config.data.val_split else {}
                searched[split] = summarize_search(found, own, f"evaluate  {split}: ")
            write_json(folder.path / "predictions" / "_search.json", searched)
            result = evaluate_run(folder, dataset)
        bundle = bundle_run(folder, scores=flat_scores(result))
        shown = bundle_place(folder)
        with self._timed("report"):
            shown_images = report_images(folder, dataset, result)
            images = with_attention(shown_images, bundle, config, folder.run_id, store, dataset)
            make_report(folder, dataset, result, self.durations, images)
            folder.push("predictions", "scores.json", "report.html")
        with self._timed("registration"):
            registered = self.tracker.finish(flat_scores(result), bundle)
        table = "\n".join(
            [
                "",
                format_table(*score_table(result)),
                "",
                *self._verdicts(result),
                "",
                f"report       {folder.root / 'report.html'}",
                f"predictions  {folder.root / 'predictions'}",
                f"model        {shown}",
                f"tracking     {self._tracking(registered)}",
                f"features     {store}",
                f"times        {', '.join(f'{name} {seconds:.0f} s' for name, seconds in self.durations.items())}",
            ]
        )
        complete = {"table": table, "durations": self.durations, "bundle": str(shown), "scores": flat_scores(result)}
        write_json(folder.path / "COMPLETE.json", {**complete, "tracked": registered is not None})
        folder.push("COMPLETE.json")
        logger.info(table)

    def _machines(self, dataset: Dataset) -> dict[int, ConstraintAutomaton]:
        """The constraints of test images, where the configuration names a file."""
        from pipeline.captioning.constraints import build_machines, read_constraints

        file = self.config.evaluation.constraints
        if file is None:
            return {}
        images = set(dataset.split(*self.config.data.test_splits).column("image_id"))
        own = {image: words for image, words in read_constraints(Path(file)).items() if image in images}
        return build_machines(own, self.folder.vocabulary, file)

    def _verdicts(self, result: dict[str, Any]) -> Iterator[str]:
        by_stage = result["validation_by_stage"]
        yield "validation CIDEr-D  " + ", ".join(f"{name} {value:.4f}" for name, value in by_stage.items())
        kinds = {stage.name: stage.objective for stage in self.config.stages}
        best = {kinds[name]: value for name, value in sorted(by_stage.items(), key=lambda item: item[1])}
        before, after = best.get("cross_entropy"), best.get("scst")
        if before is not None and after is not None:
            gain = after - before
            yield f"                    SCST {'gains' if gain >= 0 else 'LOSES'} {abs(gain):.4f} over cross entropy"

    def _tracking(self, registered: str | None) -> str:
        if not self.config.tracking.enabled:
            return "off"
        where = public_uri(self.config)
        if registered:
            return f"{where}, model {registered}"
        return f"{where} did not take everything; {self.tracker.remedy} sends the rest"

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.durations[name] = self.durations.get(name, 0.0) + time.monotonic() - begin


class _Printer:
    """Prints journal entries while a fit is under way."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.follower, self._pulled = folder, Follower(folder.journal), time.monotonic()
        self.start: dict[str, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="printer", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pull()
        self._print()

    def _follow(self) -> None:
        while not self._stop.wait(0.5):
            if time.monotonic() - self._pulled > JOURNAL_EVERY_S:
                self._pull()
            self._print()

    def _pull(self) -> None:
        with suppress(OSError):  # a storage that fails for a while delays what is printed, and nothing else
            self.folder.pull(JOURNAL)
        self._pulled = time.monotonic()

    def _print(self) -> None:
        for entry in self.follower.new():
            logger.info(self._line(entry))

    def _line(self, entry: dict[str, Any]) -> str:
        stage, step = entry["stage"], entry["step"]
        if entry["kind"] in ("event", "done", "reward"):
            self.start[stage] = (step, entry["time"])
            return f"{stage}  {entry['text']}"
        if entry["kind"] == "validation":
            score = f"validation CIDEr-D {entry['CIDEr-D']:.4f} (best {entry['best']:.4f})"
            return f"{stage}  step {step}: {score}, {entry['seconds']:.1f} s"
        first, since = self.start.get(stage, (0, entry["time"]))
        rate = (step - first) / max(entry["time"] - since, 1e-3)
        left = (entry["total"] - step) / rate if rate > 0 else 0.0
        parts = [f"{stage}  {step}/{entry['total']}", f"loss {entry['loss']:.4f}"]
        if "reward" in entry:
            parts += [f"reward {entry['reward']:.3f}", f"length {entry['length']:.1f}"]
        parts += [
            f"grad {entry['gradient_norm']:.2f}",
            f"lr {entry['lr']:.2e}",
            f"{entry['images_per_s']:.0f} images/s",
            f"data wait {100 * entry['data_wait']:.0f} %",
            f"{entry['memory_mb']:.0f} MiB",
            f"{_minutes(left)} left",
        ]
        return "  ".join(parts)


def _groups(stages: tuple[StageSection, ...]) -> list[list[StageSection]]:
    """Consecutive stages that one fit can run: features are extracted anew only between groups.

    A frozen stage after one that trained the backbone begins a group, because its features are not there yet.
    """
    groups: list[list[StageSection]] = []
    for stage in stages:
        if not groups or (not stage.train_backbone and any(earlier.train_backbone for earlier in groups[-1])):
            groups.append([])
        groups[-1].append(stage)
    return groups


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuses a second process on the same run or search."""
    with is_alone(folder) as first:
        if not first:
            raise UserError(f"another process is working on {folder.name}; wait for it or stop it")
        yield


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
