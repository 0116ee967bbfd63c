"""Reads local files of unknown kind, and parses JSON, YAML and gzip that strangers may have written.

A path may lead to a pipe, a device, or a file that is larger than the memory, so only regular files are read, up to a
limit. If a document cannot be parsed, a UserError begins with the document's name. Depth, aliases and decompressed size
are limited, because a few hundred bytes of nested lists, YAML aliases or gzip can fill the memory.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from json import JSONDecoder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line, printable, quoted

if TYPE_CHECKING:
    import yaml

GZIP_START = b"\x1f\x8b"  # the first two bytes of every gzip file
MAX_DOCUMENT_BYTES = 2**30
MAX_YAML_CHARACTERS = 2**18  # the parser takes seconds for this length, so longer texts are refused
MAX_YAML_NUMBER = 1000  # characters of a number; limited, because numbers in base 60 can become very large
MAX_YAML_NODES = 100_000  # an alias counts as a copy of what it names
MAX_YAML_TEXT = 4 * MAX_YAML_CHARACTERS  # characters of all values; an alias counts as a copy
MAX_YAML_DEPTH = 50
MAX_RATIO = 30  # decompressed bytes per compressed byte; annotation files have 3 to 20
MIN_LIMIT_BYTES = 4 * 2**20  # every file may decompress to this size
VALUE_BYTES = 100  # of memory for a value of JSON; {} takes 64
MEMORY_PART = 0.5  # of this machine's memory, which the values of a JSON document may take
YAML_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_document(path: Path) -> bytes:
    """The content of a file of text, JSON or a table, at most MAX_DOCUMENT_BYTES. May raise OSError."""
    return read_regular_file(path, MAX_DOCUMENT_BYTES)


def read_regular_file(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a regular file or of a link to one.

    Raises OSError for a folder, pipe, socket or device, and does not wait for a pipe's writer. Raises OSError also for
    a file of more than `max_bytes` bytes, and does not read its rest.
    """
    with open_regular_file(path) as file:
        if max_bytes is None:
            return file.read()
        too_large = OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", str(path))
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise too_large
        data = file.read(size + 1)
        if len(data) > size:  # the file has grown meanwhile
            data += file.read(max_bytes + 1 - len(data))
        if len(data) > max_bytes:
            raise too_large
        return data


def is_file(path: Path) -> bool:
    """True if the path leads to a regular file. False if its text cannot be a path, for example with a NUL."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises an error if the name is too long)


def is_folder(path: Path) -> bool:
    """True if the path leads to a folder. False if its text cannot be a path, for example with a NUL."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises an error if the name is too long)


def open_regular_file(path: Path, flags: int = os.O_RDONLY) -> io.BufferedReader:
    """Opens a regular file, or a link to one, for reading. Raises OSError for a folder, pipe or device.

    flags: further ones of os.open, such as O_NOFOLLOW, which refuses a link.
    """
    try:
        # with O_NONBLOCK, a pipe does not wait for a writer
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # the text has a NUL or half of a surrogate pair
        raise OSError(errno.EINVAL, "not the name of a file", str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


class RangedFile(io.RawIOBase):
    """An unbuffered file of `size` bytes. read_range: reads a range of bytes, given its start and length."""

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        self.size, self.read_range, self.place = size, read_range, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence])
        return self.place

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self.size - self.place)
        if length <= 0:
            return 0
        data = self.read_range(self.place, length)
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)


def _refuse_constant(constant: str) -> None:
    """Raises ValueError for NaN and Infinity, because they are not JSON. The parser calls this function for them."""
    raise ValueError(f"{constant} is not a JSON number")


_STRICT = JSONDecoder(parse_constant=_refuse_constant)  # made once, because a file may have a million lines


def parse_json(data: bytes | str, name: str, *, strict: bool = True) -> Any:
    """The value of a JSON document in UTF-8. name: begins the errors. Raises UserError if the document is not valid.

    strict: if true, NaN, Infinity and halves of surrogate pairs are refused. If false, they are allowed, for a caller
    that checks each value. Callers must expect OverflowError when they convert a number to an integer, because 1e999 is
    read as infinity. In messages they must use `quoted`, not `repr`, because a value may be nested hundreds of levels
    deep.
    """
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        num_bytes = len(text) + VALUE_BYTES * sum(map(text.count, "[{,"))  # at least what the values take
        if num_bytes > MEMORY_PART * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError
        value = _STRICT.decode(text) if strict else json.loads(text)
        if strict and SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError(f"{name} is not valid JSON for raycap: it is nested too deeply") from None
    except MemoryError:
        raise UserError(f"{name} needs more memory than there is; divide it into smaller files") from None
    except ValueError as error:
        raise UserError(f"{name} is not valid JSON: {one_line(error)}") from error
    return value


def parse_yaml(text: bytes | str, name: str) -> Any:
    """The value of a YAML document of mappings, lists, text, numbers, booleans, dates and null.

    Raises UserError if the document is not valid, has another tag or exceeds a limit. name: begins the errors.
    """
    import yaml

    try:
        text = text.decode() if isinstance(text, bytes) else text
        if len(text) > MAX_YAML_CHARACTERS:
            raise UserError(f"{name} has {len(text)} characters of YAML; the limit is {MAX_YAML_CHARACTERS}")
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure_node(node, name, {}, ())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise UserError(f"{name} is nested more than {MAX_YAML_DEPTH} deep") from None
    except UserError:
        raise
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{name} is not valid YAML: {_yaml_problem(error)}") from error
    except (LookupError, AttributeError, ValueError, TypeError, OverflowError) as error:
        # The error's own text is not shown, because it quotes the value.
        raise UserError(
            f"{name} is not valid YAML: a value is no date, or does not fit its tag (!!int, ...)"
        ) from error


def _yaml_problem(error: Exception) -> str:
    """Describes an error in a YAML text and its place. Quotes no words of the text, because they may be secrets."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return one_line(error)
    if r"'\t'" in problem:
        return f"found a tab in {_place(mark)}; indent with blanks"
    problem = re.sub(r"'[^'<\s]{2,}'", "'...'", problem)  # without the name of a tag or alias
    return f"{printable(problem)} in {_place(mark)}"


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


class Measures(NamedTuple):
    """The sizes of a YAML tree. characters: of all values. height: the number of levels."""

    nodes: int
    characters: int
    height: int


def _measure_node(node: yaml.Node, name: str, measured: dict[int, Measures], parents: tuple[int, ...]) -> Measures:
    """Measures a tree, in which an alias counts as a copy.

    Raises UserError above a limit. measured: earlier results by `id(node)`, so that an alias takes no time. parents:
    `id(node)` of each node above this one.
    """
    import yaml

    if id(node) in parents:
        raise UserError(f"{name}: an alias contains itself")
    known = measured.get(id(node))
    if len(parents) + (1 if known is None else known.height) > MAX_YAML_DEPTH:
        raise UserError(f"{name} is nested more than {MAX_YAML_DEPTH} deep")
    if known is not None:
        return known
    if node.tag.removeprefix("tag:yaml.org,2002:") not in YAML_TAGS:
        raise UserError(f"{name}: the tag {printable(node.tag)} is not supported; write a plain list, mapping or text")
    if isinstance(node.value, str) and len(node.value) > MAX_YAML_NUMBER and not node.tag.endswith(":str"):
        raise UserError(f"{name} has a number of {len(node.value)} characters; the limit is {MAX_YAML_NUMBER}")
    children: list[yaml.Node] = node.value if isinstance(node.value, list) else []  # keys and values of a mapping
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated_keys([key for key, _ in node.value], name)
        children = [child for pair in node.value for child in pair]
    num_nodes, num_characters, height = 1, len(node.value) if isinstance(node.value, str) else 0, 1
    for child in children:
        below = _measure_node(child, name, measured, (*parents, id(node)))
        num_nodes += below.nodes
        num_characters += below.characters
        height = max(height, 1 + below.height)
    if num_nodes > MAX_YAML_NODES:
        raise UserError(f"{name} expands to more than {MAX_YAML_NODES} values; remove aliases")
    if num_characters > MAX_YAML_TEXT:
        raise UserError(f"{name} expands to more than {MAX_YAML_TEXT} characters; remove aliases of long texts")
    measured[id(node)] = Measures(num_nodes, num_characters, height)
    return measured[id(node)]


def _refuse_repeated_keys(keys: Sequence[yaml.Node], name: str) -> None:
    """Raises UserError if a mapping repeats a key, because YAML would keep the last value."""
    seen = set[tuple[str, str]]()
    for key in keys:
        if not isinstance(key.value, str) or key.tag.endswith(":merge"):
            continue
        if (key.tag, key.value) in seen:
            place = _place(key.start_mark)
            raise UserError(f"{name} has the key {quoted(key.value)} a second time in {place}; remove one of them")
        seen.add((key.tag, key.value))


def gunzip(data: bytes, name: str) -> bytes:
    """Decompresses a gzip file, which may have several members. Other data are returned as they are.

    Raises UserError if the file is damaged or too large.
    """
    if not data.startswith(GZIP_START):
        return data
    limit = max(MIN_LIMIT_BYTES, MAX_RATIO * len(data))
    parts, left = list[bytes](), limit
    try:
        while data:
            member = zlib.decompressobj(wbits=31)
            parts.append(member.decompress(data, left + 1))
            left -= len(parts[-1])
            if left < 0:
                raise UserError(f"{name} decompresses to more than {limit} bytes; unpack it if it is what you expect")
            if not member.eof:
                raise EOFError("it ends too early")
            data = member.unused_data.lstrip(b"\0")  # without padding of zeros
    except (zlib.error, EOFError) as error:
        raise UserError(f"{name} is not a whole gzip file: {one_line(error)}") from error
    return b"".join(parts)


def kind_of(value: object) -> str:
    """The kind of a JSON or YAML value in words, for messages."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def require_mapping(value: object, name: str) -> Mapping[str, Any]:
    """Returns `value` if it is a mapping whose keys are text. Raises UserError otherwise."""
    if not isinstance(value, dict):
        raise UserError(f"{name} must hold a mapping of keys, found {kind_of(value)}")
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"{name} has the key {quoted(key)}, which is not text")
    return value
