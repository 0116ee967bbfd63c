"""What a storage contains besides runs, and all of it together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from raycap.jobs.runs.entries import TEMPORARY, RunEntry, runs
from raycap.jobs.runs.folders import (
    Files,
    Scan,
    Size,
    folders,
    is_leased,
    is_locked,
    read_record,
    reason,
)
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.retrain.champion import LEASE, POINTER, ChampionStore
from raycap.pipeline.search.trials import ENDED
from raycap.pipeline.storage.path import StoragePath

# Folders of the storage that are not listed one by one: files that several runs share.
OTHERS = ("backbones", "data", "distilled", "manifests", "mlflow", "precision")
EXCHANGE = ("log/handover", "log/assignments")  # `pipeline.search.trials.SearchFolder`


@dataclass
class SearchEntry:
    """A search. states: the number of trials by state. runs: the ids of their runs. is_active: it is in progress.

    detail: why its trials are not known.
    """

    name: str
    states: dict[str, int]
    bytes: int
    newest: float
    is_active: bool
    runs: set[str] = field(default_factory=set)
    exchange: dict[str, Size] = field(default_factory=dict)  # what its processes exchange, by folder
    detail: str = ""

    @property
    def trials(self) -> str:
        """The ended trials of all."""
        return f"{sum(self.states.get(state, 0) for state in ENDED)}/{sum(self.states.values())}"


@dataclass
class BundleEntry:
    """A model bundle. is_champion: it is a retraining's copy."""

    name: str
    bytes: int
    newest: float
    is_champion: bool


@dataclass
class ChampionEntry:
    """The champion of a configuration. runs: the ids of the runs to which its record refers."""

    name: str
    decisions: int
    bundle: str
    run: str
    is_active: bool
    runs: set[str] = field(default_factory=set)
    detail: str = ""


@dataclass
class FeatureEntry:
    """A feature store. images: those that it has; None before its first extraction has ended.

    backbone: the digest of the backbone's weights. is_region: it comes from a detector's file.
    """

    name: str
    images: int | None
    bytes: int
    newest: float
    backbone: str = ""
    is_region: bool = False
    detail: str = ""


@dataclass
class Inventory:
    """What a storage contains. other: the bytes of further folders by name."""

    storage: str
    runs: list[RunEntry]
    searches: list[SearchEntry]
    bundles: list[BundleEntry]
    champions: list[ChampionEntry]
    features: list[FeatureEntry]
    other: dict[str, int]

    @property
    def bytes(self) -> int:
        listed: tuple[RunEntry | SearchEntry | BundleEntry | FeatureEntry, ...]
        listed = (*self.runs, *self.searches, *self.bundles, *self.features)
        return sum(entry.bytes for entry in listed) + sum(self.other.values())

    @property
    def owners(self) -> tuple[SearchEntry | ChampionEntry, ...]:
        """What names runs that it needs."""
        return (*self.searches, *self.champions)

    def values(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        kinds = {name: getattr(self, name) for name in ("runs", "searches", "bundles", "champions", "features")}
        plain = {name: [_plain(entry) for entry in entries] for name, entries in kinds.items()}
        totals = {name: len(entries) for name, entries in kinds.items()} | {"bytes": self.bytes}
        return {"storage": self.storage, **plain, "other": self.other, "totals": totals}


def _plain(entry: Any) -> dict[str, Any]:
    """An entry without the sizes of its parts."""
    values = {key: value for key, value in asdict(entry).items() if key not in ("parts", "exchange")}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def read_inventory(storage: StoragePath) -> Inventory:
    """Looks at everything in a storage and changes nothing. Damaged and foreign files are named, and raise no error.

    Files are listed once, and only records of some kilobytes are read. The memory holds an entry of about a kilobyte
    per run, trial, bundle and store, and no list of files.
    """
    searches = [_search(storage, name, files) for name, files in folders(storage / "searches")]
    trials = set[str]().union(*(search.runs for search in searches))
    bundles = list(_bundles(storage))
    other = {name: Size.of((storage / name).walk()).bytes for name in OTHERS}
    return Inventory(
        storage=str(storage),
        runs=list(runs(storage, trials)),
        searches=searches,
        bundles=bundles,
        champions=[_champion(storage, name, files) for name, files in folders(storage / "retrain")],
        features=[_features(storage, name, files) for name, files in folders(storage / "features")],
        other={name: size for name, size in other.items() if size},
    )


def _search(storage: StoragePath, name: str, files: Files) -> SearchEntry:
    scan, place = Scan.of(files), storage / "searches" / name
    is_active = is_leased(storage / f"searches/{name}.lease.json") if place.is_remote else is_locked(place)
    parts = {part: part.rpartition("/")[2] for part in scan.parts}
    left = [part for part, last in parts.items() if part in EXCHANGE or TEMPORARY.fullmatch(last)]
    exchange = {part: scan.parts[part] for part in left}
    entry = SearchEntry(name, {}, scan.size.bytes, scan.size.newest, is_active, exchange=exchange)
    for record in sorted(name for name in scan.records if re.fullmatch(r"trials/\d+\.json", name)):
        try:
            values = read_record(place / record)
            state, run = values.get("state"), values.get("run")
            if not isinstance(state, str) or not isinstance(run, str):
                raise UserError(f"{place / record} is no trial")
        except (UserError, OSError) as error:
            entry.detail = reason(error)
            state, run = "damaged", ""
        entry.states[state] = entry.states.get(state, 0) + 1
        if run:
            entry.runs.add(PurePosixPath(run).name)
    return entry


def _bundles(storage: StoragePath) -> Iterator[BundleEntry]:
    for name, files in folders(storage / "models", depth=2):
        size = Size.of(files)
        is_champion = re.fullmatch(r"champion-t\d+", name.rpartition("/")[2]) is not None
        yield BundleEntry(f"models/{name}", size.bytes, size.newest, is_champion)


def _champion(storage: StoragePath, name: str, files: Files) -> ChampionEntry:
    scan = Scan.of(files)
    is_active = LEASE in scan.records and is_leased(storage / f"retrain/{name}/{LEASE}")
    entry = ChampionEntry(name, 0, "", "", is_active)
    if POINTER not in scan.records:
        return entry
    try:
        state = ChampionStore(storage, name).read()
    except (UserError, OSError) as error:
        entry.detail = reason(error)
        return entry
    entry.decisions = state.number
    entry.runs = {record.run_id for record in state.bundles} | ({state.challenger} if state.challenger else set())
    if state.champion is not None:
        entry.bundle, entry.run = state.champion.bundle, state.champion.run_id
    return entry


def _features(storage: StoragePath, name: str, files: Files) -> FeatureEntry:
    size, is_complete = Size(), False
    for file, each in files:
        size.add(each)
        is_complete |= file == "COMPLETE"
    entry = FeatureEntry(name, None, size.bytes, size.newest)
    if is_complete:
        try:
            values = read_record(storage / f"features/{name}/COMPLETE")
            entry.images = int(values["rows"])
            entry.backbone, entry.is_region = str(values.get("weights", "")), values.get("source") == "hdf5"
        except (UserError, JobFailedError, OSError, KeyError, TypeError, ValueError) as error:
            entry.detail = reason(error)
    return entry
