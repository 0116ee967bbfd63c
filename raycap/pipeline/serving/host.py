"""The model in a captioning process: how it is loaded, batches of requests, and its replacement by a new champion."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raycap.models.config import Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import ModelSource, StoredBundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.results import ImageCaption
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.serving.address import ModelAddress, parse_address, weights_digest
from raycap.pipeline.serving.limits import FAILED, RefusedError
from raycap.pipeline.serving.served_models import (
    Answer,
    ExplainJob,
    ImageJob,
    Made,
    Search,
    StaleTransform,
    transform_key,
)
from raycap.pipeline.storage.s3 import StorageOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model that captions images. digest: as `weights_digest`. name: of the bundle. options: of its storage."""

    service: CaptionService
    name: str
    digest: str
    options: StorageOptions = StorageOptions()

    def describe(self) -> Values:
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


def load_address(model: str, storage: str, endpoint_url: str | None = None, **settings: object) -> LoadedModel:
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


class ModelHost:
    """Captions batches with a model that can be replaced between two batches."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._warm(loaded.service)
        self._current = loaded

    @property
    def current(self) -> LoadedModel:
        """The model that captions now."""
        return self._current

    def replace(self, loaded: LoadedModel) -> None:
        """Warms another model up, and lets it take over. The batch that is being captioned keeps the old one."""
        self._warm(loaded.service)
        self._current = loaded

    def describe(self) -> tuple[Values, ImageTransform]:
        """The description of the current model, and its transform."""
        current = self._current
        return current.describe(), current.service.transform

    def caption(self, jobs: Sequence[ImageJob]) -> list[Answer]:
        """The captions of each image, by one model. Images with equal searches share a forward pass."""
        current = self._current
        key = transform_key(current.service.transform)
        answers: list[Answer] = [StaleTransform(current.service.transform)] * len(jobs)
        groups: dict[Search, list[int]] = {}
        for index, job in enumerate(jobs):
            if job.transform_key == key:
                groups.setdefault(job.search, []).append(index)
        for search, indices in groups.items():
            made = self._answers(current, [jobs[index].pixels for index in indices], search)
            for index, answer in zip(indices, made, strict=True):
                answers[index] = answer
        return answers

    def explain(self, job: ExplainJob) -> Answer:
        """Where the model looks for each word of a caption of one image."""
        current = self._current
        service = current.service
        if job.transform_key != transform_key(service.transform):
            return StaleTransform(service.transform)
        pixels = _normalized(service, [job.pixels])
        caption = job.caption
        if caption is None:
            caption = service.caption(pixels)[0].caption or ""
        try:
            explanation = service.explain(pixels[0], caption, job.head, job.attribution)
        except UserError as error:
            return RefusedError(422, one_line(error))
        return Made(explanation, current.name, current.digest)

    @staticmethod
    def _answers(current: LoadedModel, pixels: Sequence[np.ndarray], search: Search) -> list[Answer]:
        """The answers to the images (H, W, 3) of one forward pass. A failure is not one of the rest of the batch."""
        try:
            found = _captions(current.service, pixels, search)
        except UserError as error:
            return [RefusedError(422, one_line(error))] * len(pixels)
        except Exception as error:  # such as a search that needs more memory than the device has
            logger.exception(f"{len(pixels)} images were not captioned: {without_secrets(one_line(error))}")
            return [RefusedError(500, FAILED)] * len(pixels)
        return [Made(result, current.name, current.digest, len(pixels), place) for place, result in enumerate(found)]

    @staticmethod
    def _warm(service: CaptionService) -> None:
        """Captions a black image, so that the first request does not wait for what happens once."""
        side = service.transform.image_size
        _captions(service, [np.zeros((side, side, 3), np.uint8)], Search())


def _captions(service: CaptionService, pixels: Sequence[np.ndarray], search: Search) -> list[ImageCaption]:
    """The captions of images (H, W, 3) uint8. When the GPU's memory runs out, half of them are captioned at a time.

    Raises UserError for a search that the model does not take.
    """
    given = {"beam_size": search.beam_size, "max_length": search.max_length}
    changes = {key: value for key, value in given.items() if value is not None}
    settings = service.changed_search(changes, search.num_results)
    try:
        return service.caption(_normalized(service, pixels), settings, search.precision)
    except torch.OutOfMemoryError:
        if len(pixels) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(pixels) // 2
    return [*_captions(service, pixels[:half], search), *_captions(service, pixels[half:], search)]


def _normalized(service: CaptionService, pixels: Sequence[np.ndarray]) -> torch.Tensor:
    """(B, 3, H, W), on the service's device."""
    stacked = torch.from_numpy(np.stack(pixels)).to(service.device)
    return service.transform.normalize(stacked).contiguous()


class ChampionWatcher:
    """Looks for another champion every `interval_s` seconds, in a thread of its own.

    load: loads a bundle. A champion that cannot be read or loaded changes nothing: the current one stays, the reason is
    logged once, and the next look tries again. A rollback is a new champion, too.
    """

    def __init__(
        self,
        address: ModelAddress,
        host: ModelHost,
        current: StoredBundle,
        load: Callable[[StoredBundle], LoadedModel],
        interval_s: float,
    ) -> None:
        self.address, self.host, self.current, self.load, self.interval_s = address, host, current, load, interval_s
        self._ended = threading.Event()
        self._logged = ""
        self._thread = threading.Thread(target=self._follow, name="champion", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether the last look failed, so that the current model may be older than the champion."""
        return bool(self._logged)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the look that it may be taking."""
        self._ended.set()

    def look(self) -> bool:
        """Loads the champion if it is another one. Returns whether it took over."""
        try:
            found = self.address.resolve()
            if found == self.current:
                self._logged = ""
                return False
            self.host.replace(self.load(found))
        except Exception as error:  # of the storage, the bundle, or memory: the current model can still serve
            text = without_secrets(one_line(error))
            if text != self._logged:
                logger.warning(f"{self.address.text}: the current champion stays, because the new one failed: {text}")
            self._logged = text
            return False
        self.current, self._logged = found, ""
        logger.info(f"{self.address.text} is now {found.location} ({self.host.current.digest})")
        return True

    def _follow(self) -> None:
        while not self._ended.wait(self.interval_s):
            self.look()
