"""Reads the headers of tar archives from elsewhere: the names, places and sizes of the files in them.

Only headers are read, and the contents are skipped. Python's tarfile follows what an archive states: it reads a header
of any size into memory, and describes links and sparse files, whose content is elsewhere. The formats are ustar, pax
and GNU's: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted

BLOCK = 512  # bytes; each header and the begin of each file fill whole blocks
MAX_EXTENDED_BYTES = 2**16  # of a header that holds a long name or other values
MAX_MEMBERS = 10_000_000
_FILES = (b"0", b"\0", b"7")  # type flags
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders and pipes, whatever size they state
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL, _SPARSE = b"L", b"K", b"x", b"g", b"S"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class TarMember(NamedTuple):
    """A file in an archive, whose content is `length` bytes from `start` on."""

    name: str
    start: int
    length: int


def tar_members(file: BinaryIO, name: str) -> Iterator[TarMember]:
    """The regular files in an archive, in its order. Folders, links and devices are left out.

    name: the archive's name, with which errors begin. Raises UserError for damaged archives, sparse files, headers of
    more than MAX_EXTENDED_BYTES, and a name that occurs twice or is not UTF-8.
    """
    size, place, names = file.seek(0, os.SEEK_END), 0, set[str]()
    extended: dict[str, str] = {}
    while place < size:
        header = _read(file, place, BLOCK, name)
        if not header.strip(b"\0"):  # the end; whatever follows does not belong to the archive
            return
        _require_checksum(header, place, name)
        kind, length, place = header[156:157], _number(header[124:136], name), place + BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL):
            if not 0 <= length <= MAX_EXTENDED_BYTES:
                raise UserError(f"{name} has a header of {length} bytes; the limit is {MAX_EXTENDED_BYTES}")
            content = _read(file, place, length, name)
            if kind == _LONG_NAME:
                extended["path"] = _text(content.rstrip(b"\0"), name)
            elif kind == _PAX:
                extended |= _pax_values(content, name)
        else:
            member_name = extended.get("path") or _plain_name(header, name)
            if kind == _SPARSE or any(key.startswith("GNU.sparse") for key in extended):
                raise UserError(f"{name} has the sparse file {quoted(member_name)}; pack it again without --sparse")
            length = _pax_size(extended["size"], name) if "size" in extended else length
            length = 0 if kind in _WITHOUT_CONTENT else length
            if not 0 <= length <= size - place:
                raise UserError(f"{name} ends within {quoted(member_name)}; copy it again")
            extended = {}
            if kind in _FILES and not member_name.endswith("/"):
                if member_name in names or len(names) >= MAX_MEMBERS:
                    problem = "a second time" if member_name in names else f"after {MAX_MEMBERS} others"
                    raise UserError(f"{name} has the file {quoted(member_name)} {problem}; pack it again")
                names.add(member_name)
                yield TarMember(member_name, place, length)
        place += -(-length // BLOCK) * BLOCK


def _read(file: BinaryIO, place: int, length: int, name: str) -> bytes:
    """`length` bytes of the archive. Raises UserError if it ends before."""
    file.seek(place)
    data = file.read(length)
    if len(data) < length:
        raise UserError(f"{name} is not a whole tar archive: it ends within a header; copy it again")
    return data


def _require_checksum(header: bytes, place: int, name: str) -> None:
    """Raises UserError unless a header has its checksum, with signed or unsigned bytes, the checksum's as blanks."""
    stated = _number(header[148:156], name)
    others = header[:148] + b" " * 8 + header[156:]
    if stated in (sum(others), sum(byte - 256 * (byte > 127) for byte in others)):
        return
    form = next((form for start, form in _COMPRESSED.items() if place == 0 and header.startswith(start)), None)
    if form is not None:
        raise UserError(f"{name} is compressed by {form}; unpack it to a plain tar, whose images are read in place")
    raise UserError(f"{name} is not a tar archive, or is damaged at byte {place}; copy or pack it again")


def _number(field: bytes, name: str) -> int:
    """A number of a header in octal digits, or as GNU writes larger ones. -1 for a field that is no number."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0").split(b"\0")[0]
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else -1
    except ValueError:
        return -1


def _plain_name(header: bytes, name: str) -> str:
    """The name in a header. ustar divides a long one into two fields."""
    end = header[:100].split(b"\0")[0]
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + end if prefix else end, name)


def _pax_values(content: bytes, name: str) -> dict[str, str]:
    """The name, size and sparse map in an extended header, whose lines are `LENGTH KEY=VALUE`."""
    values, place = dict[str, str](), 0
    while place < len(content) and content[place]:
        digits, _, _ = content[place : place + 8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        line = content[place + len(digits) + 1 : place + length]
        key, separator, value = line.partition(b"=")
        if not separator or not line.endswith(b"\n"):
            raise UserError(f"{name} has a damaged extended header at byte {place} of it; pack it again")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse"):
            values[_text(key, name)] = _text(value[:-1], name)
        place += length
    return values


def _pax_size(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UserError(f"{name} states {quoted(text)} as a file's size; pack it again")
    return int(text)


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(
            f"{name} has a file whose name is not UTF-8, {quoted(data)}; rename it and pack it again"
        ) from None
