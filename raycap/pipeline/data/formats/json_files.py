"""Annotation files in JSON: Karpathy's, COCO's captions_*.json and image_info_*.json, and nocaps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.data.formats.source import MAX_CAPTION, SURROGATE, Rows, Source, as_texts, inside, malformed
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted

Image = tuple[int, str, tuple[str, ...], list[Any]]  # its id, its split, the parts of its path, its captions
_SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def add_karpathy(source: Source, data: object, rows: Rows) -> None:
    """Adds the entries of `images`: filepath, filename, split, sentences with raw text, and cocoid or imgid."""
    path = source.annotations
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not in Karpathy layout: expected an object with a list 'images' that is not empty")

    def parse(entry: Values) -> Image:
        image_id = int(entry["cocoid"] if "cocoid" in entry else entry["imgid"])
        captions = [sentence["raw"] for sentence in entry["sentences"]]
        split = source.splits.lists.get(entry["filename"], entry["split"])
        return image_id, split, (entry.get("filepath") or ".", entry["filename"]), captions

    def tokens_of(entry: Values, location: str) -> list[str]:
        return [_joined_tokens(sentence.get("tokens"), location) for sentence in entry["sentences"]]

    add_images(source, entries, parse, rows, tokens_of if source.with_tokens else lambda *_: [])


def _joined_tokens(tokens: Any, location: str) -> str:
    """The tokens of a caption joined with spaces. Raises UserError unless they are a list of words."""
    if tokens is None:
        raise UserError(f"{location}: a sentence has no tokens, and data.tokenizer is tokens; set it to spacy")
    is_list = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    text = " ".join(tokens) if is_list else ""
    if not is_list or text.split() != tokens or SURROGATE.search(text) or len(text) > MAX_CAPTION:
        raise UserError(f"{location} is malformed: the tokens of a sentence are not a list of words")
    return text


def add_images(
    source: Source,
    entries: list[Any],
    parse: Callable[[Values], Image],
    rows: Rows,
    tokens_of: Callable[[Values, str], list[str]] = lambda *_: [],
) -> None:
    """Adds the images of a JSON file. `parse` reads one entry, and may raise any error if the entry is malformed.

    tokens_of: gives the tokens of an entry's captions at a place that error messages name; by default none.
    """
    for number, entry in enumerate(entries):
        location = f"{source.annotations}: images[{number}]"
        try:
            image_id, split, names, captions = parse(entry)
            if not all(isinstance(text, str) for text in (split, *names)):
                raise TypeError("its split, domain or file name is not text")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise malformed(location, error) from error
        texts = as_texts(captions, location, rows)
        uri = inside(source.images, "/".join(names), location)[0]
        rows.add(image_id, split, uri, texts, location, tokens_of(entry, location))


def add_coco(source: Source, data: object, rows: Rows) -> None:
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

    def parse(entry: Values) -> Image:
        image_id, filename = int(entry["id"]), entry["file_name"]
        split = source.splits.listed(filename, str(image_id)) or source.split or entry.get("domain") or split_of_name
        split = split or source.splits.drawn(source.image_prefix + filename)
        return image_id, split, (filename,), captions_of.pop(image_id, [])

    add_images(source, images, parse, rows)
    if captions_of:
        count, first = len(captions_of), min(captions_of)
        raise UserError(f"{path}: {count} image ids of 'annotations' are not in 'images', first {quoted(first)}")
