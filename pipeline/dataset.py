"""Captioned images: reading annotation files, splits, and the table that every later step works from.

A `Dataset` is columnar (one row an image) and is handed between processes as an Arrow file. A worker that trains
holds the caption ids of its splits in memory: about 60 bytes a caption.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import DataSection
from pipeline.errors import UserError
from pipeline.text import Vocabulary, tokenize

SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("split", pa.string()),
        ("uri", pa.string()),  # where the image file lies
        ("captions", pa.list_(pa.string())),  # raw, as the annotation file has them
        ("key", pa.string()),  # sha256 of the file's content; null until `pipeline.snapshot` has seen it
    ]
)


@dataclass(frozen=True)
class Dataset:
    """Rows of images with captions; `table` has the columns of SCHEMA."""

    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    def split(self, *names: str) -> Dataset:
        return Dataset(self.table.filter(pc.is_in(self.table["split"], pa.array(names, pa.string()))))

    def known(self) -> Dataset:
        """Only the images that have a content key, that is, those whose file could be read."""
        return Dataset(self.table.filter(pc.is_valid(self.table["key"])))

    def without(self, keys: Sequence[str]) -> Dataset:
        """Without the images of these content keys (the quarantine's)."""
        return Dataset(self.table.filter(pc.invert(pc.is_in(self.table["key"], pa.array(keys, pa.string())))))

    def column(self, name: str) -> list[Any]:
        return self.table[name].to_pylist()

    def references(self) -> dict[int, list[str]]:
        """Raw captions by image id."""
        return dict(zip(self.column("image_id"), self.column("captions"), strict=True))

    def tokens(self) -> Iterator[list[str]]:
        """The tokens of every caption, streamed."""
        for batch in self.table.select(["captions"]).to_batches(max_chunksize=4096):
            for captions in batch.column(0).to_pylist():
                for caption in captions:
                    yield tokenize(caption)

    def fingerprint(self) -> str:
        """Hash of image contents, ids, splits and captions: the same wherever the files lie."""
        digest = hashlib.sha256()
        columns = self.table.select(["image_id", "split", "key", "captions"]).combine_chunks()
        for batch in columns.to_batches(max_chunksize=4096):
            digest.update(json.dumps(batch.to_pylist(), ensure_ascii=False).encode())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(self.table, max_chunksize=4096)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        return cls(pa.ipc.open_file(pa.memory_map(str(path))).read_all())


def read_dataset(config: DataSection, root: Path) -> Dataset:
    """The data set that a configuration names, from a folder in Karpathy layout, with every split checked.

    Raises UserError when the annotation file or image folder is missing or malformed, or a needed split is empty.
    """
    images = _inside(root, root / config.images, "data.images")
    if not root.is_dir():
        raise UserError(f"data.root: folder {root} does not exist; give the folder that holds {config.annotations}")
    if not images.is_dir():
        raise UserError(f"data.images: folder {images} does not exist; give it relative to data.root = {root}")
    dataset = read_karpathy(root / config.annotations, images)
    wanted = {
        "data.train_splits": config.train_splits,
        "data.val_split": (config.val_split,),
        **{f"data.test_splits ({name})": (name,) for name in config.test_splits},
    }
    for key, names in wanted.items():
        if not len(dataset.split(*names)):
            found = ", ".join(sorted(set(dataset.column("split")))) or "none at all"
            raise UserError(
                f"{key}: no image of {config.annotations} is in {' or '.join(names)}; it has the splits {found}"
            )
    return dataset


def read_karpathy(path: Path, images: Path) -> Dataset:
    """A Karpathy JSON: `images` with filepath, filename, split, sentences (raw), and cocoid or imgid.

    Image paths may not leave `images`. Raises UserError naming the file and the entry that is malformed. Reads the
    whole file (COCO: 150 MB) into memory; larger sets come as tables.
    """
    if not path.is_file():
        raise UserError(f"annotation file {path} does not exist; data.annotations is taken relative to data.root")
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not in Karpathy layout: expected an object with a list 'images' that is not empty")
    rows: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    seen: set[int] = set()
    for number, entry in enumerate(entries):
        try:
            image_id = int(entry["cocoid"] if "cocoid" in entry else entry["imgid"])
            captions = [sentence["raw"] for sentence in entry["sentences"]]
            split, filename = entry["split"], entry["filename"]
            folder = entry.get("filepath") or "."
            for text in (*captions, split, filename, folder):
                if not isinstance(text, str) or "\0" in text:
                    raise TypeError("a caption, split, filename or filepath is not text")
                text.encode()  # a lone surrogate is no text
            if not -(2**63) <= image_id < 2**63:
                raise ValueError(f"the image id {image_id} has more than 64 bits")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: images[{number}] is malformed ({type(error).__name__}: {error})") from error
        if image_id in seen:
            raise UserError(f"{path}: images[{number}] repeats the image id {image_id}; every id must stand once")
        seen.add(image_id)
        captions = [caption for caption in captions if tokenize(caption)]
        if not captions:
            raise UserError(f"{path}: images[{number}] (id {image_id}) has no caption with a word in it")
        rows["image_id"].append(image_id)
        rows["split"].append(split)
        rows["uri"].append(str(_inside(images, images / folder / filename, f"{path}: images[{number}]")))
        rows["captions"].append(captions)
        rows["key"].append(None)
    return Dataset(pa.table(rows, schema=SCHEMA))


def build_vocabulary(dataset: Dataset, min_count: int) -> Vocabulary:
    """The vocabulary of the training captions; UserError when it comes out empty."""
    try:
        return Vocabulary.build(dataset.tokens(), min_count)
    except ValueError as error:
        raise UserError(str(error)) from error


def longest_caption(dataset: Dataset) -> int:
    """Tokens of the longest caption with SOS and EOS."""
    return max(len(tokens) for tokens in dataset.tokens()) + 2


def _inside(folder: Path, path: Path, what: str) -> Path:
    """`path` with '.' and '..' taken out, provided that it does not leave `folder`."""
    plain = Path(os.path.normpath(path.absolute()))
    if not plain.is_relative_to(os.path.normpath(folder.absolute())):
        raise UserError(f"{what}: {path} lies outside of {folder}; paths may not leave it")
    return plain
