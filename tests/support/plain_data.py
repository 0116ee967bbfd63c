"""Annotation tables and snapshots as plain loops over lists and dicts, with which the bounded forms are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from raycap.pipeline.data.formats.source import Rows, Source, as_list, as_texts, inside
from raycap.pipeline.data.images import ImageLocation, reason_of
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted

Stored = dict[str, tuple[int, str, str]]  # {URI: (size, tag, key)}


class PlainSnapshot(NamedTuple):
    """What `take_snapshot` finds. read: the URIs of the files that it reads, in order."""

    keys: list[str | None]
    unreadable: dict[str, str]
    stored: Stored
    read: list[str]


def plain_snapshot(uris: Sequence[str], stored: Stored, key_of: Callable[[str], str]) -> PlainSnapshot:
    """A snapshot with a manifest in memory. key_of: reads the file at a URI; it raises OSError."""
    keys, tags, read = dict[str, str](), dict[str, tuple[int, str]](), list[str]()
    unreadable = dict[str, str]()
    for uri in dict.fromkeys(uris):
        file = ImageLocation.parse(uri).file
        try:
            entry = file.stat()
        except OSError as error:
            unreadable[uri] = "no such object" if file.is_remote else reason_of(error)
            continue
        tags[uri] = entry[:2]
        if uri in stored and stored[uri][:2] == entry[:2]:
            keys[uri] = stored[uri][2]
            continue
        read.append(uri)
        try:
            keys[uri] = key_of(uri)
        except OSError as error:
            unreadable[uri] = reason_of(error)
    after = {uri: (*tags[uri], keys[uri]) for uri in tags if uri in keys}
    after |= {uri: row for uri, row in stored.items() if uri not in keys}
    return PlainSnapshot([keys.get(uri) for uri in uris], unreadable, after, read)


def plain_table(source: Source, entries: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The images of a table of annotations, as `add_table` adds them. Raises its errors."""
    row_of: dict[str, tuple[int, Any]] = {}  # by name its row, and the split in its column
    found: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        location = f"{source.annotations}: row {number + 1}"
        image = source.value(entry, "image", location)
        captions = as_texts(as_list(source.value(entry, "captions", location)), location, Rows())
        uri, name = inside(source.images, image, location)
        stated = source.value(entry, "split", location)
        if name in row_of:
            row, first = row_of[name]
            if stated not in (None, "", first):
                splits = f"the split {quoted(first)} and in this row {quoted(stated)}"
                raise UserError(f"{location}: the image {quoted(image)} has {splits}; give it one split")
            found[row]["captions"].extend(captions)
            continue
        image_id, split = source.id_and_split(entry, (image,), source.image_prefix + name, location)
        row_of[name] = len(found), stated
        found.append({"image_id": image_id, "split": split, "uri": uri, "captions": captions, "key": None})
    return found
