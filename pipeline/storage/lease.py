"""A lease in storage: one retraining at a time, whatever machines they are on, and a token that fences out the late.

    lease.json   {"token", "nonce", "holder", "until"}

It is taken, renewed and given back by conditional writes. Clocks only decide how long others wait for a holder that is
gone; who may write is decided by the token, which grows with every holder: whoever wakes up after the lease has moved
on finds another token and stops. The file is never removed, so that tokens never repeat.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.errors import UserError
from pipeline.storage.path import ConflictError, StoragePath

RENEWALS = 3  # in the time that a lease lasts


class LostLeaseError(RuntimeError):
    """The lease has moved on to somebody else: this process may write nothing more."""


class Held(NamedTuple):
    """Somebody else's lease: who has it, and until when (Unix seconds) if it is not renewed."""

    holder: str
    until: float

    def __str__(self) -> str:
        return f"{self.holder} until {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(self.until))}"


class Lease:
    """A lease that this process holds; as a context it is renewed in the background and given back at the end."""

    def __init__(
        self, where: StoragePath, record: dict[str, Any], tag: str, seconds: float, now: Callable[[], float]
    ) -> None:
        self.where, self.seconds, self.now = where, seconds, now
        self._record, self._tag = record, tag
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew_on, name="lease", daemon=True)

    @property
    def token(self) -> int:
        """Larger than that of everybody who held this lease before."""
        return int(self._record["token"])

    def check(self) -> None:
        """Raises LostLeaseError unless the lease is this process's now; one that ran out unclaimed is renewed."""
        with self._lock:
            there, tag = _read(self.where)
            if there is None or tag is None or there["nonce"] != self._record["nonce"]:
                holder = "nobody" if there is None else f"{there['holder']} (token {there['token']})"
                raise LostLeaseError(f"the lease {self.where} has moved on to {holder}; token {self.token} is too late")
            self._record, self._tag = there, tag
            if there["until"] < self.now() + self.seconds * (1 - 1 / RENEWALS):
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
        except (LostLeaseError, OSError):  # then it runs out by itself, or is somebody else's
            pass

    def _renew_on(self) -> None:
        while not self._stop.wait(self.seconds / RENEWALS):
            try:
                self.check()
            except LostLeaseError:
                return  # the next write finds out too
            except OSError:
                continue  # a storage that fails for a while: until the lease runs out it may be tried again

    def _write(self, until: float) -> None:
        record = self._record | {"until": until}
        try:
            self._tag = self.where.write_if(_body(record), self._tag)
        except ConflictError as error:
            raise LostLeaseError(f"the lease {self.where} has moved on; token {self.token} is too late") from error
        self._record = record


def take_lease(
    where: StoragePath, seconds: float, *, above: int = 0, by_force: bool = False, now: Callable[[], float] = time.time
) -> Lease | Held:
    """The lease, or who else has it. Its token is larger than `above` and than any before.

    `by_force` takes it from whoever has it, who then cannot write any more. Raises UserError for a file that is no
    lease, and StorageError.
    """
    there, tag = _read(where)
    if there is not None and there["until"] > now() and not by_force:
        return Held(there["holder"], there["until"])
    record = {
        "token": max(above, there["token"] if there else 0) + 1,
        "nonce": uuid.uuid4().hex,
        "holder": f"process {os.getpid()} on {platform.node()}",
        "until": now() + seconds,
    }
    try:
        tag = where.write_if(_body(record), tag)
    except ConflictError:
        return take_lease(where, seconds, above=above, by_force=by_force, now=now)  # somebody was faster: who?
    return Lease(where, record, tag, seconds, now)


def _body(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode()


def _read(where: StoragePath) -> tuple[dict[str, Any] | None, str | None]:
    try:
        data, tag = where.read_tagged()
    except FileNotFoundError:
        return None, None
    try:
        record = json.loads(data)
        kinds: dict[str, Any] = {"token": int, "nonce": str, "holder": str, "until": (int, float)}
        if all(isinstance(record[name], kind) for name, kind in kinds.items()):
            return record, tag
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{where} is not a lease of raycap's; remove it when no retraining is under way")
