"""A job for a cluster: its command, files and environment, checked before anything is sent.

Everyone who reaches the dashboard's API can read a job's entry point, metadata and runtime environment with the values
of its variables. So none of them holds a secret: secrets are passed by name, and the cluster's own environment has
their values (a Kubernetes secret, an instance's role). A job without one of them stops at once and names it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.cluster.packaging import PACKAGE, package_sources, refuse_private_keys
from raycap.pipeline.config.load import read_file, referenced_files
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC
from raycap.pipeline.config.variables import is_secret, texts_in, variable_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import expanded_path
from raycap.pipeline.runtime.secrets import holds_secret, is_secret_name
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import is_file
from raycap.pipeline.version import COMMIT_FILE, commit, package_folder

STOP_WAIT_S = "90"  # Ray waits so long for a stopped job to save a checkpoint; its default is 3 s
OUTSIDE_FOLDER = "submitted"  # the package's folder for files that are outside the code
NO_FILES = {"features.hdf5": (SYNTHETIC,), "backbone.weights": ("none", "pretrained")}  # values that name no file
# In comments: what stands for a secret, and `key=`, which most often is no key of encryption
_PLACEHOLDER = re.compile(
    r"(?<!\w)\w{0,4}(?:\.{3}|…)|\$(?:[A-Z_][A-Z0-9_]*\b|\([^)]*\))|<[^<>]+>|(?<=\bUSER:)PASSWORD\b|(?<=[\s.])key="
)
_PROVIDED_BY_CLUSTER = ("ray",)  # packages of the lock file that a job does not install, because its cluster has them


def entrypoint(command: str, arguments: Sequence[str], secrets: Sequence[str] = ()) -> str:
    """The shell command that runs `raycap COMMAND ARGUMENTS` in the job's folder.

    The shell stops at `: "${NAME:?text}"` with this text if the variable NAME is not set. `exec` replaces the shell, so
    that Ray's signal reaches raycap.
    """
    hint = "is not set on the cluster: give its nodes this variable, for example from a secret"
    checks = [f': "${{{name}:?{hint}}}"' for name in secrets]
    words = ["python", "-m", "raycap", command, *arguments]
    return " && ".join([*checks, f"exec {shlex.join(words)}"])


def runtime_env(folder: Path, env_vars: Mapping[str, str], packages: Sequence[str]) -> dict[str, Any]:
    """Ray's description of the job's environment, without secrets.

    folder: the job's files, which Ray packs and sends. packages: lines for pip.
    """
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S} | dict(env_vars)
    environment: dict[str, Any] = {"working_dir": str(folder), "env_vars": variables}
    if packages:
        # pip rather than uv, because pip reuses packages that the cluster's Python has already
        environment["pip"] = {"packages": list(packages), "pip_check": False}
    return environment


def package_files(
    config: Path | None, package: Path, named: Iterable[str | Path] = ()
) -> tuple[dict[str, Path | bytes], str | None]:
    """The files to send, by their path in the job's folder, and the configuration's path there, if there is one.

    They are the package raycap in the folder `package`, the configuration with the files that it references, and the
    relative paths among `named` that are files here: a job starts in its folder, where they are found too.
    Raises UserError for a file with a private key.
    """
    files: dict[str, Path | bytes] = {**package_sources(package), f"{PACKAGE}/{COMMIT_FILE}": commit().encode()}
    for path in named:
        place = Path(path)
        if not place.is_absolute() and ".." not in place.parts and is_file(place):
            files.setdefault(place.as_posix(), place)
    packed_config = None
    if config is not None:
        configs = [path.resolve() for path in referenced_files(config)]
        packed = {source.resolve(): name for name, source in files.items() if isinstance(source, Path)}
        if not all(path in packed for path in configs):
            above = Path(os.path.commonpath([path.parent for path in configs]))
            for path in configs:
                packed[path] = f"{OUTSIDE_FOLDER}/{path.relative_to(above).as_posix()}"
                files[packed[path]] = path
        packed_config = packed[configs[0]]
    refuse_private_keys(files)
    return files, packed_config


def named_files(config: RunConfig) -> dict[str, str]:
    """The files of words, constraints and score inputs that a configuration names, by key.

    A job brings those with relative paths.
    """
    files = {
        "model.word_vectors": config.model.word_vectors,
        "data.extra_vocabulary": config.data.extra_vocabulary,
        "evaluation.constraints": config.evaluation.constraints,
        **config.evaluation.inputs.files(),
    }
    return {key: file for key, file in files.items() if file is not None}


def variables(given: Sequence[str]) -> dict[str, str]:
    """Parses `NAME` (its value is taken from the environment) and `NAME=VALUE`, for variables that anyone may see.

    Raises UserError for variables that are not set, and for names and values that look like secrets.
    """
    values: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        _check_name(name, "--env")
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
    """Checks names of secrets. Returns each name once. Raises UserError for a name with a value."""
    for text in given:
        if "=" in text:
            raise UserError(f"--secret takes only a name, but {text.partition('=')[0]} has a value; leave it out")
        _check_name(text, "--secret")
    return tuple(dict.fromkeys(given))


def _check_name(name: str, option: str) -> None:
    """Raises UserError for a text that cannot be the name of an environment variable."""
    if not (name.isascii() and name.isidentifier()):
        raise UserError(f"{option} {name!r} is not a variable name; use letters, digits and _")


def used_variables(config: Path) -> list[str]:
    """The names of the `${VARIABLE}`s in a configuration and the files that it references."""
    texts = [str(read_file(path)) for path in referenced_files(config)]
    return variable_names(" ".join(texts))


def check_texts(config: Path | None, arguments: Sequence[str], available: Iterable[str]) -> None:
    """Raises UserError for a secret in what is sent, and for a `${VARIABLE}` that the job would not have.

    available: the names of the variables that the job has.
    """
    texts = list[tuple[str, str]]()
    for argument in arguments:
        # an argument may be KEY=VALUE or --set=KEY=VALUE, whose value is examined as a whole, because a password may
        # contain blanks
        value = argument.partition("=")[2]
        texts += [("an argument", text) for text in (argument, value, value.partition("=")[2])]
    for path in () if config is None else reversed(referenced_files(config)):
        found = list(texts_in(read_file(path)))
        if any(is_secret(*place) for place in found):
            raise _secret_in(str(path))
        _check_lines(path)
        texts += [(str(path), text) for _, text in found]
    for source, text in texts:
        if holds_secret(text):
            raise _secret_in(source)
        for name in variable_names(text):
            if name not in available:
                raise UserError(
                    f"{source} needs the environment variable {name} on the cluster; give --secret {name}, "
                    f"or --env {name} when everyone may see its value"
                )


def _check_lines(path: Path) -> None:
    """Raises UserError for a secret in a comment of a configuration, whose file is sent as it is."""
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        # with its end, because a private key begins with a whole line
        if holds_secret(_PLACEHOLDER.sub("${PLACEHOLDER}", line) + "\n"):
            remedy = "remove it from the comment" if "#" in line else None
            raise _secret_in(f"{path}, line {number},", remedy)


def _secret_in(source: str, remedy: str | None = None) -> UserError:
    return UserError(
        f"{source} contains a password or token, which others could read on the cluster; "
        + (remedy or "write it as ${NAME} and give --secret NAME")
    )


def check_remote(values: Mapping[str, Any]) -> None:
    """Raises UserError for an argument of `raycap caption` that names a local path. values: the arguments by name."""
    named = [("IMAGES", image) for image in values["images"]]
    named += [(f"--{name}", str(values[name])) for name in ("model", "out", "explain") if values[name] is not None]
    for option, value in named:
        if not is_remote(value):
            raise UserError(
                f"{option} {value} is on this machine, whose files a cluster cannot read; give an s3:// URI"
                + (", or leave it out" if option in ("--out", "--explain") else "")
            )


def check_options(values: Mapping[str, Any], packed: Container[str]) -> None:
    """Raises UserError for an option that names a relative path which the job does not bring.

    values: the arguments of a command by name. packed: the files that the job brings.
    """
    names = {"json": "json_file"}
    options = ("data", "features", "constraints", "out", "json")
    named = [(option, values.get(names.get(option, option))) for option in options]
    for option, name in (("model", "models"), ("compare", "compared")):
        named += [(option, bundle) for bundle in values.get(name) or ()]
    for option, value in named:
        if value is None or is_remote(str(value)) or expanded_path(value).is_absolute():
            continue
        if option in ("out", "json") or os.path.normpath(value) not in packed:
            raise UserError(
                f"--{option} {value} is relative to a job's folder, which a cluster removes with the job; give an "
                "s3:// URI where the option takes one, or an absolute path that all nodes have"
            )


def check_data_file(file: Path, files: Mapping[str, Path | bytes]) -> list[str]:
    """Returns a warning for an absolute path that `--data` names, which must exist on every node.

    A shipped file that `--data` names without folder has such a path, too, but the job finds its own one. Raises
    UserError if the job does not bring it. files: what the job brings, as of `package_files`.
    """
    if not file.is_absolute():
        return []
    if not file.is_relative_to(package_folder() / "configs"):
        return [f"--data {file}: every node of the cluster must have the same file"]
    packed = {source.resolve() for source in files.values() if isinstance(source, Path)}
    for path in referenced_files(file):
        if path.resolve() not in packed:
            raise UserError(f"--data {file.stem}: the job lacks {path}, which git does not track; git add it")
    return []


def check_local_paths(config: RunConfig, packed: Container[str] = ()) -> list[str]:
    """Returns a warning for each local path, which must exist on every node. packed: the files that the job brings.

    Raises UserError for a relative path: data are not sent with a job, and its results would be lost with its folder.
    A single file must be on the nodes' disks; s3:// is refused.
    """
    folders = {"storage": config.storage.uri, "data.root": config.data.root, "init_from": config.init_from}
    files = {
        "features.hdf5": config.features.hdf5,
        "backbone.weights": config.backbone.weights,
        **named_files(config),
    }
    warnings = []
    for key, folder in folders.items():
        if folder is None or is_remote(folder):
            continue
        if not Path(folder).expanduser().is_absolute():
            raise UserError(
                f"{key} = {folder} is relative to a job's folder, which a cluster removes with the job; "
                f"give --set {key}=s3://bucket/prefix, or the absolute path of a folder that all nodes share"
            )
        warnings.append(f"{key} = {folder}: every node of the cluster must see the same files in this folder")
    for key, file in files.items():
        if file is None or file in NO_FILES.get(key, ()) or os.path.normpath(file) in packed:
            continue
        if not Path(file).expanduser().is_absolute():  # nor is an s3:// URI, which no reader of these files opens
            raise UserError(
                f"{key} = {file} is no file of a job's nodes; give the absolute path of a file that all nodes have "
                "(in the image, or in a shared folder)"
            )
        warnings.append(f"{key} = {file}: every node of the cluster must have the same file")
    return warnings


def requirements(root: Path) -> tuple[str, ...]:
    """The packages of the lock file without those that the cluster provides. UserError if the file is missing."""
    lock_file = root / "requirements.lock"
    if not lock_file.is_file():
        raise UserError(
            f"--with-dependencies needs {lock_file}, which does not exist; submit from a checkout of raycap"
        )
    lines = [line.strip() for line in lock_file.read_text(encoding="utf-8").splitlines()]
    # a line is NAME==VERSION, NAME[extra]==VERSION or NAME @ URL
    return tuple(line for line in lines if line and re.split(r"[=\[ ]", line)[0] not in _PROVIDED_BY_CLUSTER)
