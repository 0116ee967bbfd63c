"""Documents that fill the memory, the stack or the time of a plain parser are refused in one sentence."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.untrusted import documents
from raycap.pipeline.storage.untrusted.documents import gunzip, parse_json, parse_yaml
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile


def parquet_rows(data: bytes, name: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    return ParquetFile(io.BytesIO(data), name).rows(columns)


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
HIGH = "x: [" + ", ".join(f"&a{i} {'[' * 40}{f'*a{i - 1}' if i else 1}{']' * 40}" for i in range(60)) + "]"
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 27))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 3_000, "nested more than"),
        ("- " * 300 + "x", "nested more than"),
        (HIGH, "nested more than 50 deep"),
        ("a: &a {b: *a}", "an alias contains itself"),
        (ALIASES, "expands to more than"),
        (MERGES, "expands to more than"),
        (f"[&a {'x' * 10_000}, {'*a, ' * 200}]", "expands to more than 1048576 characters"),
        ("!!set {a, b}", "tag"),
        ("!!python/object/apply:os.system [ls]", "tag"),
        ("!!binary aGk=", "tag"),
        ("x: " + "1:" * 2_000 + "1", "a number of"),
        ("x" * 300_000, "characters of YAML"),
        ("{[1]: 2}", "not valid YAML"),
        ("x: 2026-99-99", "not valid YAML"),
        ("a: 'b", "not valid YAML"),
        ("a: \0", "not valid YAML"),
        (b"\xff\xfe\xff", "not valid YAML"),
        ("x: !!int nine", "not valid YAML"),
        ("a: {b: 1,\n  b: 2}", "the key 'b' a second time in line 2, column 3; remove one of them"),
        ("x: !!timestamp soon", "does not fit its tag"),
    ],
)
def test_hostile_yaml_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^file.yaml.*{reason}") as caught:
        parse_yaml(text, "file.yaml")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n  token: secret-word: x", "mapping values are not allowed here in line 2, column 21"),
        ("token: *secret-word", "found undefined alias '...' in line 1, column 8"),
        ("a:\n\t- b", "found a tab in line 2, column 1; indent with blanks"),
        ("token: !!int secret-word", "a value is no date, or does not fit its tag (!!int, ...)"),
    ],
)
def test_errors_in_yaml_quote_no_value(text: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_yaml(text, "file.yaml")
    assert str(refused.value) == f"file.yaml is not valid YAML: {problem}"


def test_plain_yaml_equals_the_plain_parser() -> None:
    rng = random.Random(1)

    def value(depth: int) -> Any:
        kind = rng.randrange(7 if depth else 5)
        plain = [
            rng.randrange(10**6),
            rng.random(),
            rng.choice(["", "no", "1e3", "ä [", "a: b"]),
            None,
            rng.random() < 0.5,
        ]
        if kind < 5:
            return plain[kind]
        children = [value(depth - 1) for _ in range(rng.randrange(4))]
        return children if kind == 5 else {f"k{index}": child for index, child in enumerate(children)}

    for _ in range(50):
        text = yaml.safe_dump(value(5))
        assert parse_yaml(text, "f") == yaml.safe_load(text)
    shared = "a: &a {x: 1}\nb: {<<: *a, y: 2, <<: *a}\nc: *a\nd: 2026-01-02"
    assert parse_yaml(shared, "f") == yaml.safe_load(shared)
    assert parse_yaml("", "f") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "Infinity is not a JSON number"),
        (r'["\ud800"]', "surrogates not allowed"),
        ("9" * 5_000, "limit"),
        (b'["\xff"]', "utf-8"),
        ("", "Expecting value"),
    ],
)
def test_hostile_json_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^file.json is not valid JSON.*{reason}"):
        parse_json(text, "file.json")


def test_pairs_of_surrogates_are_one_character() -> None:
    assert parse_json(rb'["\ud83d\ude00 \\ud800"]', "f") == ["\U0001f600 \\ud800"]


def test_the_memory_for_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MEMORY_PART", 1e-6)
    assert parse_json('["a cat"]', "file.json") == ["a cat"]
    with pytest.raises(UserError, match=r"^file.json needs more memory than there is"):
        parse_json("[" + "[]," * 1_000_000 + "0]", "file.json")


def test_gzip_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(2).randbytes(10_000)
    assert gunzip(gzip.compress(data[:5_000]) + gzip.compress(data[5_000:]) + bytes(7), "f") == data
    assert gunzip(b"no gzip", "f") == b"no gzip"
    monkeypatch.setattr(documents, "MIN_LIMIT_BYTES", 1_000)
    bomb, small = gzip.compress(bytes(10**6)), gzip.compress(data)
    with pytest.raises(UserError, match=r"^x.gz decompresses to more than"):
        gunzip(bomb, "x.gz")
    for damaged in (small[:-9], b"\x1f\x8b" + small[3:]):
        with pytest.raises(UserError, match="^x.gz is not a whole gzip file"):
            gunzip(damaged, "x.gz")


def test_a_parquet_column_whose_name_has_a_dot_is_another_column() -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"image.url": ["a.jpg"], "caption": ["a cat"]}), buffer)
    assert ParquetFile(buffer, "f").columns == ["image.url", "caption"]
    assert list(parquet_rows(buffer.getvalue(), "f", ["caption"])) == [{"caption": "a cat"}]
    nested = io.BytesIO()
    pq.write_table(pa.table({"image": [{"url": "a.jpg"}]}), nested)
    assert list(parquet_rows(nested.getvalue(), "f", ["image"])) == [{"image": {"url": "a.jpg"}}]
