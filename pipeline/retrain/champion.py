"""Who is champion: one small file in storage, written conditionally, and everything that it points to.

    retrain/NAME/champion.json          the truth: the champion, those before it, the last decision and snapshot
                 lease.json             who may write (`pipeline.storage.lease`)
                 decisions/NUMBER-tTOKEN.json, .html   one record a decision; each names the one before by digest
                 snapshots/tTOKEN.parquet              what the data prefix held (`pipeline.retrain.data_listing`)
                 held-out/tTOKEN.parquet               the fixed split (`pipeline.retrain.held_out`)
    models/NAME/champion-tTOKEN/        a champion's bundle, a copy that nobody changes any more

All but the first two are written under the fencing token of their writer, before champion.json names them: what it
does not name does not count, and the next holder of the lease removes it.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.captioning.bundle import bundle_digests
from pipeline.config.sections import Section
from pipeline.errors import UserError
from pipeline.storage.lease import Lease, LostLeaseError
from pipeline.storage.path import ConflictError, StoragePath

POINTER, LEASE = "champion.json", "lease.json"
_TOKEN = re.compile(r"[/-]t(\d{6,})(?=[./])")


class FileRecord(Section):
    """A file below retrain/NAME, with its digest."""

    name: str
    sha256: str


class BundleRecord(Section):
    """A model bundle: its folder below the storage, sha256 by file, and the run that made it."""

    bundle: str
    files: dict[str, str]
    run_id: str


class State(Section):
    """champion.json. `before`: former champions that a rollback can go back to, the newest last."""

    format: Literal[1] = 1
    token: int = 0  # of the last writer; a smaller one is too late
    nonce: str = ""
    number: int = 0  # of the last decision
    decided: tuple[int, ...] = ()  # the tokens of all decisions: files with another one do not count
    decision: FileRecord | None = None
    champion: BundleRecord | None = None
    before: tuple[BundleRecord, ...] = ()
    challenger: str | None = None  # the run whose model was last kept out, or rolled back
    snapshot: FileRecord | None = None
    fingerprint: str | None = None  # of the data that was last trained on
    held_out: FileRecord | None = None

    @property
    def bundles(self) -> tuple[BundleRecord, ...]:
        return (*self.before, *([self.champion] if self.champion else []))


class Ledger:
    """The champion's file and what it names, below one storage, for one configuration's name."""

    def __init__(self, storage: StoragePath, name: str) -> None:
        self.storage, self.name = storage, name
        self.folder = storage / f"retrain/{name}"
        self._tag: str | None = None

    def read(self) -> State:
        """The state now; an empty one before the first retraining. UserError for a file that is none."""
        try:
            data, self._tag = (self.folder / POINTER).read_tagged()
        except FileNotFoundError:
            self._tag = None
            return State()
        try:
            return State.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{self.folder / POINTER} is not a champion's file ({'.'.join(map(str, first['loc']))}: {first['msg']})"
                "; restore it, or remove it to begin anew"
            ) from error

    def fence(self, lease: Lease) -> State:
        """Makes the lease's token the last writer's: from now on nobody with a smaller one can commit.

        Raises LostLeaseError when a larger one is there already.
        """
        while True:
            state = self.read()
            if state.token > lease.token:
                raise LostLeaseError(f"{self.folder / POINTER} has token {state.token}; {lease.token} is too late")
            try:
                return self._write(state.model_copy(update={"token": lease.token}))
            except ConflictError:
                continue

    def commit(self, state: State, lease: Lease) -> None:
        """Replaces the state that `fence` returned; LostLeaseError when anybody has written since."""
        lease.check()
        try:
            self._write(state)
        except ConflictError as error:
            raise LostLeaseError(f"{self.folder / POINTER} has been written since; nothing was changed") from error

    def _write(self, state: State) -> State:
        state = state.model_copy(update={"nonce": uuid.uuid4().hex})
        self._tag = (self.folder / POINTER).write_if(state.model_dump_json(indent=1).encode(), self._tag)
        return state

    def put(self, name: str, data: bytes, lease: Lease) -> FileRecord:
        """Writes a file below retrain/NAME whose name holds the lease's token."""
        lease.check()
        (self.folder / name).write_bytes(data)
        return FileRecord(name=name, sha256=hashlib.sha256(data).hexdigest())

    def get(self, record: FileRecord) -> bytes:
        """A file that the state names; OSError when it is not what was written."""
        data = (self.folder / record.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise OSError(f"{self.folder / record.name} does not have the digest that {POINTER} names")
        return data

    def put_bundle(self, folder: Path, record: BundleRecord, lease: Lease) -> BundleRecord:
        """Copies a local bundle to where nobody changes it; OSError when it is not what `record` says."""
        target = f"models/{self.name}/champion-t{lease.token:06d}"
        for name, digest in record.files.items():
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise OSError(f"{folder / name} has changed since it was scored; run the retraining again")
            lease.check()
            (self.storage / target / name).write_bytes(data)
        return BundleRecord(bundle=target, files=record.files, run_id=record.run_id)

    def damage(self, record: BundleRecord) -> Iterator[str]:
        """A sentence for each file of a bundle that is missing or not what it was."""
        for name, digest in record.files.items():
            where = self.storage / record.bundle / name
            try:
                data = where.read_bytes()
            except FileNotFoundError:
                yield f"{where} is missing"
                continue
            if hashlib.sha256(data).hexdigest() != digest:
                yield f"{where} does not have the digest of when it became champion"

    def decision(self, record: FileRecord) -> dict[str, Any]:
        return dict(json.loads(self.get(record)))

    def decisions(self, state: State) -> Iterator[tuple[FileRecord, dict[str, Any]]]:
        """The decisions with their files, the last first. OSError for one that is missing or changed."""
        at = state.decision
        while at is not None:
            body = self.decision(at)
            yield at, body
            at = FileRecord(**body["previous"]) if body["previous"] else None

    def leftovers(self) -> dict[StoragePath, int]:
        """Files of writers that were killed or came too late, by their token. Cost: two listings."""
        decided = {*self.read().decided}
        models = self.storage / f"models/{self.name}"
        named = [self.folder / name for name in self.folder.list() if not _hidden(name)]
        named += [models / name for name in models.list() if name.startswith("champion-t")]
        tokens = {where: _TOKEN.findall(where.uri.removeprefix(self.storage.uri)) for where in named}
        return {where: int(found[-1]) for where, found in tokens.items() if found and int(found[-1]) not in decided}

    def clean(self, lease: Lease) -> None:
        """Removes the leftovers of holders before this one."""
        for where, token in self.leftovers().items():
            if token < lease.token:
                lease.check()
                where.delete()

    def verify(self) -> list[str]:
        """Everything that is wrong; cost: one read of every champion's bundle and of all records.

        The champion, and all that a rollback can go back to, are whole; the decisions lead from the first to the last
        without a gap and end with this champion; every file that they name is what was written.
        """
        try:
            state = self.read()
        except UserError as error:
            return [str(error)]
        wrong = [sentence for bundle in state.bundles for sentence in self.damage(bundle)]
        try:
            bodies = [body for _, body in self.decisions(state)][::-1]
            for record in (state.snapshot, state.held_out):
                if record:
                    self.get(record)
            for body in bodies:
                self.get(FileRecord(**body["snapshot"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [*wrong, f"{type(error).__name__}: {error}"]
        if [body["number"] for body in bodies] != list(range(1, state.number + 1)):
            wrong.append(f"the decisions are {[body['number'] for body in bodies]}, the last is {state.number}")
        champions: list[Any] = []
        for body in bodies:
            if body["decision"] in ("first", "promoted"):
                champions.append(body["champion"])
            elif body["decision"] == "rolled back":
                champions.pop()
            if not champions or body["champion"] != champions[-1]:
                wrong.append(f"decision {body['number']} does not follow from those before it")
                break
        if champions != [bundle.model_dump() for bundle in state.bundles]:
            wrong.append("the champions of the decisions are not those of champion.json")
        tokens = tuple(body["token"] for body in bodies)
        if tokens != state.decided or list(tokens) != sorted({*tokens}) or max((0, *tokens)) > state.token:
            wrong.append(f"the decisions' tokens {tokens} are not those of champion.json, or do not grow")
        return wrong


def bundle_record(folder: Path, run_id: str, name: str) -> BundleRecord:
    """What a local bundle is now."""
    return BundleRecord(bundle=name, files=bundle_digests(folder), run_id=run_id)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
