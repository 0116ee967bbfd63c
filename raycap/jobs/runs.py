"""`raycap runs`: lists what a storage contains, and removes the feature stores that nothing in it needs any more.

A removal may be killed at any point. It deletes the list of a store's shards first, so that no reader misses a shard,
and the file COMPLETE last, so that the next call finds what remains.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from typing import Annotated

import typer

from raycap.models.config import Values
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_place
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.retrain.champion import LEASE, POINTER, ChampionStore
from raycap.pipeline.runs.folder import RunMetadata
from raycap.pipeline.runs.preflight import storage_errors
from raycap.pipeline.runtime.names import expanded_path, one_line, print_line, printable, shown
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.search.records import ENDED, TRIALS, read_records
from raycap.pipeline.storage.digests import DIGESTS, digests_in
from raycap.pipeline.storage.lease import LeaseRecord
from raycap.pipeline.storage.path import Entry, StoragePath, storage_path
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import open_regular_file, parse_json, parse_yaml, require_mapping

LEAST_AGE_S = 86400.0  # Newer stores are kept, because a process on another machine may be using them.
MAX_RECORD_BYTES = 2**26  # limit of a JSON or YAML file. run.json can be large, because it lists unreadable images.
NUM_READS = 8  # folders that are read at a time
# A run on S3 has no lock, so it counts as in progress if it has changed within this time. Training changes the run
# every few seconds, but an extraction of features writes only to another folder, so the time is long.
ACTIVE_S = 3600.0
TITLES = {"runs": "run", "searches": "search", "retrain": "champion of", "features": "features", "models": "bundle"}
BEST = re.compile(r"(stages/[^/]+/best-\d+)/.*")
# Errors that are raised when a damaged file is read.
FAILURES = (UserError, JobFailedError, OSError, LookupError, TypeError, AttributeError, ValueError)


def runs(
    target: Annotated[
        str,
        typer.Argument(help="A storage's folder, s3://BUCKET/FOLDER, or a configuration.", metavar="STORAGE|CONFIG"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Show what can be removed, and how many bytes it has.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove it.")] = False,
) -> None:
    """List what a storage contains, and remove what is not needed.

    The tables have the runs with their state and CIDEr-D, searches, champions, bundles and feature stores. --prune
    shows the feature stores that no run uses. Nothing is removed without --yes.

    Example: raycap runs results
    """
    storage = _storage(target)
    if yes and not prune:
        raise UserError("--yes removes what --prune shows; give both")
    with storage_errors("AWS_ENDPOINT_URL", "give a storage that exists"):
        storage.require_answer()
    found = read_contents(storage)
    size = sum(entry.bytes for entries in found.values() for entry in entries)
    if as_json:
        values = {part: [entry.values() for entry in entries] for part, entries in found.items()}
        print(json.dumps({"storage": str(storage), "bytes": size, **values}, indent=1))
    else:
        for part, entries in found.items():
            _print_table(TITLES[part], entries)
        counts = ", ".join(f"{part} {len(entries)}" for part, entries in found.items())
        print_line(f"{storage}: {_size(size)}; {counts}")
    if prune:
        _prune(storage, found, yes)


def _storage(target: str) -> StoragePath:
    """The storage that an argument names. Raises UserError if there is none."""
    if is_remote(target):
        return storage_path(target)
    path = named_place(expanded_path(target))
    if path is None:
        raise UserError(f"{shown(target)} does not exist; give a storage's folder, s3://..., or a configuration")
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
        print_line(f"{text}  {without_secrets(detail)}".rstrip())
    print()


def _prune(storage: StoragePath, found: Mapping[str, Sequence[Content]], yes: bool) -> None:
    """Prints which feature stores can be removed and, with --yes, removes them one by one."""
    removals, kept = plan_removals(storage, found)
    if kept:
        print_line(without_secrets(kept))
    total = _size(sum(store.bytes for store in removals))
    for store in removals:
        if yes:
            remove(storage / store.path)
        print_line(f"{'removed' if yes else 'would go'}  {_size(store.bytes):>9}  {store.path}  (no run reads it)")
    if yes:
        print(f"removed {total}")
    elif removals:
        print(f"{len(removals)} stores with {total}; nothing was removed, --yes removes them")
    else:
        print("nothing to remove")


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
    backbone: for a feature store, the digest of its backbone, or "" for regions from a detector's file. None if the
    first extraction has not ended.
    detail: why the state is "damaged".
    """

    part: str
    name: str
    files: dict[str, Entry] = field(default_factory=dict)
    state: str = ""
    facts: Values = field(default_factory=dict)
    backbone: str | None = None
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

    def values(self) -> Values:
        """The values of `--json`."""
        kept = ("name", "bytes", "newest", "state", "detail")
        return {key: getattr(self, key) for key in kept} | self.facts


def _listed(storage: StoragePath, part: str, depth: int = 1) -> list[Content]:
    """The folders `depth` levels below a part of the storage, without hidden ones. No file is read."""
    found: dict[str, Content] = {}
    for file, entry in (storage / part).walk():
        names = file.split("/")
        is_lock = names[depth:] == [".lock"]  # left out, because its time shows no change of the content
        is_hidden = any(not name or name.startswith(".") for name in names[:depth])
        if len(names) > depth and not is_hidden and not is_lock:
            name = "/".join(names[:depth])
            found.setdefault(name, Content(part, name)).files["/".join(names[depth:])] = entry
    return [found[name] for name in sorted(found)]


def read_contents(storage: StoragePath) -> dict[str, list[Content]]:
    """Everything in a storage by part, sorted by name. Files are listed once, and only small records are read.

    A damaged file raises no error. The state of its folder is then "damaged".
    """

    def read(part: str, reader: Callable[[StoragePath, Content], None], depth: int = 1) -> list[Content]:
        """The folders of a part. `reader` sets the state of each."""

        def with_state(entry: Content) -> Content:
            try:
                reader(storage, entry)
            except FAILURES as error:
                entry.state, entry.detail = "damaged", one_line(error)
            return entry

        with ThreadPoolExecutor(NUM_READS) as pool:
            return list(pool.map(with_state, _listed(storage, part, depth)))

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
    if "run.json" not in entry.files:  # its creation is incomplete, or it is no run of raycap
        entry.state = "in progress" if is_active else "unprepared"
        return
    values = _read_record(place / "run.json")
    facts["created"] = RunMetadata.parse(values, str(place / "run.json")).created[:16]
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
    facts["at"] = "evaluation" if len(finished) == len(stages) else stages[len(finished)]
    if finished:
        facts["val"] = _read_record(place / f"stages/{finished[-1]}/DONE.json").get("best_score")
    entry.state = "in progress" if is_active else "interrupted"


def _read_search(storage: StoragePath, entry: Content) -> None:
    """Sets the state of a search, and the number of its trials that have ended, as in 3/12."""
    place = storage / entry.path
    has_trials = TRIALS in entry.files
    entry.state = "in progress" if _in_progress(place) else "" if has_trials else "interrupted"
    entry.facts = {"trials": "?"}
    if not has_trials:  # the first experiment has not ended
        return
    trials = read_records((place / TRIALS).read_bytes(MAX_RECORD_BYTES), str(place / TRIALS))
    entry.facts["trials"] = f"{sum(trial.state in ENDED for trial in trials)}/{len(trials)}"


def _read_champion(storage: StoragePath, entry: Content) -> None:
    """Sets the state of a champion, its bundle and run, and the number of decisions."""
    entry.facts = {"decisions": 0, "bundle": "", "run": ""}
    if LEASE in entry.files and _is_leased(storage / entry.path / LEASE):
        entry.state = "in progress"
    if POINTER in entry.files:
        state = ChampionStore(storage, entry.name).read()
        entry.facts["decisions"] = state.number
        if state.champion is not None:
            entry.facts |= {"bundle": state.champion.bundle, "run": state.champion.run_id}


def _read_features(storage: StoragePath, entry: Content) -> None:
    """Sets the number of images of a feature store and its backbone, if the first extraction has ended."""
    entry.facts = {"images": None}
    if "COMPLETE" in entry.files:
        values = _read_record(storage / entry.path / "COMPLETE")
        entry.facts["images"], entry.backbone = int(values["rows"]), str(values.get("weights", ""))


def _read_record(path: StoragePath) -> Values:
    """The mapping in a JSON file. Raises UserError if the file is damaged or foreign, and OSError if it is missing."""
    return dict(require_mapping(parse_json(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path)))


def _in_progress(place: StoragePath) -> bool:
    """True if a process works on a folder: on a disk it has the folder's lock, and on S3 the folder's lease."""
    if place.is_remote:
        return _is_leased(StoragePath(f"{place}.lease.json", place.options))
    try:
        with open_regular_file(place.path / ".lock", os.O_NOFOLLOW) as file:
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


def plan_removals(storage: StoragePath, found: Mapping[str, Sequence[Content]]) -> tuple[list[Content], str]:
    """The feature stores that can be removed, and why the others are kept, or "" if all were examined.

    found: from `read_contents`. A store can be removed if no run has its backbone.
    """
    try:
        for entry in (*found["searches"], *found["retrain"], *found["runs"]):
            if entry.state in ("in progress", "damaged"):
                raise UserError(f"{entry.path} is {entry.state} and may need them")
        latest = time.time() - LEAST_AGE_S
        stores = [store for store in found["features"] if store.backbone is not None and store.newest < latest]
        used = _used_backbones(storage, found["runs"]) if stores else set()
    except FAILURES as error:
        return [], f"features are kept: {one_line(error)}"
    return [store for store in stores if store.backbone not in used], ""


def _used_backbones(storage: StoragePath, runs: Sequence[Content]) -> set[str]:
    """The digests of the runs' backbones, "" for a run that reads regions. Raises one of FAILURES if one is unknown."""
    used = set[str]()
    for run in runs:
        if run.state == "unprepared":  # it would extract its features again
            continue
        best = {match[1] for match in map(BEST.fullmatch, run.files) if match}
        for part in ("init", *best):
            path = storage / run.path / part / DIGESTS
            digests = digests_in(path.read_bytes(MAX_RECORD_BYTES), str(path))
            used.add(str(digests.get("backbone.safetensors", "")))
    return used


def remove(folder: StoragePath) -> None:
    """Removes a feature store, in the order that the top of this file describes."""
    for name in sorted(folder.list(), key=lambda name: (name == "COMPLETE", not name.startswith("manifest/"))):
        (folder / name).delete()
    folder.delete_folder()
