"""Where a model to be served is: a bundle's folder, a bundle on S3, or the champion of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import SentBundle, StoredBundle, bundle_digests, fetched
from raycap.pipeline.retrain.champion import ChampionStore
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions

CHAMPION = "champion:"  # champion:NAME is the champion of the configuration NAME
WEIGHTS = "model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ModelAddress:
    """A model that a caller names. text: a folder, s3://..., or champion:NAME, whose champion is in `storage`."""

    text: str
    storage: StoragePath

    @property
    def champion(self) -> str | None:
        """The name of the configuration whose champion it is; None for a bundle."""
        return self.text.removeprefix(CHAMPION) if self.text.startswith(CHAMPION) else None

    def resolve(self) -> StoredBundle:
        """The bundle that the address means now, with the digests of a champion's files.

        Raises UserError if there is no such bundle or champion, and StorageError if the storage does not answer.
        """
        name = self.champion
        if name is None:
            location = storage_path(self.text, self.storage.options)
            if not location.is_remote and not location.path.is_dir():
                found = "a file; give its folder" if location.path.is_file() else "no such folder; give a model bundle"
                raise UserError(f"{self.text}: {found}, such as results/models/NAME/RUN")
            location.require_answer()
            return StoredBundle(location)
        if not _NAME.fullmatch(name):
            raise UserError(f"{shown(self.text)} names no configuration; give champion:NAME, as in retrain/NAME")
        self.storage.require_answer()
        record = ChampionStore(self.storage, name).read().champion
        if record is None:
            raise UserError(f"{self.storage} has no champion of {name}; `raycap retrain` makes one, or give a bundle")
        return StoredBundle(self.storage / record.bundle, record.files)


@dataclass(frozen=True)
class NamedModel:
    """A model with the name by which clients choose it.

    source: its bundle when the server started. digest: as `weights_digest`. sent: the same bundle in Ray's object
    store, for one on a disk that other nodes cannot read.
    """

    name: str
    address: ModelAddress
    source: StoredBundle
    digest: str
    sent: SentBundle | None = None


def parse_address(text: str, storage: str, options: StorageOptions = StorageOptions()) -> ModelAddress:
    """The address of a model. storage: the folder or prefix in which champions are looked up."""
    return ModelAddress(text, storage_path(storage, options))


def split_name(text: str) -> tuple[str | None, str]:
    """NAME and the address of NAME=ADDRESS; None for an address without a name. Raises UserError for a bad name.

    An address that contains = is a path if what is before it is no name, such as /data/a=b.
    """
    name, separator, rest = text.partition("=")
    if not separator or "/" in name or name.startswith(CHAMPION):
        return None, text
    if not _NAME.fullmatch(name) or not rest:
        raise UserError(
            f"--model {shown(text)}: {shown(name)} is no name; use up to 64 letters, digits, dots, - and _, and an "
            "address after the ="
        )
    return name, rest


def weights_digest(bundle: StoredBundle) -> str:
    """The digest of a bundle's weights as answers and lines of `raycap caption --out` show it: 16 hex digits.

    A bundle on S3 is copied to this machine.
    """
    recorded: Mapping[str, str] = bundle.digests
    digest = recorded.get(WEIGHTS) or bundle_digests(fetched(bundle.location), (WEIGHTS,))[WEIGHTS]
    return digest[:16]
