"""Captioned images: reads annotation files, and defines the table that every later step reads.

Processes exchange a `Dataset` as an Arrow file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annotations.files import find_files
from pipeline.annotations.formats import read_sources
from pipeline.annotations.rows import Rows, Source, images_folder
from pipeline.annotations.splits import Splits, read_split_lists
from pipeline.config.sections import DataSection, SourceSection
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import DamagedError, UserError
from pipeline.language.tokenizers import SUBWORD, TOKENIZERS, caption_words, text_column
from pipeline.scoring.result_files import shorten
from pipeline.storage.atomic import atomic_path
from pipeline.storage.path import StorageOptions, StoragePath, storage_path
from pipeline.untrusted.files import read_document
from pipeline.untrusted.names import shown

SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("split", pa.string()),
        ("uri", pa.string()),  # where the image is: the text of a `pipeline.annotations.location.ImageLocation`
        ("captions", pa.list_(pa.string())),  # as in the annotation file
        ("key", pa.string()),  # content key: sha256 of the image file; null until `content_keys.py` sets it
    ]
)


# a further column with `data.tokenizer: tokens`: those of each caption in the annotation file, joined with spaces
TOKENS = pa.field("tokens", pa.list_(pa.string()))


@dataclass(frozen=True)
class Dataset:
    """Images with their captions, one row of `table` per image; its columns are those of SCHEMA, and maybe TOKENS."""

    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def num_captions(self) -> int:
        """The number of captions of all images."""
        return pc.sum(pc.list_value_length(self.table["captions"])).as_py() or 0

    def split(self, *names: str) -> Dataset:
        """The images of these splits."""
        return Dataset(self.table.filter(pc.is_in(self.table["split"], pa.array(names, pa.string()))))

    def readable(self) -> Dataset:
        """The images with a content key: the files of all others could not be read."""
        return Dataset(self.table.filter(pc.is_valid(self.table["key"])))

    def with_column(self, name: str, values: pa.Array | pa.ChunkedArray) -> Dataset:
        """A copy in which this column of SCHEMA has these values, one per row."""
        return Dataset(self.table.set_column(self.table.schema.get_field_index(name), name, values))

    def with_more_captions(self, more: pa.Table) -> Dataset:
        """The data set with further captions, which follow those that an image has.

        more: has the columns key and captions, and each key once. A tokenizer of tokens splits them at spaces.
        """
        rows = pc.index_in(self.table["key"], value_set=more["key"])
        further = more["captions"].combine_chunks().take(rows.combine_chunks())  # null for images without any
        dataset = self
        for name in ("captions", TOKENS.name):
            if name in self.table.column_names:
                joined = _joined(self.table[name].combine_chunks(), further)
                dataset = dataset.with_column(name, joined.cast(TOKENS.type))
        return dataset

    def keyed_by_id(self) -> Dataset:
        """The data set with `id-<image id>` as content keys, for images whose files are not available."""
        ids = pc.cast(self.table["image_id"], pa.string())
        return self.with_column("key", pc.binary_join_element_wise("id", ids, "-"))

    def without(self, content_keys: Sequence[str]) -> Dataset:
        """The images that have none of these content keys."""
        return Dataset(self.table.filter(pc.invert(pc.is_in(self.table["key"], pa.array(content_keys, pa.string())))))

    def column(self, name: str) -> list[Any]:
        """A column of SCHEMA as a list."""
        return self.table[name].to_pylist()

    def references(self, tokenizer: str | None = None) -> dict[int, list[str]]:
        """Raw captions by image id; with a tokenizer of `TOKENIZERS`, the texts that it splits."""
        return dict(zip(self.column("image_id"), self.column(text_column(tokenizer)), strict=True))

    def uris(self) -> dict[int, str]:
        """Where each image is, by image id."""
        return dict(zip(self.column("image_id"), self.column("uri"), strict=True))

    def with_words(self, tokenizer: str = "expansionnet") -> Dataset:
        """The data set without captions in which the tokenizer finds no word.

        Raises UserError for an image whose captions all have no word.
        """
        texts = {name: self.column(name) for name in ("captions", TOKENS.name) if name in self.table.column_names}
        kept = [
            [
                number
                for number, (caption, *tokens) in enumerate(zip(*image, strict=True))
                if caption_words(tokenizer, caption) and all(tokens)
            ]
            for image in zip(*texts.values(), strict=True)
        ]
        if [] in kept:
            row = self.table.slice(kept.index([]), 1).to_pylist()[0]
            image = f"image {shown(row['uri'])} (id {row['image_id']})"
            raise UserError(f"{image} has no caption with a word in it; add one")
        dataset = self
        for name, column in texts.items():
            chosen = [[image[number] for number in numbers] for image, numbers in zip(column, kept, strict=True)]
            dataset = dataset.with_column(name, pa.array(chosen, TOKENS.type))
        return dataset

    def texts(self, tokenizer: str = "expansionnet") -> Iterator[str]:
        """The text of every caption that the tokenizer splits, one caption at a time."""
        for batch in self.table.select([text_column(tokenizer)]).to_batches(max_chunksize=4096):
            for texts in batch.column(0).to_pylist():
                yield from texts

    def tokens(self, tokenizer: str = "expansionnet") -> Iterator[list[str]]:
        """The words of every caption, one caption at a time."""
        return map(TOKENIZERS[tokenizer].split, self.texts(tokenizer))

    def fingerprint(self) -> str:
        """Hash of content keys, ids, splits and captions. It does not depend on the paths of the image files."""
        digest = hashlib.sha256()
        names = ["image_id", "split", "key", "captions", *self.table.column_names[len(SCHEMA) :]]
        for batch in self.table.select(names).combine_chunks().to_batches(max_chunksize=4096):
            digest.update(json.dumps(batch.to_pylist(), ensure_ascii=False).encode())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Writes an Arrow file atomically."""
        with atomic_path(path) as temporary, pa.ipc.new_file(temporary, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=4096)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        """Memory-maps an Arrow file. Raises DamagedError for a file that is not a table of SCHEMA."""
        return cls.parse(pa.memory_map(str(path)), str(path))

    @classmethod
    def parse(cls, content: pa.NativeFile, name: str) -> Dataset:
        """The data set in the content of the Arrow file `name`. Raises DamagedError as `load`."""
        try:
            table = pa.ipc.open_file(content).read_all()
            table = table.cast(SCHEMA.append(TOKENS) if TOKENS.name in table.column_names else SCHEMA)
            table.validate(full=True)
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, MemoryError | pa.ArrowCancelled) or getattr(error, "errno", None):
                raise  # the machine is at fault, and not the file
            raise DamagedError(f"{name} is damaged: {' '.join(str(error).split())}") from error
        return cls(table)


def _joined(first: pa.ListArray, second: pa.ListArray) -> pa.ListArray:
    """The lists of two arrays of equal length, joined row by row. A null is an empty list."""
    counts = [pc.fill_null(pc.list_value_length(each), 0).to_numpy(zero_copy_only=False) for each in (first, second)]
    values = pa.concat_arrays([first.flatten(), second.flatten()])
    # the number of the row of each value; a stable sort leaves the values of the first array before those of the other
    owners = np.concatenate([np.repeat(np.arange(len(each)), each) for each in counts])
    order = np.argsort(owners, kind="stable")
    return pa.ListArray.from_arrays(np.cumsum([0, *(counts[0] + counts[1])]), values.take(pa.array(order)))


def read_dataset(config: DataSection, root: Path | str, options: StorageOptions = StorageOptions()) -> Dataset:
    """The data set of a configuration, without wordless captions.

    Raises UserError when a file or folder is missing or malformed, a caption is not text, an image has no caption with
    a word in it, or a split that training needs is empty.
    """
    dataset, problems = read_annotations(config, root, options)
    if problems:
        raise UserError(problems[0])
    dataset = dataset.with_words(config.tokenizer)
    require_splits(dataset, config)
    return dataset


def require_splits(dataset: Dataset, config: DataSection) -> None:
    """Raises UserError, naming the configuration key, when a split that the configuration needs has no image."""
    needed = {"data.train_splits": config.train_splits, "data.val_split": (config.val_split,)}
    needed |= {f"data.test_splits ({name})": (name,) for name in config.test_splits}
    needed["data.vocabulary_splits"] = config.vocabulary_splits or config.train_splits
    for key, names in needed.items():
        if not len(dataset.split(*names)):
            splits = shorten(pc.unique(dataset.table["split"]).sort().to_pylist()) or "none at all"
            missing = f"no image of {config.annotations} is in {' or '.join(names)}"
            raise UserError(f"{key}: {missing}; it has the splits {splits}")


def read_annotations(
    config: DataSection, root: Path | str, options: StorageOptions = StorageOptions()
) -> tuple[Dataset, list[str]]:
    """Every image and caption of the annotation files, and a sentence for each caption that is not valid.

    Raises UserError when a file or folder is missing, or when a file does not have its format, repeats an image id or
    names a path outside of the data set's folder.
    """
    base = storage_path(root, options)
    if not base.is_remote and not base.path.is_dir():
        raise UserError(f"data.root: folder {root} does not exist; give the folder that holds {config.annotations}")
    rows, sources = Rows(), _find_sources(config, base)
    read_sources(sources, config.format, rows)
    ids = pa.array(rows.image_id, pa.int64())
    if pc.count_distinct(ids).as_py() < len(ids):
        repeated, _ = Counter(rows.image_id).most_common(1)[0]
        uri = dict(zip(rows.image_id, rows.uri, strict=True))[repeated]  # the last image with this id
        image = f"image {shown(uri)}"
        raise UserError(f"{config.annotations}: {image} repeats the image id {repeated}; every id must occur once")
    columns = [ids, rows.split, rows.uri, rows.captions, pa.nulls(len(ids), pa.string())]
    table = pa.table(columns, schema=SCHEMA)
    if config.tokenizer == TOKENS.name:
        table = table.append_column(TOKENS, pa.array(rows.tokens, TOKENS.type))
    return Dataset(table), rows.problems


def _find_sources(config: DataSection, root: StoragePath) -> list[Source]:
    """The annotation files of a data set. Raises UserError as `read_annotations`."""
    splits = Splits(read_split_lists(root, config.split_lists), config.split_fractions, config.split_seed)
    # Without `data.sources` these three keys of the section `data` describe the only source.
    only_source = SourceSection(**config.model_dump(include={"annotations", "images", "split"}))
    sources = []
    for section in config.sources or (only_source,):
        images = images_folder(root, section.images)
        if not images.is_remote and not images.path.is_dir():
            raise UserError(f"data.images: folder {images} does not exist; give it relative to data.root = {root}")
        for name in find_files(root, section.annotations):
            path = root if name in ("", ".") else root / name.rstrip("/")
            source = Source(path, images, name, section.images, section.split, splits, config.columns)
            sources.append(replace(source, with_tokens=config.tokenizer == TOKENS.name))
    return sources


def build_vocabulary(dataset: Dataset, config: DataSection) -> Vocabulary:
    """The vocabulary of a configuration. Raises UserError when it is empty.

    The words of `data.extra_vocabulary`, for example names of novel objects, are added even if no caption uses them. A
    subword model needs no further words.
    """
    training = dataset.split(*(config.vocabulary_splits or config.train_splits))
    try:
        if config.tokenizer == SUBWORD:
            texts = training.texts(config.tokenizer)
            return Vocabulary.train_subwords(texts, config.subword_vocabulary, config.min_count)
        vocabulary = Vocabulary.build(training.tokens(config.tokenizer), config.min_count, config.tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    if config.extra_vocabulary is None:
        return vocabulary
    try:
        lines = read_document(Path(config.extra_vocabulary).expanduser()).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.extra_vocabulary {config.extra_vocabulary} cannot be read as text: {error}") from error
    extra = {word for line in lines for word in vocabulary.tokenize(line.lower())}
    return Vocabulary(tuple(sorted(extra.union(vocabulary.words))), config.tokenizer)


def longest_caption(dataset: Dataset, vocabulary: Vocabulary) -> int:
    """Number of the vocabulary's tokens in the longest caption, with SOS and EOS."""
    return max(len(vocabulary.tokenize(text)) for text in dataset.texts(vocabulary.tokenizer)) + 2
