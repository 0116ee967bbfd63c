"""COCO's captions_*.json and image_info_*.json, and nocaps."""

from __future__ import annotations

import re
from typing import Any

from raycap.pipeline.data.formats.karpathy import Image, add_images
from raycap.pipeline.data.formats.rows import Rows, Source, malformed
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted

_SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def add_coco(source: Source, data: Any, rows: Rows) -> None:
    """Adds `images` (id, file_name) with `annotations` (image_id, caption). A nocaps image's domain is its split.

    A file without `annotations`, as COCO's image_info_test2014.json, has images without captions.
    """
    path = source.annotations
    images = data.get("images") if isinstance(data, dict) else None
    annotations = data.get("annotations", []) if isinstance(data, dict) else None
    if not isinstance(images, list) or not images or not isinstance(annotations, list):
        raise UserError(
            f"{path} is not in COCO's layout: expected an object with the list 'images', and with the list "
            "'annotations' if the images have captions"
        )
    captions_of: dict[int, list[Any]] = {}
    for number, entry in enumerate(annotations):
        try:
            captions_of.setdefault(int(entry["image_id"]), []).append(entry["caption"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise malformed(f"{path}: annotations[{number}]", error) from error
    # A name like COCO's, for example captions_val2014.json, has the split as a word.
    words = re.findall("[a-z]+", path.name.lower())
    split_of_name = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)

    def parse(entry: dict[str, Any]) -> Image:
        image_id, filename = int(entry["id"]), entry["file_name"]
        split = source.splits.listed(filename, str(image_id)) or source.split or entry.get("domain") or split_of_name
        split = split or source.splits.drawn(source.image_prefix + filename)
        return image_id, split, (filename,), captions_of.pop(image_id, [])

    add_images(source, images, parse, rows)
    if captions_of:
        count, first = len(captions_of), min(captions_of)
        raise UserError(f"{path}: {count} image ids of 'annotations' are not in 'images', first {quoted(first)}")
