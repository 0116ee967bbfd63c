"""Finds out the form of a data set in a folder, annotation file or prefix on S3, and the configuration's keys for it.

File names suggest candidates. Each candidate is read as a configuration would read it, until one can be read.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pyarrow.compute as pc
from pydantic import ValidationError

from raycap.models.config import Values
from raycap.pipeline.config.sections import SPLIT_WORDS, ColumnSection, DataSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.formats.files import (
    TEXT_ENDINGS,
    find_files,
    is_hidden,
    is_image,
    matches,
    opened,
    unused_kind,
)
from raycap.pipeline.data.formats.rows import Rows
from raycap.pipeline.data.formats.source import COLUMNS, Source, columns_named
from raycap.pipeline.data.formats.splits import read_split_lists, split_in_name
from raycap.pipeline.data.formats.table import MIXED_ENDINGS, TABLE_ENDINGS, read_head
from raycap.pipeline.data.formats.webdataset import TAR_ENDINGS
from raycap.pipeline.data.images import ImageLocation
from raycap.pipeline.data.reading import Annotations, read_annotations, read_sources
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.runtime.names import one_line, plain_name, quoted, shorten, shown
from raycap.pipeline.storage.path import StoragePath, join, storage_path
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile

logger = logging.getLogger(__name__)

MAX_SOURCES = 50  # annotation files that are listed one by one
MAX_GROUPS = 20  # groups of annotation files with the same ending that are tried
_USUAL = re.compile(r"(?:^|/)(?:dataset|caption|annotation|nocaps|image_info)[^/]*$")  # tried first
# names of columns that are tried after those of `pipeline.data.formats.source.COLUMNS`
OTHER_COLUMNS = {
    "image": (
        "img", "jpg", "png", "filename", "filepath", "file", "path", "image_path", "image_name", "image_file",
        "image_id",
    ),
    "captions": ("sentences", "sentence", "description", "title", "comment", "alt_text", "alt", "prompt", "txt", "raw"),
}  # fmt: skip
PACKED_ENDINGS = (".zip", ".7z", ".rar", ".xlsx", ".xls", ".ods")
MAX_NAME_BYTES = 2**12  # limit of a line of a list of names that is looked at
MAX_LISTED = 1_000_000  # files of a folder that are looked at
MAX_FOLDERS = 20  # folders that are tried as the images' folder
NUM_TRIED = 20  # images that are looked for in each of these folders
# fractions of the splits; the second ones are for few images, of which a tenth may be none
FRACTIONS = ({"train": 0.8, "val": 0.1, "test": 0.1}, {"train": 0.6, "val": 0.2, "test": 0.2})
WITHOUT_TEST = ({"train": 0.9, "val": 0.1}, {"train": 0.7, "val": 0.3})  # if some images are for test
NUM_SEEDS, MIN_DIVISIBLE = 20, 100  # seeds that are tried for fewer images than this
MIN_HELD_OUT = 2  # images of a split that is scored, because the least for CIDEr-D are two
PARQUET_WITH_IMAGES, TARS = "Parquet with images", "WebDataset tars"


class Candidate(NamedTuple):
    """Files that may be one data set. form: files, text or text apart.

    files: annotation files, the images that have texts, or the folders of images and of texts.
    """

    form: str
    files: tuple[str, ...]


def find_candidates(root: StoragePath, names: Sequence[str]) -> Iterator[Candidate]:
    """The candidates among the files below `root`, the likeliest first."""
    images = tuple(filter(is_image, names))
    stems = {name.rpartition(".")[0] for name in images}
    # Of tars, compressed ones are for the reader's error, which names the remedy.
    for ending in (".arrow", ".json", *TABLE_ENDINGS, ".tar", ".tgz"):
        is_mixed = ending in MIXED_ENDINGS
        files = [name for name in names if name.removesuffix(".gz").endswith(ending)]
        files = [name for name in files if not (is_mixed and name.rpartition(".")[0] in stems)]
        for group in sorted(_groups(files), key=lambda group: not _USUAL.search(group[0])):
            is_doubtful = is_mixed or (ending == ".json" and len(files) > 1 and not _USUAL.search(group[0]))
            found = group
            if is_doubtful or (1 < len(group) <= MAX_SOURCES and ending not in (".arrow", ".parquet", ".tar", ".tgz")):
                found = tuple(name for name in group[:MAX_SOURCES] if _has_captions(root / name))
            for alike in _alike(root, found) if ending == ".json" else filter(None, [found]):
                yield Candidate("files", alike)
            if not is_doubtful and (others := tuple(name for name in group if name not in found)):
                yield Candidate("files", others)
            if is_mixed and len(found) > 1:  # Flickr8k has two; the one with the shorter name has the raw captions
                yield from (Candidate("files", (name,)) for name in sorted(found, key=len))
    texts = {plain_name(name.rpartition(".")[0]) for name in names if name.lower().endswith(TEXT_ENDINGS)}
    if paired := tuple(name for name in images if plain_name(name.rpartition(".")[0]) in texts):
        yield Candidate("text", paired)
    elif images and texts and _top(images) != _top(tuple(texts)):
        yield Candidate("text apart", (_top(images), _top(tuple(texts))))


def _alike(root: StoragePath, files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the JSON files that are lists, as in LAVIS, and those that are objects, which are never one data set."""
    lists = []
    with suppress(UserError):  # the reader says what is wrong
        lists = [name for name in files[:MAX_SOURCES] if read_head(root / name).is_table]
    yield from filter(None, [tuple(lists), tuple(name for name in files if name not in lists)])


def _top(names: Sequence[str]) -> str:
    """The last folder that is above all of these files, "." if there is none."""
    parents = {name.rpartition("/")[0] for name in names}
    return (os.path.commonpath(parents) if all(parents) else "") or "."


def _has_captions(path: StoragePath) -> bool:
    """True if a file of text or JSON begins as one with images and captions does, or cannot be read."""
    try:
        text, is_table, columns = read_head(path)
    except UserError:
        return True  # for the reader's error
    if not is_table:
        return re.search(r'"(images|annotations)"\s*:\s*\[', text) is not None
    roles = (columns_named((*COLUMNS[role], *others), columns, role) for role, others in OTHER_COLUMNS.items())
    return "conversations" in columns or all(roles)


def read_names(root: StoragePath, candidate: Candidate, names: Sequence[str]) -> tuple[str, Values]:
    """The form of a candidate in words, and the keys of the section `data` with which it can be read.

    names: all files below `root`. Raises UserError for files that cannot be read.
    """
    if candidate.form == "text":
        return "text beside images", _text_keys(candidate.files, names)
    if candidate.form == "text apart":
        images, texts = candidate.files
        return "texts in folders like those of the images", {"format": "text", "annotations": texts, "images": images}
    first = root / candidate.files[0]
    keys = _sources(candidate.files, names, by_folder=not first.name.endswith((*TAR_ENDINGS, ".parquet")))
    if first.name.endswith(TAR_ENDINGS):
        return TARS, keys
    binary: list[str] = []  # columns that contain images
    if first.name.endswith(".parquet"):
        with opened(first) as file:
            table = ParquetFile(file, f"annotation file {first}")
        columns = tuple(table.columns)
        binary = [name for name in columns if table.binary_column(name) is not None]
    else:
        _, is_table, columns = read_head(first)
        if not is_table:
            return "JSON", keys
    chosen: dict[str, str] = {}
    for role, others in OTHER_COLUMNS.items():
        found = [other for other in others if columns_named((other,), columns, role)]
        if role == "image":
            found += binary
        if found and not columns_named(COLUMNS[role], columns, role):
            chosen[role] = found[0]
    if chosen:
        keys["columns"] = chosen
    image = columns_named((chosen["image"],) if "image" in chosen else COLUMNS["image"], columns, "image")
    if image and image[0] in binary:
        return PARQUET_WITH_IMAGES, keys
    return f"table ({PurePosixPath(first.name.removesuffix('.gz')).suffix})", keys


def _groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups of annotation files that may be one data set, at most MAX_GROUPS. The highest folders come first.

    The files of a group are equally deep in the folders, and their names have the same first word, apart from splits.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        words = re.findall("[a-z]+", name.rsplit("/", 1)[-1].lower())
        word = next((word for word in words if word not in SPLIT_WORDS), "")
        groups.setdefault((name.count("/"), word), []).append(name)
    order = sorted(groups, key=lambda key: (key[0], "dataset" not in groups[key][0], -len(groups[key]), groups[key]))
    return [tuple(groups[key]) for key in islice(order, MAX_GROUPS)]


def _text_keys(texts: Sequence[str], names: Sequence[str]) -> Values:
    """The keys for images with text files beside them. texts: these images. names: all files.

    The folder above them is read. If it also has folders without any text, the folders with text are sources instead.
    """
    parents = {name.rpartition("/")[0] for name in texts}
    top = _top(texts).removeprefix(".")
    prefix = f"{top}/" if top else ""
    # The folders directly below `top` that have text. `top` itself is one if it has text.
    folders = sorted({top if parent == top else prefix + parent[len(prefix) :].partition("/")[0] for parent in parents})
    keys: Values = {"format": "text"}  # `auto` would not recognize a folder on S3
    with_text = tuple(f"{folder}/" for folder in folders)
    has_others = any(is_image(name) and name.startswith(prefix) and not name.startswith(with_text) for name in names)
    if has_others and top not in folders and len(folders) <= MAX_SOURCES:
        return keys | {"sources": [{"annotations": folder} for folder in folders]}
    return keys | {"annotations": top or "."}


def _sources(files: Sequence[str], names: Sequence[str], *, by_folder: bool) -> Values:
    """The keys for annotation files: one file or pattern, or sources with the splits that the file names contain.

    by_folder: files in different folders are different sources, because each may have a folder of images.
    """
    splits = {name: split_in_name(name) for name in files}
    has_splits = len(files) > 1 and None not in splits.values()
    groups: dict[tuple[str | None, str], list[str]] = {}
    for name, split in splits.items():
        folder = name.rpartition("/")[0] if by_folder else ""
        groups.setdefault((split if has_splits else None, folder), []).append(name)
    sources: list[Values] = [
        {"annotations": pattern} | ({"split": split} if has_splits else {})
        for (split, _), group in groups.items()
        for pattern in _patterns(group, names)
    ]
    return {"sources": sources} if has_splits or len(sources) > 1 else sources[0]


def _patterns(files: Sequence[str], names: Sequence[str]) -> list[str]:
    """One pattern that matches these files and no other names. If there is no such pattern, the files themselves.

    Raises UserError if more than MAX_SOURCES files have no pattern.
    """
    if len(files) == 1:
        return list(files)
    begin = os.path.commonprefix(files).rstrip("0123456789")  # noqa: RUF071 (character by character)
    reversed_rests = [name[len(begin) :][::-1] for name in files]
    end = os.path.commonprefix(reversed_rests)[::-1].lstrip("0123456789")  # noqa: RUF071 (the common suffix)
    ending = f".{files[0].rsplit('.', 1)[-1]}"
    possible = [name for name in names if name.endswith(ending)]
    for pattern in (f"{begin}*{ending}", f"{begin}*{end}"):
        is_plain = pattern.endswith(ending) and not re.search(r"[\[{*?]", begin + end)
        if is_plain and {name for name in possible if matches(name.split("/"), pattern.split("/"))} == set(files):
            return [pattern]
    if len(files) > MAX_SOURCES:
        raise UserError(f"{len(files)} annotation files such as {shown(files[0])} have no common name; rename them")
    return list(files)


@dataclass(frozen=True)
class Survey:
    """A data set that has been read. form: in words. keys: those of the section `data`, without root.

    left_out: a sentence for each kind of things that were found and are not used.
    """

    form: str
    root: StoragePath
    keys: Values
    dataset: Dataset
    left_out: list[str]


def survey(place: str, *, divides: bool = True) -> Survey:
    """Reads the data set in a folder, below a prefix or of an annotation file. Raises UserError if there is none.

    divides: whether the images get the splits that training needs, if they have none.
    """
    path = storage_path(place)
    path.require_answer()
    if not path.is_remote and not path.path.exists():
        raise UserError(f"{shown(place)} does not exist; give the folder of images and captions, or an annotation file")
    is_file = path.exists() and (path.is_remote or path.path.is_file())
    root = StoragePath(path.uri.rpartition("/")[0] or "/") if is_file else path
    listed = []
    try:
        with progress("listed   ", None, "files") as advance:
            for name in islice(root.names(), MAX_LISTED):
                listed.append(name)
                advance(1)
    except OSError as error:
        raise UserError(f"{root} cannot be listed: {one_line(error)}") from error
    if len(listed) == MAX_LISTED and not is_file:
        raise UserError(f"{root} has {MAX_LISTED} files or more; name the folder of the images, or an annotation file")
    listed.sort()
    names = [name for name in listed if not is_hidden(name)]
    chosen = [path.name] if is_file else names
    candidates = find_candidates(root, chosen)
    if is_file and not is_image(path.name):  # it is the only candidate, but files beside it may be its images
        candidates = iter([Candidate("files", (path.name,))])
    failures: list[tuple[Candidate, UserError]] = []
    for candidate in candidates:
        try:
            found = _read(root, candidate, names, divides=divides)
        except UserError as error:
            failures.append((candidate, error))
            continue
        failed = [error for other, error in failures if not set(candidate.files) & set(other.files)]
        found.left_out.extend(f"annotation files that are not used: {error}" for error in failed)
        unused_images = Rows()
        for name in listed if candidate.form == "files" and found.form != TARS else ():  # other readers count them
            if kind := unused_kind(name):
                unused_images.leave_out(kind, name)
        found.left_out.extend(unused_images.left_out)
        others = list(candidates)
        for form, kind in (("files", "other annotation files"), ("text", "texts beside images")):
            names_of_form = {name for other in others if other.form == form for name in other.files}
            if unused := sorted(names_of_form.difference(candidate.files)):
                found.left_out.append(f"{len(unused)} {kind} are not used, first {shown(unused[0])}")
        return found
    if failures:
        raise failures[0][1]
    raise UserError(
        f"{shown(place)} has {sum(map(is_image, chosen))} images and no captions; {_unpack(chosen)}add an annotation "
        "file, or a text file of the same name beside each image (docs/data.md lists the forms)"
    )


def _unpack(names: Sequence[str]) -> str:
    """The remedy for files that must be unpacked or saved in another form, with "; ", or "" if there is none."""
    packed = next((name for name in names if name.lower().endswith(PACKED_ENDINGS)), None)
    return "" if packed is None else f"unpack {shown(packed)}, or save it as CSV; "


def _read(root: StoragePath, candidate: Candidate, names: Sequence[str], *, divides: bool) -> Survey:
    """Reads a candidate, and maybe divides it into the splits that training needs. Raises UserError."""
    form, keys = read_names(root, candidate, names)
    if candidate.form == "files" and form not in (PARQUET_WITH_IMAGES, TARS):  # they name image files
        keys = _with_images_folder(root, keys, names)
    dataset, problems, left_out = _rows(root, keys)
    if problems:
        raise UserError(problems[0])
    images = zip(dataset.column("uri"), dataset.column("captions"), strict=True)
    without = [uri for uri, captions in images if not any(map(str.strip, captions))]
    if without and (divides or len(without) == len(dataset)):
        remedy = "add theirs, or remove these images"
        if len(without) == len(dataset) and form.startswith("table"):
            remedy = "add some, or set data.columns.captions to the table's column of captions"
        first = ImageLocation.parse(without[0])
        problem = (
            f"{len(without)} of {len(dataset)} images have no caption ({form}), first {shown(first.name or without[0])}"
        )
        raise UserError("; ".join([f"{shown(root)}: {problem}", *left_out, remedy]))
    lists, unused_lists = _split_lists(root, candidate, names, dataset)
    if lists:
        keys = keys | {"split_lists": lists}
        dataset = _rows(root, keys).dataset
    uris = set(dataset.column("uri"))
    folders = {split_in_name(uri.removeprefix(root.uri).rpartition("/")[0]) for uri in uris}
    if set(dataset.split_sizes()) == {"train"} and folders & {"val", "test"} and folders & {"train", None}:
        keys = keys | {"split_by_folder": True}
        dataset = _rows(root, keys).dataset
    if divides:
        keys = keys | _split_keys(root, keys, dataset)
    dataset, _, left_out = _rows(root, keys)  # read again, because the new keys decide the splits
    unnamed = [name for name in names if is_image(name) and join(root.uri, name) not in uris]
    for kind, unused in (("images that no annotation names", unnamed), ("further lists of a split", unused_lists)):
        if unused:
            left_out.append(f"{len(unused)} {kind} are not used, first {shown(unused[0])}")
    return Survey(form, root, keys, dataset, left_out)


def _split_lists(
    root: StoragePath, candidate: Candidate, names: Sequence[str], dataset: Dataset
) -> tuple[dict[str, str], list[str]]:
    """{split: text file}, if files with the names of splits begin with an image of a data set without splits.

    The second value has the further files of splits that already have one.
    """
    known = {_base(uri) for uri in dataset.column("uri")}
    known |= {name.rpartition(".")[0] for name in known}
    lists: dict[str, str] = {}
    unused = []
    for name in names if dataset.split_sizes().keys() <= {"train"} else ():
        words = re.findall("[A-Z]?[a-z]+", _base(name))  # for Flickr_8k.trainImages.txt
        split = next((SPLIT_WORDS[word.lower()] for word in words if word.lower() in SPLIT_WORDS), None)
        if split is None or not name.endswith(".txt") or name.count("/") > 1:
            continue
        with suppress(UserError), opened(root / name) as file:
            line = file.readline(MAX_NAME_BYTES).decode("utf-8-sig", errors="replace").split()
            is_list = name not in candidate.files and line and _base(line[0]) in known
            if is_list and lists.setdefault(split, name) != name:
                unused.append(name)
    if not lists.keys() & {"val", "test"}:
        return {}, []
    read_split_lists(root, lists)  # raises UserError for lists that contradict each other
    return lists, unused


def _base(name: str) -> str:
    """The last part of a path, as names are compared."""
    return plain_name(name).rpartition("/")[2]


def _rows(root: StoragePath, keys: Values) -> Annotations:
    """The result of `read_annotations` for a section `data` with these keys. Raises UserError."""
    try:
        section = DataSection(root=root.uri, **keys)
    except ValidationError as error:
        value = quoted(error.errors()[0]["input"])
        raise UserError(f"{shown(root)}: a configuration cannot contain the name {value}; rename it") from error
    return read_annotations(section, root.uri, root.options)


def _with_images_folder(root: StoragePath, keys: Values, names: Sequence[str]) -> Values:
    """The keys with `images` added to each source: the folder that contains most of the source's first images.

    Raises UserError if no folder contains any.
    """
    known = set(map(plain_name, names))
    folders = [name.rpartition("/")[0] for name in names if is_image(name)]
    tops = [folder.partition("/")[0] for folder in folders]
    frequent = [folder for folder, _ in Counter([*folders, *tops]).most_common(MAX_FOLDERS) if folder]
    others = {key: value for key, value in keys.items() if key not in ("sources", "annotations")}

    def completed(source: Values) -> Values:
        annotations = root / source["annotations"]
        dataset = _rows(root, others | {"annotations": source["annotations"]}).dataset
        uris = dataset.table["uri"].slice(0, NUM_TRIED).to_pylist()
        images = [uri.removeprefix(f"{root.uri.rstrip('/')}/") for uri in uris]
        if images and images[0].startswith(("http:/", "https:/")):  # one slash, because the reader reduces // to /
            problem = f"{annotations} names images on the web such as {shown(images[0])}"
            raise UserError(f"{problem}; download them into its folder, and replace the addresses by their file names")
        own, split = source["annotations"].rpartition("/")[0], split_in_name(source["annotations"])
        counts = {
            folder: len(known.intersection(plain_name(f"{folder}/{image}".removeprefix("/")) for image in images))
            for folder in dict.fromkeys(["", own, *frequent])
        }

        def fitness(folder: str) -> tuple[int, bool, bool]:
            """Of several folders with these names, that of the same split is meant, or that beside the annotations."""
            is_beside = own != "" and f"{folder}/".startswith(f"{own}/")
            return counts[folder], split is not None and split_in_name(folder) == split, is_beside

        best = max(counts, key=fitness)
        if not images:
            raise UserError(f"{annotations} is empty; put the images beside it")
        if not counts[best]:
            stem = _base(images[0]).rpartition(".")[0] or _base(images[0])
            near = next(
                (name for name in known if _base(name).rpartition(".")[0].lower() == stem.strip().lower()), None
            )
            remedy = f"{_unpack(names)}put the images beside it"
            if near is not None:
                remedy = f"write whole names of files, such as {shown(_base(near))}"
            raise UserError(
                f"{annotations} names images such as {shown(images[0])}, which are not below {root}; {remedy}"
            )
        return source | {"images": best} if best else source

    if "sources" in keys:
        return keys | {"sources": list(map(completed, keys["sources"]))}
    return completed(keys)


def _split_keys(root: StoragePath, keys: Values, dataset: Dataset) -> Values:
    """The keys that name the splits. If no image is for validation, the keys also divide the images.

    Raises UserError if no image is for training, or if the images are too few to be divided.
    """
    splits = Counter(dataset.split_sizes())
    train = [split for split in splits if SPLIT_WORDS.get(split) == "train" or split == "restval"]
    val = [split for split in sorted(splits) if SPLIT_WORDS.get(split) == "val"]
    val_split = "val" if "val" in val else next(iter(val), None)
    test = [split for split in splits if split not in (*train, val_split)]
    if not train:
        shown_splits = ", ".join(sorted(map(shown, splits)))
        raise UserError(f"{root} has the splits {shown_splits}, and none of them is for training; name one train")
    if val_split is None:
        chosen = _divided(root, keys, dataset, WITHOUT_TEST if test else FRACTIONS)
        if test not in ([], ["test"]):
            chosen["test_splits"] = sorted(test)
        return chosen
    chosen = {}
    if not set(train) <= {"train", "restval"}:
        chosen["train_splits"] = sorted(train)
    if val_split != "val":
        chosen["val_split"] = val_split
    if test != ["test"]:
        chosen["test_splits"] = sorted(test) or [val_split]
    return chosen


def _divided(root: StoragePath, keys: Values, dataset: Dataset, choices: Sequence[dict[str, float]]) -> Values:
    """The keys that divide the images by the first of these fractions with MIN_HELD_OUT images in each split.

    Raises UserError if none has.
    """
    divided: Values = {}
    if "sources" in keys:
        divided["sources"] = [dict(source) for source in keys["sources"]]
        for source in divided["sources"]:
            if source.get("split") == "train":
                del source["split"]  # so that the source's images are divided
    # A hash may leave a split of few images almost empty. Another seed then gives it more.
    for seed, fractions in product(range(NUM_SEEDS if len(dataset) < MIN_DIVISIBLE else 1), choices):
        divided |= {"split_fractions": fractions} | ({"split_seed": seed} if seed else {})
        sizes = _rows(root, keys | divided).dataset.split_sizes()
        if all(sizes.get(split, 0) >= MIN_HELD_OUT for split in fractions):
            return divided
    of_file = f"of {shown(keys['annotations'])} " if "annotations" in keys else ""
    raise UserError(
        f"{shown(root)}: the {len(dataset)} images {of_file}cannot be divided into {', '.join(choices[0])}: they are "
        "too few to divide, or the annotations put all into the split train; add images, or list the file names of "
        "some in val.txt and set data.split_lists: {val: val.txt} (docs/data.md)"
    )


def read_references(place: Path | str, split: str | None = None, images: Path | None = None) -> Dataset:
    """The images with captions of an annotation file, of the files that a pattern names, or of a folder with texts.

    split: if it is None, all splits are read. images: the folder of the images that the files name. If it is None,
    these have no URI. Raises UserError for files without captions or without this split, and for ids that occur twice.
    """
    path = storage_path(place)
    if not path.is_remote and path.path.is_dir():
        whole = survey(str(place), divides=False)
        found, left_out = whole.dataset, whole.left_out
    else:
        folder = re.split(r"[*?\[{]", path.uri)[0].rpartition("/")[0]  # the last one without wildcards
        root = StoragePath(folder or "/")
        names = find_files(root, path.uri[len(folder) + 1 :])
        if len(names) == 1 and not (root / names[0]).exists():
            raise UserError(f"{shown(place)} does not exist; give an annotation file, or a folder of images and texts")
        keys = read_names(root, Candidate("files", tuple(names)), names)[1]
        columns, rows = ColumnSection(**keys.get("columns", {})), Rows()
        images_folder = None if images is None else storage_path(images)
        read_sources([Source(root / name, images_folder, name, columns=columns) for name in names], "auto", rows)
        if rows.problems:
            raise UserError(rows.problems[0])
        found, left_out = Dataset(rows.table(with_tokens=False)), rows.left_out
    for sentence in left_out:
        logger.warning(sentence)
    if split is not None:
        sizes, found = found.split_sizes(), found.split(split)
        if not len(found):
            available = shorten(f"{name} ({count} images)" for name, count in sizes.items())
            raise UserError(f"{shown(place)} has no images in split {split!r}; it has {available}")
    found = found.where(pc.greater(pc.list_value_length(found.table["captions"]), 0))
    if not len(found):
        raise UserError(f"{shown(place)} has no reference captions; give a file with captions")
    found.require_distinct_ids()
    return found
