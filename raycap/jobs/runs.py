"""`raycap runs`: lists what a storage contains, and removes what nothing in it needs any more.

Bundles, champions, their records and everything in progress are never removed. A removal may be killed at any point:
on a disk, a folder is first renamed to a hidden name, which every reader skips and the next plan contains. On S3, the
files that mark a folder as complete are removed first, so that the rest counts as never written.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Annotated, Literal, NamedTuple

import typer

from raycap.models.config import Values
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_place
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.retrain.champion import LEASE, POINTER, ChampionStore
from raycap.pipeline.runs.folder import RunMetadata, try_lock
from raycap.pipeline.runs.preflight import storage_errors
from raycap.pipeline.runtime.names import expanded_path, one_line, printable, shown
from raycap.pipeline.runtime.secrets import remember_address, without_secrets
from raycap.pipeline.search.records import ENDED, TRIALS, read_records
from raycap.pipeline.storage.digests import DIGESTS, digests_in
from raycap.pipeline.storage.lease import LeaseRecord
from raycap.pipeline.storage.path import Entry, StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions, is_remote
from raycap.pipeline.storage.untrusted.documents import parse_json, parse_yaml, require_mapping

OLD_DAYS = 30
LEAST_DAYS = 1.0  # Newer folders are kept, because a process on another machine may be using them.
MAX_RECORD_BYTES = 2**26  # limit of a JSON or YAML file. run.json can be large, because it lists unreadable images.
NUM_READS = 8  # folders that are read at a time
# A run on S3 has no lock, so it counts as in progress if it has changed within this time. Training changes the run
# every few seconds, but an extraction of features writes only to another folder, so the time is long.
ACTIVE_S = 3600.0
TRAINED = "evaluation"  # the fact `at` of a run whose stages are all finished
TITLES = {"runs": "run", "searches": "search", "retrain": "champion of", "features": "features", "models": "bundle"}
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # temporary names of `pipeline.storage.atomic`
TRIAL, BEST = re.compile(r"trials/.*\.json"), re.compile(r"(stages/[^/]+/best-\d+)/.*")
# What raycap writes into a run's folder. A folder with other files may belong to another program, so it is kept.
KNOWN = {
    "config.yaml", "decisions.json", "run.json", "data.arrow", "vocabulary.json", "init", "stages", "log",
    "predictions", "scores.json", "report.html", "COMPLETE.json", ".lock",
}  # fmt: skip
# The files that are removed first, in this order. Without them, readers see that the folder is not complete.
MARKERS = (r".*/DONE\.json", r".*/progress\.json", r"run\.json", r"manifest/.*", "COMPLETE")
# Errors that are raised when a damaged file is read.
FAILURES = (UserError, JobFailedError, OSError, LookupError, TypeError, AttributeError, ValueError)


def runs(
    target: Annotated[
        str,
        typer.Argument(help="A storage's folder, s3://BUCKET/FOLDER, or a configuration.", metavar="STORAGE|CONFIG"),
    ],
    endpoint_url: Annotated[str | None, typer.Option(help="Of an S3-compatible server, for s3://...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Show what can be removed, and how many bytes it has.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove it.")] = False,
    older_than: Annotated[
        int, typer.Option(min=1, max=36500, help="With --prune: days without a change of an unfinished run.")
    ] = OLD_DAYS,
) -> None:
    """List what a storage contains, and remove what is not needed.

    The tables have the runs with their state and CIDEr-D, searches, champions, bundles and feature stores. --prune
    shows what can be removed: feature stores that no run uses, runs that were not trained to the end and not touched
    for some days, and what killed processes have left. Nothing is removed without --yes, and never a bundle, a champion
    or what is in progress.

    Example: raycap runs results
    """
    storage = _storage(target, endpoint_url)
    if yes and not prune:
        raise UserError("--yes removes what --prune shows; give both")
    with storage_errors("--endpoint-url", "give a storage that exists"):
        storage.require_answer()
    found = read_contents(storage)
    size = sum(entry.bytes for entries in found.values() for entry in entries)
    if as_json:
        values = {part: [entry.values() for entry in entries] for part, entries in found.items()}
        print(json.dumps({"storage": str(storage), "bytes": size, **values}, indent=1))
    else:
        for part, entries in found.items():
            _print_table(TITLES[part], entries)
        _print(f"{storage}: {_size(size)}; {', '.join(f'{part} {len(entries)}' for part, entries in found.items())}")
    if prune:
        _prune(storage, found, older_than, yes)


def _storage(target: str, endpoint_url: str | None) -> StoragePath:
    """The storage that an argument names. Raises UserError if there is none."""
    if is_remote(target):
        remember_address(endpoint_url or "")
        return storage_path(target, StorageOptions(endpoint_url))
    path = named_place(expanded_path(target))
    if path is None:
        raise UserError(f"{shown(target)} does not exist; give a storage's folder, s3://..., or a configuration")
    if endpoint_url is not None:
        raise UserError("--endpoint-url belongs to s3://...; a configuration has the key storage.endpoint_url")
    return load_config(path, ()).storage_place if path.is_file() else storage_path(path)


def _print_table(title: str, entries: Sequence[Content]) -> None:
    """Prints a table unless it is empty. The row of a damaged folder ends with the reason."""
    if not entries:
        return
    lines = [[title, *entries[0].facts, "state", "changed", "size"]]
    for entry in entries:
        changed = datetime.fromtimestamp(entry.newest, UTC).strftime("%Y-%m-%d")
        lines.append([entry.name, *map(_cell, entry.facts.values()), entry.state, changed, _size(entry.bytes)])
    widths = [max(len(printable(cell)) for cell in cells) for cells in zip(*lines, strict=True)]
    for cells, detail in zip(lines, ["", *(entry.detail for entry in entries)], strict=True):
        text = "  ".join(printable(cell).ljust(width) for cell, width in zip(cells, widths, strict=True))
        _print(f"{text}  {without_secrets(detail)}".rstrip())
    print()


def _prune(storage: StoragePath, found: Mapping[str, Sequence[Content]], older_than: int, yes: bool) -> None:
    """Prints which folders can be removed and, with --yes, removes them one by one."""
    removals, kept = plan_removals(storage, found, older_than)
    for sentence in kept:
        _print(without_secrets(sentence))
    removed, total = 0, sum(removal.content.bytes for removal in removals)
    for removal in removals:
        outcome = "would go"
        if yes:
            is_removed = remove(storage, removal)
            removed += removal.content.bytes if is_removed else 0
            outcome = "removed" if is_removed else "kept: a process works on it"
        _print(f"{outcome}  {_size(removal.content.bytes):>9}  {removal.content.path}  ({removal.why})")
    if yes:
        print(f"removed {_size(removed)} of {_size(total)}")
    elif removals:
        print(f"{len(removals)} folders with {_size(total)}; nothing was removed, --yes removes them")
    else:
        print(f"nothing to remove; unfinished runs count after {older_than} days without a change (--older-than)")


def _print(line: str) -> None:
    """Prints a line. Control characters in names from the storage are escaped."""
    print(printable(line))


def _cell(fact: object) -> str:
    """A fact as the text of a cell. A float is a score, so it gets four digits."""
    if fact is None:
        return "-"
    return f"{fact:.4f}" if isinstance(fact, float) else str(fact)


def _size(count: int) -> str:
    """A number of bytes in mebibytes."""
    return f"{count / 2**20:,.1f} MiB"


@dataclass
class Content:
    """A folder of the storage: a run, a search, the champion of a configuration, a bundle or a feature store.

    part: the storage's folder that contains this folder: "runs", "searches", "retrain", "models" or "features".
    files: all files except locks, by their path in this folder.
    state: as docs/commands.md explains it, or "".
    facts: values for the table and for JSON.
    needs: for a search or champion, the names of the runs it needs. For a feature store, the digest of its backbone.
    detail: why the state is "damaged" or "foreign".
    """

    part: str
    name: str
    files: dict[str, Entry] = field(default_factory=dict)
    state: str = ""
    facts: Values = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    detail: str = ""

    @property
    def path(self) -> str:
        """The path of the folder in the storage."""
        return f"{self.part}/{self.name}"

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def newest(self) -> float:
        """The time of the last change in Unix seconds."""
        return max(entry.modified for entry in self.files.values())

    @property
    def days(self) -> float:
        """The days since the last change."""
        return (time.time() - self.newest) / 86400

    def values(self) -> Values:
        """The values of `--json`."""
        kept = ("name", "bytes", "newest", "state", "detail")
        return {key: getattr(self, key) for key in kept} | self.facts


def _listed(storage: StoragePath, part: str, depth: int = 1) -> list[Content]:
    """The folders `depth` levels below a part of the storage, including hidden ones. No file is read."""
    found: dict[str, Content] = {}
    for file, entry in (storage / part).walk():
        names = file.split("/")
        is_lock = names[depth:] == [".lock"]  # left out, because its time shows no change of the content
        if len(names) > depth and all(names[:depth]) and not is_lock:
            name = "/".join(names[:depth])
            found.setdefault(name, Content(part, name)).files["/".join(names[depth:])] = entry
    return [found[name] for name in sorted(found)]


def read_contents(storage: StoragePath) -> dict[str, list[Content]]:
    """Everything in a storage by part, sorted by name. Files are listed once, and only small records are read.

    A damaged or foreign file raises no error. The state of its folder is then "damaged" or "foreign".
    """

    def read(part: str, reader: Callable[[StoragePath, Content], None], depth: int = 1) -> list[Content]:
        """The folders of a part, without hidden ones. `reader` sets the state of each."""

        def with_state(entry: Content) -> Content:
            try:
                reader(storage, entry)
            except FAILURES as error:
                entry.state, entry.detail = "damaged", one_line(error)
            return entry

        with ThreadPoolExecutor(NUM_READS) as pool:
            visible = (each for each in _listed(storage, part, depth) if not re.search(r"(^|/)\.", each.name))
            return list(pool.map(with_state, visible))

    readers = {"runs": _read_run, "searches": _read_search, "retrain": _read_champion, "features": _read_features}
    found = {part: read(part, reader) for part, reader in readers.items()}
    return found | {"models": read("models", lambda *_: None, depth=2)}


def _read_run(storage: StoragePath, entry: Content) -> None:
    """Sets the state and the facts of a run. Raises one of FAILURES for a damaged file.

    Facts: `at` is the first unfinished stage of an incomplete run, or "evaluation". `val` and `test` are the CIDEr-D of
    a complete run. For an incomplete run, `val` is the best CIDEr-D of its last finished stage.
    """
    place, facts = storage / entry.path, {"created": "", "at": "", "val": None, "test": None}
    entry.facts = facts
    is_active = _in_progress(place) or (place.is_remote and time.time() - entry.newest < ACTIVE_S)
    if "run.json" not in entry.files:  # foreign, or its creation or removal is incomplete
        tops = {name.partition("/")[0] for name in entry.files}
        is_ours = all(name in KNOWN or TEMPORARY.fullmatch(name) for name in tops)
        if not is_ours:
            entry.state = "foreign"
        else:
            entry.state = "in progress" if is_active else "unprepared"
        return
    values = _read_record(place / "run.json")
    facts["created"] = RunMetadata.parse(values, str(place / "run.json")).created[:16]
    if values.get("run_id") != entry.name:
        entry.state, entry.detail = "foreign", f"run.json is that of {values.get('run_id')}"
        return
    path = place / "config.yaml"
    config = require_mapping(parse_yaml(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path))
    if "COMPLETE.json" in entry.files:
        scores, data = _read_record(place / "COMPLETE.json")["scores"], config["data"]
        facts["val"] = scores.get(f"{data['val_split']}_CIDEr-D")
        facts["test"] = next((scores.get(f"{split}_CIDEr-D") for split in data["test_splits"]), None)
        entry.state = "complete"
        return
    stages = [str(stage["name"]) for stage in config["stages"]]
    finished = list(takewhile(lambda name: f"stages/{name}/DONE.json" in entry.files, stages))
    facts["at"] = TRAINED if len(finished) == len(stages) else stages[len(finished)]
    if finished:
        facts["val"] = _read_record(place / f"stages/{finished[-1]}/DONE.json").get("best_score")
    entry.state = "in progress" if is_active else "interrupted"


def _read_search(storage: StoragePath, entry: Content) -> None:
    """Sets the state of a search, the runs that it needs, and the number of its trials that have ended, as in 3/12."""
    place = storage / entry.path
    has_trials = TRIALS in entry.files
    entry.state = "in progress" if _in_progress(place) else "" if has_trials else "interrupted"
    entry.facts = {"trials": "?"}
    if not has_trials:  # the first experiment has not ended
        return
    trials = read_records((place / TRIALS).read_bytes(MAX_RECORD_BYTES), str(place / TRIALS))
    entry.needs = {PurePosixPath(trial.run).name for trial in trials if trial.run}
    entry.facts["trials"] = f"{sum(trial.state in ENDED for trial in trials)}/{len(trials)}"


def _read_champion(storage: StoragePath, entry: Content) -> None:
    """Sets the state of a champion. All former champions' runs are needed, because a rollback may restore them."""
    entry.facts = {"decisions": 0, "bundle": "", "run": ""}
    if LEASE in entry.files and _is_leased(storage / entry.path / LEASE):
        entry.state = "in progress"
    if POINTER in entry.files:
        state = ChampionStore(storage, entry.name).read()
        entry.facts["decisions"] = state.number
        entry.needs = {record.run_id for record in state.bundles}
        if state.champion is not None:
            entry.facts |= {"bundle": state.champion.bundle, "run": state.champion.run_id}


def _read_features(storage: StoragePath, entry: Content) -> None:
    """Sets the number of images of a feature store and its backbone's digest, if the first extraction has ended.

    The digest is "" if the features are regions from a detector's file.
    """
    entry.facts = {"images": None}
    if "COMPLETE" in entry.files:
        values = _read_record(storage / entry.path / "COMPLETE")
        entry.facts["images"], entry.needs = int(values["rows"]), {str(values.get("weights", ""))}


def _read_record(path: StoragePath) -> Values:
    """The mapping in a JSON file. Raises UserError if the file is damaged or foreign, and OSError if it is missing."""
    return dict(require_mapping(parse_json(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path)))


def _in_progress(place: StoragePath) -> bool:
    """True if a process works on a folder: on a disk it has the folder's lock, and on S3 the folder's lease."""
    if place.is_remote:
        return _is_leased(StoragePath(f"{place}.lease.json", place.options))
    try:
        with (place.path / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # another process has the lock, or the file is not readable
        return True
    return False


def _is_leased(path: StoragePath) -> bool:
    """True if the lease in a file has not expired. A file that cannot be read counts as a lease."""
    try:
        return LeaseRecord.model_validate_json(path.read_bytes(2**16)).until > time.time()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


class Removal(NamedTuple):
    """A folder that can be removed, and the reason."""

    kind: Literal["leftover", "features", "run"]
    content: Content
    why: str


def plan_removals(
    storage: StoragePath, found: Mapping[str, Sequence[Content]], older_than_days: float
) -> tuple[list[Removal], list[str]]:
    """The folders that can be removed, and sentences about what is kept because something is damaged or in progress.

    found: from `read_contents`. older_than_days: days without a change after which an unfinished run can be removed.
    """
    owners = [*found["searches"], *found["retrain"]]
    needed = set[str]().union(*(owner.needs for owner in owners))  # the names of runs
    removals, kept = list(_leftovers(storage)), list[str]()
    try:
        _require_idle([*owners, *found["runs"]])
        removals += _features(storage, found)
    except FAILURES as error:
        kept.append(f"features are kept: {one_line(error)}")
    try:
        _require_idle(owners)
        removals += _old_runs(found["runs"], needed, max(older_than_days, LEAST_DAYS))
    except UserError as error:
        kept.append(f"unfinished runs are kept: {one_line(error)}")
    return removals, kept


def _require_idle(entries: Sequence[Content]) -> None:
    """Raises UserError if one of the folders is in progress or damaged, because its needs are then unknown."""
    for entry in entries:
        if entry.state in ("in progress", "damaged"):
            raise UserError(f"{entry.path} is {entry.state} and may need them")


def _leftovers(storage: StoragePath) -> Iterator[Removal]:
    """The hidden folders that killed processes have left beside runs and feature stores on a disk."""
    if storage.is_remote:
        return
    for part in ("runs", "features"):
        for content in _listed(storage, part):
            if TEMPORARY.fullmatch(content.name) and content.days > LEAST_DAYS:
                yield Removal("leftover", content, "of a killed process")


def _features(storage: StoragePath, found: Mapping[str, Sequence[Content]]) -> list[Removal]:
    """The feature stores whose backbone no run has. Raises one of FAILURES if the backbones of a run cannot be read."""
    stores = [store for store in found["features"] if store.needs and store.days > LEAST_DAYS]
    if not stores:
        return []
    used = set[str]()
    for run in found["runs"]:
        if run.state == "foreign":
            continue
        if run.state == "unprepared":
            raise UserError(f"{run.path} is unprepared, and what it needs cannot be read")
        best = {match[1] for match in map(BEST.fullmatch, run.files) if match}
        for part in ("init", *best):
            path = storage / run.path / part / DIGESTS
            digests = digests_in(path.read_bytes(MAX_RECORD_BYTES), str(path))
            used.add(str(digests.get("backbone.safetensors", "")))  # "" for a run that reads regions
    unused = [store for store in stores if not store.needs & used]
    return [Removal("features", store, "no run reads it") for store in unused]


def _old_runs(runs: Sequence[Content], needed: Collection[str], least_days: float) -> list[Removal]:
    """Runs that were not trained to the end, have not changed for `least_days`, and are not in `needed`.

    A run that lacks only its evaluation is kept, because a search may take its backbone from this run.
    """
    unfinished = [run for run in runs if run.state in ("interrupted", "unprepared") and run.facts["at"] != TRAINED]
    old = [run for run in unfinished if run.days >= least_days and run.name not in needed]
    return [Removal("run", run, f"{run.state} for {run.days:.0f} days") for run in old]


def remove(storage: StoragePath, removal: Removal) -> bool:
    """Removes a folder. Returns False if a process works on it, or another process has removed it."""
    place, is_run = storage / removal.content.path, removal.kind == "run"
    if is_run:  # checked again, because the run may have been resumed since the plan was made
        newest = max((entry.modified for name, entry in place.walk() if name != ".lock"), default=0.0)
        if time.time() - newest < 86400 * LEAST_DAYS:
            return False
    if storage.is_remote:
        for pattern in (*MARKERS, ".*"):  # finally all other files
            for name, _ in place.walk():
                if re.fullmatch(pattern, name):
                    (place / name).delete()
        return True
    folder = place.path
    with ExitStack() as stack:
        if is_run:
            has_lock = folder.is_dir() and stack.enter_context(try_lock(folder))
            if not has_lock:
                return False
        if removal.kind != "leftover":
            folder = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
            try:
                place.path.rename(folder)
            except FileNotFoundError:  # another process has removed it
                return False
        shutil.rmtree(folder, ignore_errors=True)
    return True
