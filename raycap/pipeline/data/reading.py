"""Reads the data set that a configuration names: its annotation files, vocabulary and content keys.

`FORMATS` lists the formats of annotation files. `data.format` in `pipeline/config/sections.py` must list the same
names. This module does not import torch, because the import would take longer than all the work of `raycap check`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SPLIT_WORDS, DataSection, SourceSection
from raycap.pipeline.data.content_keys import hash_files, take_snapshot
from raycap.pipeline.data.dataset import SCHEMA, SOURCE_ID, TOKENS, Dataset
from raycap.pipeline.data.formats.files import (
    TEXT_ENDINGS,
    errors_named,
    find_files,
    is_hidden,
    is_image,
    prefix_of,
    read_json,
    unused_kind,
)
from raycap.pipeline.data.formats.rows import MAX_CAPTION, SURROGATE, Identity, Rows, as_texts
from raycap.pipeline.data.formats.source import Source, inside, lines_of, malformed
from raycap.pipeline.data.formats.splits import Splits, id_of_name, read_split_lists, split_in_name
from raycap.pipeline.data.formats.table import TABLE_ENDINGS, add_table, read_head, table_entries
from raycap.pipeline.data.formats.webdataset import TAR_ENDINGS, add_samples, read_samples
from raycap.pipeline.data.language.tokenizers import SUBWORD
from raycap.pipeline.data.synthetic.scenes import MARKER, write_dataset
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import plain_name, shorten, shown
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions, is_remote
from raycap.pipeline.storage.untrusted.documents import read_document

logger = logging.getLogger(__name__)


class Annotations(NamedTuple):
    """What the annotation files of a data set contain.

    problems: a sentence for each caption that is not valid. left_out: a sentence for each kind of things that were
    found and are not used.
    """

    dataset: Dataset
    problems: list[str]
    left_out: list[str]


Image = tuple[Identity, str, tuple[str, ...], list[Any], list[str]]  # id, split, parts of the path, captions, tokens
MAX_TEXT_BYTES = 2**20  # limit of a text file with the captions of one image
OTHER_TEXTS = {"readme", "license", *SPLIT_WORDS}  # names of text files that are no captions
_NUM_THREADS, _FILES_PER_SLICE = 8, 10_000


def find_data(config: RunConfig) -> tuple[Dataset, dict[str, str]]:
    """The data set with content keys, and {URI: reason} of unreadable images."""
    dataset = read_data(config)
    build_vocabulary(dataset, config.data)  # raises UserError for an empty vocabulary before any image is read
    return snapshot_of(dataset, config)


def read_data(config: RunConfig) -> Dataset:
    """The data set without content keys, checked for training. A missing synthetic data set is written first."""
    return read_dataset(config.data, data_root(config), config.storage.options)


def data_root(config: RunConfig) -> str:
    """The folder or s3:// prefix of the data set. A missing synthetic data set is written first."""
    scenes = config.data.synthetic
    if scenes is None:
        return storage_path(str(config.data.root)).uri
    digest = hashlib.sha256(json.dumps(asdict(scenes), sort_keys=True).encode()).hexdigest()[:10]
    name = f"data/synthetic-{digest}"
    root, remote = config.working_path / name, config.home(name)  # remote: None if the storage is local
    if remote is None or not (remote / MARKER).exists():
        if not root.is_dir():
            logger.info(f"writing the synthetic data set, {scenes.num_images} images, to {remote or root}")
        write_dataset(root, scenes)
        if remote is not None:
            Mirror(remote, root).push()
    return str(root) if remote is None else remote.uri


def snapshot_of(dataset: Dataset, config: RunConfig, listing: pa.Table | None = None) -> tuple[Dataset, dict[str, str]]:
    """The data set with content keys, and {URI: reason} of images that cannot be read. Updates the manifest of keys.

    listing: known sizes and tags (`take_snapshot`). With region features, the content keys are made from the image ids,
    because the image files need not exist.
    """
    if not config.has_backbone:
        return dataset.keyed_by_id(), {}
    root = "" if config.data.root is None else storage_path(config.data.root).uri
    image_source = f"{root} {config.data.model_dump_json(include={'images', 'sources', 'synthetic'})}"
    name = hashlib.sha256(image_source.encode()).hexdigest()[:16]
    manifest = config.storage_place / f"manifests/{name}.parquet"
    hash_new = partial(hash_files, cache_bytes=config.features.cache_bytes)
    return take_snapshot(dataset, manifest, config.storage.options, hash_new, listing)


def read_dataset(config: DataSection, root: Path | str, options: StorageOptions = StorageOptions()) -> Dataset:
    """The data set of a configuration, without the captions in which the tokenizer finds no word.

    Raises UserError if a file or folder is missing or malformed, a caption is not text, an image has no caption with a
    word in it, or a split that training needs is empty.
    """
    dataset, problems, left_out = read_annotations(config, root, options)
    if problems:
        raise UserError(problems[0])
    for sentence in left_out:
        logger.warning(sentence)
    with_words = dataset.with_words(config.tokenizer)
    if wordless := dataset.num_captions - with_words.num_captions:
        logger.warning(f"{wordless} captions without a word are not used")
    require_splits(with_words, config)
    return with_words


def require_splits(dataset: Dataset, config: DataSection) -> None:
    """Raises UserError if a split that the configuration needs has no image."""
    needed = {"data.train_splits": config.train_splits, "data.val_split": (config.val_split,)}
    needed |= {f"data.test_splits ({name})": (name,) for name in config.test_splits}
    needed["data.vocabulary_splits"] = config.vocabulary_splits or config.rewarded_splits
    for key, names in needed.items():
        if not len(dataset.split(*names)):
            splits = shorten(pc.unique(dataset.table["split"]).sort().to_pylist()) or "none at all"
            missing = f"no image of {config.annotations} is in {' or '.join(names)}"
            raise UserError(f"{key}: {missing}; it has the splits {splits}")


def read_annotations(config: DataSection, root: Path | str, options: StorageOptions = StorageOptions()) -> Annotations:
    """The data set with every image and caption, what is wrong with it, and what is left out.

    Raises UserError if a file or folder is missing, or if a file does not have its format, repeats an image id or names
    a path outside of the data set's folder.
    """
    base = storage_path(root, options)
    if not base.is_remote and not base.path.is_dir():
        raise UserError(f"data.root: folder {root} does not exist; give the folder that holds {config.annotations}")
    # Without `data.sources`, the keys annotations, images and split of the section `data` describe the only source.
    only_source = SourceSection(**config.model_dump(include={"annotations", "images", "split"}))
    sources = config.sources or (only_source,)
    lists = read_split_lists(base, config.split_lists)
    rows = Rows(Splits(lists, config.split_fractions, config.split_seed, config.split_by_folder))
    rewarded = [each for part in sources if part.rewarded for each in _find_sources(part, config, base)]
    read_sources(rewarded, config.format, rows)
    table = rows.table(with_tokens=config.tokenizer == TOKENS.name)
    taught = [_taught_captions(section, config, base, table) for section in sources if not section.rewarded]
    table = pa.concat_tables([table, *taught])
    counts = table["image_id"].value_counts()
    if len(counts) < len(table):
        repeated = counts.field("values")[int(np.argmax(counts.field("counts")))].as_py()
        uri = table["uri"].filter(pc.equal(table["image_id"], repeated))[-1].as_py()  # the last image with this id
        image = f"image {shown(uri)}"
        raise UserError(f"{config.annotations}: {image} repeats the image id {repeated}; every id must occur once")
    table = table.append_column("key", pa.nulls(len(table), pa.string()))
    if table[SOURCE_ID.name].null_count == len(table):
        table = table.drop_columns([SOURCE_ID.name])
    names = [name for name in (*SCHEMA.names, TOKENS.name, SOURCE_ID.name) if name in table.column_names]
    return Annotations(Dataset(table.select(names)), rows.problems, rows.left_out)


def _taught_captions(section: SourceSection, config: DataSection, root: StoragePath, people: pa.Table) -> pa.Table:
    """A table of a model's captions for training images. people: the table of the images with people's captions.

    All rows get the split of the source. Images that are not in a rewarded split of `people` are left out, because a
    model may caption a whole folder. Images without a caption are left out, too. Raises UserError if `people` has
    images in the source's split.
    """
    if pc.is_in(pa.scalar(section.split), value_set=pc.unique(people["split"])).as_py():
        raise UserError(
            f"data.sources: images with people's captions are in the split {section.split}; give the source with "
            "rewarded: false another split"
        )
    is_learned = pc.is_in(people["split"], value_set=pa.array(config.rewarded_splits, pa.string()))
    learned = set(people["uri"].filter(is_learned).to_pylist())
    rows = Rows()
    read_sources(_find_sources(section, config, root), "auto", rows)
    table = rows.table(with_tokens="tokens" in people.column_names)
    images = zip(table["uri"].to_pylist(), table["captions"].to_pylist(), strict=True)
    is_taught = [uri in learned and any(map(str.strip, captions)) for uri, captions in images]
    taught = Dataset(table.filter(pa.array(is_taught, pa.bool_())))
    ids = [id_of_name(f"{section.annotations} {image_id}") for image_id in taught.column("image_id")]
    splits = pa.array([section.split] * len(taught), pa.string())
    taught = taught.with_column(SOURCE_ID.name, pa.array(map(json.dumps, taught.source_ids()), pa.string()))
    return taught.with_column("image_id", pa.array(ids, pa.int64())).with_column("split", splits).table


def _find_sources(section: SourceSection, config: DataSection, root: StoragePath) -> list[Source]:
    """The annotation files that a section of `data.sources` names. Raises UserError for missing or bad paths."""
    uri = section.images.rstrip("/") if is_remote(section.images) else inside(root, section.images, "data.images")[0]
    images = StoragePath(uri, root.options)
    if not images.is_remote and not images.path.is_dir():
        raise UserError(f"data.images: folder {images} does not exist; give it relative to data.root = {root}")
    sources = []
    for name in find_files(root, section.annotations):
        path = root if name in ("", ".") else root / name.rstrip("/")
        source = Source(path, images, name, section.images, section.split, config.columns)
        sources.append(replace(source, with_tokens=config.tokenizer == TOKENS.name))
    return sources


def build_vocabulary(dataset: Dataset, config: DataSection) -> Vocabulary:
    """The vocabulary of a configuration. Raises UserError if it is empty.

    The words of `data.extra_vocabulary`, for example names of novel objects, are added even if no caption uses them.
    With subwords they are not added, because subwords can spell any word.
    """
    training = dataset.split(*(config.vocabulary_splits or config.rewarded_splits))
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
    """The largest number of tokens in a caption of the data set, with SOS and EOS."""
    return max(map(len, map(vocabulary.tokenize, dataset.texts(vocabulary.tokenizer)))) + 2


def add_karpathy(source: Source, data: object, rows: Rows) -> None:
    """Adds the images of a file in Karpathy's layout.

    data: {"images": [...]} with filepath, filename, split, sentences with raw text, and cocoid or imgid. Raises
    UserError for other content.
    """
    path = source.annotations
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not in Karpathy layout: expected an object with a list 'images' that is not empty")

    def parse(entry: Values, location: str) -> Image:
        image_id = source.image_id(entry["cocoid"] if "cocoid" in entry else entry["imgid"], location)
        sentences = entry["sentences"]
        tokens = []
        if source.with_tokens:
            tokens = [_joined_tokens(sentence.get("tokens"), location) for sentence in sentences]
        filename = source.text(entry, "filename")
        names = entry.get("filepath") or ".", filename
        name = prefix_of(source.images_name) + "/".join(map(str, names))
        split = rows.split_of(location, name, [filename], source.text(entry, "split"))
        return image_id, split, names, [sentence["raw"] for sentence in sentences], tokens

    _add_images(source, entries, parse, rows)


def _joined_tokens(tokens: Any, location: str) -> str:
    """The tokens of a caption, joined with spaces. Raises UserError for anything but a list of words."""
    if tokens is None:
        raise UserError(f"{location}: a sentence has no tokens, and data.tokenizer is tokens; set it to spacy")
    text = " ".join(tokens) if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens) else None
    if text is None or text.split() != tokens or SURROGATE.search(text):
        raise UserError(f"{location} is malformed: the tokens of a sentence are not a list of words")
    if len(text) > MAX_CAPTION:
        limit = f"the limit is {MAX_CAPTION}; shorten the sentence or remove it"
        raise UserError(f"{location}: the tokens of a sentence have {len(text)} characters; {limit}")
    return text


def _add_images(source: Source, entries: list[Any], parse: Callable[[Values, str], Image], rows: Rows) -> None:
    """Adds the images of a JSON file. parse: makes an Image of an entry. Its second argument names the entry in errors.

    Raises UserError if `parse` fails, which means that the entry is malformed.
    """
    for number, entry in enumerate(entries):
        location = f"{source.annotations}: images[{number}]"
        try:
            image_id, split, names, captions, tokens = parse(entry, location)
            if not all(isinstance(text, str) for text in (split, *names)):
                raise TypeError("its split, domain or file name is not text")
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise malformed(location, error) from error
        uri = source.find("/".join(names), location)[0]
        rows.add(image_id, split, uri, as_texts(captions, location, rows), location, tokens)


def add_coco(source: Source, data: object, rows: Rows) -> None:
    """Adds the images of a file in COCO's layout. The domain of an image of nocaps is its split.

    data: an object with the lists images (id, file_name) and annotations (image_id, caption). If there are no
    annotations, as in COCO's image_info_test2014.json, the images have no captions. Raises UserError for other content.
    """
    path = source.annotations
    images = data.get("images") if isinstance(data, dict) else None
    annotations = data.get("annotations", []) if isinstance(data, dict) else None
    if not isinstance(images, list) or not images or not isinstance(annotations, list):
        raise UserError(
            f"{path} is not in COCO's layout: expected an object with the list 'images', and with the list "
            "'annotations' if the images have captions"
        )
    captions_of: dict[str, list[Any]] = {}
    for number, entry in enumerate(annotations):
        location = f"{path}: annotations[{number}]"
        try:
            text = source.image_id(entry["image_id"], location).text
            captions_of.setdefault(text, []).append(entry["caption"])
        except (KeyError, TypeError) as error:
            raise malformed(location, error) from error
    # COCO's files are named by their splits, such as captions_val2014.json and image_info_test-dev2017.json.
    split_of_file = split_in_name(path.name, first=True)

    def parse(entry: Values, location: str) -> Image:
        image_id, filename = source.image_id(entry["id"], location), source.text(entry, "file_name")
        name, names = prefix_of(source.images_name) + filename, [filename, image_id.text]
        split = rows.split_of(location, name, names, source.split, entry.get("domain"), split_of_file)
        return image_id, split, (filename,), captions_of.pop(image_id.text, []), []

    _add_images(source, images, parse, rows)
    if captions_of:
        count, first = len(captions_of), min(captions_of)
        raise UserError(f"{path}: {count} image ids of 'annotations' are not in 'images', first {shown(first)}")


def read_text_files(source: Source, place: StoragePath, rows: Rows) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, captions) of each image in or below the folder `place`, sorted by name. Raises UserError.

    The captions of dog.jpg are the lines of dog.txt, which is beside it, or in the same folder below
    `source.annotations`. An image without a text file has no captions. A text that is a link out of the folder is not
    read, because a stranger's link may name any file.
    """
    folder = source.annotations
    with errors_named(folder):
        texts = sorted(folder.names(rows.leave_out))
        found = texts if place is folder else sorted(place.names(rows.leave_out))
    for name in found:
        if kind := unused_kind(name):
            rows.leave_out(kind, name)
    images = [name for name in found if is_image(name) and not is_hidden(name)]
    texts = [name for name in texts if name.lower().endswith(TEXT_ENDINGS) and not is_hidden(name)]
    text_of = {plain_name(name.rpartition(".")[0]): name for name in texts}
    stems, top = {plain_name(name.rpartition(".")[0]) for name in images}, os.path.realpath(folder.uri)
    for stem, name in list(text_of.items()):
        path = Path(folder.uri, name)
        if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(top)):
            rows.leave_out("texts that are links out of the folder or to nothing", name)
            del text_of[stem]
        elif stem not in stems and stem.rpartition("/")[2].lower() not in OTHER_TEXTS:
            rows.leave_out("texts beside no image", name)

    def read(name: str) -> tuple[str, list[str]]:
        text = text_of.get(plain_name(name.rpartition(".")[0]))
        if text is None:
            return name, []
        with errors_named(folder / text):
            return name, lines_of((folder / text).read_bytes(MAX_TEXT_BYTES), str(folder / text))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # because requests to S3 mostly wait
        for start in range(0, len(images), _FILES_PER_SLICE):
            yield from pool.map(read, images[start : start + _FILES_PER_SLICE])


def add_text_files(source: Source, _: None, rows: Rows) -> None:
    """Adds the images of a folder. An image's id is a hash of its name. Raises UserError if there is no image."""
    count = rows.count
    folder, folder_name = source.annotations, source.annotations_name
    if source.images not in (None, folder) and not any(map(is_image, folder.names())):
        folder, folder_name = source.images, source.images_name  # the texts are in folders of their own
    for name, captions in read_text_files(source, folder, rows):
        location = str(folder / name)
        image_id, split = source.id_and_split({}, name, prefix_of(folder_name) + name, location, rows)
        rows.add(image_id, split, location, as_texts(captions, location, rows), location)
    if rows.count == count:
        if not folder.is_remote and not folder.path.exists():
            raise UserError(f"folder {folder} does not exist; data.annotations is relative to data.root")
        raise UserError(f"folder {folder} contains no image; give the folder that holds them")


class Format(NamedTuple):
    """The functions that read a format. open: opens a source. add: adds what `open` returned to the rows.

    Both functions raise UserError.
    """

    open: Callable[[Source], Any]
    add: Callable[[Source, Any, Rows], None]


def _open_json(source: Source) -> Any:
    data = read_json(source.annotations)
    if source.images is None and isinstance(data, dict) and isinstance(data.get("annotations"), list):
        # Captions that are only scored may be about images that the file does not list.
        images = data["images"] if isinstance(data.get("images"), list) else []
        listed = {str(image.get("id")) for image in images if isinstance(image, dict)}
        ids = [entry.get("image_id") for entry in data["annotations"] if isinstance(entry, dict)]
        further = {str(value): {"id": value} for value in ids if str(value) not in listed}
        data["images"] = [*images, *further.values()]
    return data


FORMATS = {
    "karpathy": Format(_open_json, add_karpathy),
    "coco": Format(_open_json, add_coco),
    "nocaps": Format(_open_json, add_coco),
    "table": Format(table_entries, add_table),
    "webdataset": Format(read_samples, add_samples),
    "text": Format(lambda _: None, add_text_files),
}


def read_sources(sources: Sequence[Source], name: str, rows: Rows) -> None:
    """Adds the images of annotation files to `rows`, file by file. name: a key of `FORMATS`, or "auto"."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(sources), _NUM_THREADS):
            part = sources[start : start + _NUM_THREADS]
            are_tars = all(_form_by_name(name, source) == "webdataset" for source in part)
            # Tars are opened in parallel, because reading headers from S3 takes many requests.
            opened = (pool.map if are_tars else map)(partial(_open, name), part)
            for source in part:
                form, data = next(opened)  # zip would keep the data
                rows.file = source.annotations_name
                FORMATS[form].add(source, data, rows)
                del data  # frees a JSON file, which takes much memory, before the next one is opened


def _open(name: str, source: Source) -> tuple[str, Any]:
    """The format (a key of `FORMATS`) of an annotation file, and what the format's `open` returned.

    name: the configured format, or "auto". Raises UserError if the format is unknown, or lacks tokens that are needed.
    """
    form = _form_by_name(name, source)
    if form is None and read_head(source.annotations).is_table:
        form = "table"
    data = FORMATS[form or "coco"].open(source)
    if form is None:
        images = data.get("images") if isinstance(data, dict) else None
        if not isinstance(images, list):
            expected = "Karpathy's or COCO's JSON (an object with a list 'images'), a table, a .tar, or a folder"
            raise UserError(f"{source.annotations} has an unknown format; expected {expected}")
        is_coco = bool(images) and isinstance(images[0], dict) and {"filename", "sentences"}.isdisjoint(images[0])
        form = "coco" if is_coco else "karpathy"
    if source.with_tokens and form != "karpathy":
        raise UserError(
            f"data.tokenizer is tokens, and {source.annotations} is not in Karpathy's layout, whose sentences have "
            "tokens; set it to expansionnet or spacy"
        )
    return form, data


def _form_by_name(form: str, source: Source) -> str | None:
    """The configured format, or with "auto" the format by the file's name. None if only the content shows it."""
    if form != "auto":
        return form
    path, name = source.annotations, source.annotations_name
    if path.name.removesuffix(".gz").endswith(TABLE_ENDINGS):
        return "table"
    if path.name.endswith(TAR_ENDINGS):
        return "webdataset"
    is_folder = name in ("", ".") or name.endswith("/") or (not path.is_remote and path.path.is_dir())
    return "text" if is_folder else None
