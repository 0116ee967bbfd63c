"""Views: random versions of training images, and their keys in a feature store.

This module imports neither torch nor Pillow, because configurations contain these settings.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from raycap.models.config import NUMBER, PYDANTIC, Rate, Values

VERSION = 1  # of `encoders.transform.augmented`; raise it when its pixels change, which makes views again


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, which `models.encoders.transform.augmented` makes.

    min_area: the smallest share of the image's area that a crop keeps; 1 for no crop. color: the largest relative
    change of brightness, contrast and saturation. mirror: mirrors half of the images; captions that name left and right
    are then wrong.
    """

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    min_area: Annotated[float, Ge(0.01), Le(1), NUMBER] = 0.8
    color: Rate = 0.2
    mirror: bool = False


@dataclass(frozen=True)
class Views:
    """`count` augmented versions of each training image. A seed selects one of the stored ones, or draws a new one."""

    count: int
    augmentation: Augmentation

    def keys(self, content_key: str) -> list[str]:
        """The keys of an image's versions in a feature store, which differ from those of another augmentation."""
        return [content_key + suffix for suffix in self.suffixes]

    @cached_property
    def suffixes(self) -> list[str]:
        """The ends of the keys, which follow the content key."""
        settings = json.dumps([VERSION, asdict(self.augmentation)], sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        return [f"-{digest}-{number}" for number in range(self.count)]


def content_key_of(key: str) -> str:
    """The content key in a key of `Views.keys`, or the content key `key` itself."""
    return key.partition("-")[0]


def seed_of_key(key: str) -> int | None:
    """The seed of `augmented` for a key of `Views.keys`; None for a content key, whose image is not changed."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) if "-" in key else None
