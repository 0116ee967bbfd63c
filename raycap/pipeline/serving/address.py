"""What a server serves, who may send requests, and their limits.

A model has an address: a bundle's folder, a bundle on S3, or the champion of a configuration.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    ModelSource,
    SentBundle,
    StoredBundle,
    bundle_digests,
    fetched,
    read_bundle_config,
    require_intact,
)
from raycap.pipeline.retrain.champion import ChampionStore
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.path import StoragePath, storage_path

TOKEN_VARIABLE = "RAYCAP_SERVE_TOKEN"
MIN_TOKEN = 16  # characters
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
CLUSTER = "a cluster"  # in place of a host, for a server that a cluster starts
CHAMPION = "champion:"  # champion:NAME is the champion of the configuration NAME
NO_BACKBONE = "this bundle has no backbone, so it captions stored features and no images; give one with a backbone"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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


@dataclass(frozen=True)
class ModelAddress:
    """The address of a model. text: a folder, s3://... or champion:NAME. storage: the storage with the champions."""

    text: str
    storage: StoragePath

    @property
    def champion(self) -> str | None:
        """NAME if the address is champion:NAME, or None if it is that of a bundle."""
        return self.text.removeprefix(CHAMPION) if self.text.startswith(CHAMPION) else None

    def resolve(self) -> StoredBundle:
        """The bundle that is at the address now.

        Raises UserError if there is no such bundle or champion, and StorageError if the storage does not answer.
        """
        if self.champion is not None:
            return self._bundle_of_champion(self.champion)
        location = storage_path(self.text, self.storage.options)
        if not location.is_remote and not location.path.is_dir():
            raise UserError(f"{self.text}: no such folder; give a model bundle, such as results/models/NAME/RUN")
        location.require_answer()
        return StoredBundle(location)

    def _bundle_of_champion(self, name: str) -> StoredBundle:
        """The bundle of a configuration's champion, with the digests from champion.json."""
        if not _NAME.fullmatch(name):
            raise UserError(f"{shown(self.text)} names no configuration; give champion:NAME, as in retrain/NAME")
        self.storage.require_answer()
        record = ChampionStore(self.storage, name).read().champion
        if record is None:
            raise UserError(f"{self.storage} has no champion of {name}; `raycap retrain` makes one, or give a bundle")
        return StoredBundle(self.storage / record.bundle, record.files)


@dataclass(frozen=True)
class NamedModel:
    """A model and the name by which clients choose the model. source: its bundle when the server started."""

    name: str
    address: ModelAddress
    source: ModelSource

    def sent(self) -> NamedModel:
        """Returns the same model in a form that all nodes of a cluster can load. Ray must have been started.

        A bundle on this machine's disk is put into Ray's object store, because other nodes cannot read this disk. A
        champion stays in its storage, because each process looks there for newer champions.
        """
        source, is_champion = self.source, self.address.champion is not None
        if isinstance(source, SentBundle) or source.location.is_remote or is_champion:
            return self
        return replace(self, source=SentBundle.of(source.location.path))


def named_models(arguments: ServeArguments) -> list[NamedModel]:
    """The models to serve, in order. Raises UserError if a model cannot be served or two have the same name."""
    models = [_named(text, arguments) for text in arguments.models]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--model: two models have the name {name}; give names, as in --model NAME={name}")
    return models


def _named(text: str, arguments: ServeArguments) -> NamedModel:
    """The model of one option --model, ADDRESS or NAME=ADDRESS. Raises UserError if it cannot be served."""
    given, _, place = text.partition("=")
    has_name = place != "" and _NAME.fullmatch(given) is not None
    if not has_name:  # the text is an address, whose path may contain =
        place = text
    address = ModelAddress(place, storage_path(arguments.storage))
    try:
        source = address.resolve()
        folder = fetched(source.location)
        digests = require_intact(folder) or bundle_digests(folder)
        config = read_bundle_config(folder)
    except UserError as error:
        raise UserError(f"--model {error}") from error
    if config.get("backbone") is None:
        raise UserError(f"--model {place}: {NO_BACKBONE}")
    name = given if has_name else address.champion or str(config["name"])
    if not _NAME.fullmatch(name):
        raise UserError(f"--model {place}: the bundle's name {shown(name)} cannot be used; give NAME={place}")
    return NamedModel(name, address, StoredBundle(source.location, source.digests or digests))
