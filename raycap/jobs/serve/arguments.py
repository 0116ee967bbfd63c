"""The arguments of a server, from the command line or from a RayService, and the models that they name."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    SentBundle,
    StoredBundle,
    bundle_digests,
    fetched,
    read_bundle_config,
    require_intact,
)
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.serving.address import NamedModel, parse_address, split_name, weights_digest
from raycap.pipeline.serving.limits import Limits
from raycap.pipeline.storage.s3 import StorageOptions

TOKEN_VARIABLE = "RAYCAP_SERVE_TOKEN"
MIN_TOKEN = 16  # characters
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServeArguments(BaseModel):
    """What is served and how; a RayService gives the same as `args` of its application.

    models: addresses, also as NAME=ADDRESS; the first is the default. storage: where champions are. poll_s: between
    two looks for a new champion. batch_size: most images per forward pass. replicas: processes per model, or the range
    [least, most]. gpus: of each process; None for one if Ray has GPUs. threads: of torch in each process. insecure:
    whether other machines may ask without a token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = Field(min_length=1)
    storage: str = "results"
    endpoint_url: str | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    poll_s: float = Field(default=30.0, gt=0)
    batch_size: int = Field(default=16, ge=1, le=1024)
    replicas: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    gpus: float | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1)
    allow_uris: tuple[str, ...] = ()
    allow_attribution: bool = False
    loopback_only: bool = False
    insecure: bool = False
    limits: Limits = Limits()

    @property
    def options(self) -> StorageOptions:
        """How S3 is reached."""
        return StorageOptions(self.endpoint_url)


def named_models(arguments: ServeArguments, *, send_local: bool) -> list[NamedModel]:
    """The models in order. Raises UserError for one that cannot be served.

    send_local: send bundles on this machine's disk through Ray, which must have been started, because its other nodes
    cannot read them.
    """
    models = [_named(text, arguments, send_local) for text in arguments.models]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--model: two models have the name {name}; give names, as in --model NAME={name}")
    return models


def _named(text: str, arguments: ServeArguments, send_local: bool) -> NamedModel:
    """The model that a --model option names. Raises UserError."""
    name, place = split_name(text)
    address = parse_address(place, arguments.storage, arguments.options)
    try:
        source = address.resolve()
        folder = fetched(source.location)
        require_intact(folder)
        config = read_bundle_config(folder)
    except UserError as error:
        raise UserError(f"--model {error}") from error
    if config.get("backbone") is None:
        raise UserError(
            f"--model {place}: this bundle has no backbone, it captions stored features and not images; give a bundle "
            "of a run with a backbone"
        )
    name = name or address.champion or str(config["name"])
    if split_name(f"{name}=x")[0] is None:
        raise UserError(f"--model {place}: the bundle's name {shown(name)} cannot be used; give NAME={place}")
    if address.champion is None and not source.digests:
        source = StoredBundle(source.location, bundle_digests(folder))
    sent = SentBundle.of(folder) if send_local and not source.location.is_remote else None
    return NamedModel(name, address, source, weights_digest(source), sent)


def server_token(host: str | None, insecure: bool) -> str | None:
    """The token of RAYCAP_SERVE_TOKEN; None without one.

    host: to which the server is bound; None in a cluster, which other machines reach. Raises UserError for a short
    token, and without one unless only this machine can ask or `insecure` is set.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and (len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        raise UserError(f"{TOKEN_VARIABLE} must have {MIN_TOKEN} or more visible ASCII characters without blanks")
    if token is None and host not in LOOPBACK_HOSTS and not insecure:
        place = "in a cluster" if host is None else f"on {host}"
        raise UserError(
            f"a server {place} can be reached by other machines and needs a token in {TOKEN_VARIABLE}; set it, give "
            "--insecure, or use --host 127.0.0.1"
        )
    return token
