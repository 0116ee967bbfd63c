"""Mutated files of every form give a result, or an error that the command line prints as one sentence.

`make test` tries a few mutations of each form, and `make proof` a thousand. hypothesis prints the smallest that fails.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from raycap.jobs.import_ import import_checkpoint
from raycap.jobs.named_files import open_bundle
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.caption_files import read_predictions
from raycap.pipeline.data.image_sources import MAX_PIXELS
from raycap.pipeline.data.images import BadImage, decode_image, read_image_file
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.data.word_vectors import read_word_vectors
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.captioning.constraints import read_constraints
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.search.records import TrialRecord, read_records
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.storage.lease import LeaseRecord, take_lease
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError
from tests.conftest import ROOT
from tests.support.bundles import make_bundle, with_confidence, without_digests
from tests.support.golden import EXPANSIONNET_SETTINGS, GOLDEN

SENTENCES = [{"raw": "a cat"}, {"raw": "cats"}]
KARPATHY = {
    "images": [{"filepath": "f", "filename": f"{k}.png", "cocoid": k, "split": "val", "sentences": SENTENCES}
               for k in range(2)]
}  # fmt: skip
COCO = {
    "images": [{"id": 1, "file_name": "1.png", "domain": "near"}, {"id": 2, "file_name": "2.png"}],
    "annotations": [{"image_id": 1, "caption": "a cat"}, {"image_id": 2, "caption": "a dog"}],
}
ROWS = [
    {"image": "1.png", "id": 1, "captions": ["a cat", "cats"], "split": "train"},
    {"image": "2.png", "id": 2, "captions": ["a dog"], "split": "val"},
]
CONSTRAINTS = [{"image_id": 1, "constraints": ["horse", ["cart", "red wagon"]], "at_least": 1}]
LEASE = LeaseRecord(token=3, nonce="a", holder="process 1 on host", until=0.0, seconds=0.01).model_dump()
TRIALS = [asdict(TrialRecord("a", {"G": "4 8"}, 0, "stopped", run="runs/x", reports=[(1.0, 0.5)], costs={"macs": 2.0}))]
CSV = b'image,id,captions,split\n1.png,1,"[""a cat"", ""cats""]",train\n2.png,2,a dog,val\n'

# Values of every type, in place of the expected one.
STRANGE: tuple[Any, ...] = (
    [], {}, None, True, -1, 0, 7, 2**31, 2**63, 10**30, -(10**400), 1e308, 1e-320, float("inf"), float("nan"), "", "\0",
    "\ud800", "\x1b[2J\n", "\u202e", "9" * 5_000, "x" * 20_000, "../..", "/dev/zero", "s3://b/c", "${HOME}", "auto",
    [None], {"id": []}, {"": None}, list(range(5_000)),
)  # fmt: skip
# Text that no encoder writes, in the place of the string "@".
RAW = ("[" * 50_000 + "]" * 50_000, "1e999", "NaN", "9" * 5_000, r'"\ud800"', '{"a": 1, "a": 2}', '["')
RAW_YAML = (*RAW[1:], "[" * 2_000 + "]" * 2_000, "!!python/object/apply:os.system ['touch owned']", "&a [*a]", "!x 3")
# Pickles that run code or ask for much memory.
PICKLES = (
    b"cos\nsystem\n(S'touch owned'\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0btouch owned\x85R.",
    b"\x80\x04]r\xff\xff\xff\x7f.",
    b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value below a document's root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


@st.composite
def trees(draw: st.DrawFn, value: Any) -> Any:
    """A document in which one value, or one key, is replaced, or is missing."""
    copy = json.loads(json.dumps(value))
    *parents, last = draw(st.sampled_from(list(places(value))))
    node = copy
    for key in parents:
        node = node[key]
    kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename")))
    if kind == "rename" and isinstance(node, dict):
        node[draw(st.sampled_from((f"{last}s", f"\x1b[2J{last}", "x" * 3_000)))] = node.pop(last)
    elif kind == "remove":
        del node[last]
    else:
        node[last] = draw(st.sampled_from((*STRANGE, "@", "@", "@")))
    return copy


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with one change: a bit is flipped, a part is cut out, repeated or replaced, or the end is missing."""
    start, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 20))
    return draw(
        st.sampled_from(
            (
                data[:start] + bytes([data[start] ^ 1 << length % 8]) + data[start + 1 :],
                data[:start] + data[start + length :],
                data[: start + length] + data[start:],
                data[:start] + b"\xff" * length + data[start + length :],
                data[:start],
            )
        )
    )


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_lines(value: Any) -> bytes:
    return b"\n".join(map(as_json, value if isinstance(value, list) else [value]))


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value).encode(errors="surrogatepass")


def mutants(tree: Any, write: Callable[[Any], bytes] = as_json) -> st.SearchStrategy[bytes]:
    """Files with a mutated document, some with text that no encoder writes, and files with damaged bytes."""
    at, raw = (b"'@'", RAW_YAML) if write is as_yaml else (b'"@"', RAW)
    documents = st.builds(
        lambda value, text: write(value).replace(at, text.encode()), trees(tree), st.sampled_from(raw)
    )
    return st.one_of(documents, documents, damaged(write(tree)))


class Form(NamedTuple):
    """A form of files: the content of a valid one and of hostile ones, and what reads the file at a path."""

    valid: bytes
    hostile: st.SearchStrategy[bytes]
    read: Callable[[Path], object]


def read_annotation_file(path: Path) -> None:
    read_annotations(DataSection(root=str(path.parent), annotations=path.name), path.parent)


def read_archive(path: Path) -> None:
    dataset = read_annotations(DataSection(root=str(path.parent), annotations=path.name), path.parent).dataset
    for uri in dataset.column("uri"):
        read_image_file(StoragePath(uri))


def use_bundle(path: Path) -> None:
    opened = open_bundle("--model", str(path.parent)).bundle
    service = CaptionService(opened, beam_size=2, max_length=5)
    service.caption(service.transform(Image.new("RGB", (8, 8)))[None])


def use_checkpoint(path: Path) -> None:
    folder = GOLDEN / "expansionnet_v2"
    files = [path if path.name == name else folder / name for name in ("checkpoint.pth", "tokens.pickle")]
    import_checkpoint("expansionnet_v2", *files, path.parent / "out", overrides=list(EXPANSIONNET_SETTINGS))


def table(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def picture(form: str) -> bytes:
    sink = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
    Image.fromarray(pixels).save(sink, form)
    return sink.getvalue()


def tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in (("1.png", picture("PNG")), ("1.txt", b"a cat"), ("2.png", picture("PNG"))):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return sink.getvalue()


def of_document(
    tree: Any, read: Callable[[Path], object], write: Callable[[Any], bytes] = as_json
) -> Callable[[Path], Form]:
    return lambda _: Form(write(tree), mutants(tree, write), read)


def of_bytes(data: bytes, read: Callable[[Path], object], *others: bytes) -> Callable[[Path], Form]:
    """others: further hostile contents."""
    hostile = st.one_of(damaged(data), st.sampled_from(others)) if others else damaged(data)
    return lambda _: Form(data, hostile, read)


def of_config(name: str, read: Callable[[Path], object]) -> Callable[[Path], Form]:
    """A shipped configuration, beside those that it names."""

    def form(folder: Path) -> Form:
        shutil.copytree(ROOT / "raycap" / "configs", folder, dirs_exist_ok=True)
        data = (folder / name).read_bytes()
        return Form(data, mutants(yaml.safe_load(data), as_yaml), read)

    return form


def of_bundle(name: str) -> Callable[[Path], Form]:
    """One file of a bundle that has no digests."""

    def form(folder: Path) -> Form:
        without_digests(with_confidence(make_bundle(folder)))
        data = (folder / name).read_bytes()
        if name == "model.safetensors":
            return Form(data, damaged(data), use_bundle)
        tree, write = (yaml.safe_load(data), as_yaml) if name == "config.yaml" else (json.loads(data), as_json)
        return Form(data, mutants(tree, write), use_bundle)

    return form


def of_checkpoint(name: str) -> Callable[[Path], Form]:
    return of_bytes((GOLDEN / "expansionnet_v2" / name).read_bytes(), use_checkpoint, *PICKLES)


def of_picture(form: str) -> Callable[[Path], Form]:
    return of_bytes(picture(form), lambda path: decode_image(path.read_bytes(), MAX_PIXELS).load())


GLOVE = b"3 2\ncat 0.5 -1\ndog 1e-3 2\n"
IMAGE_ROWS = [{"image": {"bytes": picture("PNG"), "path": "1.png"}, "caption": "a cat"}]
# {path of the file: its form}
FORMS: dict[str, Callable[[Path], Form]] = {
    "karpathy.json": of_document(KARPATHY, read_annotation_file),
    "coco.json": of_document(COCO, read_annotation_file),
    "coco.json.gz": of_bytes(gzip.compress(as_json(COCO), mtime=0), read_annotation_file),
    "rows.jsonl": of_document(ROWS, read_annotation_file, as_lines),
    "rows.csv": of_bytes(CSV, read_annotation_file),
    "rows.parquet": of_bytes(table(ROWS), read_annotation_file),
    "images.parquet": of_bytes(table(IMAGE_ROWS), read_archive),
    "images.tar": of_bytes(tar(), read_archive),
    "references.json": of_document(COCO, read_references),
    "predictions.json": of_document([{"image_id": 1, "caption": "a cat"}], read_predictions),
    "constraints.jsonl": of_document(CONSTRAINTS, read_constraints, as_lines),
    "glove.txt": of_bytes(GLOVE, lambda path: read_word_vectors(path, ["cat", "dog"], 2)),
    "image.png": of_picture("PNG"),
    "image.jpg": of_picture("JPEG"),
    "image.webp": of_picture("WEBP"),
    "image.gif": of_picture("GIF"),
    "image.bmp": of_picture("BMP"),
    "image.ppm": of_picture("PPM"),
    "image.tif": of_picture("TIFF"),
    "checkpoint.pth": of_checkpoint("checkpoint.pth"),
    "tokens.pickle": of_checkpoint("tokens.pickle"),
    "lease.json": of_document(LEASE, lambda path: take_lease(StoragePath(str(path)), 0.01, above=2)),
    "trials.json": of_document(TRIALS, lambda path: read_records(path.read_bytes(), path.name)),
    "demo.yaml": of_config("demo.yaml", load_config),
    "clustformer_regions_coco.yaml": of_config("clustformer_regions_coco.yaml", load_config),
    "search_demo.yaml": of_config("search_demo.yaml", load_search),
    "config.yaml": of_bundle("config.yaml"),
    "model.safetensors": of_bundle("model.safetensors"),
    "vocabulary.json": of_bundle("vocabulary.json"),
    "preprocessing.json": of_bundle("preprocessing.json"),
    "confidence.json": of_bundle("confidence.json"),
}


@pytest.mark.parametrize("num_mutants", [25, pytest.param(1_000, marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", FORMS)
def test_a_mutated_file_is_read_or_refused_in_one_sentence(
    name: str, num_mutants: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RAYCAP_COCO", "RAYCAP_REGIONS"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)  # where the hostile pickles would leave their file
    path = tmp_path / "inputs" / name
    path.parent.mkdir()
    form = FORMS[name](path.parent)
    path.write_bytes(form.valid)
    form.read(path)

    @settings(
        max_examples=num_mutants,
        deadline=20_000,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(content=form.hostile)
    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            form.read(path)
        except (UnicodeError, json.JSONDecodeError, ValidationError):
            raise
        except (UserError, DamagedError, BadImage, StorageError, OSError) as error:
            assert len(str(error)) < 2_000 and str(error).isprintable(), repr(error)

    check()
    assert not list(tmp_path.rglob("owned"))
