"""Stores the champion of a configuration: champion.json, the files that it references, and the lease.

    retrain/NAME/champion.json          the champion, its predecessors, the last decision, the last listing of the data
                 lease.json             the lease, whose holder alone may write (`pipeline.storage.lease`)
                 decisions/NUMBER-tTOKEN.json          the record of a decision
                 snapshots/tTOKEN.parquet              listing of the data folder (`list_data`)
                 held-out/tTOKEN.parquet               the fixed held-out split (`find_held_out`)
    models/NAME/champion-tTOKEN/        an immutable copy of a champion's bundle

Conditional writes replace champion.json, after all files that it references have been written. Every file name except
the first two contains the token of the lease under which the file was written. Tokens grow, so a file with a larger
token than the last decision belongs to no decision: its writer was killed or has lost the lease. The next lease holder
deletes such a file. If champion.json is missing, nothing is deleted, because the files may belong to lost decisions.

A listing is an Arrow table with the URI, size and tag (on S3 the ETag) of each file, about 150 bytes per file. No file
is read for it, so a large folder is listed quickly.

Models are compared on the held-out split. The first retraining fixes its images and references. Images are identified
by their content, so their files may be moved or renamed.
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field, ValidationError

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import Section
from raycap.pipeline.data.content_keys import ENTRIES
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.comparison.bootstrap import Difference
from raycap.pipeline.runtime.names import relative_name, shown
from raycap.pipeline.storage.lease import Lease, LostLeaseError
from raycap.pipeline.storage.path import StoragePath, join
from raycap.pipeline.storage.s3 import ConflictError, is_remote
from raycap.pipeline.storage.tables import from_bytes, to_bytes

logger = logging.getLogger(__name__)

POINTER, LEASE = "champion.json", "lease.json"
Verdict = Literal["first", "promoted", "kept", "rolled back"]
# A listing has two kinds of rows: a file with its URI, size and tag, or only the content key of an image (`with_keys`).
# The other cells are null.
LISTING = ENTRIES.append(pa.field("key", pa.string()))
TOKEN = re.compile(r"(?:champion-|snapshots/|held-out/|decisions/\d+-)t(\d+)[./]")  # matches a relative name


# A path inside its folder. Strangers may have written champion.json, so any other text raises UserError.
Name = Annotated[str, AfterValidator(lambda name: relative_name(name, POINTER))]


class BundleRecord(Section):
    """A model bundle: its folder in the storage, the SHA-256 of each file, and the run that produced the bundle."""

    bundle: Name
    files: dict[Name, str]
    run_id: str


class Change(Section):
    """The numbers of added, changed and missing files between two listings."""

    added: int
    changed: int
    gone: int

    def __str__(self) -> str:
        return f"{self.added} new, {self.changed} changed, {self.gone} gone"


class DataRecord(Section):
    """The data that a challenger was trained on."""

    root: str
    files: Change
    new_images: int
    images: int
    fingerprint: str | None


class Decision(Section):
    """The content of a JSON file in decisions/. A rollback leaves the fields from `data` on at their defaults."""

    name: str
    number: int
    token: int
    time: str
    decision: Verdict
    reason: str
    champion: BundleRecord
    champion_before: BundleRecord | None
    snapshot: Name
    previous: Name | None  # the file of the previous decision
    run: str  # the run of the challenger, or of the champion that a rollback replaced
    data: DataRecord | None = None
    held_out: Name | None = None  # the file of the held-out split
    num_compared: int | None = None  # images of the held-out split that still exist
    scores: dict[str, float] = Field(default_factory=dict)  # CIDEr-D of "challenger" and, if there was one, "champion"
    difference: Difference | None = None  # challenger minus champion


class ChampionState(Section):
    """The content of champion.json. before: the former champions, which rollbacks can restore, newest last."""

    token: int = 0  # the last writer's token; writers with smaller tokens are refused
    nonce: str = ""  # random, so that two writes never give the file the same tag
    number: int = 0  # the number of the last decision
    decided: int = 0  # the token of the last decision; files with larger tokens belong to no decision
    decision: Name | None = None
    champion: BundleRecord | None = None
    before: tuple[BundleRecord, ...] = ()
    snapshot: Name | None = None
    fingerprint: str | None = None  # the fingerprint of the data of the last training
    held_out: Name | None = None

    @property
    def bundles(self) -> tuple[BundleRecord, ...]:
        """The former champions and the champion, oldest first."""
        return (*self.before, *([self.champion] if self.champion else []))


class ChampionStore:
    """Reads and writes champion.json and the files that it references, for one configuration in one storage."""

    def __init__(self, storage: StoragePath, name: str) -> None:
        self.storage, self.name = storage, name
        self.folder = storage / f"retrain/{name}"
        # The tag of champion.json when it was last read or written. A write replaces only this version.
        self._tag: str | None = None

    def read(self) -> ChampionState:
        """The content of champion.json, or an empty state if the file is missing. Raises UserError if it is invalid."""
        try:
            data, self._tag = (self.folder / POINTER).read_tagged()
        except FileNotFoundError:
            self._tag = None
            return ChampionState()
        try:
            return ChampionState.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{self.folder / POINTER} is not a champion's file ({shown(field)}: {shown(first['msg'])})"
                "; restore it from a copy, or remove it to start over without a champion (no bundle is deleted)"
            ) from error

    def fence(self, lease: Lease) -> ChampionState:
        """Writes the lease's token into champion.json, so that no process with a smaller token can commit.

        If champion.json is missing, all earlier tokens count as decided, so that no existing file is deleted. Raises
        LostLeaseError if champion.json has a larger token.
        """
        while True:
            state = self.read()
            if state.token > lease.token:
                raise LostLeaseError(f"{self.folder / POINTER} has token {state.token}; {lease.token} is too late")
            decided = lease.token - 1 if self._tag is None else state.decided
            try:
                return self._write(state.model_copy(update={"token": lease.token, "decided": decided}))
            except ConflictError:  # another process has written since the read
                continue

    def commit(self, state: ChampionState, lease: Lease) -> None:
        """Replaces the state that `fence` wrote. Raises LostLeaseError if another process has replaced it."""
        lease.check()
        try:
            self._write(state)
        except ConflictError as error:
            raise LostLeaseError(f"{self.folder / POINTER} has been written since; nothing was changed") from error

    def _write(self, state: ChampionState) -> ChampionState:
        """Writes champion.json. Raises ConflictError if the stored version is not the one that was last read."""
        state = state.model_copy(update={"nonce": uuid.uuid4().hex})
        self._tag = (self.folder / POINTER).write_if(state.model_dump_json(indent=1).encode(), self._tag)
        return state

    def write_file(self, name: str, data: bytes, lease: Lease) -> str:
        """Writes a file below retrain/NAME. Returns `name`, which must contain the lease's token."""
        lease.check()
        (self.folder / name).write_bytes(data)
        return name

    def copy_bundle(self, folder: Path, record: BundleRecord, lease: Lease) -> BundleRecord:
        """Copies a local bundle to a champion's folder. Returns the new record. Raises OSError if a digest differs."""
        target = f"models/{self.name}/champion-t{lease.token:06d}"
        for name, digest in record.files.items():
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise OSError(f"{folder / name} has changed since it was compared; nothing was changed, call again")
            lease.check()
            (self.storage / target / name).write_bytes(data)
        return record.model_copy(update={"bundle": target})

    def orphans(self, state: ChampionState) -> dict[StoragePath, int]:
        """{file: token} of files that belong to no decision, by their tokens. Lists two folders of the storage."""
        folders = (self.folder, self.storage / f"models/{self.name}")
        found = {folder / name: TOKEN.match(name) for folder in folders for name in folder.list()}
        tokens = {path: int(match[1]) for path, match in found.items() if match}
        return {path: token for path, token in tokens.items() if token > state.decided}

    def remove_orphans(self, state: ChampionState, lease: Lease) -> None:
        """Deletes the files that earlier lease holders wrote and that belong to no decision."""
        for path, token in self.orphans(state).items():
            if token < lease.token:
                lease.check()
                path.delete()


def list_data(config: RunConfig, root: str) -> pa.Table:
    """The listing of all files in the data root and in remote image folders outside of it. All keys are null.

    Hidden files and raycap's results are left out.
    """
    rows = []
    image_folders = {config.data.images, *(source.images for source in config.data.sources)}
    inside, results = f"{root.rstrip('/')}/", f"{config.storage_place.uri.rstrip('/')}/"
    outside = [each for each in sorted(image_folders) if is_remote(each) and not f"{each}/".startswith(inside)]
    for prefix in [root, *outside]:
        for name, entry in StoragePath(prefix, config.storage.options).walk():
            uri, is_hidden = join(prefix, name), "/." in f"/{name}"
            # Synthetic images are data, so they are listed, although they are in the folder of the results.
            is_result = uri.startswith(results) and config.data.synthetic is None
            if not is_hidden and not is_result:
                rows.append({"uri": uri, "size": entry.size, "tag": entry.tag})
    return pa.Table.from_pylist(rows, LISTING)


def compare(now: pa.Table, before: pa.Table | None) -> Change:
    """Counts the files that differ from the previous listing. If that is None, every file is new.

    now: the files only. before: as stored, with the rows that `with_keys` has added.
    """
    if before is None:
        return Change(added=now.num_rows, changed=0, gone=0)
    before = before.filter(pc.is_valid(before["size"]))  # the files only
    rows = pc.index_in(now["uri"], value_set=before["uri"])  # null for a new file
    num_kept = now.num_rows - rows.null_count
    previous = before.take(rows)
    is_same = pc.and_(pc.equal(previous["size"], now["size"]), pc.equal(previous["tag"], now["tag"]))
    num_same = _count(pc.fill_null(is_same, False))
    return Change(added=rows.null_count, changed=num_kept - num_same, gone=before.num_rows - num_kept)


def with_keys(listing: pa.Table, dataset: Dataset) -> pa.Table:
    """Adds the data set's content keys to a listing, so that a later retraining recognizes the images."""
    nulls = [pa.nulls(len(dataset), field.type) for field in ENTRIES]
    return pa.concat_tables([listing, pa.table([*nulls, dataset.table["key"]], LISTING)])


def new_keys(dataset: Dataset, before: pa.Table | None) -> int:
    """The number of images whose content is not in the previous listing."""
    if before is None:
        return len(dataset)
    return len(dataset) - _count(pc.is_in(dataset.table["key"], value_set=before["key"].drop_null()))


def _count(mask: pa.ChunkedArray) -> int:
    """The number of true values."""
    return int(pc.sum(mask).as_py() or 0)  # the sum of no rows is None


class HeldOut(NamedTuple):
    """The fixed held-out split."""

    file: bytes  # the content of its Parquet file
    part: Dataset  # its images that still exist, with their current locations


def held_out_split(config: RunConfig) -> str:
    """The name of the held-out split: retrain.split, else the first test split, else the validation split.

    Raises UserError if the split is in data.train_splits.
    """
    name = config.retrain.split or next(iter(config.data.test_splits), config.data.val_split)
    if name in config.data.train_splits:
        raise UserError(f"retrain.split = {name} is one of data.train_splits; name a split that training does not use")
    return name


def find_held_out(file: bytes | None, dataset: Dataset, config: RunConfig) -> HeldOut:
    """Finds the images of the fixed held-out split in the present data. Logs how many are gone.

    file: the content of the split's Parquet file, with its ids and references. If it is None, the split is chosen now.
    Raises UserError if fewer than two images remain, or if training or validation uses some of them.
    """
    name, current, data = held_out_split(config), dataset.readable(), config.data
    if file is None:
        chosen = current.split(name)
        if len(chosen) < 2:
            raise UserError(
                f"retrain.split = {name} has {len(chosen)} images; CIDEr-D needs two documents or more, better hundreds"
            )
        file = to_bytes(chosen.table.select(SCHEMA.names))
    fixed = from_bytes(file, SCHEMA, "the held-out split")
    rows = pc.index_in(fixed["key"], value_set=current.table["key"])  # null for an image that is gone
    uris = current.table["uri"].take(rows)
    part = Dataset(fixed.set_column(SCHEMA.get_field_index("uri"), "uri", uris).filter(pc.is_valid(rows)))
    start_over = f"start over without {config.storage_place}/retrain/{config.name}"
    if rows.null_count:
        gone = f"{rows.null_count} of the {fixed.num_rows} images of the fixed held-out split"
        logger.warning(f"{gone} are gone from the data, so they are not compared")
    if len(part) < 2:
        raise UserError(f"fewer than two images of the fixed held-out split are left; restore them, or {start_over}")
    other_splits = {*data.train_splits, data.val_split} - {name}
    other_keys = pc.unique(current.split(*other_splits).table["key"])
    if num_leaked := _count(pc.is_in(fixed["key"], value_set=other_keys)):
        raise UserError(
            f"{num_leaked} images of the fixed held-out split are now in training or validation; "
            f"take them out, or {start_over}"
        )
    return HeldOut(file, part)
