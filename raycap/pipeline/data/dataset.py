"""The data set: a table of images with captions, made of the annotation files. Processes share it as an Arrow file."""

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

from raycap.models.config import Values
from raycap.pipeline.data.language.tokenizers import TOKENIZERS, caption_words
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.atomic import atomic_path
from raycap.pipeline.storage.untrusted.documents import open_regular_file

SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("split", pa.string()),
        ("uri", pa.string()),  # where the image is: the text of a `pipeline.data.images.ImageLocation`
        ("captions", pa.list_(pa.string())),  # as in the annotation file
        ("key", pa.string()),  # content key: sha256 of the image file; null until `content_keys.py` sets it
    ]
)

# One more column if `data.tokenizer` is `tokens`: each caption's tokens in the annotation file, joined with spaces.
TOKENS = pa.field("tokens", pa.list_(pa.string()))
# One more column if some image_id is not the id in the annotation file: this id as JSON text, or null if it is.
SOURCE_ID = pa.field("source_id", pa.string())
ImageId = int | str  # the id of an image in an annotation file
CHUNK_ROWS = 4096  # rows that are converted to Python objects at a time, and rows per chunk of the Arrow file


@dataclass(frozen=True)
class Dataset:
    """Images with their captions.

    table: one row per image, with the columns of SCHEMA, and sometimes TOKENS and SOURCE_ID.
    """

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
        """The images with a content key. An image without a key has a file that could not be read."""
        return self.where(pc.is_valid(self.table["key"]))

    def without(self, content_keys: Sequence[str]) -> Dataset:
        """The images that have none of these content keys."""
        return self.where(pc.invert(pc.is_in(self.table["key"], pa.array(content_keys, pa.string()))))

    def where(self, mask: pa.ChunkedArray) -> Dataset:
        """The images for which the mask is true. mask: one bool per row, without nulls."""
        return self if pc.sum(mask).as_py() == len(self) else Dataset(self.table.filter(mask))

    def with_column(self, name: str, values: pa.Array | pa.ChunkedArray) -> Dataset:
        """A copy with new values in one column. name: a column of SCHEMA or TOKENS. values: one per row."""
        return Dataset(self.table.set_column(self.table.schema.get_field_index(name), name, values))

    def keyed_by_id(self) -> Dataset:
        """A copy whose content keys are `id-<image id>`, for region features, which need no image files.

        Raises UserError for an id that is no number, or that several files use.
        """
        for number, source in zip(self.column("image_id"), self.source_ids(), strict=True):
            if source != number and not (isinstance(source, str) and source.isdecimal() and int(source) == number):
                problem = f"the id {shown(source)} is no whole number, or two images have it"
                raise UserError(f"features.hdf5: the features of regions are found by the ids of images; {problem}")
        ids = pc.cast(self.table["image_id"], pa.string())
        return self.with_column("key", pc.binary_join_element_wise("id", ids, "-"))

    def column(self, name: str) -> list[Any]:
        """The values of a column as a list."""
        return self.table[name].to_pylist()

    def source_ids(self) -> list[ImageId]:
        """The ids in the annotation files, which results have. They are distinct only within a split."""
        numbers = self.column("image_id")
        if SOURCE_ID.name not in self.table.column_names:
            return numbers
        sources = self.column(SOURCE_ID.name)
        return [n if text is None else json.loads(text) for n, text in zip(numbers, sources, strict=True)]

    def require_distinct_ids(self) -> None:
        """Raises UserError if the ids in the annotation files are not distinct, because several splits use them."""
        repeated = self.where(repeated_ids(self.table)).source_ids()
        if repeated:
            splits = ", ".join(map(shown, self.split_sizes()))
            raise UserError(f"images of several splits have the id {shown(repeated[0])}; give one --split of {splits}")

    def references(self) -> dict[ImageId, list[str]]:
        """{id in the annotation file: captions as annotated}."""
        return dict(zip(self.source_ids(), self.column("captions"), strict=True))

    def uris(self) -> dict[ImageId, str]:
        """{id in the annotation file: the text of its `ImageLocation`}."""
        return dict(zip(self.source_ids(), self.column("uri"), strict=True))

    def split_sizes(self) -> dict[str, int]:
        """{split: number of its images}, in the order in which the splits occur."""
        return {each["values"]: each["counts"] for each in self.table["split"].value_counts().to_pylist()}

    def with_words(self, tokenizer: str = "expansionnet") -> Dataset:
        """A copy without the captions in which the tokenizer finds no word.

        Raises UserError for an image that would have no caption left.
        """
        parts = [self.table.schema.empty_table()]
        for chunk in self.chunks(*self.table.column_names):
            images = chunk.to_pylist()
            for image in images:
                _drop_wordless_captions(image, tokenizer)
            parts.append(pa.Table.from_pylist(images, chunk.schema))
        return Dataset(pa.concat_tables(parts))

    def chunks(self, *names: str) -> Iterator[pa.Table]:
        """The columns with these names, CHUNK_ROWS rows at a time. The last chunk may have fewer rows."""
        table = self.table.select(list(names))
        for start in range(0, len(table), CHUNK_ROWS):
            yield table.slice(start, CHUNK_ROWS)

    def texts_by_image(self, tokenizer: str = "expansionnet") -> Iterator[list[str]]:
        """For each image, its captions from the column that the tokenizer splits."""
        for chunk in self.chunks(TOKENS.name if tokenizer == TOKENS.name else "captions"):
            yield from chunk.column(0).to_pylist()

    def texts(self, tokenizer: str = "expansionnet") -> Iterator[str]:
        """Every caption from the column that the tokenizer splits."""
        return chain.from_iterable(self.texts_by_image(tokenizer))

    def tokens(self, tokenizer: str = "expansionnet") -> Iterator[list[str]]:
        """The words of every caption: one list per caption."""
        return map(TOKENIZERS[tokenizer].split, self.texts(tokenizer))

    def fingerprint(self) -> str:
        """A hash of content keys, ids, splits and captions, but not of the paths of the image files."""
        digest = hashlib.sha256()
        tokens = {TOKENS.name}.intersection(self.table.column_names)
        for chunk in self.chunks("image_id", "split", "key", "captions", *tokens):
            digest.update(json.dumps(chunk.to_pylist(), ensure_ascii=False).encode())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Writes an Arrow file atomically."""
        with atomic_path(path) as temporary, pa.ipc.new_file(temporary, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=CHUNK_ROWS)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        """Memory-maps an Arrow file. Raises DamagedError for a file that is not a table of SCHEMA."""
        open_regular_file(path).close()  # refuses a pipe, because opening it would wait for a writer
        content = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_file(content).read_all()
            further = [field for field in (TOKENS, SOURCE_ID) if field.name in table.column_names]
            table = table.cast(pa.schema([*SCHEMA, *further]))
            table.validate(full=True)
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None):
                raise  # the fault is the machine's, so the file does not count as damaged
            raise DamagedError(f"{path} is damaged: {' '.join(str(error).split())}") from error
        return Dataset(table)


def repeated_ids(table: pa.Table) -> pa.ChunkedArray:
    """For each image, True if another image has the same id in the annotation files, as a number or as text."""
    ids = pc.cast(table["image_id"], pa.string())
    if SOURCE_ID.name in table.column_names:
        ids = pc.coalesce(pc.replace_substring_regex(table[SOURCE_ID.name], '^"(.*)"$', r"\1"), ids)
    counts = ids.value_counts()
    return pc.is_in(ids, value_set=counts.field("values").filter(pc.greater(counts.field("counts"), 1)))


def _drop_wordless_captions(image: Values, tokenizer: str) -> None:
    """Removes the captions of a data set's row that have no word. Raises UserError if no caption is left."""
    captions: list[str] = image["captions"]
    tokens: list[str] = image.get(TOKENS.name, captions)
    kept = [number for number, text in enumerate(captions) if tokens[number] and caption_words(tokenizer, text)]
    if not kept:
        where = f"image {shown(image['uri'])} (id {image.get(SOURCE_ID.name) or image['image_id']})"
        raise UserError(f"{where} has no caption with a word in it; add one")
    image["captions"] = [captions[number] for number in kept]
    if TOKENS.name in image:
        image[TOKENS.name] = [tokens[number] for number in kept]
