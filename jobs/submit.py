"""`raycap submit`: a command as a job on a Ray cluster, followed to its end; and `status`, `logs`, `stop` of a job."""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from jobs.cli import COMMANDS
from pipeline.cluster.jobs_api import FINAL_STATES, JobsServer, UnreachableError
from pipeline.cluster.packaging import pack
from pipeline.cluster.submission import (
    Submission,
    check_places,
    check_texts,
    package_files,
    requirements,
    secret_names,
    variables,
)
from pipeline.config.load import load_config
from pipeline.config.run import RunConfig
from pipeline.errors import UserError
from pipeline.runtime.log import unchanged_level
from pipeline.version import project_root

logger = logging.getLogger(__name__)

POLL_S = 2.0
LOST_S = 600.0  # how long a cluster may be unreachable before the follower gives up


@dataclass(frozen=True)
class Request:
    """A command line for the cluster, with the variables that the job needs."""

    command: str
    config: Path
    arguments: Sequence[str] = ()
    env: Sequence[str] = ()
    secrets: Sequence[str] = ()
    with_dependencies: bool = False


def submit(request: Request, address: str, *, detach: bool = False) -> int:
    """Packs the code, sends it and follows the job. Returns the job's exit code, or 0 at once with `detach`.

    Raises UserError for every mistake that can be found before anything is sent.
    """
    given, named = variables(request.env), secret_names(request.secrets)
    if not request.config.is_file():
        raise UserError(f"configuration {request.config} does not exist; give the path of a YAML file")
    check_texts(request.config, request.arguments, {*given, *named})
    with _present(named):
        parsed = _parse(request.command, request.config, request.arguments)
    server = JobsServer(address)
    for warning in check_places(parsed):
        logger.warning(warning)
    _log_versions(server)
    root = project_root()
    dependencies = requirements(root) if request.with_dependencies else ()
    with tempfile.TemporaryDirectory(prefix="raycap-submit-") as scratch:
        data_folders = [Path(place) for place in (parsed.data.root, parsed.storage.uri) if place and "://" not in place]
        files, path = package_files(request.config, root, data_folders)
        package = pack(files, Path(scratch) / "code.zip")
        job = Submission(request.command, path, tuple(request.arguments), given, named, dependencies)
        logger.info(f"code      {package.describe()}")
        logger.info("          sent" if server.upload(package) else "          the cluster has it already")
        job_id = _new_id(parsed.name)
        server.submit(job_id, job.entrypoint, job.runtime_env(f"gcs://{package.name}"), job.metadata)
    logger.info(f"job       {job_id}: raycap {request.command} {path}")
    if given:
        logger.info(f"variables {', '.join(given)} (their values can be read on the cluster)")
    if named:
        logger.info(f"secrets   {', '.join(named)} must be in the environment of the cluster's nodes")
    if detach:
        _log_commands(job_id, server)
        return 0
    return follow(server, job_id)


@contextmanager
def _present(names: Sequence[str]) -> Iterator[None]:
    """Sets placeholders for the cluster's secrets, so that a configuration that names them can be checked here."""
    missing = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "on-the-cluster"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _parse(command: str, config: Path, arguments: Sequence[str]) -> RunConfig:
    """The run's configuration as the job will read it; UserError for a command line that the job would refuse."""
    overrides = command_overrides(command, config, arguments)
    if command == "tune":
        from pipeline.search.spec import load_search

        return load_search(config, overrides).base
    return load_config(config, overrides)


def command_overrides(command: str, config: Path, arguments: Sequence[str]) -> list[str]:
    """Parses `raycap COMMAND CONFIG ARGUMENTS` as the job will; returns the values of --set.

    Raises UserError for a command that does not take a configuration or would refuse its options.
    """
    names = sorted(name for name, entry in COMMANDS.items() if entry.can_submit)
    if command not in names:
        raise UserError(f"{command!r} cannot be submitted; one of {', '.join(names)} can, and status, logs, stop")
    if "--address" in arguments:
        raise UserError("--address was given twice; the job joins the cluster that it runs on")
    try:
        with unchanged_level():  # --quiet is for the job, not for this process
            context = COMMANDS[command].load(command).make_context(command, [str(config), *arguments])
    except TyperException as error:
        raise UserError(f"raycap {command} refuses these options: {error.format_message()}") from error
    return list(context.params.get("set_") or ())


def refuse_options(command: str, words: Sequence[str], **options: object) -> None:
    """Raises UserError for options that have no effect on a command."""
    refused = [*words, *(f"--{name.replace('_', '-')}" for name, value in options.items() if value)]
    if refused:
        raise UserError(
            f"submit {command} does not take {' '.join(refused)} there; the form is: "
            "raycap submit COMMAND CONFIG|ID --address URL OPTIONS"
        )


def _log_versions(server: JobsServer) -> None:
    local, remote = importlib.metadata.version("ray"), server.version()["ray_version"]
    logger.info(f"cluster   {server.address}, Ray {remote}")
    if local != remote:
        logger.warning(f"this machine has Ray {local}; the job uses the cluster's, which may not fit this code")
    if server.token_sent and server.is_unencrypted:
        logger.warning("the token is sent over http, where others can read it; use https or a tunnel")


def _new_id(name: str) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"raycap-{re.sub(r'[^A-Za-z0-9-]', '-', name)}-{now}-{uuid.uuid4().hex[:6]}"


def _log_commands(job_id: str, server: JobsServer) -> None:
    logger.info(f"follow    raycap submit logs {job_id} --address {server.address}")
    logger.info(f"stop      raycap submit stop {job_id} --address {server.address}")


def follow(server: JobsServer, job_id: str, write: Callable[[str], None] | None = None) -> int:
    """Prints a job's log until the job ends and returns its exit code. A broken connection is made again.

    Ctrl-C asks whether to stop the job. Without a terminal the job continues, and the command that stops it is printed.
    """
    try:
        info = asyncio.run(_Follower(server, job_id, write or _write).run())
    except KeyboardInterrupt:
        return _interrupted(server, job_id)
    return _verdict(job_id, info)


class _Follower:
    """Follows one job: how much of its log has been printed, and since when the cluster has been unreachable."""

    def __init__(self, server: JobsServer, job_id: str, write: Callable[[str], None]) -> None:
        self.server, self.job_id, self.write = server, job_id, write
        self.printed = 0  # characters
        self.lost_at: float | None = None
        self.waiting = ""

    async def run(self) -> dict[str, Any]:
        while True:
            try:
                info = await asyncio.to_thread(self.server.job, self.job_id)
                self._connected()
                if info["status"] == "PENDING":
                    self._log_pending(info)
                    await asyncio.sleep(POLL_S)
                    continue
                await self._print()
                info = await asyncio.to_thread(self.server.job, self.job_id)
                if info["status"] in FINAL_STATES:
                    return info
            except UnreachableError as error:
                self._lost(error)
            await asyncio.sleep(POLL_S)

    async def _print(self) -> None:
        """Prints the log. Each connection sends it from its beginning, so that the printed part is skipped."""
        received = 0
        async for text in self.server.tail(self.job_id):
            if not text and (await asyncio.to_thread(self.server.job, self.job_id))["status"] in FINAL_STATES:
                text = await asyncio.to_thread(self.server.logs, self.job_id)
                self.write(text[self.printed :])  # the connection is dead, but the job has ended
                self.printed = len(text)
                return
            self._connected()
            new = text[max(0, self.printed - received) :]
            received += len(text)
            if new:
                self.write(new)
                self.printed = received

    def _log_pending(self, info: dict[str, Any]) -> None:
        message = " ".join(str(info.get("message") or "waiting for the cluster").split())
        if message != self.waiting:
            logger.info(f"pending   {message}")
            self.waiting = message

    def _lost(self, error: UnreachableError) -> None:
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            logger.warning(f"{error}; the job continues, trying again")
        elif time.monotonic() - self.lost_at > LOST_S:
            raise UnreachableError(
                f"{error}; given up after {LOST_S / 60:.0f} minutes, the job may still run: "
                f"raycap submit logs {self.job_id} --address {self.server.address} --follow"
            ) from error

    def _connected(self) -> None:
        if self.lost_at is not None:
            logger.info("          connected again")
        self.lost_at = None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _verdict(job_id: str, info: dict[str, Any]) -> int:
    """The job's exit code; 1 for a job that has none because it never started or was stopped."""
    status, code = info["status"], info.get("driver_exit_code")
    if status == "SUCCEEDED":
        logger.info(f"job       {job_id} succeeded")
        return 0
    if status == "STOPPED":
        logger.info(f"job       {job_id} was stopped")
        return 1
    if code is None:
        logger.info(f"job       {job_id} failed: {' '.join(str(info.get('message') or 'no reason given').split())}")
        return 1
    code = int(code)
    logger.info(f"job       {job_id} failed with exit code {code}")
    return code if code > 0 else 128 - code  # killed by a signal: as a shell reports it


def _interrupted(server: JobsServer, job_id: str) -> int:
    stop_it = False
    if sys.stdin is not None and sys.stdin.isatty():
        try:
            stop_it = input(f"\nStop the job {job_id} too? [y/N] ").strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            logger.info("")
    if stop_it:
        return stop(job_id, server.address)
    logger.info(f"the job {job_id} continues")
    _log_commands(job_id, server)
    return 130


def status(job_id: str, address: str) -> int:
    """Prints the state of a job. Returns 0 unless it failed or was stopped."""
    info = JobsServer(address).job(job_id)
    logger.info(f"{job_id}: {info['status']}")
    if info.get("message"):
        logger.info(str(info["message"]).splitlines()[0])
    begin, end = info.get("start_time"), info.get("end_time")
    if begin:
        logger.info(f"{((end or time.time() * 1000) - begin) / 1000:.0f} s, {info['entrypoint']}")
    return 0 if info["status"] not in ("FAILED", "STOPPED") else _verdict(job_id, info)


def logs(job_id: str, address: str, to_the_end: bool = False) -> int:
    """Prints a job's log so far, or until the job ends."""
    server = JobsServer(address)
    server.job(job_id)
    if to_the_end:
        return follow(server, job_id)
    _write(server.logs(job_id))
    return 0


def stop(job_id: str, address: str, patience_s: float = 60.0) -> int:
    """Stops a job and waits for its end. Ray kills a job that does not end by itself within some seconds."""
    server = JobsServer(address)
    info = server.job(job_id)
    if info["status"] in FINAL_STATES:
        logger.info(f"job       {job_id} had ended already: {info['status']}")
        return 0
    server.stop(job_id)
    deadline = time.monotonic() + patience_s
    while (info := server.job(job_id))["status"] not in FINAL_STATES:
        if time.monotonic() > deadline:
            raise UnreachableError(f"{job_id} is still {info['status']} after {patience_s:.0f} s; ask again later")
        time.sleep(0.5)
    logger.info(f"job       {job_id} has ended: {info['status']}; the same command resumes its work")
    return 0


def command(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="A command that takes a CONFIG; or status, logs, stop.")],
    config: Annotated[str, typer.Argument(help="The command's YAML file, or a job's id.", metavar="CONFIG|ID")],
    address: Annotated[str, typer.Option(help="The cluster's dashboard, for example http://head:8265.")],
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for the job. Its value is not secret.")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable that is set on the cluster's nodes.")
    ] = None,
    with_dependencies: Annotated[
        bool, typer.Option("--with-dependencies", help="Install requirements.lock for the job; for development.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the job.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="With logs: print until the job ends.")] = False,
) -> int:
    """Run a command as a job on a Ray cluster.

    The job's log is printed until it ends, and the exit code is the job's. Ctrl-C asks whether to stop the job too.
    Options that are not listed here, such as --set, go to the command. `submit status ID`, `submit logs ID` and
    `submit stop ID` manage a job. A token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.

    Example: raycap submit run configs/demo.yaml --address http://head:8265 --set storage=s3://bucket/prefix
    """
    if command in ("status", "logs", "stop"):
        refuse_options(
            command, context.args, env=env, secret=secret, detach=detach, with_dependencies=with_dependencies
        )
        if command == "logs":
            return logs(config, address, follow)
        return status(config, address) if command == "status" else stop(config, address)
    refuse_options(command, [config] if config.startswith("-") else [], follow=follow)
    request = Request(command, Path(config), context.args, env or (), secret or (), with_dependencies)
    return submit(request, address, detach=detach)
