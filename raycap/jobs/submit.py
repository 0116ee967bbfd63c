"""`raycap submit`: runs a command as a job on a Ray cluster and follows it. It also has `status`, `logs` and `stop`."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.exceptions import TyperException

from raycap.jobs.cli import COMMANDS
from raycap.pipeline.cluster.jobs_api import JobsServer, UnreachableError
from raycap.pipeline.cluster.packaging import stage
from raycap.pipeline.cluster.submission import (
    check_data_file,
    check_local_paths,
    check_options,
    check_remote,
    check_texts,
    entrypoint,
    named_files,
    package_files,
    requirements,
    runtime_env,
    secret_names,
    variables,
)
from raycap.pipeline.config.load import load_config, referenced_files, with_data
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.log import unchanged_level
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.runtime.stopping import handle_signals
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.version import commit, package_folder

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

logger = logging.getLogger(__name__)

JOB_COMMANDS = ("status", "logs", "stop")
POLL_S = 2.0
GIVE_UP_AFTER_S = 600.0  # following a job ends when the cluster was unreachable for this long


@dataclass(frozen=True)
class Job:
    """A command to run on a cluster: `raycap COMMAND ARGUMENTS`. The first argument may name a configuration.

    variables: environment variables for the command. secrets: names of variables that the cluster's nodes have.
    """

    command: str
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()


def submit(job: Job, address: str, *, with_dependencies: bool = False, detach: bool = False) -> int:
    """Sends the code and follows the job. Returns the job's exit code, or 0 at once with `detach`.

    Raises UserError for every mistake that can be found before anything is sent.
    """
    server, job_id = start(job, address, with_dependencies=with_dependencies)
    if detach:
        _log_commands(job_id, server)
        return 0
    return follow(server, job_id)


def start(job: Job, address: str, *, with_dependencies: bool = False) -> tuple[JobsServer, str]:
    """Sends the code and starts the job. Returns the server and the job's id. Raises as `submit`."""
    content = _read(job)
    server = JobsServer(address)
    for warning in content.warnings:
        logger.warning(warning)
    local_ray, cluster_ray = importlib.metadata.version("ray"), server.ray_version
    logger.info(f"cluster   {server.address}, Ray {cluster_ray}")
    if local_ray != cluster_ray:
        logger.warning(f"this machine has Ray {local_ray}; the job uses the cluster's, which may not fit this code")
    dependencies = requirements(package_folder().parent) if with_dependencies else ()
    begin = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9-]", "-", content.name)  # a job's id is part of a URL
    job_id = f"raycap-{name}-{begin}-{uuid.uuid4().hex[:6]}"
    arguments = job.arguments if content.config is None else [content.config, *job.arguments[1:]]
    with tempfile.TemporaryDirectory(prefix="raycap-submit-") as folder:
        logger.info(f"code      {stage(content.files, Path(folder))}")
        server.submit(
            job_id,
            entrypoint(job.command, arguments, job.secrets),
            runtime_env(Path(folder), job.variables, dependencies),
            {"raycap.command": f"{job.command} {arguments[0]}", "raycap.commit": commit()},
        )
    logger.info(f"job       {job_id}: raycap {job.command} {arguments[0]}")
    if job.variables:
        logger.info(f"variables {', '.join(job.variables)} (their values can be read on the cluster)")
    if job.secrets:
        logger.info(f"secrets   {', '.join(job.secrets)} must be in the environment of the cluster's nodes")
    return server, job_id


@contextmanager
def _placeholders(names: Sequence[str]) -> Iterator[None]:
    """Sets missing variables to a placeholder, so that a configuration that uses the cluster's secrets can be read."""
    missing = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "on-the-cluster"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


class _Content(NamedTuple):
    """What a job needs: a name for it, the files to send, its configuration's path among them, and warnings."""

    name: str
    files: Mapping[str, Path | bytes]
    config: str | None = None
    warnings: Sequence[str] = ()


def _read(job: Job) -> _Content:
    """Reads the arguments and the configuration as the job will read them. UserError for what the job would refuse."""
    available = {*job.variables, *job.secrets}
    check_texts(None, job.arguments, available)
    values = parse_arguments(job.command, job.arguments)
    if "config" not in values:
        check_remote(values)
        return _Content(job.command, *package_files(None, package_folder()))
    path: Path = values["config"]
    data: Path | None = values.get("data")
    for file in filter(None, (path, data)):
        check_texts(file, (), available)
    with _placeholders(job.secrets):
        config = _load(job.command, path, values.get("set_") or ())
        configs = [config] if data is None else [config, with_data(config, data)]
    named: list[str | Path] = [file for each in configs for file in named_files(each).values()]
    named += [] if data is None else referenced_files(data)
    named += filter(None, [values.get("constraints")])
    files, packed = package_files(path, package_folder(), named)
    check_options(values, files)
    warnings = dict.fromkeys(warning for each in configs for warning in check_local_paths(each, files))
    warnings |= dict.fromkeys([] if data is None else check_data_file(data, files))
    return _Content(config.name, files, packed, list(warnings))


def _load(command: str, config: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run, or the base of a search."""
    if command == "tune":
        return load_search(config, list(overrides)).base
    return load_config(config, overrides)


def _require_command(command: str) -> None:
    """Raises UserError for a command that cannot be submitted."""
    names = sorted(name for name, entry in COMMANDS.items() if entry.can_submit)
    if command not in names:
        listed = f"one of {', '.join(names)} can, and {', '.join(JOB_COMMANDS)}"
        raise UserError(f"{shown(command)!r} cannot be submitted; {listed}")


def _checked_command(command: str) -> str:
    """The first argument of `raycap submit`. It is checked before the others are asked for."""
    if command not in JOB_COMMANDS:
        _require_command(command)
    return command


def parse_arguments(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Parses `raycap COMMAND ARGUMENTS` as the job will parse it. Returns the values by name.

    Raises UserError for a command that cannot be submitted or would refuse its arguments.
    """
    _require_command(command)
    if "--address" in arguments:
        raise UserError("--address was given twice; the job joins the cluster that it runs on")
    try:
        with unchanged_level():  # --quiet is for the job, not for this process
            return dict(COMMANDS[command].load(command).make_context(command, list(arguments)).params)
    except TyperException as error:
        raise UserError(f"raycap {command} refuses these options: {error.format_message()}") from error


def _log_commands(job_id: str, server: JobsServer) -> None:
    """Logs the commands that follow and stop the job."""
    logger.info(f"follow    raycap submit logs {job_id} --address {server.address}")
    logger.info(f"stop      raycap submit stop {job_id} --address {server.address}")


def follow(server: JobsServer, job_id: str, write: Callable[[str], None] | None = None) -> int:
    """Prints a job's log until the job ends, reconnecting when the connection breaks. Returns the job's exit code.

    Ctrl-C asks whether to stop the job. Without a terminal the job continues, and the command that stops it is printed.
    """
    try:
        info = asyncio.run(_Follower(server, job_id, write or _print_text).run())
    except KeyboardInterrupt:
        handle_signals()  # the command asks a question now, which another Ctrl-C answers
        return _ask_to_stop(server, job_id)
    return _log_end(job_id, info)


class _Follower:
    """Prints the log of one job until the job ends."""

    def __init__(self, server: JobsServer, job_id: str, write: Callable[[str], None]) -> None:
        self.server, self.job_id, self.write = server, job_id, write
        self.num_printed = 0  # the number of characters of the log that were printed
        self.unreachable_since: float | None = None
        self.pending_message = ""  # the last message of Ray about why the job is pending

    async def run(self) -> JobDetails:
        """Follows the job to its end, and returns its record."""
        while True:
            try:
                info = await asyncio.to_thread(self.server.job, self.job_id)
                self._note_connected()
                if info.status.value == "PENDING":
                    message = " ".join((info.message or "waiting for the cluster").split())
                    if message != self.pending_message:
                        logger.info(f"pending   {message}")
                        self.pending_message = message
                else:
                    await self._print_log()
                    info = await asyncio.to_thread(self.server.job, self.job_id)
                    if info.status.is_terminal():
                        return info
            except UnreachableError as error:
                self._note_unreachable(error)
            await asyncio.sleep(POLL_S)

    async def _print_log(self) -> None:
        """Prints the part of the log that is not printed yet. Each connection sends the log from its beginning."""
        num_received = 0
        async for text in self.server.tail(self.job_id):
            if not text and (await asyncio.to_thread(self.server.job, self.job_id)).status.is_terminal():
                text = await asyncio.to_thread(self.server.logs, self.job_id)
                self.write(text[self.num_printed :])  # the connection is dead, but the job has ended
                self.num_printed = len(text)
                return
            self._note_connected()
            new = text[max(0, self.num_printed - num_received) :]  # without what was printed before
            num_received += len(text)
            if new:
                self.write(new)
                self.num_printed = num_received

    def _note_unreachable(self, error: UnreachableError) -> None:
        """Logs the first failure of a series. Raises UnreachableError when the series lasts too long."""
        if self.unreachable_since is None:
            self.unreachable_since = time.monotonic()
            logger.warning(f"{error}; the job continues, trying again")
        elif time.monotonic() - self.unreachable_since > GIVE_UP_AFTER_S:
            raise UnreachableError(
                f"{error}; given up after {GIVE_UP_AFTER_S / 60:.0f} minutes, the job may still run: "
                f"raycap submit logs {self.job_id} --address {self.server.address} --follow"
            ) from error

    def _note_connected(self) -> None:
        if self.unreachable_since is not None:
            logger.info("          connected again")
        self.unreachable_since = None


def _print_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _log_end(job_id: str, info: JobDetails) -> int:
    """Logs how the job ended. Returns its exit code, or 1 if it was stopped or never started."""
    code, status = info.driver_exit_code, info.status.value
    if status == "SUCCEEDED":
        exit_code, outcome = 0, "succeeded"
    elif status == "STOPPED":
        exit_code, outcome = 1, "was stopped"
    elif code is None:
        exit_code, outcome = 1, f"failed: {' '.join((info.message or 'no reason given').split())}"
    else:
        # A job that signal n killed has the code -n. A shell reports this as 128 + n.
        exit_code, outcome = code if code > 0 else 128 - code, f"failed with exit code {code}"
    logger.info(f"job       {job_id} {outcome}")
    return exit_code


def _ask_to_stop(server: JobsServer, job_id: str) -> int:
    """After Ctrl-C, asks on a terminal whether to stop the job. Returns the exit code."""
    answer = ""
    if sys.stdin is not None and sys.stdin.isatty():
        try:
            answer = input(f"\nStop the job {job_id} too? [y/N] ")
        except (KeyboardInterrupt, EOFError):
            logger.info("")
    if answer.strip().lower() in ("y", "yes"):
        return _stop(server, job_id)
    logger.info(f"the job {job_id} continues")
    _log_commands(job_id, server)
    return 130


def _print_status(server: JobsServer, job_id: str) -> int:
    """Prints the state of a job. Returns 0 unless it failed or was stopped."""
    info = server.job(job_id)
    logger.info(f"{job_id}: {info.status.value}")
    if info.message:
        logger.info(info.message.splitlines()[0])
    if info.start_time:  # in milliseconds
        seconds = ((info.end_time or time.time() * 1000) - info.start_time) / 1000
        logger.info(f"{seconds:.0f} s, {info.entrypoint}")
    return _log_end(job_id, info) if info.status.value in ("FAILED", "STOPPED") else 0


def _stop(server: JobsServer, job_id: str, timeout_s: float = 120.0) -> int:
    """Stops a job and waits for its end. Ray kills a job that does not end by itself within STOP_WAIT_S."""
    info = server.job(job_id)
    if info.status.is_terminal():
        logger.info(f"job       {job_id} had ended already: {info.status.value}")
        return 0
    server.stop(job_id)
    deadline = time.monotonic() + timeout_s
    while not (info := server.job(job_id)).status.is_terminal():
        if time.monotonic() > deadline:
            raise UnreachableError(f"{job_id} is still {info.status.value} after {timeout_s:.0f} s; ask again later")
        time.sleep(0.5)
    logger.info(f"job       {job_id} has ended: {info.status.value}; the same command resumes its work")
    return 0


def command(
    context: typer.Context,
    command: Annotated[
        str,
        typer.Argument(help="A command of raycap; or status, logs, stop.", callback=_checked_command, is_eager=True),
    ],
    argument: Annotated[
        str, typer.Argument(help="The command's YAML file or images, or a job's id.", metavar="CONFIG|IMAGES|ID")
    ],
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
    follow_log: Annotated[bool, typer.Option("--follow", help="With logs: print until the job ends.")] = False,
) -> int:
    """Run a command as a job on a Ray cluster.

    The job's log is printed until it ends, and the exit code is the job's. Ctrl-C asks whether to stop the job too.
    Options that are not listed here, such as --set, go to the command. Of this machine, a job gets the package, its
    configuration, and files of words and constraints that are named by relative paths: `submit caption` takes images, a
    model and an output on S3. `submit status ID`, `submit logs ID` and `submit stop ID` manage a job. A token comes
    from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.

    Example: raycap submit run demo --address http://head:8265 --set storage=s3://bucket/prefix
    """
    manages_job = command in JOB_COMMANDS
    if manages_job:
        options = {"--env": env, "--secret": secret, "--detach": detach, "--with-dependencies": with_dependencies}
        refused = [*context.args, *(name for name, value in options.items() if value)]
    else:
        # The command itself must take its first argument before its options, unless it takes several arguments.
        refused = [argument] if argument.startswith("-") and command != "caption" else []
        refused += ["--follow"] if follow_log else []
    if refused:
        raise UserError(
            f"submit {command} does not take {' '.join(refused)} there; the form is: "
            "raycap submit COMMAND CONFIG|ID --address URL OPTIONS"
        )
    if not manages_job:
        job = Job(command, [argument, *context.args], variables(env or ()), secret_names(secret or ()))
        return submit(job, address, with_dependencies=with_dependencies, detach=detach)
    server = JobsServer(address)
    if command == "status":
        return _print_status(server, argument)
    if command == "stop":
        return _stop(server, argument)
    server.job(argument)  # raises UserError if this job does not exist
    if follow_log:
        return follow(server, argument)
    _print_text(server.logs(argument))
    return 0
