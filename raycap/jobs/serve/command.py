"""`raycap serve`: serves captions over HTTP with Ray Serve, until the command is stopped."""

from __future__ import annotations

import logging
import signal
import socket
from typing import Annotated, Literal

import typer

from raycap.jobs.options import Address
from raycap.pipeline.cluster.start import check_address, cluster_address, connect
from raycap.pipeline.config.load import parse_section
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.runtime.stopping import exit_code, handle_signals
from raycap.pipeline.serving.address import LOOPBACK_HOSTS, ServeArguments, named_models, server_token

logger = logging.getLogger(__name__)


def command(
    model: Annotated[
        list[str],
        typer.Option(help="A bundle's folder, s3://... or champion:NAME; with a name: NAME=ADDRESS.", metavar="MODEL"),
    ],
    host: Annotated[str, typer.Option(help="Where the server listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of --host.")] = 8000,
    storage: Annotated[str, typer.Option(help="The folder or s3:// prefix in which champions are.")] = "results",
    poll_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks for a new champion.")] = 30.0,
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the models.")] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Most images per forward pass.")] = 16,
    replicas: Annotated[int, typer.Option(min=1, help="Processes per model.")] = 1,
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="GPUs of each process. The default is 1 if Ray has GPUs, else 0.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch's threads of each process.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="A limit of requests, such as queue=128; docs/serving.md lists them.", metavar="NAME=VALUE"),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines ask without a token in RAYCAP_SERVE_TOKEN.")
    ] = False,
    address: Address = None,
) -> int:
    """Serve captions over HTTP.

    The page of the server is at /, and docs/serving.md describes its API. Ctrl-C and SIGTERM stop it. Requests need the
    token of the variable RAYCAP_SERVE_TOKEN if it is set.

    Example: raycap serve --model results/models/demo/RUN --model champion:demo
    """
    values = {
        "models": tuple(model), "storage": storage, "precision": precision, "poll_s": poll_s,
        "batch_size": batch_size, "replicas": replicas, "gpus": gpus_per_replica, "threads": threads,
        "loopback_only": host in LOOPBACK_HOSTS, "insecure": insecure,
        "limits": {name: value for name, _, value in (text.partition("=") for text in limit or ())},
    }  # fmt: skip
    arguments = parse_section(ServeArguments, values)
    handle_signals(even_ignored=True)  # scripts start servers in the background and stop them by a signal
    try:
        _serve(arguments, host, port, address)
    except KeyboardInterrupt:
        logger.info("the server has stopped")
        return 0 if exit_code() == 128 + signal.SIGTERM else exit_code()
    return 1


def _serve(arguments: ServeArguments, host: str, port: int, address: str | None) -> None:
    """Starts the server and waits. Returns only if the server fails. Ctrl-C and SIGTERM raise KeyboardInterrupt."""
    has_token = server_token(host, arguments.insecure) is not None
    check_address(address)
    try:
        from raycap.jobs.serve import deployments
    except ModuleNotFoundError as error:
        raise UserError(f"`raycap serve` needs {error.name}; install raycap with the extra `serve`") from error
    models = named_models(arguments)  # finds mistakes before Ray starts, which takes seconds
    if not cluster_address(address):
        require_free(host, port)
    is_local = not connect(address, deployments.needed_cpus(arguments))
    if not is_local:
        deployments.require_unused()
    try:
        deployments.start(arguments, models, host, port, is_local=is_local)
        access = "with the token of RAYCAP_SERVE_TOKEN" if has_token else "without a token"
        place = f"[{host}]" if ":" in host else host  # an IPv6 address
        logger.info(f"serving    http://{place}:{port} ({access}); Ctrl-C stops it")
        deployments.wait(arguments.limits)
    finally:
        if not is_local:  # a local Ray ends with this process
            deployments.stop()
    logger.error("the server has ended; Ray's logs have the reason")


def require_free(host: str, port: int) -> None:
    """Raises UserError if this machine cannot listen on the host and port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"--host {shown(host)} --port {port}: {error.strerror}; give another one") from error
