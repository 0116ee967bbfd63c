"""Clients that ask a server of `raycap serve` without pause, retry until they have an answer, and check it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

from tests.support.serving import is_right

RETRIED = (429, 503)
PROXY_FAILED = "500 by the proxy"  # answers in plain text after the ingress has died, which clients retry as well
PATIENCE_S = 300.0  # for one request, with all its retries
TIMEOUT_S = 90.0  # of one try; the server promises an answer or a refusal earlier


@dataclass(frozen=True)
class Answered:
    """A request with its answer. begin, end: values of time.monotonic. refusals: of the tries before the answer."""

    client: int
    begin: float
    end: float
    model: str
    digest: str
    refusals: tuple[str, ...]


@dataclass
class Clients:
    """Threads that ask for captions of one to three images. captions: of `captions_by_digest`.

    `errors` has answers with wrong captions, statuses that no client should get, and requests that were never answered.
    """

    url: str
    captions: Mapping[str, Mapping[str, Any]]
    models: Sequence[str]
    count: int = 8
    answered: list[Answered] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> Clients:
        self.names = list(next(iter(self.captions.values())))
        self.files = {name: Path(name).read_bytes() for name in self.names}
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.count)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _ask(self, client: int) -> None:
        rng = random.Random(client)
        pool = urllib3.PoolManager(maxsize=1)
        while not self.over.is_set():
            names, model = rng.sample(self.names, rng.randint(1, 3)), rng.choice(self.models)
            fields: list[tuple[str, Any]] = [("images", ("a.png", self.files[name])) for name in names]
            body, kind = urllib3.encode_multipart_formdata([*fields, ("model", model)])
            begin, refusals = time.monotonic(), list[str]()
            while True:
                try:
                    answer = pool.request(
                        "POST",
                        f"{self.url}/caption",
                        body=body,
                        headers={"content-type": kind},
                        retries=False,
                        timeout=TIMEOUT_S,
                    )
                    status = str(answer.status)
                    if status == "500" and answer.headers.get("content-type") != "application/json":
                        status = PROXY_FAILED
                except urllib3.exceptions.HTTPError as error:
                    status = type(error).__name__
                if status == "200":
                    parsed = json.loads(answer.data)
                    if not is_right(parsed, names, self.captions):
                        self.errors.append(f"wrong captions: {parsed}")
                    digest = parsed["model"]["digest"]
                    self.answered.append(Answered(client, begin, time.monotonic(), model, digest, tuple(refusals)))
                    break
                refusals.append(status)
                if status.isdecimal() and int(status) not in RETRIED:
                    self.errors.append(f"status {status}: {answer.data[:200]!r}")
                if time.monotonic() > begin + PATIENCE_S:
                    self.errors.append(f"no answer within {PATIENCE_S:g} s: {Counter(refusals)}")
                    break
                time.sleep(rng.uniform(0.2, 0.6))

    def wait_until(self, is_reached: Callable[[], bool], what: str, deadline_s: float = 240.0) -> None:
        """Waits until something has happened, as long as the clients see no error."""
        deadline = time.monotonic() + deadline_s
        while not is_reached():
            assert not self.errors, self.errors[:3]
            assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
            time.sleep(0.2)

    def settle(self, model: str = "", digest: str = "") -> None:
        """Waits until each client has answers to four more requests of which no try was refused.

        digest: of the weights that must have made the last 20 answers of `model`.
        """
        begin = time.monotonic()

        def is_settled() -> bool:
            calm = [each for each in list(self.answered) if each.begin >= begin and not each.refusals]
            counts = Counter(each.client for each in calm)
            digests = [each.digest for each in calm if each.model == model][-20:]
            return min(counts[client] for client in range(self.count)) >= 4 and (not model or digests == [digest] * 20)

        self.wait_until(is_settled, f"calm answers of {model or 'all models'} {digest}")
