"""The files of a model bundle: copies from S3, digests, and signatures.

digests.json contains the SHA-256 of every other file, so that a damaged file is found when the bundle is loaded.
digests.sig is an Ed25519 signature of digests.json, as `openssl pkeyutl -sign -rawin` makes it. It shows that the
owner of a key wrote the bundle, which digests alone cannot show.

RAYCAP_BUNDLE_KEYS names a PEM file with public keys. Where it is set, only bundles with a signature of one of them are
loaded. RAYCAP_BUNDLE_SIGNING_KEY names a PEM file with the private key by which new bundles are signed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from raycap.pipeline.data.vocabulary import MAX_BYTES as MAX_VOCABULARY_BYTES
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.storage.digests import DIGESTS, digests_in, file_digest, memory_bytes, write_digests
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import CACHE_VARIABLE, Entry, StoragePath, cache_folder
from raycap.pipeline.storage.untrusted.documents import read_regular_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

# The identity of a run that starts from a bundle contains the digests of these files: the weights and the words.
CONTENT_FILES = ("model.safetensors", "vocabulary.json")
REQUIRED_FILES = ("config.yaml", *CONTENT_FILES)
CONFIDENCE = "confidence.json"
DIGESTED_FILES = (*REQUIRED_FILES, "preprocessing.json", "card.md", CONFIDENCE)
SIGNATURE = "digests.sig"
BUNDLE_FILES = (*DIGESTED_FILES, DIGESTS, SIGNATURE)

KEYS_VARIABLE, SIGNING_VARIABLE = "RAYCAP_BUNDLE_KEYS", "RAYCAP_BUNDLE_SIGNING_KEY"
MAX_BYTES = 2**16  # of digests.json, of its signature, of confidence.json and of files of keys
MAX_CONFIG_BYTES = 2**20  # of config.yaml, preprocessing.json and card.md
# The limits with which the files are read. The weights are limited by the machine.
FILE_LIMITS = {
    **dict.fromkeys(("config.yaml", "preprocessing.json", "card.md"), MAX_CONFIG_BYTES),
    "vocabulary.json": MAX_VOCABULARY_BYTES,
    **dict.fromkeys((DIGESTS, SIGNATURE, CONFIDENCE), MAX_BYTES),
}
_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)


def fetched(bundle: StoragePath) -> Path:
    """The local folder of a bundle. For a bundle on S3 it is a local copy, which is brought up to date first.

    Raises UserError, before anything is fetched, for a file that is larger than what would be read, or than the disk.
    """
    if not bundle.is_remote:
        return bundle.path
    copy = cache_folder() / "bundles" / hashlib.sha256(bundle.uri.encode()).hexdigest()[:20]
    Mirror(bundle, copy).pull(only=BUNDLE_FILES, check=lambda files: _check_sizes(bundle, files))
    return copy


def _check_sizes(bundle: StoragePath, files: Mapping[str, Entry]) -> None:
    """Raises UserError if one of the files to fetch is larger than its limit, or all are larger than the free disk."""
    for name, entry in files.items():
        size, limit = entry.size, FILE_LIMITS.get(name, memory_bytes())
        if size > limit:
            kind = "such a file may have" if name in FILE_LIMITS else "this machine has as memory"
            raise UserError(f"{bundle / name} has {size} bytes, more than the {limit} that {kind}; give another bundle")
    size, free = sum(entry.size for entry in files.values()), shutil.disk_usage(cache_folder()).free
    if size > free:
        raise UserError(
            f"{bundle}: {size} bytes are to be copied to {cache_folder()}, more than the {free} that are free there; "
            f"make room, or name a folder on a larger disk by {CACHE_VARIABLE}"
        )


def bundle_digests(folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """{file: sha256} of the named files of a bundle, by default of all. UserError when one of them is missing."""
    # For an empty folder, the error below names a file that every bundle needs.
    names = names or [name for name in BUNDLE_FILES if (folder / name).is_file()] or CONTENT_FILES
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{folder} is not a model bundle: it lacks {missing[0]}; give the folder of a bundle")
    return {name: file_digest(folder / name) for name in names}


def seal(folder: Path) -> None:
    """Writes digests.json for the other files of a bundle, and the signature if there is a key for it."""
    for name in (SIGNATURE, DIGESTS):
        (folder / name).unlink(missing_ok=True)
    write_digests(folder, [name for name in DIGESTED_FILES if (folder / name).is_file()])
    if file := os.environ.get(SIGNING_VARIABLE):
        (folder / SIGNATURE).write_bytes(_sign((folder / DIGESTS).read_bytes(), Path(file)))


def require_sealable(folder: Path) -> None:
    """Raises UserError for a bundle with a signature that `seal` could not replace."""
    if (folder / SIGNATURE).exists() and not os.environ.get(SIGNING_VARIABLE):
        raise UserError(f"{folder} has a signature, which a change would make invalid; set {SIGNING_VARIABLE}")


def require_intact(folder: Path) -> None:
    """Raises UserError if a file differs from digests.json. A bundle of an older version has no digests.json.

    If RAYCAP_BUNDLE_KEYS is set, the bundle must have one, with a signature by one of these keys.
    """
    if keys := os.environ.get(KEYS_VARIABLE):
        _require_signature(folder, Path(keys))
    elif not (folder / DIGESTS).exists():
        return
    recorded = _recorded(folder / DIGESTS)
    remedy = f"restore the bundle, or remove {DIGESTS} if the change is yours"
    for name in DIGESTED_FILES:
        file = folder / name
        if name in recorded and not file.is_file():
            raise UserError(f"{folder} lacks {name}, which is in its {DIGESTS}; {remedy}")
        if file.is_file() and recorded.get(name) != file_digest(file):
            raise UserError(f"{file} does not have the digest in {DIGESTS}: it is damaged or changed; {remedy}")


def _recorded(path: Path) -> dict[str, str]:
    """The digests in digests.json. Raises UserError for other content."""
    try:
        files = digests_in(_read(path), str(path))
    except DamagedError as error:
        raise UserError(f"{error}; restore it") from error
    if not set(REQUIRED_FILES) <= files.keys() <= set(DIGESTED_FILES):
        raise UserError(f"{path} is damaged: it must have the digests of a bundle's files; restore it")
    return files


def _read(path: Path) -> bytes:
    """The content of a small file. Raises UserError if it cannot be read."""
    try:
        return read_regular_file(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _sign(data: bytes, file: Path) -> bytes:
    """The signature of `data` by the private key in a file. Raises UserError if the file has none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    text = _read(file)
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):  # no key, a key with a password, an unknown kind
        key = load_pem_private_key(text, password=None)
        if isinstance(key, Ed25519PrivateKey):
            return key.sign(data)
    raise UserError(f"{SIGNING_VARIABLE}={file} must be a PEM file with an Ed25519 private key without a password")


def _require_signature(folder: Path, file: Path) -> None:
    """Raises UserError unless digests.json has a signature by one of the keys in a file."""
    from cryptography.exceptions import InvalidSignature

    keys = _public_keys(file)
    if missing := [name for name in (DIGESTS, SIGNATURE) if not (folder / name).is_file()]:
        raise UserError(f"{folder} lacks {missing[0]}; {KEYS_VARIABLE} is set, so that a bundle needs a signature")
    data, signature = _read(folder / DIGESTS), _read(folder / SIGNATURE)
    for key in keys:
        with suppress(InvalidSignature):
            key.verify(signature, data)
            return
    raise UserError(f"{folder / SIGNATURE} is no signature of {DIGESTS} by a key of {KEYS_VARIABLE}={file}")


def _public_keys(file: Path) -> list[Ed25519PublicKey]:
    """The keys in a PEM file. Raises UserError unless there is one or more, and all are Ed25519 public keys."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    text, keys = _read(file), list[Ed25519PublicKey]()
    with suppress(ValueError, UnsupportedAlgorithm):
        for block in _PUBLIC_KEY.findall(text):
            key = load_pem_public_key(block)
            if not isinstance(key, Ed25519PublicKey):
                break
            keys.append(key)
        else:
            if keys:
                return keys
    raise UserError(f"{KEYS_VARIABLE}={file} must be a PEM file with Ed25519 public keys")
