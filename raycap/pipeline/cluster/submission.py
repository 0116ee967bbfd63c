"""A job for a cluster: its command, files and environment, checked before anything is sent.

Everyone who reaches the dashboard's API can read a job's entry point, metadata and runtime environment with the values
of its variables. So none of them holds a secret: secrets are passed by name, and the cluster's own environment has
their values (a Kubernetes secret, an instance's role). A job without one of them stops at once and names it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from raycap.pipeline.config.load import read_file, referenced_files
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC
from raycap.pipeline.config.variables import is_secret, texts_in, variable_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import expanded_path, shown
from raycap.pipeline.runtime.secrets import holds_secret, is_secret_name
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import is_file
from raycap.pipeline.version import COMMIT_FILE, commit, package_folder

PACKAGE = "raycap"
SUFFIXES = (".py", ".yaml", ".html", ".jinja", ".typed")  # of the package's files
OUTSIDE_FOLDER = "submitted"  # the job's folder for configurations that are not shipped with the package
NO_PATHS = ("none", "pretrained", SYNTHETIC)  # values of keys that otherwise name a file


def dashboard_address(address: str) -> str:
    """The address with its scheme and without a slash at its end. Raises UserError for a text that is none."""
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
    """The files to send beside the package, by their path in the job's folder, and the configuration's path there.

    They are the configuration with the files that it references, unless the package has them, and the relative paths
    among `named` that are files here: a job starts in its folder, where they are found too.
    """
    paths = (Path(path) for path in named)
    files = {
        path.as_posix(): path for path in paths if not path.is_absolute() and ".." not in path.parts and is_file(path)
    }
    if config is None:
        return files, None
    package, configs = package_folder().resolve(), [path.resolve() for path in referenced_files(config)]
    if all(path.is_relative_to(package) for path in configs):
        return files, f"{PACKAGE}/{configs[0].relative_to(package).as_posix()}"
    above = Path(os.path.commonpath([path.parent for path in configs]))
    packed = {path: f"{OUTSIDE_FOLDER}/{path.relative_to(above).as_posix()}" for path in configs}
    return files | {name: path for path, name in packed.items()}, packed[configs[0]]


def pack(folder: Path, files: Mapping[str, Path]) -> None:
    """Fills the folder that Ray packs and sends: the package with the files that a wheel has, and `files`."""

    def left_out(parent: str, names: Sequence[str]) -> set[str]:
        return {name for name in names if not (name.endswith(SUFFIXES) or Path(parent, name).is_dir())}

    shutil.copytree(package_folder(), folder / PACKAGE, ignore=left_out)
    (folder / PACKAGE / COMMIT_FILE).write_text(commit(), encoding="utf-8")
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def named_paths(config: RunConfig) -> dict[str, str | None]:
    """The files and folders that a configuration names, by key. A job brings the files with relative paths."""
    return {
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


def check_paths(paths: Iterable[tuple[str, str | Path | None]], packed: Container[str]) -> list[str]:
    """Returns a warning for each absolute local path, which must exist on every node.

    paths: keys or options with their values. packed: the files that the job brings. Raises UserError for another
    relative path: a job's folder has no such file, and results in it would be lost.
    """
    warnings = []
    for key, path in paths:
        if path is None or str(path) in NO_PATHS or is_remote(str(path)) or os.path.normpath(path) in packed:
            continue
        if not expanded_path(path).is_absolute():
            raise UserError(
                f"{key} = {path} is relative to a job's folder, which a cluster removes with the job; give an s3:// "
                "URI where it takes one, or an absolute path that all nodes have"
            )
        warnings.append(f"{key} = {path}: every node of the cluster must see the same files there")
    return warnings


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


def check_texts(config: Path | None, arguments: Sequence[str], available: Container[str]) -> None:
    """Raises UserError for a secret in what is sent, and for a `${VARIABLE}` that the job would not have.

    available: the names of the variables that the job has.
    """
    texts = list[tuple[str, str, bool]]()  # where it is, the text, and whether its key is that of a secret
    for argument in arguments:
        # an argument may be KEY=VALUE or --set=KEY=VALUE, whose value is examined as a whole, because a password may
        # contain blanks
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
