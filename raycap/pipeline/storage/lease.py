"""Leases in storage: of all processes on all machines, only the one that has the lease may retrain and write.

    lease.json   {"token", "nonce", "holder", "until", "seconds"}

A process takes, renews and returns a lease by conditional writes. The clocks of two machines may differ, so they decide
only how long other processes wait. A renewal during the wait shows that the holder is alive. The token decides who may
write. Each new holder gets a larger token, so a process that has lost the lease finds a larger token and stops. No
token is used twice, because the file is never removed.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from contextlib import suppress
from typing import Annotated

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import ConflictError

logger = logging.getLogger(__name__)

MAX_TIME = 2.0**36  # Unix seconds (the year 4147), within the range of the system's calendar
MAX_LEASE_S = 1e7  # the longest time from a renewal to the expiry, in seconds
RENEWALS_PER_LEASE = 3  # a lease of s seconds is renewed every s / 3 seconds


class LostLeaseError(JobFailedError):
    """This process has lost the lease to another one and may not write any more."""


class LeaseRecord(BaseModel, frozen=True):
    """The content of a lease's file.

    until: the Unix time at which the lease expires unless it is renewed, or 0 if it was returned. seconds: the time
    from a renewal to the expiry. nonce: random, new for each holder. holder: its process and machine.
    """

    token: NonNegativeInt
    nonce: str
    holder: str
    until: Annotated[float, Field(ge=0, le=MAX_TIME)]
    seconds: Annotated[float, Field(gt=0, le=MAX_LEASE_S)]

    def __str__(self) -> str:
        return f"{printable(self.holder)} until {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(self.until))}"


class Lease:
    """A lease that this process has taken. A `with` block renews it in a thread, and returns it at the end."""

    def __init__(self, path: StoragePath, record: LeaseRecord, tag: str) -> None:
        """record, tag: the content and the tag of the file `path` as this process wrote it."""
        self.path, self.seconds, self._record, self._tag = path, record.seconds, record, tag
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._loss: LostLeaseError | None = None  # set when the background thread finds the lease lost
        self._thread = threading.Thread(target=self._renew_repeatedly, name="lease", daemon=True)

    @property
    def token(self) -> int:
        """A number that is larger than the token of every earlier holder."""
        return self._record.token

    def check(self) -> None:
        """Raises LostLeaseError if another process has the lease.

        Renews the lease if the last renewal is more than a third of the lease's time ago.
        """
        with self._lock:
            stored, tag = _read(self.path)
            if stored is None or tag is None or stored.nonce != self._record.nonce:
                holder = "nobody" if stored is None else f"{printable(stored.holder)} (token {stored.token})"
                raise LostLeaseError(f"the lease {self.path} has passed to {holder}; token {self.token} is too late")
            self._record, self._tag = stored, tag
            now, renewal_interval = time.time(), self.seconds / RENEWALS_PER_LEASE
            last_renewal = stored.until - self.seconds
            if last_renewal + renewal_interval < now:
                self._write(now + self.seconds)

    def check_last_renewal(self) -> None:
        """Raises LostLeaseError if the background thread has found the lease lost. Makes no request to the storage."""
        if self._loss is not None:
            raise self._loss

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        with self._lock, suppress(LostLeaseError, OSError):  # if returning the lease fails, it expires by itself
            self._write(until=0.0)  # an expiry in the past returns the lease

    def _renew_repeatedly(self) -> None:
        while not self._stop.wait(self.seconds / RENEWALS_PER_LEASE):
            try:
                self.check()
            except LostLeaseError as error:
                self._loss = error
                return
            except OSError:
                continue  # storage failed; another attempt may succeed before the lease expires

    def _write(self, until: float) -> None:
        """Stores `until` as the time of expiry. Raises LostLeaseError if another process has taken the lease."""
        record = self._record.model_copy(update={"until": until})
        try:
            self._tag = self.path.write_if(record.model_dump_json().encode(), self._tag)
        except ConflictError as error:
            raise LostLeaseError(
                f"the lease {self.path} has passed to another process; token {self.token} is too late"
            ) from error
        self._record = record


def take_lease(path: StoragePath, seconds: float, *, above: int = 0, by_force: bool = False) -> Lease | LeaseRecord:
    """Takes the lease, or returns the record of its holder if that process may be alive.

    If the lease has a holder, waits for half of the holder's lease time, at most 5 * `seconds`, and once more if the
    lease has not expired by this machine's clock. The holder may be alive if the lease was renewed meanwhile, or if it
    is longer than `seconds` and has not expired.

    above: the new token is larger than this number and than every earlier token. by_force: if true, takes the lease
    without waiting, and its holder cannot write any more. Raises UserError if the file is not a lease, and StorageError
    if the storage fails.
    """
    stored, tag = _read(path)
    if stored is not None and stored.until and not by_force:
        tag_before = tag
        stored, tag = _wait_for_change(path, stored, tag, max_pause_s=5 * seconds)
        if stored is not None and stored.until:
            was_renewed = tag != tag_before
            is_long = stored.seconds > seconds and stored.until > time.time()
            if was_renewed or is_long:
                return stored
    record = LeaseRecord(
        token=max(above, stored.token if stored else 0) + 1,
        nonce=uuid.uuid4().hex,
        holder=f"process {os.getpid()} on {platform.node()}",
        until=time.time() + seconds,
        seconds=seconds,
    )
    try:
        new_tag = path.write_if(record.model_dump_json().encode(), tag)
    except ConflictError:
        return take_lease(path, seconds, above=above, by_force=by_force)  # another process was faster, so start again
    return Lease(path, record, new_tag)


def _wait_for_change(
    path: StoragePath, stored: LeaseRecord, tag: str | None, max_pause_s: float
) -> tuple[LeaseRecord | None, str | None]:
    """Waits, as `take_lease` describes, until the lease's file no longer has this tag. Returns what `_read` returns."""
    pause_s = min(stored.seconds / 2, max_pause_s)  # long enough, because a holder renews after a third of its lease
    has_expired = stored.until < time.time()
    for _ in range(1 if has_expired else 2):
        logger.info(f"lease     held by {stored}; waiting {pause_s:.0f} s to see whether it is renewed")
        time.sleep(pause_s)
        present, present_tag = _read(path)
        if present_tag != tag:
            break
    return present, present_tag


def _read(path: StoragePath) -> tuple[LeaseRecord | None, str | None]:
    """The stored record and its tag, or (None, None) if there is no file. Raises UserError if the file is invalid."""
    try:
        data, tag = path.read_tagged()
        return LeaseRecord.model_validate_json(data), tag
    except FileNotFoundError:
        return None, None
    except (ValidationError, RecursionError) as error:
        raise UserError(f"{path} is not a lease of raycap; remove it when no retraining is running") from error
