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
from pathlib import Path
from typing import Any

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
from pipeline.version import project_root

logger = logging.getLogger(__name__)


POLL_S = 2.0
LOST_S = 600.0  # how long a cluster may be out of reach before following is given up


def submit(
    command: str,
    config: Path,
    arguments: Sequence[str],
    address: str,
    *,
    env: Sequence[str] = (),
    secrets: Sequence[str] = (),
    with_dependencies: bool = False,
    detach: bool = False,
) -> int:
    """Packs, sends and follows; returns the job's exit code (0 at once with `detach`).

    Everything that can be checked is checked before anything is sent: UserError.
    """
    given, named = variables(env), secret_names(secrets)
    if not config.is_file():
        raise UserError(f"configuration {config} does not exist; give the path of a YAML file")
    check_texts(config, arguments, {*given, *named})
    with _present(named):
        parsed = _parse(command, config, arguments)
    server = JobsServer(address)
    for warning in check_places(parsed):
        logger.warning(f"{warning}")
    _log_versions(server)
    root = project_root()
    job = Submission(command, "", tuple(arguments), given, named, requirements(root) if with_dependencies else ())
    with tempfile.TemporaryDirectory(prefix="raycap-submit-") as scratch:
        own = [Path(place) for place in (parsed.data.root, parsed.storage.uri) if place and "://" not in place]
        files, path = package_files(config, root, own)
        package = pack(files, Path(scratch) / "code.zip")
        job = Submission(command, path, job.arguments, given, named, job.requirements)
        logger.info(f"code      {package.describe()}")
        logger.info("          sent" if server.upload(package) else "          the cluster has it already")
        job_id = _new_id(parsed.name)
        server.submit(job_id, job.entrypoint, job.runtime_env(f"gcs://{package.name}"), job.metadata)
    logger.info(f"job       {job_id}: raycap {command} {path}")
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
    """The cluster's secrets need not be here to check a configuration that names them."""
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
    """Parses `raycap COMMAND CONFIG ARGUMENTS` with the command line itself; returns what --set was given.

    Raises UserError for a command that does not take a configuration or would refuse its options.
    """
    from typer.main import get_command

    from jobs.cli import app

    root: Any = get_command(app)
    fitting = sorted(
        name
        for name, known in root.commands.items()
        if any(parameter.name == "config" and parameter.param_type_name == "argument" for parameter in known.params)
    )
    fitting.remove("submit")
    if command not in fitting:
        raise UserError(f"{command!r} cannot be submitted; one of {', '.join(fitting)} can, and status, logs, stop")
    if "--address" in arguments:
        raise UserError("--address was given twice; the job joins the cluster that it runs on")
    try:
        context = root.commands[command].make_context(command, [str(config), *arguments])
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own, which typer carries under a private name
            raise
        raise UserError(f"raycap {command} refuses these options: {error.format_message()}") from error
    return list(context.params.get("set_") or ())


def refuse_options(command: str, words: Sequence[str], **options: object) -> None:
    """UserError for options that have no meaning with a command, rather than leaving them out silently."""
    found = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if words or found:
        raise UserError(
            f"submit {command} does not take {' '.join([*words, *found])} there; the form is: "
            "raycap submit COMMAND CONFIG|ID --address URL OPTIONS"
        )


def _log_versions(server: JobsServer) -> None:
    here, there = importlib.metadata.version("ray"), server.version()["ray_version"]
    logger.info(f"cluster   {server.address}, Ray {there}")
    if here != there:
        logger.warning(f"this machine has Ray {here}; the job uses the cluster's, which may not fit this code")
    if server.token_sent and server.is_unencrypted:
        logger.warning("the token goes over http, where it can be read on the way; use https or a tunnel")


def _new_id(name: str) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"raycap-{re.sub(r'[^A-Za-z0-9-]', '-', name)}-{now}-{uuid.uuid4().hex[:6]}"


def _log_commands(job_id: str, server: JobsServer) -> None:
    logger.info(f"follow    raycap submit logs {job_id} --address {server.address}")
    logger.info(f"stop      raycap submit stop {job_id} --address {server.address}")


def follow(server: JobsServer, job_id: str, write: Callable[[str], None] | None = None) -> int:
    """Prints a job's log until it is over and returns its exit code; a connection that is cut is made again.

    Ctrl-C asks whether to stop the job; without a terminal it goes on, and what stops it is printed.
    """
    try:
        info = asyncio.run(_Follower(server, job_id, write or _write).run())
    except KeyboardInterrupt:
        return _interrupted(server, job_id)
    return _verdict(job_id, info)


class _Follower:
    """The state of following one job: how much of its log was printed, and since when the cluster is out of reach."""

    def __init__(self, server: JobsServer, job_id: str, write: Callable[[str], None]) -> None:
        self.server, self.job_id, self.write = server, job_id, write
        self.printed = 0  # characters
        self.lost_at: float | None = None
        self.waiting = ""

    async def run(self) -> dict[str, Any]:
        while True:
            try:
                info = await asyncio.to_thread(self.server.job, self.job_id)
                self._back()
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
        """The log's tail begins at the beginning each time: what was printed before is skipped."""
        seen = 0
        async for text in self.server.tail(self.job_id):
            if not text and (await asyncio.to_thread(self.server.job, self.job_id))["status"] in FINAL_STATES:
                text = await asyncio.to_thread(self.server.logs, self.job_id)
                self.write(text[self.printed :])  # the connection is dead: the rest of the log by another way
                self.printed = len(text)
                return
            self._back()
            new = text[max(0, self.printed - seen) :]
            seen += len(text)
            if new:
                self.write(new)
                self.printed = seen

    def _log_pending(self, info: dict[str, Any]) -> None:
        message = " ".join(str(info.get("message") or "waiting for the cluster").split())
        if message != self.waiting:
            logger.info(f"pending   {message}")
            self.waiting = message

    def _lost(self, error: UnreachableError) -> None:
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            logger.warning(f"{error}; the job goes on, trying again")
        elif time.monotonic() - self.lost_at > LOST_S:
            raise UnreachableError(
                f"{error}; given up after {LOST_S / 60:.0f} minutes, the job may go on: "
                f"raycap submit logs {self.job_id} --address {self.server.address} --follow"
            ) from error

    def _back(self) -> None:
        if self.lost_at is not None:
            logger.info("          connected again")
        self.lost_at = None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _verdict(job_id: str, info: dict[str, Any]) -> int:
    """The job's own exit code; 1 for one that has none because it never started or was stopped."""
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
    return code if code > 0 else 128 - code  # killed by a signal, as a shell says it


def _interrupted(server: JobsServer, job_id: str) -> int:
    stop_it = False
    if sys.stdin is not None and sys.stdin.isatty():
        try:
            stop_it = input(f"\nStop the job {job_id} too? [y/N] ").strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            logger.info("")
    if stop_it:
        return stop(job_id, server.address)
    logger.info(f"the job {job_id} goes on")
    _log_commands(job_id, server)
    return 130


def status(job_id: str, address: str) -> int:
    """Says how a job is; 0 unless it failed or was stopped."""
    info = JobsServer(address).job(job_id)
    logger.info(f"{job_id}: {info['status']}")
    if info.get("message"):
        logger.info(str(info["message"]).splitlines()[0])
    begin, end = info.get("start_time"), info.get("end_time")
    if begin:
        logger.info(f"{((end or time.time() * 1000) - begin) / 1000:.0f} s, {info['entrypoint']}")
    return 0 if info["status"] not in ("FAILED", "STOPPED") else _verdict(job_id, info)


def logs(job_id: str, address: str, to_the_end: bool = False) -> int:
    """Prints a job's log: what there is, or all of it until the job is over."""
    server = JobsServer(address)
    server.job(job_id)
    if to_the_end:
        return follow(server, job_id)
    _write(server.logs(job_id))
    return 0


def stop(job_id: str, address: str, patience_s: float = 60.0) -> int:
    """Stops a job and waits until it is over: Ray kills it when it does not end by itself within some seconds."""
    server = JobsServer(address)
    info = server.job(job_id)
    if info["status"] in FINAL_STATES:
        logger.info(f"job       {job_id} was over already: {info['status']}")
        return 0
    server.stop(job_id)
    until = time.monotonic() + patience_s
    while (info := server.job(job_id))["status"] not in FINAL_STATES:
        if time.monotonic() > until:
            raise UnreachableError(f"{job_id} is still {info['status']} after {patience_s:.0f} s; ask again later")
        time.sleep(0.5)
    logger.info(f"job       {job_id} is over: {info['status']}; the same command continues what it did")
    return 0
