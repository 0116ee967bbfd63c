"""Random changes of training images. This module does not import torch, so that Ray's decoding tasks start fast."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance

from raycap.models.encoders.views import Augmentation

MAX_RATIO = 4 / 3  # of a crop's width to its height, both as shares of the image; its inverse is the smallest
COLOR_CHANGES = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def augmented(
    image: Image.Image, augmentation: Augmentation, seed: int, resize: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    """Pixels (H, W, 3) uint8 of an RGB image that is cropped, resized by `resize`, changed in color and maybe mirrored.

    The seed decides all of it. Colors are changed after resizing, when there are fewer pixels.
    The crop has a share of the area between `min_area` and 1. The ratio of its sides, relative to those of the image,
    is log-uniform between 3/4 and 4/3 as far as the crop fits into the image, and its place is uniform. Brightness,
    contrast and saturation are multiplied by factors between 1 - `color` and 1 + `color`. A mirroring has the
    probability 1/2.
    """
    # all numbers are drawn in every case, so that one setting does not change the effect of another one
    area, ratio, left, top, *factors, side = np.random.default_rng(seed).random(8)
    area = 1 - area * (1 - augmentation.min_area)
    ratio = min(MAX_RATIO, 1 / area) ** (2 * ratio - 1)
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
