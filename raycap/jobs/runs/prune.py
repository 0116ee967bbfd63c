"""What can be removed from a storage without a loss, and its removal.

Bundles, champions, their records and everything that is in progress are never removed. On a local storage, parts of a
run are removed under its lock.

A removal may be killed at any point. On disk the folder gets a hidden name first, which every reader skips, and the
next plan contains it. On S3 the files that mark a folder or a part of it as complete are removed first, so that what
remains counts as never written.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from raycap.jobs.runs.contents import (
    FAILURES,
    MAX_RECORD_BYTES,
    TEMPORARY,
    TRAINED,
    Content,
    finished_stages,
    folders,
    reason,
)
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.folder import try_lock
from raycap.pipeline.storage.digests import DIGESTS, digests_in
from raycap.pipeline.storage.path import StoragePath

UNFINISHED = ("interrupted", "unprepared")
LEAST_DAYS = 1.0  # what was changed later may belong to a process that this one cannot see
CHECKPOINT = re.compile(rf"stages/[^/]+/(step-\d+|{TEMPORARY.pattern})")
BEST = re.compile(r"stages/[^/]+/best-\d+")
# The files that are removed first, in this order: without them a reader takes nothing else of a folder for complete.
MARKERS = (r".*/DONE\.json", r"(.*/)?progress\.json", r"run\.json", r"index\.parquet", r"manifest/.*", "COMPLETE")
Kind = Literal["checkpoint", "leftover", "features", "run"]


@dataclass(frozen=True)
class Removal:
    """A folder that can be removed. name: in the storage. run: the run's folder, under whose lock it is removed."""

    kind: Kind
    name: str
    bytes: int
    why: str
    run: str = ""


def plan_removals(
    storage: StoragePath, found: Mapping[str, Sequence[Content]], older_than_days: float
) -> tuple[list[Removal], list[str]]:
    """What can be removed, and sentences about what is kept because something is damaged or in progress.

    found: of `read_contents`. older_than_days: runs that were not trained to the end go after this time without a
    change.
    """
    removals, kept = [*_checkpoints(found["runs"]), *_leftovers(storage)], list[str]()
    owners = [*found["searches"], *found["retrain"]]
    for what, plan, needed_by in (
        ("features", lambda: _features(storage, found), [*owners, *found["runs"]]),
        ("unfinished runs", lambda: _old_runs(found["runs"], owners, older_than_days), owners),
    ):
        try:
            if busy := next((entry.path for entry in needed_by if entry.state == "in progress"), None):
                raise UserError(f"{busy} is in progress and may need them")
            removals += plan()
        except FAILURES as error:
            kept.append(f"{what} are kept: {reason(error)}")
    return removals, kept


def _checkpoints(runs: Sequence[Content]) -> Iterator[Removal]:
    """The checkpoints of complete runs. Their best weights remain."""
    for run in runs:
        done = finished_stages(run)
        for part, size in sorted(run.parts.items()):
            is_checkpoint = CHECKPOINT.fullmatch(part) and part.split("/")[1] in done
            if run.state == "complete" and not run.facts["trial"] and is_checkpoint:
                yield Removal("checkpoint", f"{run.path}/{part}", size, "the run is complete", run.path)


def _leftovers(storage: StoragePath) -> Iterator[Removal]:
    """The hidden folders of killed processes beside runs and features on a disk."""
    for room in ("runs", "features") if not storage.is_remote else ():
        for name, files in folders(storage / room, hidden=True):
            content = Content.of(room, name, files)
            if TEMPORARY.fullmatch(name) and content.days > LEAST_DAYS:
                yield Removal("leftover", content.path, content.bytes, "of a killed process")


def _features(storage: StoragePath, found: Mapping[str, Sequence[Content]]) -> list[Removal]:
    """The feature stores whose backbone no run has. Raises one of FAILURES if the backbones of a run are not known."""
    stores = [store for store in found["features"] if store.needs and store.days > LEAST_DAYS]
    runs = [run for run in found["runs"] if stores and run.state != "foreign"]
    used = set[str]().union(*(_backbones(storage, run) for run in runs))
    return [
        Removal("features", store.path, store.bytes, "no run reads it") for store in stores if not store.needs & used
    ]


def _backbones(storage: StoragePath, run: Content) -> set[str]:
    """The digests of a run's backbones, with "" for one that reads regions. Raises one of FAILURES."""
    if run.state in ("damaged", "unprepared", "of another version"):
        raise UserError(f"{run.path} is {run.state}, and it is not known what it needs")
    paths = [storage / run.path / part / DIGESTS for part in ("init", *filter(BEST.fullmatch, run.parts))]
    digests = [digests_in(path.read_bytes(MAX_RECORD_BYTES), str(path)) for path in paths]
    return {str(files.get("backbone.safetensors", "")) for files in digests}


def _old_runs(runs: Sequence[Content], owners: Sequence[Content], older_than_days: float) -> list[Removal]:
    """Runs that were not trained to the end and not touched for a long time, and that no search or champion names.

    Raises UserError for a damaged search or champion.
    """
    for owner in owners:
        if owner.detail:
            raise UserError(f"it is not known what {owner.path} needs: {owner.detail}")
    named = set[str]().union(*(owner.needs for owner in owners))
    old = [run for run in runs if run.state in UNFINISHED and _is_old(run, older_than_days) and run.name not in named]
    return [Removal("run", run.path, run.bytes, f"{run.state} for {run.days:.0f} days", run.path) for run in old]


def _is_old(run: Content, older_than_days: float) -> bool:
    """True for a run without a change for these days. One that lacks only its evaluation may be a search's backbone."""
    return run.facts["at"] != TRAINED and run.days >= max(older_than_days, LEAST_DAYS)


def remove(storage: StoragePath, removal: Removal) -> bool:
    """Removes what a plan contains. Returns False if a process works on it now, or another one has removed it."""
    place = storage / removal.name
    room, _, name = removal.name.partition("/")
    if removal.kind == "run" and Content.of(room, name, place.walk()).days < LEAST_DAYS:  # resumed since the plan
        return False
    with ExitStack() as stack:
        if removal.run and not storage.is_remote:
            folder = storage.path / removal.run
            if not folder.is_dir() or not stack.enter_context(try_lock(folder)):
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


def _delete_objects(place: StoragePath) -> None:
    """Removes a folder on S3, its markers first. It lists the folder once per marker, and holds no list of files."""
    for pattern in (*MARKERS, ".*"):
        for name, _ in place.walk():
            if re.fullmatch(pattern, name):
                (place / name).delete()
