"""Where the bytes of an image are: in a file of their own, in a tar archive, or in a page of a Parquet file.

The column `uri` of a data set holds one text per image:

    /folder/dog.jpg or s3://bucket/dog.jpg
    tar:START+LENGTH+CHARACTERS:/folder/shard.tar/dog.jpg
    parquet:START+LENGTH+START+LENGTH+ROW+CODEC+LEVEL+CHARACTERS:/folder/part.parquet/dog.jpg

The ranges are those of the image in the archive, or of the value's page and dictionary. CHARACTERS is the length of the
file's path or URI, after which a slash and the image's name follow. The name is for people and may contain anything.
A local path in this column is absolute, so that it cannot begin like the other forms.
"""

from __future__ import annotations

import errno
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from raycap.pipeline.storage.path import StorageOptions, StoragePath, is_remote
from raycap.pipeline.storage.s3 import REMOTE
from raycap.pipeline.storage.untrusted.parquet_pages import (
    MAX_PAGE_BYTES,
    PageValue,
    Values,
    decode_dictionary,
    decode_page,
    uses_dictionary,
)

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = ("tar:", "parquet:")  # the begins of locations within a file
CACHED_BYTES = 256 * 2**20  # of decompressed pages in a process
_TAR = re.compile(r"tar:(\d{1,19})\+(\d{1,19})\+(\d{1,6}):(.*)", re.DOTALL)
_PARQUET = re.compile(r"parquet:" + r"(\d{1,19})\+" * 5 + r"(\w+)\+(\d{1,9})\+(\d{1,6}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class ImageLocation:
    """An image's file, and the place of the image in it: (start, length) in bytes, a value of a page, or all of it."""

    file: StoragePath
    part: tuple[int, int] | PageValue | None = None
    name: str = field(default="", compare=False)  # of the image in the file

    @classmethod
    def parse(cls, uri: str, options: StorageOptions = StorageOptions()) -> ImageLocation:
        """The location that a text of the column `uri` states. Raises ValueError for a text that no location has."""
        if not uri.startswith(PARTS):
            return cls(StoragePath(uri, options))
        match = _TAR.fullmatch(uri) or _PARQUET.fullmatch(uri)
        if match is None:
            raise ValueError(f"{uri[:200]!r} is not the location of an image")
        *values, count, path = match.groups()
        file, name = path[: int(count)], path[int(count) + 1 :]
        if len(values) == 2:
            return cls(StoragePath(file, options), (int(values[0]), int(values[1])), name)
        start, length, first, size, row, codec, level = values
        place = PageValue(int(start), int(length), int(first), int(size), int(row), codec, int(level))
        return cls(StoragePath(file, options), place, name)

    @property
    def uri(self) -> str:
        """The text from which `parse` makes an equal location."""
        if self.part is None:
            return self.file.uri
        kind = "parquet" if isinstance(self.part, PageValue) else "tar"
        return f"{kind}:{'+'.join(map(str, self.part))}+{len(self.file.uri)}:{self.file.uri}/{self.name}"

    def __str__(self) -> str:
        return self.uri

    @property
    def is_remote(self) -> bool:
        return self.file.is_remote

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """The image's bytes. Raises OSError as StoragePath, and for a part that the file does not have."""
        if self.part is None:
            return self.file.read_bytes(max_bytes)
        if isinstance(self.part, PageValue):
            return self._page_value(self.part, max_bytes)
        start, length = self.part
        return self._range(start, length, max_bytes)

    def _range(self, start: int, length: int, max_bytes: int | None = None) -> bytes:
        """A range of the file."""
        if max_bytes is not None and length > max_bytes:
            raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
        data = self.file.read_range(start, length) if length else b""
        if len(data) != length:
            raise OSError(errno.EIO, f"{self.file} ends before it; was it replaced?", self.uri)
        return data

    def _page_value(self, place: PageValue, max_bytes: int | None) -> bytes:
        """A value of a page of a Parquet file, whose decompressed pages are cached."""
        try:
            values = _page_cache().get((self.file.uri, place.start), lambda: self._read_page(place))
            span = values.span(place.row)
        except (ValueError, IndexError) as error:
            raise OSError(errno.EIO, f"not readable in {self.file}: {error}", self.uri) from error
        if span is None:
            raise OSError(errno.ENODATA, "the row has no bytes", self.uri)
        if max_bytes is not None and span[1] - span[0] > max_bytes:
            raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
        return values.data[slice(*span)]

    def _read_page(self, place: PageValue) -> Values:
        data, dictionary = self._range(place.start, place.length, MAX_PAGE_BYTES), None
        if place.dictionary_length and uses_dictionary(data):
            dictionary = _page_cache().get(
                (self.file.uri, place.dictionary_start),
                lambda: decode_dictionary(
                    self._range(place.dictionary_start, place.dictionary_length, MAX_PAGE_BYTES), place.codec
                ),
            )
        return decode_page(data, place.codec, place.max_level, dictionary)


class PageCache:
    """The decompressed pages that this process has used last. Threads that need the same page read it once."""

    def __init__(self, limit: int) -> None:
        """limit: bytes of all pages, except that the newest one stays."""
        self.limit, self.lock = limit, threading.Lock()
        self.pages: OrderedDict[tuple[str, int], Future[Values]] = OrderedDict()

    def get(self, key: tuple[str, int], read: Callable[[], Values]) -> Values:
        """The page with this key; `read` makes it if it is not cached. An error of `read` is raised and not cached."""
        with self.lock:
            future = self.pages.get(key)
            is_new = future is None
            if future is None:
                future = self.pages[key] = Future()
            self.pages.move_to_end(key)
        if is_new:
            try:
                future.set_result(read())
            except BaseException as error:
                future.set_exception(error)
                with self.lock:
                    self.pages.pop(key, None)
            else:
                self._remove_oldest()
        return future.result()

    def _remove_oldest(self) -> None:
        with self.lock:
            sizes = {key: page.result().num_bytes for key, page in self.pages.items() if _is_ready(page)}
            excess = sum(sizes.values()) - self.limit
            for key in list(sizes)[:-1]:
                if excess <= 0:
                    return
                excess -= sizes[key]
                del self.pages[key]

    def clear(self) -> None:
        """Forgets the pages that are complete."""
        with self.lock:
            for key in [key for key, page in self.pages.items() if page.done()]:
                del self.pages[key]


def _is_ready(page: Future[Values]) -> bool:
    return page.done() and page.exception() is None


@cache
def _page_cache() -> PageCache:
    return PageCache(CACHED_BYTES)


def forget_pages() -> None:
    """Empties this process's cache of pages, because files may have been replaced."""
    _page_cache().clear()


def is_part(uri: str) -> bool:
    """Whether a text of the column `uri` is a location within a file."""
    return uri.startswith(PARTS)


def is_remote_image(uri: str) -> bool:
    """Whether the file of an image, given by its text in the column `uri`, is on S3."""
    return ImageLocation.parse(uri).is_remote if uri.startswith(PARTS) else is_remote(uri)


def has_remote_image(uris: pa.ChunkedArray) -> bool:
    """Whether `is_remote_image` is true of one of the texts, which are not made Python objects."""
    import pyarrow.compute as pc

    is_remote_file = pc.starts_with(uris, REMOTE)
    is_within = pc.or_(*(pc.starts_with(uris, begin) for begin in PARTS))
    # nothing before the path or URI of the file contains a second colon
    is_remote_part = pc.match_substring_regex(uris.filter(is_within), rf"^\w+:[^:]*:{REMOTE}")
    return bool(pc.any(is_remote_file).as_py() or pc.any(is_remote_part).as_py())
