"""`raycap submit`: runs a command as a job on a Ray cluster and follows it. `ray job` manages it further."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from raycap.jobs.cli import COMMANDS
from raycap.models.config import Values
from raycap.pipeline.cluster.submission import (
    check_paths,
    check_texts,
    dashboard_address,
    entrypoint,
    job_files,
    named_paths,
    pack,
    secret_names,
    variables,
)
from raycap.pipeline.config.load import load_config, referenced_files, with_data
from raycap.pipeline.config.shipped import is_shipped
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runtime.log import unchanged_level
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.version import commit

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

logger = logging.getLogger(__name__)

POLL_S = 2.0
GIVE_UP_AFTER_S = 600.0  # following a job ends when the cluster was unreachable for this long
STOP_WAIT_S = "90"  # Ray waits so long for a stopped job to save a checkpoint; its default is 3 s
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's client prefers them to its argument
CLIENT_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")


@dataclass(frozen=True)
class Job:
    """A command to run on a cluster: `raycap COMMAND ARGUMENTS`. The first argument may name a configuration.

    variables: environment variables for the command. secrets: names of variables that the cluster's nodes have.
    """

    command: str
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()


def submit(job: Job, address: str, *, detach: bool = False) -> int:
    """Sends the code and follows the job. Returns the job's exit code, or 0 at once with `detach`.

    Raises UserError for every mistake that can be found before anything is sent.
    """
    address = dashboard_address(address)
    name, files, config = _read(job)
    arguments = list(job.arguments) if config is None else [config, *job.arguments[1:]]
    begin = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    # an id is part of a URL
    job_id = f"raycap-{re.sub(r'[^A-Za-z0-9-]', '-', name)}-{begin}-{uuid.uuid4().hex[:6]}"
    title = " ".join([job.command, *arguments[:1]])
    with tempfile.TemporaryDirectory(prefix="raycap-submit-") as folder:
        pack(Path(folder), files)
        with _jobs_server(address) as client:
            client.submit_job(
                submission_id=job_id,
                entrypoint=entrypoint(job.command, arguments, job.secrets),
                runtime_env={
                    "working_dir": folder,
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S} | dict(job.variables),
                },
                metadata={"raycap.command": title, "raycap.commit": commit()},
            )
    logger.info(f"job       {job_id}: raycap {title}")
    logger.info(f"follow    ray job logs {job_id} --address {address} --follow")
    logger.info(f"stop      ray job stop {job_id} --address {address}")
    if job.variables:
        logger.info(f"variables {', '.join(job.variables)} (their values can be read on the cluster)")
    if job.secrets:
        logger.info(f"secrets   {', '.join(job.secrets)} must be in the environment of the cluster's nodes")
    return 0 if detach else follow(client, job_id)


@contextmanager
def _jobs_server(address: str) -> Iterator[JobSubmissionClient]:
    """Ray's client of the jobs server, which sends the token that it finds.

    Inside the `with`, a refused request raises UserError, and an unreachable server raises JobFailedError.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in CLIENT_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield JobSubmissionClient(address)
    except AuthenticationError as error:
        raise UserError(
            f"{address} refuses the token, or asks for one; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file"
        ) from error
    except OSError as error:  # of the package requests, too
        raise JobFailedError(f"{address} cannot be reached: {one_line(error)}") from error
    except RuntimeError as error:  # the client's error for other answers
        raise UserError(f"{address} refuses the request, or is no Ray dashboard: {one_line(error)}") from error


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


def _read(job: Job) -> tuple[str, dict[str, Path], str | None]:
    """Reads the arguments and the configuration as the job will read them. Logs a warning for paths of the nodes.

    Returns a name for the job, its files and its configuration's path among them. Raises UserError for what the job
    would refuse.
    """
    available = {*job.variables, *job.secrets}
    check_texts(None, job.arguments, available)
    values = parse_arguments(job.command, job.arguments)
    path, data = values.get("config"), values.get("data")
    for file in filter(None, (path, data)):
        check_texts(file, (), available)
    configs = []
    if path is not None:
        with _placeholders(job.secrets):
            if job.command == "tune":
                configs.append(load_search(path, list(values["set_"] or ())).base)
            else:
                configs.append(load_config(path, values.get("set_") or ()))
            configs += [] if data is None else [with_data(configs[0], data)]
    paths: list[tuple[str, str | Path | None]] = []
    for config in configs:
        paths += named_paths(config).items()
    paths += [("IMAGES", image) for image in values.get("images") or ()]
    paths += [(f"--{name}", values.get(name)) for name in ("features", "constraints")]
    outputs = [("--out", values.get("out")), ("--explain", values.get("explain")), ("--json", values.get("json_file"))]
    paths += [("--data", data)] if data is not None and not is_shipped(data) else []
    for option, name in (("--model", "model"), ("--model", "models"), ("--compare", "compared")):
        named = values.get(name) or ()
        paths += [(option, bundle) for bundle in ([named] if isinstance(named, str | Path) else named)]
    extended = [] if data is None else referenced_files(data)
    files, packed = job_files(path, [*(str(value) for _, value in paths if value is not None), *extended])
    # a job's folder is removed with the job, and with it what a relative path writes there
    for warning in dict.fromkeys([*check_paths(paths, files), *check_paths(outputs, ())]):
        logger.warning(warning)
    return configs[0].name if configs else job.command, files, packed


def parse_arguments(command: str, arguments: Sequence[str]) -> Values:
    """Parses `raycap COMMAND ARGUMENTS` as the job will parse it. Returns the values by name.

    Raises UserError for a command that cannot be submitted or would refuse its arguments.
    """
    if "--address" in arguments:
        raise UserError("--address was given twice; the job joins the cluster that it runs on")
    try:
        with unchanged_level():  # --quiet is for the job, not for this process
            return dict(COMMANDS[_checked_command(command)].load(command).make_context(command, list(arguments)).params)
    except TyperException as error:
        raise UserError(f"raycap {command} refuses these options: {error.format_message()}") from error


def _checked_command(command: str) -> str:
    """The first argument of `raycap submit`. It is checked before the others are asked for."""
    names = sorted(name for name, entry in COMMANDS.items() if entry.can_submit)
    if command not in names:
        raise UserError(f"{shown(command)!r} cannot be submitted; one of {', '.join(names)} can")
    return command


def follow(client: JobSubmissionClient, job_id: str) -> int:
    """Prints a job's log until the job ends, reconnecting when the connection breaks. Returns the job's exit code.

    After Ctrl-C the job continues.
    """
    try:
        info = asyncio.run(_print_log(client, job_id))
    except KeyboardInterrupt:
        logger.info(f"the job {job_id} continues")
        return 130
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


async def _print_log(client: JobSubmissionClient, job_id: str) -> JobDetails:
    """Follows a job to its end, and returns its record. Each connection sends the log from its beginning."""
    import aiohttp

    num_printed, pending, unreachable_since = 0, "", None
    while True:
        try:
            info, unreachable_since = client.get_job_info(job_id), None
            if info.status.value == "PENDING":
                if pending != (pending := " ".join((info.message or "waiting for the cluster").split())):
                    logger.info(f"pending   {pending}")
            else:
                num_received = 0
                async for text in client.tail_job_logs(job_id):
                    print(text[max(0, num_printed - num_received) :], end="", flush=True)  # without what was printed
                    num_received += len(text)
                    num_printed = max(num_printed, num_received)
                info = client.get_job_info(job_id)
                if info.status.is_terminal():
                    return info
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            if unreachable_since is None:
                unreachable_since = time.monotonic()
                logger.warning(f"the connection was lost ({one_line(error)}); the job continues, trying again")
            elif time.monotonic() - unreachable_since > GIVE_UP_AFTER_S:
                raise JobFailedError(
                    f"the cluster was out of reach for {GIVE_UP_AFTER_S / 60:.0f} minutes; the job {job_id} may still "
                    "run: ray job logs follows it"
                ) from error
        await asyncio.sleep(POLL_S)


def command(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="A command of raycap.", callback=_checked_command, is_eager=True)],
    argument: Annotated[str, typer.Argument(help="The command's YAML file or images.", metavar="CONFIG|IMAGES")],
    address: Annotated[str, typer.Option(help="The cluster's dashboard, for example http://head:8265.")],
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for the job. Its value is not secret.")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable that is set on the cluster's nodes.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the job.")] = False,
) -> int:
    """Run a command as a job on a Ray cluster.

    The job's log is printed until it ends, and the exit code is the job's. After Ctrl-C the job continues. Options that
    are not listed here, such as --set, go to the command. Of this machine, a job gets the package, its configuration,
    and files of words and constraints that are named by relative paths: `submit caption` takes images, a model and an
    output on S3. `ray job status`, `ray job logs` and `ray job stop` manage a job. A token comes from RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH.

    Example: raycap submit run demo --address http://head:8265 --set storage=s3://bucket/prefix
    """
    # The command itself must take its first argument before its options, unless it takes several arguments.
    if argument.startswith("-") and command != "caption":
        raise UserError(f"submit {command} does not take {argument} there; the form is: raycap submit COMMAND CONFIG")
    job = Job(command, [argument, *context.args], variables(env or ()), secret_names(secret or ()))
    return submit(job, address, detach=detach)
