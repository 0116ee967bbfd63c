"""Addresses of models to serve: a bundle's folder, a bundle on S3, or the champion of a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    ModelSource,
    SentBundle,
    StoredBundle,
    bundle_digests,
    fetched,
    read_bundle_config,
    require_intact,
)
from raycap.pipeline.retrain.champion import ChampionStore
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.serving.settings import ServeArguments
from raycap.pipeline.storage.path import StoragePath, storage_path

CHAMPION = "champion:"  # champion:NAME is the champion of the configuration NAME
NO_BACKBONE = "this bundle has no backbone, so it captions stored features and no images; give one with a backbone"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ModelAddress:
    """The address of a model. text: a folder, s3://... or champion:NAME. storage: the storage with the champions."""

    text: str
    storage: StoragePath

    @property
    def champion(self) -> str | None:
        """NAME if the address is champion:NAME, or None if it is that of a bundle."""
        return self.text.removeprefix(CHAMPION) if self.text.startswith(CHAMPION) else None

    def resolve(self) -> StoredBundle:
        """The bundle that is at the address now.

        Raises UserError if there is no such bundle or champion, and StorageError if the storage does not answer.
        """
        if self.champion is not None:
            return self._bundle_of_champion(self.champion)
        location = storage_path(self.text, self.storage.options)
        if not location.is_remote and not location.path.is_dir():
            raise UserError(f"{self.text}: no such folder; give a model bundle, such as results/models/NAME/RUN")
        location.require_answer()
        return StoredBundle(location)

    def _bundle_of_champion(self, name: str) -> StoredBundle:
        """The bundle of a configuration's champion, with the digests from champion.json."""
        if not _NAME.fullmatch(name):
            raise UserError(f"{shown(self.text)} names no configuration; give champion:NAME, as in retrain/NAME")
        self.storage.require_answer()
        record = ChampionStore(self.storage, name).read().champion
        if record is None:
            raise UserError(f"{self.storage} has no champion of {name}; `raycap retrain` makes one, or give a bundle")
        return StoredBundle(self.storage / record.bundle, record.files)


@dataclass(frozen=True)
class NamedModel:
    """A model and the name by which clients choose the model. source: its bundle when the server started."""

    name: str
    address: ModelAddress
    source: ModelSource

    def sent(self) -> NamedModel:
        """Returns the same model in a form that all nodes of a cluster can load. Ray must have been started.

        A bundle on this machine's disk is put into Ray's object store, because other nodes cannot read this disk. A
        champion stays in its storage, because each process looks there for newer champions.
        """
        source, is_champion = self.source, self.address.champion is not None
        if isinstance(source, SentBundle) or source.location.is_remote or is_champion:
            return self
        return replace(self, source=SentBundle.of(source.location.path))


def named_models(arguments: ServeArguments) -> list[NamedModel]:
    """The models to serve, in order. Raises UserError if a model cannot be served or two have the same name."""
    models = [_named(text, arguments) for text in arguments.models]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--model: two models have the name {name}; give names, as in --model NAME={name}")
    return models


def _named(text: str, arguments: ServeArguments) -> NamedModel:
    """The model of one option --model, ADDRESS or NAME=ADDRESS. Raises UserError if it cannot be served."""
    given, _, place = text.partition("=")
    has_name = place != "" and _NAME.fullmatch(given) is not None
    if not has_name:  # the text is an address, whose path may contain =
        place = text
    address = ModelAddress(place, storage_path(arguments.storage))
    try:
        source = address.resolve()
        folder = fetched(source.location)
        digests = require_intact(folder) or bundle_digests(folder)
        config = read_bundle_config(folder)
    except UserError as error:
        raise UserError(f"--model {error}") from error
    if config.get("backbone") is None:
        raise UserError(f"--model {place}: {NO_BACKBONE}")
    name = given if has_name else address.champion or str(config["name"])
    if not _NAME.fullmatch(name):
        raise UserError(f"--model {place}: the bundle's name {shown(name)} cannot be used; give NAME={place}")
    return NamedModel(name, address, StoredBundle(source.location, source.digests or digests))
