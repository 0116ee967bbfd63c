"""The champion of a configuration: a small file, which conditional writes replace, and the files that it references.

    retrain/NAME/champion.json          the champion, its predecessors, the last decision, the last listing of the data
                 lease.json             the lease, whose holder alone may write (`pipeline.storage.lease`)
                 decisions/NUMBER-tTOKEN.json, .html   one record per decision, with the digest of the previous record
                 snapshots/tTOKEN.parquet              listing of the data folder (`pipeline.retrain.listing`)
                 held-out/tTOKEN.parquet               the fixed held-out split (`pipeline.retrain.listing`)
    models/NAME/champion-tTOKEN/        an immutable copy of a champion's bundle

The name of every file except the first two contains the token of the lease under which it was written. Such a file is
written before champion.json references it. The next lease holder deletes files that champion.json does not reference.
champion.json contains its own digest, so that no file is deleted because of a damaged one.
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
_TOKEN = re.compile(r"[/-]t(\d{6,})(?=[./])")  # in snapshots/t000003.parquet or champion-t000003/weights.safetensors


# a relative path; UserError for any other text, because others may have written the file
Name = Annotated[str, AfterValidator(lambda name: relative_name(name, POINTER))]


class FileRecord(Section):
    """A file below retrain/NAME and its digest."""

    name: Name
    sha256: str


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


class HeldOutRecord(FileRecord):
    """The held-out split of a comparison: its file, the number of its images, and how many images are gone."""

    images: int
    missing: int


class ScoreRecord(Section):
    """CIDEr-D on the held-out split; `champion` is None for the first model."""

    champion: float | None
    challenger: float


class Decision(Section):
    """The content of a file below decisions/. For a rollback the fields from `challenger` on are not set."""

    format: Literal[1]
    name: str
    number: int
    token: int
    time: str
    decision: Verdict
    reason: str
    champion: BundleRecord
    champion_before: BundleRecord | None
    snapshot: FileRecord
    previous: FileRecord | None  # the file of the previous decision
    run: str  # the run whose model was compared, or replaced by a rollback
    challenger: BundleRecord | None = None
    data: DataRecord | None = None
    held_out: HeldOutRecord | None = None
    scores: ScoreRecord | None = None
    difference: Difference | None = None  # challenger minus champion
    asked: Values | None = None  # the settings: the retrain section and the number of bootstrap resamples


class ChampionState(Section):
    """The content of champion.json. `before` lists the champions that rollbacks can restore, the newest last."""

    format: Literal[1] = 1
    token: int = 0  # the last writer's token; a writer with a smaller token is refused
    nonce: str = ""  # random, so that two writes never give the file the same tag
    number: int = 0  # the number of the last decision
    decided: tuple[int, ...] = ()  # the tokens of all decisions; files with other tokens are deleted
    decision: FileRecord | None = None
    champion: BundleRecord | None = None
    before: tuple[BundleRecord, ...] = ()
    challenger: str | None = None  # the run whose model was last rejected or rolled back
    snapshot: FileRecord | None = None
    fingerprint: str | None = None  # the fingerprint of the data of the last training
    held_out: FileRecord | None = None
    sha256: str = ""  # of the other fields

    @property
    def bundles(self) -> tuple[BundleRecord, ...]:
        """The former champions and the champion, oldest first."""
        return (*self.before, *([self.champion] if self.champion else []))

    @property
    def references(self) -> tuple[str, ...]:
        """The names below retrain/NAME of the files that belong to this state."""
        files = [record.name for record in (self.decision, self.snapshot, self.held_out) if record]
        return (*files, *([self.decision.name.replace(".json", ".html")] if self.decision else []))


class ChampionStore:
    """Reads and writes champion.json and the files it references, for one configuration name in one storage."""

    def __init__(self, storage: StoragePath, name: str) -> None:
        self.storage, self.name = storage, name
        self.folder = storage / f"retrain/{name}"
        # the tag of the version of champion.json that was last read or written; only this version may be replaced
        self._tag: str | None = None

    def read(self) -> ChampionState:
        """The current state, which is empty before the first retraining. UserError for an invalid or damaged file."""
        try:
            data, self._tag = (self.folder / POINTER).read_tagged()
        except FileNotFoundError:
            self._tag = None
            return ChampionState()
        try:
            state = ChampionState.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{self.folder / POINTER} is not a champion's file ({shown(field)}: {shown(first['msg'])})"
                "; restore it from a copy, or remove it to start over"
            ) from error
        if state.sha256 != _digest_of_fields(state):
            raise UserError(
                f"{self.folder / POINTER} is damaged (its fields do not have the digest in sha256); restore it from a "
                "copy, nothing was changed"
            )
        return state

    def fence(self, lease: Lease) -> ChampionState:
        """Writes the lease's token into champion.json, so that no process with a smaller token can commit.

        Raises LostLeaseError when the file already has a larger token.
        """
        while True:
            state = self.read()
            if state.token > lease.token:
                raise LostLeaseError(f"{self.folder / POINTER} has token {state.token}; {lease.token} is too late")
            try:
                return self._write(state.model_copy(update={"token": lease.token}))
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
        state = state.model_copy(update={"sha256": _digest_of_fields(state)})
        self._tag = (self.folder / POINTER).write_if(state.model_dump_json(indent=1).encode(), self._tag)
        return state

    def write_file(self, name: str, data: bytes, lease: Lease) -> FileRecord:
        """Writes a file below retrain/NAME and returns its record; `name` must contain the lease's token."""
        lease.check()
        (self.folder / name).write_bytes(data)
        return FileRecord(name=name, sha256=_sha256(data))

    def read_file(self, record: FileRecord) -> bytes:
        """The content of a referenced file; OSError when its digest is not the recorded one."""
        data = (self.folder / record.name).read_bytes()
        if _sha256(data) != record.sha256:
            raise OSError(f"{self.folder / record.name} does not have the digest recorded for it; restore it")
        return data

    def copy_bundle(self, folder: Path, record: BundleRecord, lease: Lease) -> BundleRecord:
        """Copies a local bundle to the champion's folder; OSError when a file does not have its digest in `record`."""
        target = f"models/{self.name}/champion-t{lease.token:06d}"
        for name, digest in record.files.items():
            data = (folder / name).read_bytes()
            if _sha256(data) != digest:
                raise OSError(f"{folder / name} has changed since it was scored; run the retraining again")
            lease.check()
            (self.storage / target / name).write_bytes(data)
        return BundleRecord(bundle=target, files=record.files, run_id=record.run_id)

    def require_intact(self, bundle: BundleRecord) -> None:
        """Raises OSError if a file of a champion's bundle is missing or has changed."""
        for name, digest in bundle.files.items():
            path = self.storage / bundle.bundle / name
            damage = ""
            try:
                if _sha256(path.read_bytes()) != digest:
                    damage = "does not have the digest of when it became champion"
            except FileNotFoundError:
                damage = "is missing"
            if damage:
                raise OSError(
                    f"a champion's bundle is damaged: {path} {damage}; restore it from a copy, nothing was changed"
                )

    def decision(self, record: FileRecord) -> Decision:
        """The decision in the file that `record` references."""
        return Decision.model_validate_json(self.read_file(record))

    def orphans(self, state: ChampionState) -> dict[StoragePath, int]:
        """{file: token} of the files that belong to no decision, because their writer was killed or lost its lease.

        It lists two folders of the storage and reads no file.
        """
        models = self.storage / f"models/{self.name}"
        bundles = tuple(f"{record.bundle}/" for record in state.bundles)
        kept = {self.folder / name for name in state.references}
        # hidden files are locks; only the names below the two folders contain tokens
        found = {self.folder / name: _token_of(name) for name in self.folder.list() if "/." not in f"/{name}"}
        for name in models.list():
            if name.startswith("champion-t") and not f"models/{self.name}/{name}".startswith(bundles):
                found[models / name] = _token_of(name)
        tokens = {path: token for path, token in found.items() if token is not None and path not in kept}
        return {path: token for path, token in tokens.items() if token not in state.decided}

    def remove_orphans(self, state: ChampionState, lease: Lease) -> None:
        """Deletes the orphans of earlier lease holders."""
        for path, token in self.orphans(state).items():
            if token < lease.token:
                lease.check()
                path.delete()


def _token_of(name: str) -> int | None:
    """The token in the name of a file; None for a file without one, such as champion.json."""
    found = _TOKEN.search(f"/{name}")
    return None if found is None else int(found[1])


def _digest_of_fields(state: ChampionState) -> str:
    """The digest of a state without its field `sha256`."""
    return _sha256(state.model_dump_json(exclude={"sha256"}).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
