"""The champion of a configuration: a small file, which conditional writes replace, and the files that it references.

    retrain/NAME/champion.json          the champion, its predecessors, the last decision, the last listing of the data
                 lease.json             the lease, whose holder alone may write (`pipeline.storage.lease`)
                 decisions/NUMBER-tTOKEN.json, .html   one record and one page per decision
                 snapshots/tTOKEN.parquet              listing of the data folder (`pipeline.retrain.listing`)
                 held-out/tTOKEN.parquet               the fixed held-out split (`pipeline.retrain.listing`)
    models/NAME/champion-tTOKEN/        an immutable copy of a champion's bundle

The name of every file except the first two contains the token of the lease under which it was written. Such a file is
written before champion.json references it. Tokens grow, so a file with a larger token than the last decision belongs to
no decision: its writer was killed or has lost the lease. The next lease holder deletes it. When champion.json itself is
absent, nothing is deleted, because the files may belong to decisions that it recorded.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationError

from raycap.models.config import Values
from raycap.pipeline.config.sections import Section
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.comparison.bootstrap import Difference
from raycap.pipeline.retrain.listing import Change
from raycap.pipeline.runtime.names import relative_name, shown
from raycap.pipeline.storage.lease import Lease, LostLeaseError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import ConflictError

POINTER, LEASE = "champion.json", "lease.json"
Verdict = Literal["first", "promoted", "kept", "rolled back"]
TOKEN = re.compile(r"(?:champion-|snapshots/|held-out/|decisions/\d+-)t(\d+)[./]")  # at the start of a relative name


# a relative path; UserError for any other text, because others may have written the file
Name = Annotated[str, AfterValidator(lambda name: relative_name(name, POINTER))]


class BundleRecord(Section):
    """A model bundle: its folder in the storage, the sha256 of each file, and the run that produced it."""

    bundle: Name
    files: dict[Name, str]
    run_id: str


class DataRecord(Section):
    """The data that a challenger was trained on."""

    root: str
    files: Change
    new_images: int
    images: int
    fingerprint: str | None


class HeldOutRecord(Section):
    """The held-out split of a comparison: its file, the number of its images, and how many images are gone."""

    name: Name
    images: int
    missing: int


class ScoreRecord(Section):
    """CIDEr-D on the held-out split; `champion` is None for the first model."""

    champion: float | None
    challenger: float


class Decision(Section):
    """The content of a file below decisions/. For a rollback the fields from `challenger` on are not set."""

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
    run: str  # the run whose model was compared, or replaced by a rollback
    challenger: BundleRecord | None = None
    data: DataRecord | None = None
    held_out: HeldOutRecord | None = None
    scores: ScoreRecord | None = None
    difference: Difference | None = None  # challenger minus champion
    asked: Values | None = None  # the settings: the retrain section and the number of bootstrap resamples


class ChampionState(Section):
    """The content of champion.json. `before` lists the champions that rollbacks can restore, the newest last."""

    token: int = 0  # the last writer's token; a writer with a smaller token is refused
    nonce: str = ""  # random, so that two writes never give the file the same tag
    number: int = 0  # the number of the last decision
    decided: int = 0  # the token of the last decision; files with larger tokens belong to no decision
    decision: Name | None = None
    champion: BundleRecord | None = None
    before: tuple[BundleRecord, ...] = ()
    challenger: str | None = None  # the run whose model was last rejected or rolled back
    snapshot: Name | None = None
    fingerprint: str | None = None  # the fingerprint of the data of the last training
    held_out: Name | None = None

    @property
    def bundles(self) -> tuple[BundleRecord, ...]:
        """The former champions and the champion, oldest first."""
        return (*self.before, *([self.champion] if self.champion else []))


class ChampionStore:
    """Reads and writes champion.json and the files it references, for one configuration name in one storage."""

    def __init__(self, storage: StoragePath, name: str) -> None:
        self.storage, self.name = storage, name
        self.folder = storage / f"retrain/{name}"
        # the tag of the version of champion.json that was last read or written; only this version may be replaced
        self._tag: str | None = None

    def read(self) -> ChampionState:
        """The current state, which is empty before the first retraining. Raises UserError for an invalid file."""
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

        If the file is absent, all present files count as decided, so that none of them is ever an orphan. Raises
        LostLeaseError when the file already has a larger token.
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
        """Replaces the state that `fence` returned; LostLeaseError when another process has written after it."""
        lease.check()
        try:
            self._write(state)
        except ConflictError as error:
            raise LostLeaseError(f"{self.folder / POINTER} has been written since; nothing was changed") from error

    def _write(self, state: ChampionState) -> ChampionState:
        """Writes champion.json; ConflictError when it is not the version that was last read."""
        state = state.model_copy(update={"nonce": uuid.uuid4().hex})
        self._tag = (self.folder / POINTER).write_if(state.model_dump_json(indent=1).encode(), self._tag)
        return state

    def write_file(self, name: str, data: bytes, lease: Lease) -> str:
        """Writes a file below retrain/NAME and returns its name, which must contain the lease's token."""
        lease.check()
        (self.folder / name).write_bytes(data)
        return name

    def copy_bundle(self, folder: Path, record: BundleRecord, lease: Lease) -> BundleRecord:
        """Copies a local bundle to the champion's folder. Raises OSError when a file does not have its digest."""
        target = f"models/{self.name}/champion-t{lease.token:06d}"
        for name, digest in record.files.items():
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise OSError(f"{folder / name} has changed since it was compared; nothing was changed, call again")
            lease.check()
            (self.storage / target / name).write_bytes(data)
        return record.model_copy(update={"bundle": target})

    def decision(self, name: str) -> Decision:
        """The decision in the file of this name."""
        return Decision.model_validate_json((self.folder / name).read_bytes())

    def orphans(self, state: ChampionState) -> dict[StoragePath, int]:
        """{file: token} of the files of lease holders after the last decision. It lists two folders of the storage."""
        folders = (self.folder, self.storage / f"models/{self.name}")
        found = {folder / name: TOKEN.match(name) for folder in folders for name in folder.list()}
        tokens = {path: int(match[1]) for path, match in found.items() if match}
        return {path: token for path, token in tokens.items() if token > state.decided}

    def remove_orphans(self, state: ChampionState, lease: Lease) -> None:
        """Deletes the orphans of earlier lease holders."""
        for path, token in self.orphans(state).items():
            if token < lease.token:
                lease.check()
                path.delete()
