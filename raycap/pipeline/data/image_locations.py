"""Where images are, and how their bytes are read.

The column `uri` of a data set holds one text per image, an `ImageLocation`:

    /folder/dog.jpg or s3://bucket/dog.jpg
    tar:START+LENGTH+CHARACTERS:/folder/shard.tar/dog.jpg
    parquet:GROUP+ROW+LEAF+CHARACTERS:/folder/part.parquet/dog.jpg

START and LENGTH are the range of the image in the archive; GROUP, ROW and LEAF are the number of a row group, a row in
it and a leaf column. CHARACTERS is the length of the file's path or URI, after which a slash and the image's name
follow. The name is for people and may contain anything. A local path in this column is absolute, so that it cannot
begin like the other forms.

No other module reads images from elsewhere. This module does not import torch, so that Ray's decoding tasks start fast.
"""

from __future__ import annotations

import errno
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.cache import cached_image
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import REMOTE, StorageOptions, is_remote
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile, RowPlace

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = ("tar:", "parquet:")  # the begins of locations within a file
MAX_BYTES = 256 * 2**20  # a larger file is refused, because a file is read into memory as a whole
UNREADABLE = "cannot be read"  # a reason that starts with this is temporary: the next extraction tries the image again
_TAR = re.compile(r"tar:(\d{1,19})\+(\d{1,19})\+(\d{1,6}):(.*)", re.DOTALL)
_PARQUET = re.compile(r"parquet:(\d{1,9})\+(\d{1,9})\+(\d{1,9})\+(\d{1,6}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class ImageLocation:
    """An image's file, and the place of the image in it: (start, length) in bytes, a row of a table, or all of it."""

    file: StoragePath
    part: tuple[int, int] | RowPlace | None = None
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
        numbers = list(map(int, values))
        part = RowPlace(*numbers) if len(numbers) == 3 else (numbers[0], numbers[1])
        return cls(StoragePath(file, options), part, name)

    @property
    def uri(self) -> str:
        """The text from which `parse` makes an equal location."""
        if self.part is None:
            return self.file.uri
        kind = "parquet" if isinstance(self.part, RowPlace) else "tar"
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
        if isinstance(self.part, RowPlace):
            return self._row_value(self.part, max_bytes)
        start, length = self.part
        if max_bytes is not None and length > max_bytes:
            raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
        data = self.file.read_range(start, length) if length else b""
        if len(data) != length:
            raise OSError(errno.EIO, f"{self.file} ends before it; was it replaced?", self.uri)
        return data

    def _row_value(self, place: RowPlace, max_bytes: int | None) -> bytes:
        """A value of a column of a Parquet file, whose row groups are cached."""
        try:
            value = _GROUPS.values(self.file, place)[place.row]
        except (UserError, IndexError) as error:
            raise OSError(errno.EIO, f"not readable: {error}", self.uri) from error
        if not value.is_valid:
            raise OSError(errno.ENODATA, "the row has no bytes", self.uri)
        if max_bytes is not None and len(value.as_buffer()) > max_bytes:
            raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
        data: bytes = value.as_py()
        return data


class RowGroups:
    """The columns of images in row groups of Parquet files that this process has used last."""

    def __init__(self, limit: int) -> None:
        """limit: bytes of all columns, except that the newest one stays."""
        self.limit, self.lock = limit, threading.Lock()
        self.columns: OrderedDict[tuple[str, int, int], pa.LargeBinaryArray] = OrderedDict()

    def values(self, file: StoragePath, place: RowPlace) -> pa.LargeBinaryArray:
        """The column of a place. Raises UserError, and OSError as StoragePath."""
        key = file.uri, place.group, place.leaf
        with self.lock:  # threads that need the same column read it once
            if key not in self.columns:
                with file.open() as opened:
                    self.columns[key] = ParquetFile(opened, str(file)).values(place.group, place.leaf)
            self.columns.move_to_end(key)
            while len(self.columns) > 1 and sum(each.nbytes for each in self.columns.values()) > self.limit:
                self.columns.popitem(last=False)
            return self.columns[key]

    def clear(self) -> None:
        with self.lock:
            self.columns.clear()


_GROUPS = RowGroups(256 * 2**20)


def forget_row_groups() -> None:
    """Empties this process's cache of row groups, because files may have been replaced."""
    _GROUPS.clear()


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


def read_image_file(path: StoragePath, key: str | None = None) -> bytes:
    """The content of an image file, or of an image in an archive or table. path: its text may be any ImageLocation's.

    key: its content key if that is known. An image on S3 is then not read if it is in this machine's cache. Raises
    OSError if the file is larger than MAX_BYTES, and for pipes and devices.
    """
    image = ImageLocation.parse(path.uri, path.options)
    cached = cached_image(key) if key and image.is_remote else None
    return image.read_bytes(MAX_BYTES) if cached is None else cached


def reason_of(error: OSError) -> str:
    """Why a file cannot be read, without secrets, because the reason is stored."""
    return without_secrets(error.strerror or str(error))
