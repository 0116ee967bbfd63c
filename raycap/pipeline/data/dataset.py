"""Captioned images: the table that every step after the annotation files reads. Processes share it as an Arrow file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.data.language.tokenizers import TOKENIZERS, caption_words, text_column
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.atomic import atomic_path

SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("split", pa.string()),
        ("uri", pa.string()),  # where the image is: the text of a `pipeline.data.images.ImageLocation`
        ("captions", pa.list_(pa.string())),  # as in the annotation file
        ("key", pa.string()),  # content key: sha256 of the image file; null until `content_keys.py` sets it
    ]
)

# A further column with `data.tokenizer: tokens`: of each caption, the annotation file's tokens joined with spaces.
TOKENS = pa.field("tokens", pa.list_(pa.string()))
CHUNK_ROWS = 4096  # rows that become Python objects at a time, and rows of a chunk of the Arrow file


@dataclass(frozen=True)
class Dataset:
    """Images with their captions. table: one row per image, with the columns of SCHEMA, and maybe TOKENS."""

    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def num_captions(self) -> int:
        """The number of captions of all images."""
        return pc.sum(pc.list_value_length(self.table["captions"])).as_py() or 0

    def split(self, *names: str) -> Dataset:
        """The images of these splits."""
        return self.where(pc.is_in(self.table["split"], pa.array(names, pa.string())))

    def readable(self) -> Dataset:
        """The images with a content key: the files of all others could not be read."""
        return self.where(pc.is_valid(self.table["key"]))

    def without(self, content_keys: Sequence[str]) -> Dataset:
        """The images that have none of these content keys."""
        return self.where(pc.invert(pc.is_in(self.table["key"], pa.array(content_keys, pa.string()))))

    def where(self, mask: pa.ChunkedArray) -> Dataset:
        """The images for which a mask without nulls is true."""
        return self if pc.sum(mask).as_py() == len(self) else Dataset(self.table.filter(mask))

    def with_column(self, name: str, values: pa.Array | pa.ChunkedArray) -> Dataset:
        """A copy in which this column of SCHEMA has these values, one per row."""
        return Dataset(self.table.set_column(self.table.schema.get_field_index(name), name, values))

    def keyed_by_id(self) -> Dataset:
        """The data set with `id-<image id>` as content keys, because region features need no image files."""
        ids = pc.cast(self.table["image_id"], pa.string())
        return self.with_column("key", pc.binary_join_element_wise("id", ids, "-"))

    def column(self, name: str) -> list[Any]:
        """A column of SCHEMA as a list."""
        return self.table[name].to_pylist()

    def references(self, tokenizer: str | None = None) -> dict[int, list[str]]:
        """{image id: captions}.

        With a tokenizer of `TOKENIZERS`, the captions are the texts that were stored for it to split. Without one, they
        are as annotated.
        """
        return dict(zip(self.column("image_id"), self.column(text_column(tokenizer)), strict=True))

    def uris(self) -> dict[int, str]:
        """Where each image is, by image id."""
        return dict(zip(self.column("image_id"), self.column("uri"), strict=True))

    def split_sizes(self) -> dict[str, int]:
        """The number of images of each split, in the order in which the splits occur."""
        return {each["values"]: each["counts"] for each in self.table["split"].value_counts().to_pylist()}

    def with_words(self, tokenizer: str = "expansionnet") -> Dataset:
        """The data set without captions that have no word for the tokenizer.

        Raises UserError for an image that would have no caption left.
        """
        names = [name for name in ("captions", TOKENS.name) if name in self.table.column_names]
        parts: list[list[pa.Array]] = [[] for _ in names]
        for start, batch in zip(range(0, len(self), CHUNK_ROWS), self.chunks(*names), strict=True):
            kept = [
                [texts for texts in zip(*image, strict=True) if caption_words(tokenizer, texts[0]) and all(texts[1:])]
                for image in zip(*map(pa.ChunkedArray.to_pylist, batch.columns), strict=True)
            ]
            if [] in kept:
                row = self.table.slice(start + kept.index([]), 1).to_pylist()[0]
                image = f"image {shown(row['uri'])} (id {row['image_id']})"
                raise UserError(f"{image} has no caption with a word in it; add one")
            for place, part in enumerate(parts):
                part.append(pa.array([[texts[place] for texts in image] for image in kept], TOKENS.type))
        dataset = Dataset(self.table)
        for name, part in zip(names, parts, strict=True):
            dataset = dataset.with_column(name, pa.chunked_array(part, TOKENS.type))
        return dataset

    def chunks(self, *names: str) -> Iterator[pa.Table]:
        """These columns, CHUNK_ROWS rows at a time; the last chunk may have fewer."""
        table = self.table.select(list(names))
        for start in range(0, len(table), CHUNK_ROWS):
            yield table.slice(start, CHUNK_ROWS)

    def texts_by_image(self, tokenizer: str = "expansionnet") -> Iterator[list[str]]:
        """The texts of each image's captions that the tokenizer splits, one image at a time."""
        for chunk in self.chunks(text_column(tokenizer)):
            yield from chunk.column(0).to_pylist()

    def texts(self, tokenizer: str = "expansionnet") -> Iterator[str]:
        """The text of every caption that the tokenizer splits, one caption at a time."""
        return chain.from_iterable(self.texts_by_image(tokenizer))

    def tokens(self, tokenizer: str = "expansionnet") -> Iterator[list[str]]:
        """The words of every caption, one caption at a time."""
        return map(TOKENIZERS[tokenizer].split, self.texts(tokenizer))

    def fingerprint(self) -> str:
        """Hash of content keys, ids, splits and captions. It does not depend on the paths of the image files."""
        digest = hashlib.sha256()
        for chunk in self.chunks("image_id", "split", "key", "captions", *self.table.column_names[len(SCHEMA) :]):
            digest.update(json.dumps(chunk.to_pylist(), ensure_ascii=False).encode())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Writes an Arrow file atomically."""
        with atomic_path(path) as temporary, pa.ipc.new_file(temporary, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=CHUNK_ROWS)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        """Memory-maps an Arrow file. Raises DamagedError for a file that is not a table of SCHEMA."""
        content = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_file(content).read_all()
            table = table.cast(SCHEMA.append(TOKENS) if TOKENS.name in table.column_names else SCHEMA)
            table.validate(full=True)
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None):
                raise  # the machine is at fault, and not the file
            raise DamagedError(f"{path} is damaged: {' '.join(str(error).split())}") from error
        return Dataset(table)
