"""What can be removed from a storage without a loss, and its removal.

A plan has only what no run, search, champion or bundle that remains needs. Bundles, champions, their records and
everything that is in progress are never part of a plan. Before a part is removed, its reason is verified once more, for
runs and searches of a local storage under their lock.

A removal may be killed at any point. On disk the folder gets a hidden name first, which every reader skips, and the
next plan contains it. On S3 the files that mark a folder or a part of it as complete are removed first, so that what
remains counts as never written.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from raycap.jobs.runs.contents import FeatureEntry, Inventory, SearchEntry
from raycap.jobs.runs.entries import STEP, TEMPORARY, TRAINED, RunEntry, backbones, read_run
from raycap.jobs.runs.folders import Scan, Size, folder_names, is_leased
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runs.folder import try_lock
from raycap.pipeline.storage.path import StoragePath

LEAST_DAYS = 1.0  # what was changed later may belong to a process that this one cannot see
Kind = Literal["checkpoint", "leftover", "features", "run"]
# The files that are removed first, in this order: without them a reader takes nothing else of a folder for complete.
MARKERS = (r".*/DONE\.json", r"(.*/)?progress\.json", r"run\.json", r"index/.*", r"manifest/.*", "COMPLETE")


@dataclass(frozen=True)
class Removal:
    """A folder that can be removed. name: in the storage. owner: the run or search under whose lock it is removed."""

    kind: Kind
    name: str
    bytes: int
    why: str
    owner: str = ""


@dataclass(frozen=True)
class Plan:
    """What would be removed, and sentences about what is kept because something is damaged or in progress."""

    removals: list[Removal]
    kept: list[str]

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removals)


def plan_removals(storage: StoragePath, found: Inventory, older_than_days: float) -> Plan:
    """The plan for a storage with these contents. older_than_days: unfinished runs without a change since then go."""
    removals, kept = list[Removal](), list[str]()
    for run in found.runs:
        if run.state == "complete" and not run.trial:
            removals += _of_complete_run(run)
    removals += _leftovers(storage, found.searches)
    removals += _features(storage, found, kept)
    removals += _old_runs(found, older_than_days, kept)
    return Plan(removals, kept)


def _of_complete_run(run: RunEntry) -> Iterator[Removal]:
    """The checkpoints of a complete run, and what its killed processes have left. Its best weights remain."""
    for part, size in sorted(run.parts.items()):
        is_left = TEMPORARY.fullmatch(part.rpartition("/")[2]) is not None or part == "log/.ray"
        if part.startswith("stages/") and part.split("/")[1] not in run.stages:
            continue
        if STEP.fullmatch(part):
            yield Removal("checkpoint", f"runs/{run.id}/{part}", size.bytes, "the run is complete", f"runs/{run.id}")
        elif is_left:
            yield Removal("leftover", f"runs/{run.id}/{part}", size.bytes, "of a killed process", f"runs/{run.id}")


def _leftovers(storage: StoragePath, searches: Sequence[SearchEntry]) -> Iterator[Removal]:
    """What killed processes have left beside runs, searches and features."""
    for search in searches:
        if not search.is_active:
            for part, size in search.exchange.items():
                name = f"searches/{search.name}"
                yield Removal("leftover", f"{name}/{part}", size.bytes, "of a killed search", name)
    if not storage.is_remote:
        for room in ("runs", "features", "searches"):
            for name in folder_names(storage.path / room, hidden=True):
                size = Size.of((storage / room / name).walk())
                if TEMPORARY.fullmatch(name) and size.age_days() > LEAST_DAYS:
                    yield Removal("leftover", f"{room}/{name}", size.bytes, "of a killed process")


def _features(storage: StoragePath, found: Inventory, kept: list[str]) -> Iterator[Removal]:
    """The feature stores whose backbone no run has, and those of regions if no run reads regions."""
    used, reads_regions = set[str](), False
    active = [entry.name for entry in found.owners if entry.is_active]
    active += [run.id for run in found.runs if run.state == "in progress"]
    if found.features and active:
        kept.append(f"features are kept, because {active[0]} is in progress and may need them")
        return
    for run in found.runs:
        if not found.features or run.state == "foreign":
            continue
        try:
            if run.state in ("damaged", "unprepared", "of another version"):
                raise UserError(f"runs/{run.id} is {run.state}")
            digests = backbones(storage, run)
        except (UserError, JobFailedError, OSError) as error:
            kept.append(f"features are kept, because it is not known what runs/{run.id} needs: {error}")
            return
        used |= digests
        reads_regions |= not digests
    for store in found.features:
        why = _unused(store, used, reads_regions)
        if why:
            yield Removal("features", f"features/{store.name}", store.bytes, why)


def _unused(store: FeatureEntry, used: set[str], reads_regions: bool) -> str:
    """Why no run reads a store; "" if one may."""
    if (time.time() - store.newest) / 86400 < LEAST_DAYS or store.detail or store.images is None:
        return ""
    if store.is_region:
        return "" if reads_regions else "no run reads regions"
    return "no run has its backbone" if store.backbone and store.backbone not in used else ""


def _old_runs(found: Inventory, older_than_days: float, kept: list[str]) -> Iterator[Removal]:
    """Runs that were not trained to the end and not touched for a long time.

    Runs that a search or champion names are kept. A run that lacks only its evaluation may be the backbone of a search.
    """
    unknown = next((f"{entry.name}: {entry.detail}" for entry in found.owners if entry.detail), "")
    named = set[str]().union(*(entry.runs for entry in found.owners))
    active = {champion.name for champion in found.champions if champion.is_active}
    searching = any(search.is_active for search in found.searches)
    for run in found.runs:
        days = (time.time() - run.newest) / 86400
        if run.state not in ("interrupted", "unprepared") or days < max(older_than_days, LEAST_DAYS):
            continue
        if run.id in named or run.at == TRAINED:
            continue
        name = f"runs/{run.id}"
        if unknown:
            kept.append(f"{name} is kept, because what needs it is not known: {unknown}")
        elif searching or run.id.rpartition("-")[0] in active:
            kept.append(f"{name} is kept, because a search or retraining is in progress and may need it")
        else:
            yield Removal("run", name, run.bytes, f"{run.state_text}, {days:.0f} days ago", name)


def remove(storage: StoragePath, removal: Removal, older_than_days: float) -> bool:
    """Removes what a plan contains. Returns False if it must remain, because it has changed since the plan."""
    place = storage / removal.name
    with ExitStack() as stack:
        if removal.owner and not storage.is_remote:
            owner = storage.path / removal.owner
            if not owner.is_dir() or not stack.enter_context(try_lock(owner)):
                return False
        if not _still_holds(storage, removal, older_than_days):
            return False
        if storage.is_remote:
            _delete_objects(place)
            return True
        hidden = place.path
        if not TEMPORARY.fullmatch(hidden.name):
            hidden = hidden.with_name(f".{hidden.name}.{uuid.uuid4().hex[:12]}.tmp")
            try:
                place.path.rename(hidden)
            except FileNotFoundError:  # another process has removed it
                return False
        shutil.rmtree(hidden, ignore_errors=True)
    return True


def _still_holds(storage: StoragePath, removal: Removal, older_than_days: float) -> bool:
    """Whether the reason of a removal is true now."""
    if removal.kind == "run":
        entry = read_run(storage / removal.name, Scan.of((storage / removal.name).walk()))
        days = (time.time() - entry.newest) / 86400
        # under the lock of this process, a run on disk seems to be in progress
        states = ("interrupted", "unprepared") if storage.is_remote else ("interrupted", "unprepared", "in progress")
        return entry.state in states and entry.at != TRAINED and days >= max(older_than_days, LEAST_DAYS)
    if removal.kind == "features" or not removal.owner:
        return Size.of((storage / removal.name).walk()).age_days() > LEAST_DAYS
    if removal.owner.startswith("searches/"):
        return not (storage.is_remote and is_leased(storage / f"{removal.owner}.lease.json"))
    return (storage / removal.owner / "COMPLETE.json").exists()


def _delete_objects(place: StoragePath) -> None:
    """Removes a folder on S3, its markers first. It lists the folder once per marker, and holds no list of files."""
    for pattern in (*MARKERS, ".*"):
        for name, _ in place.walk():
            if re.fullmatch(pattern, name):
                (place / name).delete()
