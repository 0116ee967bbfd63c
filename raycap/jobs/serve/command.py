"""`raycap serve`: captions over HTTP with Ray Serve, in the foreground."""

from __future__ import annotations

import logging
import os
import socket
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from raycap.jobs.options import Address
from raycap.jobs.serve.arguments import LOOPBACK_HOSTS, ServeArguments, named_models, server_token
from raycap.pipeline.cluster.start import check_address, cluster_address, connect
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.serving.limits import Limits

DEFAULTS = Limits()
PROXY_CALLBACK, LIMIT_HEADS = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "raycap.jobs.serve.proxy:limit_heads"
MIB = 2**20
logger = logging.getLogger(__name__)


def command(
    model: Annotated[
        list[str],
        typer.Option(help="A bundle's folder, s3://... or champion:NAME; with a name: NAME=ADDRESS.", metavar="MODEL"),
    ],
    host: Annotated[str, typer.Option(help="Where the server listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of --host.")] = 8000,
    storage: Annotated[str, typer.Option(help="The folder or s3:// prefix in which champions are.")] = "results",
    endpoint_url: Annotated[str | None, typer.Option(help="Of an S3-compatible server.")] = None,
    poll_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks for a new champion.")] = 30.0,
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Of requests that give none.")
    ] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Most images per forward pass.")] = 16,
    replicas: Annotated[int, typer.Option(min=1, help="Processes per model.")] = 1,
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="GPUs of each process. The default is 1 if Ray has GPUs, else 0.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch's threads of each process.")] = None,
    allow_uri: Annotated[
        list[str] | None,
        typer.Option(help="A folder or s3:// prefix whose images clients may name by URI.", metavar="PREFIX"),
    ] = None,
    allow_attribution: Annotated[
        bool, typer.Option("--allow-attribution", help="Let clients ask for integrated gradients, which take minutes.")
    ] = False,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB per request.")] = DEFAULTS.body_bytes // MIB,
    max_image_mib: Annotated[int, typer.Option(min=1, help="MiB per image.")] = DEFAULTS.image_bytes // MIB,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels per image.")] = DEFAULTS.pixels,
    max_images: Annotated[int, typer.Option(min=1, help="Images per request.")] = DEFAULTS.images,
    max_body_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which a request must arrive.")
    ] = DEFAULTS.body_s,
    max_answer_s: Annotated[float, typer.Option(min=0.1, help="Seconds until an answer.")] = DEFAULTS.answer_s,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that are worked on or wait.")] = DEFAULTS.queue,
    max_beam: Annotated[int, typer.Option(min=1, help="The largest beam of a request.")] = DEFAULTS.beam_size,
    max_results: Annotated[int, typer.Option(min=1, help="Most captions per image.")] = DEFAULTS.num_results,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines ask without a token in RAYCAP_SERVE_TOKEN.")
    ] = False,
    address: Address = None,
) -> int:
    """Serve captions over HTTP.

    The page of the server is at /, and docs/serving.md describes its API. Ctrl-C stops it. Requests need the token of
    the variable RAYCAP_SERVE_TOKEN if it is set.

    Example: raycap serve --model results/models/demo/RUN --model champion:demo
    """
    limits = Limits(
        max_body_mib * MIB, max_image_mib * MIB, max_pixels, max_images, max_body_s, max_answer_s, max_queue, max_beam,
        max_results,
    )  # fmt: skip
    has_token = server_token(host, insecure) is not None
    arguments = _arguments(
        models=tuple(model),
        storage=storage,
        endpoint_url=endpoint_url,
        precision=precision,
        poll_s=poll_s,
        batch_size=batch_size,
        replicas=replicas,
        gpus=gpus_per_replica,
        threads=threads,
        allow_uris=tuple(allow_uri or ()),
        allow_attribution=allow_attribution,
        loopback_only=host in LOOPBACK_HOSTS,
        insecure=insecure,
        limits=limits,
    )
    _serve(arguments, host, port, address, has_token)
    return 1


def _serve(arguments: ServeArguments, host: str, port: int, address: str | None, has_token: bool) -> None:
    """Starts the server and returns when it has ended by itself."""
    check_address(address)
    deployments = _deployments()
    named_models(arguments, send_local=False)  # before Ray is started, so that a mistake is said at once
    if not cluster_address(address):
        require_free(host, port)
    is_local = start_or_join(address, deployments.needed_cpus(arguments))
    if not is_local:
        deployments.require_unused()
    try:
        deployments.start(arguments, host, port, is_local=is_local)
        access = "with the token of RAYCAP_SERVE_TOKEN" if has_token else "without a token"
        logger.info(f"serving    http://{f'[{host}]' if ':' in host else host}:{port} ({access}); Ctrl-C stops it")
        deployments.wait()
    finally:
        deployments.stop(is_local=is_local)
    logger.error("the server has ended; Ray's logs have the reason")


def start_or_join(address: str | None, needed_cpus: int) -> bool:
    """`connect`, so that the proxy of a Ray that is started here has limits. Returns whether one was started."""
    os.environ.setdefault(PROXY_CALLBACK, LIMIT_HEADS)
    return not connect(address, needed_cpus)


def _deployments() -> Any:
    """The module with the deployments. Raises UserError without the packages that it needs."""
    try:
        from raycap.jobs.serve import deployments
    except ModuleNotFoundError as error:
        raise UserError(f"`raycap serve` needs {error.name}; install raycap with the extra `serve`") from error
    return deployments


def _arguments(**values: Any) -> ServeArguments:
    """The arguments. Raises UserError naming the first that does not fit."""
    try:
        return ServeArguments(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))}: {shown(first['msg'])}") from error


def require_free(host: str, port: int) -> None:
    """Raises UserError if this machine cannot listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"--host {shown(host)} --port {port}: {error.strerror}; give another one") from error
