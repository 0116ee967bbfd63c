"""The transform of images for the backbone, and random changes of training images.

The driver chooses the transform (`encoders.backbone.image_transform`) and sends it to CPU tasks. The tasks decode and
resize images, and the device that computes features normalizes them. torch is imported only where tensors are made, so
that a task starts in a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL import Image, ImageEnhance

from raycap.models.config import PYDANTIC, Augmentation, Values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")  # as Pillow names its filters
MAX_ENLARGEMENT = 2.0  # the largest ratio of the scaled side to the cropped side; timm's models have at most 1 / 0.875
# Images are scaled and then cropped. If an image's sides differ by a larger factor, only its middle is scaled, because
# the whole scaled image could take gigabytes.
MAX_ASPECT_RATIO = 16
# The largest ratio of a crop's width to its height, both as fractions of the image's. Its inverse is the smallest one.
MAX_RATIO = 4 / 3
COLOR_CHANGES = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


@lru_cache
def _statistics(device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation (3,) as tensors, cached because a copy to a GPU would wait for the GPU."""
    import torch

    return torch.tensor(mean, device=device), torch.tensor(std, device=device)


@dataclass(frozen=True)
class ImageTransform:
    """Makes a normalized float32 tensor (3, H, W) of a PIL RGB image. H and W are `image_size`.

    The image is resized with antialiasing, cropped to the square in its middle, scaled to [0, 1], and normalized with
    the mean and standard deviation of each channel. The defaults are the transform of ExpansionNet v2's reference: the
    whole image becomes a square, bilinearly, and the statistics are ImageNet's.

    resize_to: the side in pixels before the crop. By default it is `image_size`, so that nothing is cropped.
    keep_aspect: If it is True, the shorter side becomes `resize_to`, and the aspect ratio is kept. Otherwise both sides
    become `resize_to`. Raises ValueError for sizes, statistics or an interpolation that cannot be used.
    """

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    image_size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    resize_to: int | None = None
    keep_aspect: bool = False

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation is {self.interpolation!r}; expected one of {', '.join(INTERPOLATIONS)}")
        if self.image_size < 1 or not self.image_size <= self.scaled_side <= MAX_ENLARGEMENT * self.image_size:
            raise ValueError(
                f"images are resized to {self.scaled_side} px and cropped to {self.image_size} px; the first must be "
                f"1 to {MAX_ENLARGEMENT:g} times the second"
            )
        for name, values, least in (("mean", self.mean, -math.inf), ("std", self.std, 0.0)):
            if len(values) != 3 or not all(math.isfinite(value) and value > least for value in values):
                raise ValueError(f"{name} is {list(values)}; expected 3 numbers" + (" above 0" if not least else ""))

    @property
    def scaled_side(self) -> int:
        """The side in pixels to which an image is resized before it is cropped."""
        return self.image_size if self.resize_to is None else self.resize_to

    def __call__(self, image: Image.Image) -> Tensor:
        import torch

        return self.normalize(torch.from_numpy(self.resize(image)[None].copy())).contiguous()[0]

    def resize(self, image: Image.Image) -> np.ndarray:
        """Returns the square's pixels (H, W, 3) uint8. CPU tasks do only this part, because bytes are small to send."""
        width = height = side = self.scaled_side
        if self.keep_aspect:
            image = _without_far_ends(image)
            shorter, longer = sorted(image.size)
            scaled = side * longer // shorter
            width, height = (side, scaled) if image.width <= image.height else (scaled, side)
        resized = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        if (width, height) != (self.image_size, self.image_size):
            left, top = (round((length - self.image_size) / 2) for length in (width, height))
            resized = resized.crop((left, top, left + self.image_size, top + self.image_size))
        return np.asarray(resized)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalizes pixels on their device, (B, H, W, 3) uint8 -> (B, 3, H, W) float32 in channels-last format."""
        import torch

        mean, std = _statistics(pixels.device, self.mean, self.std)
        return (pixels.to(torch.float32) / 255.0).sub_(mean).div_(std).permute(0, 3, 1, 2)


def _without_far_ends(image: Image.Image) -> Image.Image:
    """Crops an image to its middle if its longer side is more than MAX_ASPECT_RATIO times the shorter side."""
    longest = MAX_ASPECT_RATIO * min(image.size)
    if max(image.size) <= longest:
        return image
    left, top = (max(0, length - longest) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top))


def augmented(
    image: Image.Image, augmentation: Augmentation, seed: int, resize: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    """Crops an RGB image at random, resizes it by `resize`, and changes its color. Returns pixels (H, W, 3) uint8.

    If `augmentation.mirror` is set, half of the images are mirrored. The seed decides all random numbers. The crop has
    a uniform place and a fraction of the area between `min_area` and 1. The ratio of its sides, relative to that of the
    image, is log-uniform between 3/4 and 4/3, if such a crop fits. Brightness, contrast and saturation are multiplied
    by factors between 1 - `color` and 1 + `color`.
    """
    # all numbers are drawn even if they are not needed, so that no setting changes the numbers of another setting
    for_area, for_ratio, left, top, *factors, side = np.random.default_rng(seed).random(8)
    area = 1 - for_area * (1 - augmentation.min_area)
    ratio = min(MAX_RATIO, 1 / area) ** (2 * for_ratio - 1)
    width = max(1, round(image.width * math.sqrt(area * ratio)))
    height = max(1, round(image.height * math.sqrt(area / ratio)))
    x, y = round(left * (image.width - width)), round(top * (image.height - height))
    if (width, height) != image.size:
        image = image.crop((x, y, x + width, y + height))
    pixels = resize(image)
    if augmentation.color:
        image = Image.fromarray(pixels)
        for change, factor in zip(COLOR_CHANGES, factors, strict=True):
            image = change(image).enhance(1 + augmentation.color * (2 * factor - 1))
        pixels = np.asarray(image)
    return pixels[:, ::-1] if augmentation.mirror and side < 0.5 else pixels
