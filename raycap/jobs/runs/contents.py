"""What a storage contains: runs, searches, champions, bundles and feature stores. Looking at them changes nothing."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePosixPath

from raycap.models.config import Values
from raycap.pipeline.errors import JobFailedError, OtherVersionError, UserError
from raycap.pipeline.retrain.champion import LEASE, POINTER, ChampionStore
from raycap.pipeline.runs.folder import RunMetadata
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.search.trials import ENDED
from raycap.pipeline.storage.lease import LeaseRecord
from raycap.pipeline.storage.path import Entry, StoragePath
from raycap.pipeline.storage.untrusted.documents import parse_json, parse_yaml, require_mapping

MAX_RECORD_BYTES = 2**26  # of a JSON or YAML file; run.json lists unreadable images
NUM_READS = 8  # folders that are read at a time; requests to S3 mostly wait
# A run on S3 has no lock. Its workers send the journal every few seconds, but an extraction writes elsewhere for hours.
ACTIVE_S = 3600.0
TRAINED = "evaluation"  # where a run is whose stages are finished
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # the names of `pipeline.storage.atomic`
# What raycap writes into a run's folder. A folder with anything else may be another program's.
KNOWN = {
    "config.yaml", "decisions.json", "run.json", "data.arrow", "vocabulary.json", "init", "stages", "log",
    "predictions", "scores.json", "report.html", "COMPLETE.json", "tokens", ".lock",
}  # fmt: skip
FAILURES = (UserError, JobFailedError, OSError, LookupError, TypeError, AttributeError, ValueError)  # of damaged files
Files = Iterator[tuple[str, Entry]]


@dataclass
class Content:
    """A folder of the storage: a run, a search, the champion of a configuration, a bundle or a feature store.

    room: "runs", "searches", "retrain", "models" or "features". newest: the time of the last change in Unix seconds.
    parts: the bytes by name of the folders below stages/NAME/. records: the names of the other files of a run or search
    that tell its state. state: "in progress" if a process works on it, "damaged", or of a run. facts: values for the
    table and JSON, the same keys for all of one room. needs: the names of the runs that a search or champion names, and
    the digest of a feature store's backbone. detail: why it is damaged or not known.
    """

    room: str
    name: str
    bytes: int = 0
    newest: float = 0.0
    parts: dict[str, int] = field(default_factory=dict)
    records: set[str] = field(default_factory=set)
    tops: set[str] = field(default_factory=set)  # the first parts of the names of all files
    state: str = ""
    facts: Values = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    detail: str = ""

    @property
    def path(self) -> str:
        """Its folder in the storage."""
        return f"{self.room}/{self.name}"

    @property
    def days(self) -> float:
        """The days since the last change."""
        return (time.time() - self.newest) / 86400

    def values(self) -> Values:
        """Plain values for a JSON file."""
        kept = ("name", "bytes", "newest", "state", "detail")
        return {key: getattr(self, key) for key in kept} | self.facts

    @classmethod
    def of(cls, room: str, name: str, files: Files) -> Content:
        """A folder with these files, of which nothing was read."""
        content = cls(room, name)
        for file, entry in files:
            names = file.split("/")
            content.tops.add(names[0])
            if file == ".lock":  # who only looks at a folder touches it, too
                continue
            content.bytes += entry.size
            content.newest = max(content.newest, entry.modified)
            if names[0] == "stages" and len(names) > 3:
                part = "/".join(names[:3])
                content.parts[part] = content.parts.get(part, 0) + entry.size
            if file.endswith(".json") or file == "config.yaml":
                content.records.add(file)
        return content


def folders(place: StoragePath, depth: int = 1, *, hidden: bool = False) -> Iterator[tuple[str, Files]]:
    """(name, files) of each visible or hidden folder `depth` levels below a place.

    The files, with names relative to the folder, must be read before the next folder: all are one stream.
    """
    parts = ((name.split("/"), entry) for name, entry in place.walk())
    deep = ((names, entry) for names, entry in parts if len(names) > depth)
    for key, group in groupby(deep, key=lambda item: item[0][:depth]):
        if all(key) and any(name.startswith(".") for name in key) is hidden:
            yield "/".join(key), (("/".join(names[depth:]), entry) for names, entry in group)


def read_contents(storage: StoragePath) -> dict[str, list[Content]]:
    """Everything in a storage by room, sorted by name. Damaged and foreign files are named, and raise no error.

    Files are listed once, and only records of some kilobytes are read. The memory holds an entry of about a kilobyte
    per run, trial, bundle and store, and no list of files.
    """

    def read(room: str, reader: Callable[[StoragePath, Content], None] | None, depth: int = 1) -> list[Content]:
        entries = (Content.of(room, name, files) for name, files in folders(storage / room, depth))
        with ThreadPoolExecutor(NUM_READS) as pool:
            found = pool.map(lambda entry: _with_state(storage, entry, reader), entries)
            return sorted(found, key=lambda entry: entry.name)

    rooms = {"runs": read_run, "searches": _read_search, "retrain": _read_champion, "features": _read_features}
    found = {room: read(room, reader) for room, reader in rooms.items()}
    trials = set[str]().union(*(search.needs for search in found["searches"]))
    for run in found["runs"]:
        run.facts["trial"] = "trial" if run.name in trials else ""
    return found | {"models": read("models", None, 2)}


def _with_state(storage: StoragePath, entry: Content, reader: Callable[[StoragePath, Content], None] | None) -> Content:
    """The entry as its reader completes it, or "damaged"."""
    try:
        if reader is not None:
            reader(storage, entry)
    except OtherVersionError as error:
        entry.state, entry.detail = "of another version", reason(error)
    except FAILURES as error:
        entry.state, entry.detail = entry.state or "damaged", reason(error)
    return entry


def read_run(storage: StoragePath, entry: Content) -> None:
    """Sets the state and the facts of a run. Raises one of FAILURES for a damaged file.

    at: the stage, or `evaluation`, at which an incomplete run is. val, test: CIDEr-D; of an incomplete run, val is the
    best of its last finished stage.
    """
    place, facts = storage / entry.path, {"created": "", "at": "", "val": None, "test": None}
    entry.facts = facts
    if "run.json" not in entry.records:  # another program's folder, or its creation or removal was killed or goes on
        is_ours = entry.tops and all(name in KNOWN or TEMPORARY.fullmatch(name) for name in entry.tops)
        entry.state = "foreign" if not is_ours else "in progress" if _is_active(place, entry) else "unprepared"
        return
    values = _read_record(place / "run.json")
    facts["created"] = RunMetadata.parse(values, str(place / "run.json")).created[:16]
    if values.get("run_id") != entry.name:
        entry.state, entry.detail = "foreign", f"run.json is that of {values.get('run_id')}"
        return
    path = place / "config.yaml"
    config = require_mapping(parse_yaml(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path))
    stages = [str(stage["name"]) for stage in config["stages"]]
    done = finished_stages(entry)
    if "COMPLETE.json" in entry.records:
        scores, splits = _read_record(place / "COMPLETE.json")["scores"], config["data"]
        facts["val"] = scores.get(f"{splits['val_split']}_CIDEr-D")
        facts["test"] = scores.get(f"{splits['test_splits'][0]}_CIDEr-D") if splits["test_splits"] else None
        entry.state = "complete"
        return
    facts["at"] = next((name for name in stages if name not in done), TRAINED)
    if last := [name for name in stages if name in done]:
        facts["val"] = _read_record(place / f"stages/{last[-1]}/DONE.json").get("best_score")
    entry.state = "in progress" if _is_active(place, entry) else "interrupted"


def finished_stages(run: Content) -> set[str]:
    """The names of the finished stages of a run."""
    return {match[1] for name in run.records if (match := re.fullmatch(r"stages/([^/]+)/DONE\.json", name))}


def _is_active(place: StoragePath, entry: Content) -> bool:
    """Whether a process works on a run. The run of a search's backbone has a lease on S3 (`jobs.tune.features`)."""
    if not place.is_remote:
        return _is_locked(place)
    return time.time() - entry.newest < ACTIVE_S or _is_leased(StoragePath(f"{place}.lease.json", place.options))


def _read_search(storage: StoragePath, entry: Content) -> None:
    """Sets the state of a search and the number of its trials, ended ones of all."""
    place, ended, records = storage / entry.path, 0, [each for each in entry.records if each.startswith("trials/")]
    entry.facts = {"trials": f"0/{len(records)}"}
    if _is_leased(storage / f"{entry.path}.lease.json") if place.is_remote else _is_locked(place):
        entry.state = "in progress"
    for record in sorted(records):
        try:
            values = _read_record(place / record)
            ended += values["state"] in ENDED
            entry.needs |= {PurePosixPath(values["run"]).name} if values["run"] else set()
        except FAILURES as error:
            entry.detail = reason(error)
    entry.facts["trials"] = f"{ended}/{len(records)}"


def _read_champion(storage: StoragePath, entry: Content) -> None:
    """Sets the state of a configuration's champion. Its record needs the runs of all champions that may return."""
    entry.facts = {"decisions": 0, "bundle": "", "run": ""}
    if LEASE in entry.records and _is_leased(storage / entry.path / LEASE):
        entry.state = "in progress"
    if POINTER in entry.records:
        state = ChampionStore(storage, entry.name).read()
        entry.facts["decisions"] = state.number
        entry.needs = {record.run_id for record in state.bundles} | ({state.challenger} if state.challenger else set())
        if state.champion is not None:
            entry.facts |= {"bundle": state.champion.bundle, "run": state.champion.run_id}


def _read_features(storage: StoragePath, entry: Content) -> None:
    """Sets the number of images of a feature store, None before its first extraction has ended.

    Its backbone is "" for regions of a detector's file.
    """
    entry.facts = {"images": None}
    if "COMPLETE" in entry.tops:
        values = _read_record(storage / entry.path / "COMPLETE")
        entry.facts["images"], entry.needs = int(values["rows"]), {str(values.get("weights", ""))}


def _read_record(path: StoragePath) -> Values:
    """The mapping in a JSON file. Raises UserError for a damaged or foreign one, and OSError for a missing one."""
    return dict(require_mapping(parse_json(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path)))


def _is_locked(folder: StoragePath) -> bool:
    """Whether a process of this machine works on a local folder. It holds the lock for a moment, as others do."""
    try:
        with (folder.path / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # another process has the lock, or the file is another user's
        return True
    return False


def _is_leased(path: StoragePath) -> bool:
    """Whether the file of a lease names a holder whose time has not expired. A file that is no lease counts as one."""
    try:
        return LeaseRecord.model_validate_json(path.read_bytes(2**16)).until > time.time()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def reason(error: Exception) -> str:
    """An error in one line."""
    return str(error) if isinstance(error, UserError) else one_line(error)
