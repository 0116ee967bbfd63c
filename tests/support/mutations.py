"""Hostile values, and mutations of documents, bytes, archives and files. All draws come from the given generator."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

SPARSE_BYTES = 2**40
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# Values of every type that a file or an option may hold in place of the expected one.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 10**9, 2**31, 2**63, 10**32, 0.5, -0.0, 1e-320, 1e308, float("inf"),
    float("nan"), "", " ", "0", "-1", "1e999", "none", "auto", "synthetic", "\0", "a\0b", "a\nb", "\r\n",
    "\x1b[2J\x1b]0;owned\a", "\u202e\u2066", "\u0300" * 50, "..", "../../outside", "/nowhere/at/all", "~", "~root/x",
    "s3://", "s3:///key", "file:///nowhere", "http://127.0.0.1:1/", "${NOT_SET}", "${HOME}", "a.b", "{}", "%s%n",
    "x" * 100_000, [], [[]], [None], [0, -1], ["a", "a"], {}, {"": None}, {"a": {"b": {}}}, {"name": 1},
    list(range(20_000)), {str(key): key for key in range(2_000)},
)  # fmt: skip

# Text that no encoder writes. A document holds "@name@", which `spelled` replaces.
RAW_JSON = {
    "deep": "[" * 50_000 + "]" * 50_000,
    "deeper": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "huge": "1e999",
    "minus": "-1e999",
    "nan": "NaN",
    "infinity": "Infinity",
    "digits": "9" * 5_000,
    "surrogate": '"\\ud800"',
    "twice": '{"a": 1, "a": 2}',
    "cut": '["',
}
TEN = ",".join(["x"] * 10)
RAW_YAML = RAW_JSON | {
    "deep": "[" * 3_000 + "]" * 3_000,
    "deeper": "{a: " * 3_000 + "1" + "}" * 3_000,
    "set": "!!set {a, b}",
    "object": '!!python/object/apply:os.system ["touch owned"]',
    "binary": "!!binary aGVsbG8=",
    "cycle": "&loop [*loop]",
    "mapping": "&self {root: *self}",
    "sixty": ":".join(["59"] * 2_000),
    "date": "2001-01-01",
    "tagged": "!other 3",
    "key": "{[1, 2]: 3}",
    "bomb": f"[&l0 [{TEN}]" + "".join(f",&l{n} [{TEN.replace('x', f'*l{n - 1}')}]" for n in range(1, 9)) + "]",
}
_RAW_NAME = re.compile(r"""["']?@(\w+)@["']?""")


def as_json(tree: Any) -> str:
    return spelled(json.dumps(tree, default=str), RAW_JSON)


def as_yaml(tree: Any) -> str:
    return spelled(yaml.dump(tree, Dumper=DUMPER, sort_keys=False, allow_unicode=True), RAW_YAML)


def spelled(text: str, raw: dict[str, str]) -> str:
    """The text with the raw spelling of each "@name@"."""
    return _RAW_NAME.sub(lambda match: raw.get(match[1], match[0]), text)


def hostile(random: Random, raw: Sequence[str] = ()) -> Any:
    """A hostile value; one in four is a name of `raw`, for `spelled`."""
    return f"@{random.choice(list(raw))}@" if raw and random.random() < 0.25 else copy.copy(random.choice(HOSTILE))


def mutated_tree(tree: Any, random: Random, raw: Sequence[str] = ()) -> Any:
    """A copy of a document with one to three changes. raw: names for `spelled`."""
    root = [copy.deepcopy(tree)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        parent, key = random.choice(list(_nodes(root)))
        random.choice(_CHANGES)(parent, key, random, raw, root)
    return root[0]


def _nodes(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value below a list or mapping: (container, index or key)."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _nodes(node[key])


def _replace(parent: Any, key: Any, random: Random, raw: Sequence[str], root: Any) -> None:
    parent[key] = hostile(random, raw)


def _remove(parent: Any, key: Any, random: Random, raw: Sequence[str], root: Any) -> None:
    if parent is root:
        root[0] = None
    else:
        del parent[key]


def _misspell(parent: Any, key: Any, random: Random, raw: Sequence[str], root: Any) -> None:
    if isinstance(parent, dict):
        name = str(key)
        parent[random.choice((name + "s", name[:-1], name.upper(), f"\x1b[2J{name}\n", name * 1_000, 7))] = parent[key]
        if random.random() < 0.5:
            del parent[key]


def _swap(parent: Any, key: Any, random: Random, raw: Sequence[str], root: Any) -> None:
    """Puts a copy of another part of the document here."""
    other, place = random.choice(list(_nodes(root)))
    parent[key] = copy.deepcopy(other[place])


def _wrap(parent: Any, key: Any, random: Random, raw: Sequence[str], root: Any) -> None:
    parent[key] = random.choice((lambda v: [v], lambda v: {"a": v}, lambda v: str(v), lambda v: [v] * 200))(parent[key])


def _scale(parent: Any, key: Any, random: Random, raw: Sequence[str], root: Any) -> None:
    """Changes a number a little or a lot; anything else is replaced."""
    value = parent[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _replace(parent, key, random, raw, root)
    parent[key] = random.choice((-value, value + 1, value * 10**4, value * 10**9, value / 3, str(value), 10**30))


_CHANGES: tuple[Callable[[Any, Any, Random, Sequence[str], Any], None], ...] = (
    _replace, _replace, _replace, _remove, _misspell, _swap, _wrap, _scale,
)  # fmt: skip


PIECES = ("\t", "\0", "\x85", "\ufeff", "\x1b[31m", ": ", "- ", "&a ", "*a", "'", '"', "{", "]", "#")


def mutated_text(text: str, random: Random, raw: dict[str, str]) -> str:
    """The text with lines removed, repeated, indented or cut, or with hostile text in it."""
    lines = text.split("\n")
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(lines))
        line = lines[at]
        column = random.randrange(len(line) + 1)
        inserted = line[:column] + random.choice((*PIECES, *raw.values())) + line[column:]
        changes = ([], [line, line], [" " + line], [line.lstrip()], [line[:column]], [inserted], [line * 50])
        lines[at : at + 1] = random.choice(changes)
        lines = lines or [""]
    return "\n".join(lines)


NUMBERS = (b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff" * 8)


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """The bytes with flipped bits, hostile numbers, or with parts cut, repeated or added."""
    body = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        start = random.randrange(len(body) + 1)
        end = min(len(body), start + random.choice((1, 4, 16, 256)))
        kind = random.randrange(8)
        if kind <= 2 and start < len(body):
            body[start] ^= 1 << random.randrange(8)
        elif kind == 3:
            number = random.choice((*NUMBERS, random.randbytes(4)))
            body[start : start + len(number)] = number
        elif kind == 4:
            del body[start:end]
        elif kind == 5:
            body[start:start] = body[start:end] * random.choice((1, 2, 50))
        elif kind == 6:
            del body[start:]
        else:
            body[start:start] = random.randbytes(random.choice((1, 8, 64)))
    return bytes(body)


def mutated_zip(data: bytes, random: Random) -> bytes:
    """The archive with one entry changed, missing, repeated, renamed, or replaced by zeros that are packed tightly."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = random.randrange(len(entries))
    name, body = entries[at]
    changes: tuple[Callable[[], list[tuple[str, bytes]]], ...] = (
        lambda: [(name, mutated_bytes(body, random))],
        lambda: [(name, mutated_bytes(body, random))],
        lambda: [],
        lambda: [(name, body), (name + "0", body)],
        lambda: [("../../outside", body)],
        lambda: [(name, b"\0" * random.choice((len(body) * 2, 2**26)))],
    )
    entries[at : at + 1] = random.choice(changes)()
    sink = io.BytesIO()
    kind = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(sink, "w", kind) as archive:
        for entry, content in entries:
            archive.writestr(entry, content)
    return sink.getvalue()


def replace_by_special(path: Path, random: Random) -> None:
    """Puts something else in a file's place: nothing, a folder, a pipe, an endless device, a link, a file of 1 TiB."""
    path.unlink()
    kind = random.randrange(7)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to(path.name)
    elif kind == 5:
        path.touch()
    elif kind == 6:
        path.touch()
        os.truncate(path, SPARSE_BYTES)


def hostile_json(tree: Any, random: Random) -> bytes:
    """A mutation of a document as the content of a JSON file."""
    return as_json(mutated_tree(tree, random, list(RAW_JSON))).encode(errors="surrogatepass")


def write_hostile(
    path: Path,
    data: bytes,
    random: Random,
    share: float = 1.0,
    mutate: Callable[[bytes, Random], bytes] = mutated_bytes,
) -> Path:
    """Writes a file's content, which is mutated in this share of the calls. Returns the path.

    In one call of forty there is something else in the file's place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(mutate(data, random) if random.random() < share else data)
    if random.random() < 1 / 40:
        replace_by_special(path, random)
    return path
