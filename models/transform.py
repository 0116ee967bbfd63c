"""The image transform that belongs to the backbone: resizing for CPU tasks, normalizing for the device.

torch is imported only where tensors are made, so that a task that decodes images starts in a fraction of a second.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@lru_cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """ImageNet's mean and standard deviation (3,). The cache avoids a copy per batch, which waits for a GPU."""
    import torch

    mean, std = (torch.tensor(values, device=device) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return mean, std


def normalize(pixels: Tensor) -> Tensor:
    """(B, H, W, 3) uint8 to (B, 3, H, W) float32 in the channels-last memory format, on the pixels' device."""
    import torch

    mean, std = _statistics(pixels.device)
    return (pixels.to(torch.float32) / 255.0).sub_(mean).div_(std).permute(0, 3, 1, 2)


class ImageTransform:
    """A PIL RGB image to a normalized float32 tensor (3, H, W), as ExpansionNet v2's reference does it.

    The image is resized to the square, bilinear with antialiasing and without keeping the aspect ratio, scaled to
    [0, 1], and normalized with ImageNet's mean and standard deviation.
    """

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __call__(self, image: Image.Image) -> Tensor:
        import torch

        return normalize(torch.from_numpy(self.resize(image)[None].copy())).contiguous()[0]

    def resize(self, image: Image.Image) -> np.ndarray:
        """Pixels (H, W, 3) uint8 of the square: the part for a CPU task, whose result is small to send."""
        return np.asarray(image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR))

    def describe(self) -> dict[str, Any]:
        """The transform as JSON values, for feature keys and model bundles."""
        return {
            "resize": [self.image_size, self.image_size],
            "interpolation": "bilinear",
            "antialias": True,
            "mean": list(IMAGENET_MEAN),
            "std": list(IMAGENET_STD),
        }
