"""Snapshots as a plain loop over lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from raycap.pipeline.data.images import ImageLocation, reason_of

Stored = dict[str, tuple[int, str, str]]  # {URI: (size, tag, key)}


class PlainSnapshot(NamedTuple):
    """What `take_snapshot` finds. read: the URIs of the files that it reads, in order."""

    keys: list[str | None]
    unreadable: dict[str, str]
    stored: Stored
    read: list[str]


def plain_snapshot(uris: Sequence[str], stored: Stored, key_of: Callable[[str], str]) -> PlainSnapshot:
    """A snapshot with a manifest in memory. key_of: a function that reads the file at a URI and may raise OSError."""
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
