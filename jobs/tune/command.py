"""`raycap tune`: a search over configuration keys with Ray Tune.

Ray Tune places trials, keeps their processes for the next ones and stops them early. Which trials there are, and what
became of them, is in the search's own book (`pipeline/search/trials.py`), from which a search that was killed goes on.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from jobs.cluster import connect
from jobs.options import Address, Set
from jobs.run import alone
from jobs.tune.features import extract_once, find_backbone
from jobs.tune.schedulers import drop_checkpoints, make_scheduler, take_over
from pipeline.errors import UserError
from pipeline.runs.identity import code_digest
from pipeline.search.results import live_table, trial_line
from pipeline.search.samplers import make_proposals
from pipeline.search.spec import SCORE, Search, load_search
from pipeline.search.trials import OVER, Book, SearchFolder, TrialRecord, minutes

logger = logging.getLogger(__name__)


TABLE_EVERY_S = 30.0


def tune(
    path: Path,
    overrides: list[str],
    address: str | None = None,
    *,
    retry_failed: bool = False,
) -> int:
    """Runs a search to its end; returns the exit code: 1 when every trial failed."""
    begin = time.monotonic()
    search = load_search(path, overrides)
    if not address and "RAY_ADDRESS" not in os.environ:
        _check_fits(search, max(os.cpu_count() or 1, 2), math.inf, "this machine")
    from pipeline.data.loading import find_data
    from pipeline.runs.prepare import readable
    from pipeline.scoring.metrics import why_unavailable

    for name in search.config.objectives:
        if reason := why_unavailable(name):
            raise UserError(f"the objective {name} cannot be computed here: {reason}")
    dataset, troubles = find_data(search.base)
    dataset = readable(dataset, troubles, search.base)
    if troubles:
        logger.warning(f"{len(troubles)} images cannot be read and are left out")
    source = find_backbone(search, dataset, address)
    from pipeline.runtime.weights import weights_file_digest

    weights = "" if source is None else weights_file_digest(source.weights)
    name = search.identity(dataset.fingerprint(), code_digest(), weights)
    folder = SearchFolder(search.base.storage_path / "searches" / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    with alone(folder.path):
        store, bad = extract_once(search, dataset, source, lambda: _start_ray(search, address))
        weights_file, start = (None, None) if source is None else (source.weights, source.start)
        folder.write_plan(search, weights_file, start, store, bad)
        if retry_failed and (count := folder.reopen_failed()):
            logger.info(f"retry     {count} trials that failed run again")
        book = _open_book(folder, search)
        _log_plan(book)
        from jobs.tune.outcome import Outcome

        outcome = Outcome(book)
        try:
            if book.left_behind or book.remaining > 0:
                _start_ray(search, address)
                _run_trials(book, search, outcome.changed)
        except BaseException as error:
            outcome.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        code = outcome.finish()
    logger.info(f"finished in {minutes(time.monotonic() - begin)}")
    return code


def _open_book(folder: SearchFolder, search: Search) -> Book:
    config, trials = search.config, search.num_trials()
    points = None if trials is None else max(1, trials // len(config.seeds))
    directions = list(config.objectives.values())
    proposals = make_proposals(search.space, config.algorithm, directions, config.seed, config.population, points)
    return Book(folder, search, proposals)


def _log_plan(book: Book) -> None:
    search, config = book.search, book.search.config
    logger.info(f"search    {book.folder.path.name}  in {book.folder.path}")
    size = "any number of" if math.isinf(search.space.size) else f"{search.space.size:.0f}"
    dimensions = ", ".join(search.space.keys)
    asked = "trials until the time is over" if book.asked is None else f"{book.asked} trials"
    seeds = f" of {len(config.seeds)} seeds" if len(config.seeds) > 1 else ""
    logger.info(f"space     {dimensions}: {size} points; {config.algorithm}, {asked}{seeds}")
    early = ""
    if config.scheduler:
        early = f"; ASHA from epoch {config.scheduler.grace_epochs:g}, the best 1/{config.scheduler.reduction:g} go on"
    logger.info(f"trial     {', '.join(search.stages)}, {search.total_epochs():g} epochs{early}")
    over = sum(record.state in OVER for record in book.records)
    if book.records:
        logger.info(f"continues with {over} trials done and {len(book.left_behind)} that were left in the middle")


def _start_ray(search: Search, address: str | None) -> None:
    """Joins or starts Ray and refuses what it can never place."""
    import ray

    joined = connect(address)
    resources = ray.cluster_resources()
    where = "the Ray cluster" if joined else "this machine"
    _check_fits(search, resources.get("CPU", 0), resources.get("GPU", 0), where)


def _check_fits(search: Search, cpus: float, gpus: float, where: str) -> None:
    asked = search.config.resources
    for kind, each, there in (("cpus", asked.cpus, cpus), ("gpus", asked.gpus, gpus)):
        if each * asked.workers > there:
            raise UserError(
                f"resources: a trial asks for {asked.workers} workers x {each:g} {kind} = {each * asked.workers:g}, "
                f"and {where} has {there:g}; lower resources.{kind} or resources.workers, or join a larger cluster "
                "with --address"
            )


def concurrency(search: Search, resources: Mapping[str, float]) -> int:
    """How many trials run at a time: what the cluster can place, and not more than the budget says."""
    asked = search.config.resources
    fits = math.floor(resources.get("CPU", 0) / (asked.cpus * asked.workers) + 1e-9)
    if asked.gpus:
        fits = min(fits, math.floor(resources.get("GPU", 0) / (asked.gpus * asked.workers) + 1e-9))
    return max(1, min(fits, search.config.budget.concurrent or fits))


def _run_trials(book: Book, search: Search, changed: Callable[[], None]) -> None:
    """Ray Tune until no trial is left or the time is over."""
    for key, value in {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # the book is what a search goes on from
        "TUNE_FUNCTION_THREAD_TIMEOUT_S": "20",
        "TUNE_WARN_THRESHOLD_S": "60",
        "RAY_AIR_NEW_OUTPUT": "0",
    }.items():
        os.environ.setdefault(key, value)
    import ray
    from ray import tune

    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    asked, at_once = search.config.resources, concurrency(search, ray.cluster_resources())
    each = (
        {"CPU": asked.cpus, "GPU": asked.gpus} if asked.workers == 1 else {"memory": 2.0**20}
    )  # the workers' are theirs
    logger.info(f"resources {at_once} trials at a time, {asked.workers} x {asked.cpus:g} CPU, {asked.gpus:g} GPU each")
    hours, scratch = search.config.budget.hours, book.folder.path / "log" / "ray"
    desk = Desk(book, changed, None if hours is None else time.monotonic() + 3600 * hours)
    desk.scheduler = make_scheduler(search, book.records)
    population = search.config.algorithm == "pbt"  # all members are alive, and Ray Tune takes no searcher beside it
    tuner = tune.Tuner(
        tune.with_resources(train_trial, tune.PlacementGroupFactory([{k: v for k, v in each.items() if v}])),
        tune_config=tune.TuneConfig(
            search_alg=None if population else _searcher(desk),
            scheduler=desk.scheduler,
            num_samples=1 if population else -1,
            max_concurrent_trials=None if population else at_once,
            time_budget_s=None if hours is None else 3600 * hours,
            reuse_actors=True,
        ),
        param_space={"member": tune.grid_search(desk.members())} if population else None,
        run_config=tune.RunConfig(
            name=f"search-{uuid.uuid4().hex[:8]}",
            storage_path=str(scratch),
            callbacks=[_callback(desk)],
            failure_config=tune.FailureConfig(max_failures=0),
            verbose=0,
        ),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if desk.error is not None:
            raise desk.error


class Desk:
    """Between Ray Tune and the book: hands out trials, notes what comes in, prints."""

    def __init__(self, book: Book, changed: Callable[[], None], deadline: float | None) -> None:
        self.book, self.changed, self.deadline = book, changed, deadline
        self.by_id: dict[str, TrialRecord] = {}  # by Ray Tune's name of the trial
        self.error: BaseException | None = None
        self.scheduler: Any = None
        self.last_table = time.monotonic()

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """What goes wrong on our side is raised as it is, after Ray Tune, which would wrap it, has ended."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise

    def members(self) -> list[dict[str, Any]]:
        """All trials at once, for a population."""
        found: list[dict[str, Any]] = []
        while (config := self.give(str(len(found)))) is not None:
            found.append(config)
        return found

    def starts(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """A member of a population is named by Ray Tune when it first starts."""
        if "member" in config and trial_id not in self.by_id:
            number = config["member"]["number"]
            self.by_id[trial_id] = next(record for record in self.book.records if record.number == number)

    def give(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial as Ray Tune's configuration of it."""
        record = self.book.next() if not self.time_is_over else None
        if record is None:
            return None
        self.by_id[trial_id] = record
        take_over(self.scheduler, f"trial {record.number}", trial_id)
        verb = f"goes on from epoch {record.epoch:g}" if record.attempts > 1 else "starts"
        seed = f", seed {record.seed}" if len(self.book.search.config.seeds) > 1 else ""
        asked = f"/{self.book.asked}" if self.book.asked is not None else ""
        logger.info(f"trial {record.number}{asked}  {verb}  ({self.book.search.space.describe(record.point)}{seed})")
        return {
            "folder": str(self.book.folder.path),
            "number": record.number,
            "point": record.point,
            "seed": record.seed,
        }

    def result(self, trial_id: str, result: Mapping[str, Any], config: dict[str, Any]) -> None:
        record = self.by_id[trial_id]
        if "member" in config:
            # one that takes another's place has the other's configuration, changed: its number stays its own
            donor, config["member"]["number"] = config["member"]["number"], record.number
            if donor != record.number:
                record.point = dict(config["member"]["point"])
                record.took_over.append((result["epoch"], donor))
                logger.info(f"trial {record.number}  goes on with the weights of trial {donor}")
        if result.get("outcome"):
            outcome = dict(result["outcome"])
            outcome["reports"] = [tuple(report) for report in outcome.get("reports", record.reports)]
            self._over(record, outcome)
        elif SCORE in result:
            self.book.reported(record, result)
            self._line(record)

    def ended(self, trial_id: str, last: Mapping[str, Any]) -> None:
        """A trial that Ray Tune ended. Without an outcome: early by the scheduler, or because the time is over."""
        record = self.by_id[trial_id]
        if record.state in OVER or self.time_is_over:
            return
        self._over(record, {"state": "stopped", "seconds": record.seconds + last.get("time_total_s", 0.0)})

    def died(self, trial_id: str, reason: str) -> None:
        record = self.by_id[trial_id]
        if record.state not in OVER:
            self._over(record, {"state": "failed", "reason": reason})

    @property
    def time_is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _over(self, record: TrialRecord, outcome: Mapping[str, Any]) -> None:
        self.book.over(record, outcome)
        self._line(record)
        self.changed()

    def _line(self, record: TrialRecord) -> None:
        logger.info(trial_line(self.book.search, record, self.book.asked))
        if time.monotonic() - self.last_table > TABLE_EVERY_S:
            self.last_table = time.monotonic()
            logger.info("\n" + live_table(self.book) + "\n")


def _searcher(desk: Desk) -> Any:
    from ray.tune.search import Searcher

    class BookSearcher(Searcher):
        """Asks the book; what became of a trial is told to it by the callback."""

        def suggest(self, trial_id: str) -> Any:
            with desk.keeping_errors():
                found = desk.give(trial_id)
            return found or Searcher.FINISHED

        def set_search_properties(self, *_: Any, **__: Any) -> bool:
            return True

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            pass

        def save(self, checkpoint_path: str) -> None:
            Path(checkpoint_path).touch()

        def restore(self, checkpoint_path: str) -> None:
            pass

        def __reduce__(self) -> Any:  # Ray Tune writes down what it would restore from; the book does that
            return (object, ())

    return BookSearcher()


def _callback(desk: Desk) -> Any:
    from ray.tune import Callback

    class BookCallback(Callback):
        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            with desk.keeping_errors():
                desk.starts(trial.trial_id, trial.config)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
            with desk.keeping_errors():
                desk.result(trial.trial_id, result, trial.config)
                drop_checkpoints(desk.scheduler, trials)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            with desk.keeping_errors():
                desk.ended(trial.trial_id, trial.last_result or {})

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            with desk.keeping_errors():
                desk.died(trial.trial_id, _death(trial))

        def __reduce__(self) -> Any:
            return (object, ())

    return BookCallback()


def _death(trial: Any) -> str:
    """Why Ray Tune counts a trial as failed, in one line.

    From the driver's copy of the trial's error files: Ray's own getters read the storage, which gets them later.
    """
    import ray

    error: Any = None
    if trial.pickled_error_file and Path(trial.pickled_error_file).is_file():
        error = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "out of memory: Ray ended its process because the node's memory was full"
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died (killed, or out of memory): " + " ".join(str(error).split())[:300]
    if error is None and trial.error_file and Path(trial.error_file).is_file():
        error = Path(trial.error_file).read_text()
    return " ".join(str(error or "for a reason that Ray Tune does not name").split())[-500:]


def train_trial(config: dict[str, Any]) -> None:
    """In the trial's process: trains it, reports to Ray Tune, and at its end its outcome."""
    from ray import tune

    from jobs.tune.workers import train_on_workers
    from pipeline.search.trial import run_trial, train_here

    member = config.get("member")
    config = member or config
    folder = SearchFolder(Path(config["folder"]))
    settings = folder.plan["search"]
    if member is not None:
        tune.report({"outcome": _train_member(folder, config)})  # without a score: the population is not to change it
        return
    train = train_here if settings["resources"]["workers"] == 1 else train_on_workers
    outcome = run_trial(folder, config["point"], config["seed"], tune.report, train)
    last = {"epoch": outcome["reports"][-1][0], SCORE: outcome["reports"][-1][1]} if outcome.get("reports") else {}
    tune.report({**last, "outcome": outcome})


def _train_member(folder: SearchFolder, config: dict[str, Any]) -> dict[str, Any]:
    """A population's member: what it goes on from travels with its reports, for others to take over."""
    from ray import tune

    from pipeline.runs.folder import RunFolder
    from pipeline.search.trial import hand_over, run_trial

    def report(metrics: dict[str, Any]) -> None:
        with TemporaryDirectory(prefix="raycap-") as scratch:
            hand_over(RunFolder(Path(metrics["run"])), metrics["stage"], metrics["step"], Path(scratch))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(scratch))

    given, member = tune.get_checkpoint(), config["number"]
    if given is None:
        return run_trial(folder, config["point"], config["seed"], report, member=member)
    with given.as_directory() as parent:
        return run_trial(folder, config["point"], config["seed"], report, member=member, parent=Path(parent))


def command(
    config: Annotated[Path, typer.Argument(help="The search's YAML file.", metavar="CONFIG")],
    set_: Set = None,
    retry_failed: Annotated[bool, typer.Option(help="Also repeat the trials that failed.")] = False,
    address: Address = None,
) -> int:
    """Search over configuration keys.

    The YAML names the keys, such as the expansion coefficients. A killed search resumes with the same command.

    Example: raycap tune configs/search_demo.yaml --set budget.trials=16
    """
    return tune(config, set_ or [], address, retry_failed=retry_failed)
