"""What a request may ask for, and the sentence and status of one that is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields

from raycap.pipeline.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Limits of requests. Raises UserError unless all are above 0.

    body_bytes: of a request. image_bytes, pixels: of one image. images: per request. body_s: for a client to send its
    request. answer_s: for the captions of a request, waiting included. queue: requests that are worked on or wait.
    beam_size, num_results: the largest that a request may ask for.
    """

    body_bytes: int = 64 * 2**20
    image_bytes: int = 16 * 2**20
    pixels: int = 40_000_000
    images: int = 16
    body_s: float = 30.0
    answer_s: float = 60.0
    queue: int = 64
    beam_size: int = 10
    num_results: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise UserError(f"the limit {field.name} is {value}; expected a number above 0")


class RefusedError(Exception):
    """A request that is refused. status: of HTTP. The message is one sentence, which the client sees.

    retry_after_s: after which the client may try again; None if that would change nothing.
    """

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s

    def __reduce__(self) -> tuple[type, tuple[int, str, int | None]]:
        return RefusedError, (self.status, str(self), self.retry_after_s)
