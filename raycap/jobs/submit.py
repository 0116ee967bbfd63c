"""`raycap submit`: runs a command as a job on a Ray cluster and prints its log. `ray job` manages the job later.

Everyone who can reach the dashboard's API can read a job's entry point, metadata and variables, so none of these
contains a secret. A job gets only the names of secrets, and the environment of the cluster's nodes has their values,
for example from a Kubernetes secret. A job that lacks a secret stops at once with the secret's name.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import re
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from raycap.jobs.cli import COMMANDS
from raycap.models.config import Values
from raycap.pipeline.cluster.start import check_token_file
from raycap.pipeline.config.load import load_config, read_file, referenced_files, with_data
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC
from raycap.pipeline.config.shipped import is_shipped
from raycap.pipeline.config.variables import is_secret, texts_in, variable_names
from raycap.pipeline.data.formats.files import is_hidden
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runtime.log import unchanged_level
from raycap.pipeline.runtime.names import expanded_path, one_line, shown
from raycap.pipeline.runtime.secrets import holds_secret, is_secret_name
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import is_file, open_regular_file
from raycap.pipeline.version import COMMIT_FILE, commit, package_folder

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

logger = logging.getLogger(__name__)

POLL_S = 2.0
GIVE_UP_AFTER_S = 600.0  # the command ends if the cluster is unreachable for this time
STOP_WAIT_S = "90"  # seconds that Ray gives a stopped job to save a checkpoint; its default is 3
# These variables are removed, because Ray's client prefers them to its argument.
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
CLIENT_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
PACKAGE = "raycap"
SUFFIXES = (".py", ".yaml", ".html", ".jinja", ".typed")  # of the package's files that are sent
MAX_SEARCHED_BYTES = 2**20  # of a named file, in which a secret is looked for
OUTSIDE_FOLDER = "submitted"  # the job's folder for configurations that are not shipped with the package
INPUT_OPTIONS = {
    "images": "IMAGES",
    "model": "--model",
    "models": "--model",
    "constraints": "--constraints",
}
OUTPUT_OPTIONS = {"out": "--out", "explain": "--explain", "json_file": "--json"}
NO_PATHS = ("none", "pretrained", SYNTHETIC)  # values of keys that otherwise name a file


def submit(
    command: str,
    arguments: Sequence[str],
    address: str,
    *,
    environment: Mapping[str, str],
    secrets: Sequence[str],
    detach: bool = False,
    dry_run: bool = False,
) -> int:
    """Sends the code and starts the job `raycap COMMAND ARGUMENTS`. The first argument may name a configuration.

    Prints the job's log and returns its exit code, or 0 at once with `detach`. Raises UserError for every mistake that
    can be found before anything is sent. environment: variables for the job. secrets: names of variables that the
    cluster's nodes have. dry_run: True lists the files that would be sent beside the package, and sends nothing.
    """
    address = dashboard_address(address)
    name, files, config = _read(command, arguments, environment, secrets)
    verb = "would send" if dry_run else "sends     "
    for path in sorted(files):
        logger.info(f"{verb}  {files[path]}")
    if dry_run:
        logger.info(f"{verb}  the package raycap")
        return 0
    job_arguments = arguments if config is None else [config, *arguments[1:]]
    begin = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    # The id is a part of URLs, so it contains only letters, digits and hyphens.
    job_id = f"raycap-{re.sub(r'[^A-Za-z0-9-]', '-', name)}-{begin}-{uuid.uuid4().hex[:6]}"
    title = " ".join([command, *job_arguments[:1]])
    variables_of_job = {"RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S} | dict(environment)
    with tempfile.TemporaryDirectory(prefix="raycap-submit-") as folder:
        pack(Path(folder), files)
        with _jobs_server(address) as client:
            client.submit_job(
                submission_id=job_id,
                entrypoint=entrypoint(command, job_arguments, secrets),
                runtime_env={"working_dir": folder, "env_vars": variables_of_job},
                metadata={"raycap.command": title, "raycap.commit": commit()},
            )
    logger.info(f"job       {job_id}: raycap {title}")
    logger.info(f"follow    ray job logs {job_id} --address {address} --follow")
    logger.info(f"stop      ray job stop {job_id} --address {address}")
    return 0 if detach else follow(client, job_id)  # `_jobs_server` has translated errors and closed nothing


@contextmanager
def _jobs_server(address: str) -> Iterator[JobSubmissionClient]:
    """Yields Ray's client of the jobs server. The client finds the token by itself.

    In the `with` block, a refused request raises UserError, and an unreachable server raises JobFailedError.
    """
    check_token_file()
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # set here, because Ray reads it when it is imported
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
    except OSError as error:  # the package `requests` raises subclasses of OSError
        raise JobFailedError(f"{address} cannot be reached: {one_line(error)}") from error
    except RuntimeError as error:  # raised by the client for other answers
        raise UserError(f"{address} refuses the request, or is no Ray dashboard: {one_line(error)}") from error


def _read(
    command: str, arguments: Sequence[str], environment: Iterable[str], secrets: Sequence[str]
) -> tuple[str, dict[str, Path], str | None]:
    """Reads the arguments and the configuration as the job will. Raises UserError for what the job would refuse.

    Returns a name for the job, the files to send by their path in the job's folder, and the path of the configuration
    in this folder, or None if there is no configuration.
    """
    available = {*environment, *secrets}
    check_texts(None, arguments, available)
    values = parse_arguments(command, arguments)
    path, data = values.get("config"), values.get("data")
    for file in (path, data):
        if file is not None:
            check_texts(file, (), available)
    configs = [] if path is None else _configs(command, path, data, values.get("set_") or (), secrets)
    inputs = _given_paths(values, INPUT_OPTIONS)
    for config in configs:
        inputs += named_paths(config).items()
    extended = list[Path]()
    if data is not None:
        extended = referenced_files(data)
        if not is_shipped(data):
            inputs.append(("--data", data))
    files, packed = job_files(path, [*(given for _, given in inputs), *extended])
    check_paths(inputs, files)
    check_paths(_given_paths(values, OUTPUT_OPTIONS), ())
    return configs[0].name if configs else command, files, packed


def _given_paths(values: Values, options: Mapping[str, str]) -> list[tuple[str, str | Path]]:
    """The paths that the arguments of a command name, each after its option. options: by the names of their values."""
    paths = list[tuple[str, str | Path]]()
    for name, option in options.items():
        given = values.get(name) or ()
        several = [given] if isinstance(given, str | Path) else given
        paths += [(option, path) for path in several]
    return paths


def _configs(
    command: str, path: Path, data: Path | None, overrides: Sequence[str], secrets: Sequence[str]
) -> list[RunConfig]:
    """The configuration of the run or of the search's base, and with `--data` also a copy with that data.

    Secrets that only the cluster has are replaced by a placeholder.
    """
    missing = [name for name in secrets if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "on-the-cluster"))
    try:
        config = load_search(path, overrides).base if command == "tune" else load_config(path, overrides)
        return [config] if data is None else [config, with_data(config, data)]
    finally:
        for name in missing:
            del os.environ[name]


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
    """Checks that a command can be submitted. Typer calls this first, before it reports that arguments are missing."""
    names = sorted(name for name, entry in COMMANDS.items() if entry.can_submit)
    if command not in names:
        raise UserError(f"{shown(command)!r} cannot be submitted; one of {', '.join(names)} can")
    return command


def dashboard_address(address: str) -> str:
    """The dashboard's address with a scheme and without a slash at its end. Raises UserError if it is not one."""
    full = (address if "://" in address else f"http://{address}").rstrip("/")
    if not re.fullmatch(r"https?://([\w.-]+|\[[0-9a-fA-F:.%]+\])(:\d{1,5})?(/[\w./-]*)?", full, re.ASCII):
        raise UserError(
            f"--address {shown(address)} is not a dashboard's address; give the address that Ray's head prints, such "
            "as http://head:8265, and a token as RAY_AUTH_TOKEN, or its file as RAY_AUTH_TOKEN_PATH"
        )
    return full


def entrypoint(command: str, arguments: Sequence[str], secrets: Sequence[str] = ()) -> str:
    """The shell command that runs `raycap COMMAND ARGUMENTS` in the job's folder.

    The shell stops at `: "${NAME:?text}"` with this text if the variable NAME is not set. `exec` replaces the shell, so
    that Ray's signal reaches raycap.
    """
    hint = "is not set on the cluster: give its nodes this variable, for example from a secret"
    checks = [f': "${{{name}:?{hint}}}"' for name in secrets]
    words = ["python", "-m", "raycap", command, *arguments]
    return " && ".join([*checks, f"exec {shlex.join(words)}"])


def job_files(config: Path | None, named: Iterable[str | Path]) -> tuple[dict[str, Path], str | None]:
    """The files to send beside the package, as {path in the job's folder: local file}, and the configuration's path.

    The files are the configuration with the files that it references, unless the package has them, and the files among
    `named` with relative paths. The job starts in its folder, so it finds these files under the same paths. Raises
    UserError for a named file that is hidden, a link to a file that is hidden or outside the working folder, or begins
    with a text that contains a secret.
    """
    paths = (Path(path) for path in named)
    files = {
        path.as_posix(): path for path in paths if not path.is_absolute() and ".." not in path.parts and is_file(path)
    }
    for name, path in files.items():
        target = os.path.relpath(path.resolve())
        if is_hidden(name) or is_hidden(target) or target.startswith(".."):
            raise UserError(
                f"{name} is hidden, or a link to a file that is hidden or outside this folder; give a plain copy"
            )
        with open_regular_file(path) as file:
            data = file.read(MAX_SEARCHED_BYTES)
        if b"\0" not in data and holds_secret(data.decode(errors="replace")):  # weights contain anything
            raise UserError(f"{name} contains a password or token, which others could read on the cluster; remove it")
    if config is None:
        return files, None
    package, configs = package_folder().resolve(), [path.resolve() for path in referenced_files(config)]
    if all(path.is_relative_to(package) for path in configs):
        return files, f"{PACKAGE}/{configs[0].relative_to(package).as_posix()}"
    above = Path(os.path.commonpath([path.parent for path in configs]))
    packed = {path: f"{OUTSIDE_FOLDER}/{path.relative_to(above).as_posix()}" for path in configs}
    return files | {name: path for path, name in packed.items()}, packed[configs[0]]


def pack(folder: Path, files: Mapping[str, Path]) -> None:
    """Fills the folder that Ray packs and sends, with the package's files as in a wheel, and with `files`."""

    def left_out(parent: str, names: Sequence[str]) -> set[str]:
        return {name for name in names if not (name.endswith(SUFFIXES) or Path(parent, name).is_dir())}

    shutil.copytree(package_folder(), folder / PACKAGE, ignore=left_out)
    (folder / PACKAGE / COMMIT_FILE).write_text(commit(), encoding="utf-8")
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def named_paths(config: RunConfig) -> dict[str, str]:
    """{key: path} of the files and folders that a configuration names."""
    paths = {
        "storage": config.storage.uri,
        "data.root": config.data.root,
        "init_from": config.init_from,
        "features.hdf5": config.features.hdf5,
        "backbone.weights": config.backbone.weights,
        "model.word_vectors": config.model.word_vectors,
        "data.extra_vocabulary": config.data.extra_vocabulary,
        "evaluation.constraints": config.evaluation.constraints,
        **config.evaluation.inputs.files(),
    }
    return {key: path for key, path in paths.items() if path is not None}


def check_paths(paths: Iterable[tuple[str, str | Path]], packed: Container[str]) -> None:
    """Raises UserError for a relative path, unless it is among the files that the job brings (`packed`).

    A job's folder has no other files, and what a job writes there is lost. paths: keys or options with their values.
    """
    for key, path in paths:
        is_file_of_job = os.path.normpath(path) in packed
        is_elsewhere = str(path) in NO_PATHS or is_remote(str(path)) or expanded_path(path).is_absolute()
        if not is_file_of_job and not is_elsewhere:
            raise UserError(
                f"{key} = {path} is relative to a job's folder, which a cluster removes with the job; give an s3:// "
                "URI where it takes one, or an absolute path that all nodes have"
            )


def variables(given: Sequence[str]) -> dict[str, str]:
    """Parses the values of `--env`: `NAME=VALUE`, or `NAME` for a variable of this machine.

    Raises UserError for variables that are not set, and for names and values that look like secrets.
    """
    values: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            if name not in os.environ:
                raise UserError(f"--env {name}: this variable is not set here; export it or give --env {name}=VALUE")
            value = os.environ[name]
        if is_secret_name(name) or holds_secret(value):
            raise UserError(
                f"--env {name} looks like a secret, and everyone who sees the dashboard can read its value; "
                f"set the variable on the cluster's nodes and name it with --secret {name}"
            )
        values[name] = value
    return values


def secret_names(given: Sequence[str]) -> tuple[str, ...]:
    """Checks the values of `--secret`, and removes repetitions. Raises UserError unless each is a variable's name."""
    for text in given:
        name, separator, _ = text.partition("=")
        if separator:
            raise UserError(f"--secret takes only a name, but {name} has a value; leave it out")
        if not (name.isascii() and name.isidentifier()):  # because the name becomes a part of a shell command
            raise UserError(f"--secret {name!r} is not a variable name; use letters, digits and _")
    return tuple(dict.fromkeys(given))


def check_texts(config: Path | None, arguments: Sequence[str], available: Container[str]) -> None:
    """Raises UserError if the files or arguments contain a secret, or a `${VARIABLE}` that the job would not have.

    available: the names of the variables that the job has.
    """
    texts = list[tuple[str, str, bool]]()  # a text's source, the text, and True if its key names a secret
    for argument in arguments:
        # The value in KEY=VALUE or --set=KEY=VALUE is also examined alone, because a password may contain blanks.
        value = argument.partition("=")[2]
        texts += [("an argument", text, False) for text in (argument, value, value.partition("=")[2])]
    for path in () if config is None else reversed(referenced_files(config)):
        texts += [(str(path), text, is_secret(key, text)) for key, text in texts_in(read_file(path))]
    for source, text, is_a_secret in texts:
        if is_a_secret or holds_secret(text):
            raise UserError(
                f"{source} contains a password or token, which others could read on the cluster; write it as ${{NAME}} "
                "and give --secret NAME"
            )
        for name in variable_names(text):
            if name not in available:
                raise UserError(
                    f"{source} needs the environment variable {name} on the cluster; give --secret {name}, "
                    f"or --env {name} when everyone may see its value"
                )


def follow(client: JobSubmissionClient, job_id: str) -> int:
    """Prints a job's log until the job ends, and returns the job's exit code.

    If the connection breaks, connects again. After Ctrl-C the job continues, and the result is 130.
    """
    try:
        info = asyncio.run(_print_log(client, job_id))
    except KeyboardInterrupt:
        logger.info(f"the job {job_id} continues")
        return 130
    code, outcome = info.driver_exit_code, info.status.value.lower()
    if outcome != "failed":
        logger.info(f"job       {job_id} {outcome}")
        return 0 if outcome == "succeeded" else 1
    if code is None:
        logger.info(f"job       {job_id} failed: {' '.join((info.message or 'no reason given').split())}")
        return 1
    logger.info(f"job       {job_id} failed with exit code {code}")
    # A job that signal n killed has the code -n. The result is 128 + n, as in a shell.
    return code if code > 0 else 128 - code


async def _print_log(client: JobSubmissionClient, job_id: str) -> JobDetails:
    """Prints a job's log until the job ends, and returns its record.

    Each connection sends the log from its start, so text that was already printed is skipped.
    """
    import aiohttp

    num_printed, logged_reason, unreachable_since = 0, "", None
    while True:
        try:
            info, unreachable_since = client.get_job_info(job_id), None
            if info.status.value == "PENDING":
                reason = " ".join((info.message or "waiting for the cluster").split())
                if reason != logged_reason:
                    logger.info(f"pending   {reason}")
                    logged_reason = reason
            else:
                num_received = 0
                async for text in client.tail_job_logs(job_id):
                    num_known = max(0, num_printed - num_received)  # characters that are printed already
                    print(text[num_known:], end="", flush=True)
                    num_received += len(text)
                    num_printed = max(num_printed, num_received)
                info = client.get_job_info(job_id)
                if info.status.is_terminal():
                    return info
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            if "status code 404" in str(error) and job_id in str(error):  # as Ray words it
                raise JobFailedError(
                    f"the cluster does not have the job {job_id} any more, as after a restart of its head; "
                    "submit it again"
                ) from error
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List this machine's files that the job would get, and send nothing.")
    ] = False,
) -> int:
    """Run a command as a job on a Ray cluster.

    The job's log is printed until it ends, and the exit code is the job's. After Ctrl-C the job continues. Options that
    are not listed here, such as --set, go to the command. Of this machine, a job gets the package, its configuration,
    and files of words and constraints that are named by relative paths: `submit caption` takes images, a model and an
    output on S3. `ray job status`, `ray job logs` and `ray job stop` manage a job. A token comes from RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH.

    Example: raycap submit run demo --address http://head:8265 --set storage=s3://bucket/prefix
    """
    # An option here would be taken for the configuration. `caption` has no configuration, so it may begin with one.
    if argument.startswith("-") and command != "caption":
        raise UserError(f"submit {command} does not take {argument} there; the form is: raycap submit COMMAND CONFIG")
    arguments, environment, secrets = [argument, *context.args], variables(env or ()), secret_names(secret or ())
    return submit(command, arguments, address, environment=environment, secrets=secrets, detach=detach, dry_run=dry_run)
