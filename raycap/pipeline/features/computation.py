"""The features of pixels: one computation for the extraction and for stages that compute features at each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.storage.weights import load_weights

if TYPE_CHECKING:
    from raycap.models.config import BackboneConfig
    from raycap.pipeline.config.sections import FeatureSection

T = TypeVar("T")


class FeatureComputer:
    """A frozen backbone on a device, with the numeric settings of the feature store.

    Equal pixels, weights and settings give equal bits on one kind of device, whoever computes.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        weights: Path,
        settings: FeatureSection,
        device: torch.device,
        data: bytes | None = None,
    ) -> None:
        """weights, data: see `load_weights`. settings: with a concrete `compute_dtype` (`extraction_precision`)."""
        self.settings, self.device, self.transform = settings, device, image_transform(backbone)
        self.dtype, self.stored = getattr(torch, settings.compute_dtype), getattr(torch, settings.stored_dtype)
        module = Backbone(backbone, with_weights=False)
        load_weights(module, weights, data)
        self.backbone: Callable[[Tensor], Tensor] = module.eval().to(device)

    def features(self, pixels: Tensor) -> Tensor:
        """Features (B, N, C) in the stored dtype, on the device, of pixels (B, H, W, 3) uint8."""
        return torch.cat(self.batches(pixels, lambda features: features))

    def batches(self, pixels: Tensor, take: Callable[[Tensor], T]) -> list[T]:
        """What `take` makes of the features (b, N, C) of each `settings.batch_size` images, in their order.

        pixels: (B, H, W, 3) uint8. The features are in the stored dtype on the device, and their memory can be used
        again unless `take` keeps them. A value too large for the stored dtype is infinite.

        Black images fill up the last batch. torch selects its kernels by the batch size, so that with a fixed size the
        features of an image have the same bits in every batch.
        """
        size, taken = self.settings.batch_size, []
        with torch.no_grad(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for part in pixels.split(size):
                moved = F.pad(part.to(self.device, non_blocking=True), (0, 0, 0, 0, 0, 0, 0, size - len(part)))
                images = self.transform.normalize(moved).contiguous()
                taken.append(take(self.backbone(images)[: len(part)].to(self.stored)))
        return taken
