"""A lease in storage: one retraining at a time on any machine, with a token that fences out late writers.

    lease.json   {"token", "nonce", "holder", "until"}

It is taken, renewed and returned by conditional writes. Clocks decide only how long others wait for a holder that has
died. The token decides who may write: it grows with every holder, so that a process which continues after losing the
lease finds a larger token and stops. The file is never removed, so that no token is used twice.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable

from pydantic import BaseModel, ValidationError

from pipeline.errors import UserError
from pipeline.storage.path import ConflictError, StoragePath

RENEWALS = 3  # per duration of a lease


class LostLeaseError(RuntimeError):
    """Another process holds the lease: this one may not write any more."""


class LeaseRecord(BaseModel, frozen=True):
    """The content of a lease's file: its holder, and when it expires (Unix seconds) unless it is renewed."""

    token: int
    nonce: str
    holder: str
    until: float

    def __str__(self) -> str:
        return f"{self.holder} until {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(self.until))}"


class Lease:
    """A lease that this process holds; as a context it is renewed in the background and returned at the end."""

    def __init__(
        self, where: StoragePath, record: LeaseRecord, tag: str, seconds: float, now: Callable[[], float]
    ) -> None:
        self.where, self.seconds, self.now = where, seconds, now
        self._record, self._tag = record, tag
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew_repeatedly, name="lease", daemon=True)

    @property
    def token(self) -> int:
        """Larger than the token of every earlier holder."""
        return self._record.token

    def check(self) -> None:
        """Raises LostLeaseError unless this process holds the lease; one that expired unclaimed is renewed."""
        with self._lock:
            stored, tag = _read(self.where)
            if stored is None or tag is None or stored.nonce != self._record.nonce:
                holder = "nobody" if stored is None else f"{stored.holder} (token {stored.token})"
                raise LostLeaseError(f"the lease {self.where} has passed to {holder}; token {self.token} is too late")
            self._record, self._tag = stored, tag
            if stored.until < self.now() + self.seconds * (1 - 1 / RENEWALS):
                self._write(self.now() + self.seconds)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            with self._lock:
                self._write(0.0)
        except (LostLeaseError, OSError):  # it expires by itself, or another process holds it
            pass

    def _renew_repeatedly(self) -> None:
        while not self._stop.wait(self.seconds / RENEWALS):
            try:
                self.check()
            except LostLeaseError:
                return  # the next `check` raises too
            except OSError:
                continue  # storage fails for a while: renewal is possible until the lease expires

    def _write(self, until: float) -> None:
        record = self._record.model_copy(update={"until": until})
        try:
            self._tag = self.where.write_if(record.model_dump_json().encode(), self._tag)
        except ConflictError as error:
            raise LostLeaseError(
                f"the lease {self.where} has passed to another process; token {self.token} is too late"
            ) from error
        self._record = record


def take_lease(
    where: StoragePath, seconds: float, *, above: int = 0, by_force: bool = False, now: Callable[[], float] = time.time
) -> Lease | LeaseRecord:
    """The lease, or the record of its present holder. Its token is larger than `above` and than every earlier token.

    `by_force` takes it from its holder, who then cannot write any more. Raises UserError for a file that is not a
    lease, and StorageError.
    """
    stored, tag = _read(where)
    if stored is not None and stored.until > now() and not by_force:
        return stored
    record = LeaseRecord(
        token=max(above, stored.token if stored else 0) + 1,
        nonce=uuid.uuid4().hex,
        holder=f"process {os.getpid()} on {platform.node()}",
        until=now() + seconds,
    )
    try:
        tag = where.write_if(record.model_dump_json().encode(), tag)
    except ConflictError:
        return take_lease(where, seconds, above=above, by_force=by_force, now=now)  # another process was faster
    return Lease(where, record, tag, seconds, now)


def _read(where: StoragePath) -> tuple[LeaseRecord | None, str | None]:
    try:
        data, tag = where.read_tagged()
        return LeaseRecord.model_validate_json(data), tag
    except FileNotFoundError:
        return None, None
    except ValidationError as error:
        raise UserError(f"{where} is not a lease of raycap; remove it when no retraining is running") from error
