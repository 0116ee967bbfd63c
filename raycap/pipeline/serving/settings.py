"""Settings of a server: its models, its processes, who may send requests, and the limits of requests."""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt

from raycap.pipeline.errors import UserError

TOKEN_VARIABLE = "RAYCAP_SERVE_TOKEN"
MIN_TOKEN = 16  # characters
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
CLUSTER = "a cluster"  # in place of a host, for a server that a cluster starts


class Limits(BaseModel, extra="forbid", frozen=True):
    """Limits of requests.

    body_bytes: bytes of a request's body. image_bytes, pixels: bytes and pixels of one image. images: images per
    request. body_s: seconds in which a body must arrive. answer_s: seconds in which a request must be answered, with
    its waiting time. queue: requests in progress at once. beam_size, num_results: the largest values in a request.
    """

    body_bytes: PositiveInt = 64 * 2**20
    image_bytes: PositiveInt = 16 * 2**20
    pixels: PositiveInt = 40_000_000
    images: PositiveInt = 16
    body_s: PositiveFloat = 30.0
    answer_s: PositiveFloat = 60.0
    queue: PositiveInt = 64
    beam_size: PositiveInt = 10
    num_results: PositiveInt = 10


class ServeArguments(BaseModel, extra="forbid", frozen=True):
    """The models to serve, and how. In a RayService of Kubernetes, these are the `args` of the application.

    models: ADDRESS or NAME=ADDRESS of each model, the default model first. storage: the storage with the champions.
    poll_s: seconds between two looks for a new champion. batch_size: most images per forward pass. replicas: processes
    per model, or the range [least, most]. gpus: GPUs per process. If it is None, 1 if Ray has GPUs, else 0. threads:
    torch's threads per process. loopback_only: true if only this machine can send requests. insecure: true if other
    machines may send requests without a token.
    """

    models: tuple[str, ...] = Field(min_length=1)
    storage: str = "results"
    precision: Literal["float32", "bfloat16"] = "float32"
    poll_s: float = Field(default=30.0, gt=0)
    batch_size: int = Field(default=16, ge=1, le=1024)
    replicas: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    gpus: float | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1)
    loopback_only: bool = False
    insecure: bool = False
    limits: Limits = Limits()

    @property
    def num_captioners(self) -> int:
        """The largest number of captioning processes."""
        most_replicas = self.replicas if isinstance(self.replicas, int) else self.replicas[1]
        return most_replicas * len(self.models)


def server_token(host: str, insecure: bool) -> str | None:
    """The token in the variable RAYCAP_SERVE_TOKEN, or None if the variable is not set.

    host: the host on which the server listens, or CLUSTER. Raises UserError if the token is not valid. Raises UserError
    also if there is no token, other machines can reach the server, and `insecure` is false.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not re.fullmatch(f"[!-~]{{{MIN_TOKEN},}}", token):
        raise UserError(f"{TOKEN_VARIABLE} must have {MIN_TOKEN} or more visible ASCII characters without blanks")
    if token is None and host not in LOOPBACK_HOSTS and not insecure:
        raise UserError(
            f"a server on {host} can be reached by other machines and needs a token in {TOKEN_VARIABLE}; set it, give "
            "--insecure, or use --host 127.0.0.1"
        )
    return token
