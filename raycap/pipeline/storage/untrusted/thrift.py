"""Reads structs of Thrift's compact protocol, in which Parquet has its footer and the headers of its pages.

https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

I32, I64, LIST, STRUCT = 5, 6, 9, 12  # types
FALSE = 2  # the type of a field that is false, and has no bytes
MAX_NESTING = 8  # of structs and lists; 6 are in use
_FIXED_SIZES = {3: 1, 7: 8}  # bytes of a byte and a double
# {(type, field): an integer, a struct, a list, or True for the types true and false}
Struct = dict[tuple[int, int], Any]
# {(type, field): the fields of a struct, the Items of a list, or nothing for an integer, true or false}
Fields: TypeAlias = "Mapping[tuple[int, int], Fields | Items]"


class Items(NamedTuple):
    """The fields of the structs in a list, and what makes an item of each; it may raise any error."""

    fields: Fields
    make: Callable[[Any], Any]


def parse_struct(data: bytes, place: int, fields: Fields, nesting: int = 0) -> tuple[Struct, int]:
    """The struct at a place in the data, and the place after it. IndexError if the data ends before.

    fields: those to keep. The others are skipped, because an item of one byte would take some hundred.
    """
    values: Struct = {}
    field = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            field += head >> 4
        else:
            number, place = varint(data, place)
            field = _signed(number)
        kind = head & 15
        value: Any = True
        if kind not in (1, 2):  # true and false have no bytes
            value, place = _value(data, place, kind, fields.get((kind, field), {}), nesting)
        if (kind, field) in fields:
            values[kind, field] = value
    return values, place + 1


def _value(data: bytes, place: int, kind: int, fields: Fields | Items, nesting: int) -> tuple[Any, int]:
    """The integer, struct or list at a place, None for any other kind of value, and the place after it."""
    if nesting > MAX_NESTING:
        raise ValueError("a header is nested too deeply")
    if kind in (4, I32, I64):
        number, place = varint(data, place)
        return _signed(number), place
    if kind == STRUCT:
        return parse_struct(data, place, {} if isinstance(fields, Items) else fields, nesting + 1)
    if kind == 8:  # text or bytes
        length, place = varint(data, place)
        return None, place + length
    if kind in (LIST, 10):  # or a set
        count, kind_of_items, place = data[place] >> 4, data[place] & 15, place + 1
        if count == 15:
            count, place = varint(data, place)
        items: list[Any] = []
        fields_of_items = fields.fields if isinstance(fields, Items) else {}
        for _ in range(count):
            if place >= len(data):
                raise IndexError
            item, place = (
                (None, place + 1)
                if kind_of_items in (1, 2)
                else _value(data, place, kind_of_items, fields_of_items, nesting + 1)
            )
            if isinstance(fields, Items):
                items.append(fields.make(item))
        return items, place
    if kind not in _FIXED_SIZES:  # Parquet has no maps
        raise ValueError(f"a header has a field of type {kind}")
    return None, place + _FIXED_SIZES[kind]


def varint(data: bytes, place: int) -> tuple[int, int]:
    """The unsigned integer at a place, 7 bits per byte, and the place after it."""
    number, shift = 0, 0
    while data[place] & 128:
        number |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if shift > 63:
            raise ValueError("a header has a number of more than 64 bits")
    return number | data[place] << shift, place + 1


def _signed(number: int) -> int:
    """The signed integer with this zigzag code."""
    return (number >> 1) ^ -(number & 1)
