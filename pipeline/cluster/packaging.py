"""The code of this checkout as one archive for a job on a cluster.

The archive leaves out what `.gitignore` and `.rayignore` name, and also data, results, environments, caches, and files
whose names or contents suggest secrets, which a message lists. Equal files give an archive of equal bytes, so that a
cluster receives it only once. Ray's own packaging (`working_dir` of a runtime environment) has no such list, and its
parts are not public.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pathspec import GitIgnoreSpec

from raycap.pipeline.errors import UserError
from raycap.pipeline.untrusted.names import printable

LIMIT_BYTES = 100 * 2**20  # the largest request of Ray's jobs server (ray 2.60, DASHBOARD_CLIENT_MAX_SIZE)
NUM_NAMED_FILES = 5  # messages name this many of the largest files
IGNORE_FILES = (".gitignore", ".rayignore")
ALWAYS_LEFT_OUT = (  # patterns of .gitignore: files of tools, data and results
    *(".git", ".hg", ".venv", "venv/", "__pycache__", "*.py[co]", "*.egg-info", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".cache", ".DS_Store"),
    *("/data/", "/results/", "/mlruns/", "/build/", "/dist/", "mlflow.db"),
)
MAY_BE_SECRET = (  # patterns of .gitignore, for lower-case paths
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.ppk", "*.jks"),
    *("*.keystore", "*.kdbx", "*.asc", "*.gpg", "*.age", ".ssh/", ".gnupg/", ".password-store/", ".vault*"),
    *(".env", ".env.*", "*.env", ".envrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials"),
    *(".npmrc", ".yarnrc*", ".pypirc", "pip.conf", "**/.gem/credentials", "**/.cargo/credentials*", ".databrickscfg"),
    *(".aws/", ".s3cfg", ".boto", ".azure/", "**/.config/gcloud/", ".kube/"),
    *("*.kubeconfig", ".docker/", ".dockercfg", "auth_token", "credentials", "credentials.ini"),
    *("*credentials*.json", "client_secret*.json", "service-account*.json", "service_account*.json", ".secrets/"),
    *("*secret*.json", "*secret*.y*ml", "*secret*.toml", "*secret*.txt", "*.tfstate", "*.tfstate.*", "*.tfvars"),
    *("*token*.txt", ".huggingface/", "*password*.txt", "*api_key*.txt", "*.key.*"),
    *("auth.json", "kaggle.json", "rclone.conf", "**/gh/hosts.yml", ".env~", "*.pem.*", "*.env.*", "*credentials*.*.*"),
    *("token.json", "oauth*.json", "rootkey.csv", "*accesskeys.csv", "*credentials.csv"),
    *("*credentials.y*ml", "*credentials.toml", "*credentials.txt", "aws_credentials", "*deploy_key"),
    *("ssh_host_*_key", "signing[_-]key", "*ed25519*", "*.der", ".dockerconfigjson", ".netrc*", "kubeconfig*"),
    *("*kubeconfig*.y*ml", "kube.config", "admin.conf", ".*_history", ".gitconfig", "**/.m2/settings.xml", "*.pkcs12"),
    *("gradle.properties", "*sa-key.json", "*gcp-key.json", "secrets", "secrets.*", "passwd"),
    *("passwords.*", "apikey*", "api-key*", "*.pat", "cookies.txt", ".token", "pass.txt"),
    *("dockerconfig.json", ".smbcredentials", ".passwd-s3fs"),
)
FILE_MAY_BE_SECRET = ("token", "*_token", "*-token", "secret", "*_rsa", "*_pat")  # names of files, but not of folders
NAMES_OF_CODE = (".py", ".md")  # never left out by name, because `secrets.py` is code that reads secrets
# A private key in a file of any name: in lines, or in a text of JSON
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\n)+[\w+/=:,\s-]{20}")
MAX_KEY_BYTES = 2**16  # larger files are not searched for a private key
logger = logging.getLogger(__name__)


def find_files(root: Path, left_out: Iterable[Path] = ()) -> dict[str, Path]:
    """Files below `root` that belong into a package, by their path in it, without the folders and files `left_out`.

    Links are followed only to files inside `root`, so that a package holds nothing from outside. Logs which files were
    left out because they may hold secrets.
    """
    root = root.resolve()
    skipped = {path.resolve() for path in left_out}
    paths = _walk(root, root, [(root, GitIgnoreSpec.from_lines(ALWAYS_LEFT_OUT))], skipped)
    found = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    specs = GitIgnoreSpec.from_lines(MAY_BE_SECRET), GitIgnoreSpec.from_lines(FILE_MAY_BE_SECRET)
    targets = {name: path.resolve().relative_to(root).as_posix() for name, path in found.items()}  # of links
    may_be_secret = [
        name
        for name, path in found.items()
        if _suggests_secret(name, *specs) or _suggests_secret(targets[name], *specs) or _holds_private_key(path)
    ]
    if may_be_secret:
        logger.info(f"left out  {', '.join(map(printable, may_be_secret))}: the names or contents suggest secrets")
    return {name: path for name, path in found.items() if name not in may_be_secret}


def _suggests_secret(name: str, paths: GitIgnoreSpec, files: GitIgnoreSpec) -> bool:
    """Whether the path of a file that is not code matches `paths` in lower case, or its last part `files`."""
    lower = name.lower()
    return not lower.endswith(NAMES_OF_CODE) and (paths.match_file(lower) or files.match_file(lower.rpartition("/")[2]))


def _holds_private_key(path: Path) -> bool:
    return path.stat().st_size < MAX_KEY_BYTES and _PRIVATE_KEY.search(path.read_bytes()) is not None


def _walk(folder: Path, root: Path, specs: list[tuple[Path, GitIgnoreSpec]], skipped: set[Path]) -> Iterator[Path]:
    """Yields the files below `folder` that belong into a package of `root`.

    specs: for each folder above with an ignore file, the folder and the file's patterns, which are relative to it.
    """
    specs = specs + [(folder, _spec(folder / name)) for name in IGNORE_FILES if (folder / name).is_file()]
    for path in folder.iterdir():
        is_folder = path.is_dir() and not path.is_symlink()
        names = ((spec, path.relative_to(base).as_posix() + ("/" if is_folder else "")) for base, spec in specs)
        if path.resolve() in skipped or any(spec.match_file(name) for spec, name in names):
            continue
        if is_folder:
            yield from _walk(path, root, specs, skipped)
        elif path.is_file() and path.resolve().is_relative_to(root):
            yield path


def _spec(path: Path) -> GitIgnoreSpec:
    """The patterns of an ignore file. Raises UserError for a line that is no pattern."""
    try:
        return GitIgnoreSpec.from_lines(path.read_text("utf-8", errors="surrogateescape").splitlines())
    except ValueError as error:
        raise UserError(f"{path} has a line that is no pattern ({printable(str(error))}); correct it") from error


def pack(files: Mapping[str, Path | bytes], target: Path, limit: int = LIMIT_BYTES) -> tuple[str, str]:
    """Writes the archive `target` of files or contents by their path in it.

    Returns its name in Ray's package store, where equal files have equal names, and a line about its content. Raises
    UserError naming the largest files as soon as the archive exceeds `limit` bytes.
    """
    sizes = {name: len(value) if isinstance(value, bytes) else value.stat().st_size for name, value in files.items()}
    by_size = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{name} ({mebibytes(size)})" for name, size in by_size[:NUM_NAMED_FILES])
    num_files, content = f"{len(files)} files", mebibytes(sum(sizes.values()))
    with target.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(files):
                _add(archive, name, files[name])
                if file.tell() > limit:
                    break
        packed_size = file.tell()
    if packed_size > limit:
        raise UserError(
            f"the code to send ({num_files}, {content}) packs to more than the {mebibytes(limit)} that Ray's jobs "
            f"server accepts; list in .rayignore what a job does not need; the largest files: {largest}"
        )
    digest = hashlib.sha1(target.read_bytes()).hexdigest()
    summary = f"{num_files}, {content}, {mebibytes(packed_size)} packed; the largest: {largest}"
    return f"_ray_pkg_{digest}.zip", summary


def _add(archive: zipfile.ZipFile, name: str, value: Path | bytes) -> None:
    """Adds one file. It gets the fixed time of ZipInfo, because its own would change the archive's digest."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    is_executable = isinstance(value, Path) and os.access(value, os.X_OK)
    info.external_attr = (0o755 if is_executable else 0o644) << 16  # the upper two bytes are the Unix mode
    with (
        archive.open(info, "w") as target,
        value.open("rb") if isinstance(value, Path) else io.BytesIO(value) as source,
    ):
        shutil.copyfileobj(source, target)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:.0f} KiB"
