"""A loaded model with what identifies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import ModelSource
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.serving.address import ModelAddress, parse_address, weights_digest
from raycap.pipeline.storage.s3 import StorageOptions


@dataclass(frozen=True)
class LoadedModel:
    """A model that captions images. digest: as `weights_digest`. name: of the bundle. options: of its storage."""

    service: CaptionService
    name: str
    digest: str
    options: StorageOptions = StorageOptions()

    def describe(self) -> dict[str, Any]:
        """What callers may know of the model, as JSON values."""
        service, model = self.service, self.service.bundle.captioner.model
        transform = service.transform
        return {
            "bundle": self.name,
            "digest": self.digest,
            "system": model.config.name,
            "vocabulary_size": model.sizes.vocabulary_size,
            "image_size": transform.image_size,
            "keep_aspect": transform.keep_aspect,
            "crop_share": transform.image_size / transform.scaled_side,
            "device": service.device.type,
            "precision": service.precision,
            "beam_size": service.search.beam_size,
            "max_length": service.search.max_length,
            "has_confidence": service.bundle.confidence(service.search) is not None,
        }


def load_address(model: str, storage: str, endpoint_url: str | None = None, **settings: Any) -> LoadedModel:
    """The model at an address, as `parse_address` reads it. settings: of a `CaptionService`.

    Raises UserError if it is no model that captions images, and for a device that this machine does not have.
    """
    device = settings.get("device")
    if device not in (None, "cpu", "cuda"):
        raise UserError(f"device is {device!r}; expected cpu, cuda, or None for a GPU if there is one")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; give cpu, or check the driver with nvidia-smi")
    address = parse_address(model, storage, StorageOptions(endpoint_url))
    bundle = address.resolve()
    return load_source(bundle, weights_digest(bundle), settings, address)


def load_source(source: ModelSource, digest: str, settings: Mapping[str, Any], address: ModelAddress) -> LoadedModel:
    """The model of a source. address: of the source, for messages. Raises UserError."""
    bundle = source.load()
    if bundle.transform is None:
        raise UserError(
            f"{address.text}: this bundle has no backbone, it captions stored features and not images; give a bundle "
            "of a run with a backbone"
        )
    return LoadedModel(CaptionService(bundle, **settings), bundle.config["name"], digest, address.storage.options)
