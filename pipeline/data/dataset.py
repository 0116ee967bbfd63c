"""Captioned images: reading annotation files, splits, and the table that every later step works from.

A `Dataset` is columnar (one row an image) and is handed between processes as an Arrow file. A worker that trains
holds the caption ids of its splits in memory: about 60 bytes a caption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.sections import DataSection, SourceSection
from pipeline.data.formats import Rows, Source, images_folder, read_source, read_split_lists
from pipeline.data.vocabulary import TOKENIZERS, Vocabulary, tokenize
from pipeline.errors import UserError
from pipeline.storage.atomic import atomic_path
from pipeline.storage.path import StorageOptions, storage_path

SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("split", pa.string()),
        ("uri", pa.string()),  # where the image file lies
        ("captions", pa.list_(pa.string())),  # raw, as the annotation file has them
        ("key", pa.string()),  # sha256 of the file's content; null until `pipeline.data.content_keys` has seen it
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

    def keyed_by_id(self) -> Dataset:
        """The data set with `id-<image id>` for content keys."""
        keys = pc.binary_join_element_wise("id", pc.cast(self.table["image_id"], pa.string()), "-")
        index = self.table.schema.get_field_index("key")
        return Dataset(self.table.set_column(index, "key", keys))

    def without(self, keys: Sequence[str]) -> Dataset:
        """Without the images of these content keys (the quarantine's)."""
        return Dataset(self.table.filter(pc.invert(pc.is_in(self.table["key"], pa.array(keys, pa.string())))))

    def column(self, name: str) -> list[Any]:
        return self.table[name].to_pylist()

    def references(self) -> dict[int, list[str]]:
        """Raw captions by image id."""
        return dict(zip(self.column("image_id"), self.column("captions"), strict=True))

    def with_words(self) -> Dataset:
        """Without captions that have no word; UserError naming the first image that then has none."""
        rows = self.column("captions")
        kept = [[caption for caption in captions if tokenize(caption)] for captions in rows]
        for number, captions in enumerate(kept):
            if not captions:
                row = self.table.slice(number, 1).to_pylist()[0]
                raise UserError(f"image {row['uri']} (id {row['image_id']}) has no caption with a word in it")
        index = self.table.schema.get_field_index("captions")
        return Dataset(self.table.set_column(index, SCHEMA.field("captions"), pa.array(kept, pa.list_(pa.string()))))

    def tokens(self, tokenizer: str = "expansionnet") -> Iterator[list[str]]:
        """The tokens of every caption, streamed."""
        split = TOKENIZERS[tokenizer]
        for batch in self.table.select(["captions"]).to_batches(max_chunksize=4096):
            for captions in batch.column(0).to_pylist():
                for caption in captions:
                    yield split(caption)

    def fingerprint(self) -> str:
        """Hash of image contents, ids, splits and captions: the same wherever the files lie."""
        digest = hashlib.sha256()
        columns = self.table.select(["image_id", "split", "key", "captions"]).combine_chunks()
        for batch in columns.to_batches(max_chunksize=4096):
            digest.update(json.dumps(batch.to_pylist(), ensure_ascii=False).encode())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        with (
            atomic_path(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, SCHEMA) as writer,
        ):
            writer.write_table(self.table, max_chunksize=4096)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        return cls(pa.ipc.open_file(pa.memory_map(str(path))).read_all())


def read_dataset(config: DataSection, root: Path | str, options: StorageOptions = StorageOptions()) -> Dataset:
    """The data set that a configuration names, fit to train on: every needed split there, every image with a caption.

    Raises UserError when a file or folder is missing or malformed, a caption is not text, an image has no caption with
    a word in it, or a needed split is empty. Captions without a word are left out.
    """
    dataset, problems = read_annotations(config, root, options)
    if problems:
        raise UserError(problems[0])
    dataset = dataset.with_words()
    require_splits(dataset, config)
    return dataset


def require_splits(dataset: Dataset, config: DataSection) -> None:
    """UserError naming the key when a split that the configuration needs has no image."""
    wanted = {
        "data.train_splits": config.train_splits,
        "data.val_split": (config.val_split,),
        **{f"data.test_splits ({name})": (name,) for name in config.test_splits},
        "data.vocabulary_splits": config.vocabulary_splits or config.train_splits,
    }
    for key, names in wanted.items():
        if not len(dataset.split(*names)):
            found = ", ".join(pc.unique(dataset.table["split"]).sort().to_pylist()) or "none at all"
            raise UserError(
                f"{key}: no image of {config.annotations} is in {' or '.join(names)}; it has the splits {found}"
            )


def read_annotations(
    config: DataSection, root: Path | str, options: StorageOptions = StorageOptions()
) -> tuple[Dataset, list[str]]:
    """Every image and caption as the annotation files have them, and a sentence for each caption that is none.

    Raises UserError when a file or folder is missing, has not the form, repeats an image id or names a path outside.
    """
    base = storage_path(root, options)
    if not base.is_remote and not base.path.is_dir():
        raise UserError(f"data.root: folder {root} does not exist; give the folder that holds {config.annotations}")
    rows, lists = Rows(), read_split_lists(base, config.split_lists)
    for section in config.sources or (SourceSection(**config.model_dump(include={"annotations", "images", "split"})),):
        images = images_folder(base, section.images)
        if not images.is_remote and not images.path.is_dir():
            raise UserError(f"data.images: folder {images} does not exist; give it relative to data.root = {root}")
        read_source(Source(base / section.annotations, images, section.split, lists), config.format, rows)
    ids = pa.array(rows.image_id, pa.int64())
    if pc.count_distinct(ids).as_py() < len(ids):
        counts = pc.value_counts(ids)
        twice = next(item["values"] for item in counts.to_pylist() if item["counts"] > 1)
        number = [at for at, identifier in enumerate(rows.image_id) if identifier == twice][1]
        raise UserError(
            f"{config.annotations}: image {rows.uri[number]} repeats the image id {twice}; every id must stand once"
        )
    columns = [ids, rows.split, rows.uri, rows.captions, pa.nulls(len(ids), pa.string())]
    return Dataset(pa.table(columns, schema=SCHEMA)), rows.problems


def build_vocabulary(dataset: Dataset, config: DataSection) -> Vocabulary:
    """The vocabulary that a configuration asks for; UserError when it comes out empty.

    The words of `data.extra_vocabulary` are added however rare they are in the captions: names of novel
    objects, for example.
    """
    part = dataset.split(*(config.vocabulary_splits or config.train_splits))
    try:
        vocabulary = Vocabulary.build(part.tokens(config.tokenizer), config.min_count, config.tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    if config.extra_vocabulary is None:
        return vocabulary
    try:
        lines = Path(config.extra_vocabulary).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.extra_vocabulary {config.extra_vocabulary} cannot be read as text: {error}") from error
    more = {word for line in lines for word in vocabulary.tokenize(line)}
    return Vocabulary(tuple(sorted(more.union(vocabulary.words))), config.tokenizer)


def longest_caption(dataset: Dataset, tokenizer: str = "expansionnet") -> int:
    """Tokens of the longest caption with SOS and EOS."""
    return max(len(tokens) for tokens in dataset.tokens(tokenizer)) + 2
