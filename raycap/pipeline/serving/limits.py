"""What a request may ask for, and the sentence and status of one that is refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

FAILED = "the server failed; its log has the reason"


class Limits(BaseModel):
    """Limits of requests.

    body_bytes: of a request. image_bytes, pixels: of one image. images: per request. body_s: for a client to send its
    request. answer_s: for the captions of a request, waiting included. queue: requests that are worked on or wait.
    beam_size, num_results: the largest that a request may ask for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    body_bytes: PositiveInt = 64 * 2**20
    image_bytes: PositiveInt = 16 * 2**20
    pixels: PositiveInt = 40_000_000
    images: PositiveInt = 16
    body_s: PositiveFloat = 30.0
    answer_s: PositiveFloat = 60.0
    queue: PositiveInt = 64
    beam_size: PositiveInt = 10
    num_results: PositiveInt = 10


class RefusedError(Exception):
    """A request that is refused. status: of HTTP. The message is one sentence, which the client sees.

    retry_after_s: after which the client may try again; None if that would change nothing.
    """

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(status, message, retry_after_s)
        self.status, self.message, self.retry_after_s = status, message, retry_after_s

    def __str__(self) -> str:
        return self.message
