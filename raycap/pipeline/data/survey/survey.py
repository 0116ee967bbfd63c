"""What a folder, annotation file or prefix on S3 contains: the form of the data set and the keys that read it.

The names of files suggest candidates. Each is read by the readers of `pipeline.data.formats`, so that what is written
into a configuration has been tried.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.dataset import Dataset, read_annotations
from raycap.pipeline.data.formats.files import is_image
from raycap.pipeline.data.formats.rows import COLUMNS
from raycap.pipeline.data.survey.candidates import SPLIT_WORDS, Candidate, Reading, find_candidates, read_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line, printable, quoted, shown
from raycap.pipeline.storage.path import StorageOptions, StoragePath, storage_path

MAX_LISTED = 2_000_000  # files of a folder
MAX_FOLDERS = 20  # that are tried as the images' folder
NUM_TRIED = 20  # images that are looked for in such a folder
FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}
MAX_SEEDS = 21  # that are tried for small data sets
UNDECIDED = "undecided"  # a split of images for which the annotations name none
WITHOUT_TEST = {"train": 0.9, "val": 0.1}  # of images that are not in the test split


@dataclass(frozen=True)
class Survey:
    """A data set that has been read. keys: those of the section `data`, without root. left_out: files not used."""

    form: str
    root: StoragePath
    keys: dict[str, Any]
    dataset: Dataset
    left_out: tuple[str, ...] = ()


def survey(place: str, options: StorageOptions = StorageOptions()) -> Survey:
    """The data set in a folder, at a prefix on S3, or of one annotation file. Raises UserError if there is none."""
    path = storage_path(place, options)
    path.require_answer()
    if not path.is_remote and not path.path.exists():
        raise UserError(f"{shown(place)} does not exist; give the folder of images and captions, or an annotation file")
    is_file = path.exists() and (path.is_remote or path.path.is_file())
    root = StoragePath(path.uri.rpartition("/")[0] or "/", options) if is_file else path
    names = _names_below(root)
    chosen = [path.name] if is_file else names
    failure: UserError | None = None
    candidates = list(find_candidates(chosen))
    for candidate in candidates:
        try:
            found = _read(root, candidate, names)
        except UserError as error:
            failure = failure or error
        else:
            return replace(found, left_out=_left_out(found, candidate, candidates, chosen))
    if failure is not None:
        raise failure
    if not chosen:
        raise UserError(f"{shown(place)} is empty; give a folder of images and captions")
    if num_images := sum(map(is_image, chosen)):
        raise UserError(
            f"{shown(place)} has {num_images} images and no captions; add an annotation file, or a text file of the "
            "same name beside each image (docs/data.md lists the forms)"
        )
    raise UserError(f"{shown(place)} has neither images nor annotations; docs/data.md lists the forms that are read")


def _names_below(folder: StoragePath) -> list[str]:
    """The files below a folder by relative name, sorted, without hidden ones."""
    try:
        names = [name for name, _ in itertools.islice(folder.walk(), MAX_LISTED)]
    except OSError as error:
        raise UserError(f"{folder} cannot be listed: {one_line(error)}") from error
    return sorted(name for name in names if "/." not in f"/{name}")


def _left_out(found: Survey, used: Candidate, candidates: Sequence[Candidate], names: Sequence[str]) -> tuple[str, ...]:
    """The annotation files of other candidates, and with texts beside images the images without one."""
    others = {name for candidate in candidates if candidate.form != "text" for name in candidate.files}
    if used.form == "text":
        read = {uri.removeprefix(f"{found.root.uri.rstrip('/')}/") for uri in found.dataset.column("uri")}
        others |= {name for name in names if is_image(name) and name not in read}
    return tuple(sorted(others.difference(used.files)))


def _read(root: StoragePath, candidate: Candidate, names: Sequence[str]) -> Survey:
    """Reads a candidate, with splits that training needs. Raises UserError if it is no data set."""
    reading = read_names(root, candidate, names)
    keys = _with_images_folder(root, reading.keys, names) if reading.has_image_files else reading.keys
    dataset, problems = _rows(root, keys)
    if problems:
        raise UserError(problems[0])
    _require_captions(root, reading, dataset)
    keys = keys | _split_keys(root, keys, dataset)
    return Survey(reading.form, root, keys, _rows(root, keys)[0])


def _require_captions(root: StoragePath, reading: Reading, dataset: Dataset) -> None:
    """Raises UserError if an image has no caption, which training refuses."""
    without = [
        uri
        for uri, captions in zip(dataset.column("uri"), dataset.column("captions"), strict=True)
        if not any(map(str.strip, captions))
    ]
    if len(without) == len(dataset):  # no caption at all: the captions are elsewhere
        remedy = "add some"
        known = {*COLUMNS["captions"], reading.keys.get("columns", {}).get("captions")}
        if reading.columns and known.isdisjoint(reading.columns):
            columns = printable(", ".join(reading.columns))[:500]
            remedy = f"name their column 'captions' (or set data.columns.captions); the columns are {columns}"
        raise UserError(f"{shown(root)} has {len(dataset)} images and no captions ({reading.form}); {remedy}")
    if without:
        problem = f"{len(without)} of {len(dataset)} images have no caption ({reading.form}), first {shown(without[0])}"
        raise UserError(f"{shown(root)}: {problem}; add their captions, or remove these images")


def _rows(root: StoragePath, keys: dict[str, Any]) -> tuple[Dataset, list[str]]:
    """The images that these keys give, as `read_annotations`."""
    try:
        section = DataSection(root=root.uri, **keys)
    except ValidationError as error:
        value = error.errors()[0]["input"]
        place = "" if value == root.uri else f" below {shown(root)}"
        raise UserError(f"a configuration cannot contain the name {quoted(value)}{place}; rename it") from error
    return read_annotations(section, root.uri, root.options)


def _with_images_folder(root: StoragePath, keys: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The keys with the folders in which most of the first images of each source are."""
    known = set(names)
    folders = [name.rpartition("/")[0] for name in names if is_image(name)]
    tops = [folder.partition("/")[0] for folder in folders]
    frequent = [folder for folder, _ in Counter([*folders, *tops]).most_common(MAX_FOLDERS) if folder]

    def folder_of(source: dict[str, Any]) -> str:
        others = {key: value for key, value in keys.items() if key not in ("sources", "annotations")}
        dataset, _ = _rows(root, others | {"annotations": source["annotations"]})
        uris = dataset.table["uri"].slice(0, NUM_TRIED).to_pylist()
        images = [uri.removeprefix(f"{root.uri.rstrip('/')}/") for uri in uris]
        own = source["annotations"].rpartition("/")[0]
        counts = {
            folder: sum((f"{folder}/{image}" if folder != "." else image) in known for image in images)
            for folder in dict.fromkeys([".", own or ".", *frequent])
        }
        best = max(counts, key=counts.__getitem__)
        if images and images[0].startswith(("http:/", "https:/")):  # the reader makes one slash of two
            problem = f"{root / source['annotations']} names images on the web such as {shown(images[0])}"
            raise UserError(f"{problem}; download them into its folder, and replace the addresses by their file names")
        if not counts[best]:
            problem = f"names images such as {shown(images[0])}, which are not below {root}" if images else "is empty"
            raise UserError(f"{root / source['annotations']} {problem}; put the images beside it")
        return best

    def completed(source: dict[str, Any]) -> dict[str, Any]:
        folder = folder_of(source)
        return source if folder == "." else source | {"images": folder}

    if "sources" in keys:
        return keys | {"sources": [completed(source) for source in keys["sources"]]}
    return completed(keys)


def _split_keys(root: StoragePath, keys: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    """The keys that name the splits, and divide the images where validation has none. Raises UserError."""
    splits = Counter(dataset.split_sizes())
    known = {split: SPLIT_WORDS.get(split.lower()) for split in splits}
    train = [split for split, word in known.items() if word == "train" or split == "restval"]
    val = [split for split, word in known.items() if word == "val"]
    test = [split for split in known if split not in (*train, *val)]
    if not train:
        shown_splits = ", ".join(sorted(map(shown, splits)))
        raise UserError(f"{root} has the splits {shown_splits}, and none of them is for training; name one train")
    if not val:
        divided = _divided(root, keys, dataset, WITHOUT_TEST if test else FRACTIONS)
        return divided | ({"test_splits": sorted(test)} if test not in ([], ["test"]) else {})
    chosen: dict[str, Any] = {}
    if not set(train) <= {"train", "restval"}:
        chosen["train_splits"] = sorted(train)
    if "val" not in val:
        chosen["val_split"] = sorted(val)[0]
    if test != ["test"]:
        chosen["test_splits"] = sorted(test) or [chosen.get("val_split", "val")]
    return chosen


def _divided(root: StoragePath, keys: dict[str, Any], dataset: Dataset, fractions: dict[str, float]) -> dict[str, Any]:
    """The keys that divide the images without a split, with the first seed that gives each split an image.

    Raises UserError if the annotations put all images into the training split, or if there are too few.
    """
    divided: dict[str, Any] = {}
    if "sources" in keys:  # those without a split are divided
        divided["sources"] = [
            {key: value for key, value in source.items() if (key, value) != ("split", "train")}
            for source in keys["sources"]
        ]

    def drawn(fractions: dict[str, float], seed: int = 0) -> set[str]:
        keys_of_draw = {"split_fractions": fractions, "split_seed": seed}
        return set(_rows(root, keys | divided | keys_of_draw)[0].split_sizes())

    if UNDECIDED not in drawn({UNDECIDED: 1.0}):
        raise UserError(
            f"{shown(root)}: the annotations put all {len(dataset)} images into the split train, and training needs a "
            "split for validation; add the annotations of one, or list the file names of its images in val.txt and "
            "set data.split_lists: {val: val.txt} (docs/data.md)"
        )
    for seed in range(MAX_SEEDS if len(dataset) >= len(fractions) else 0):
        if set(fractions) <= drawn(fractions, seed):
            return divided | {"split_fractions": fractions} | ({"split_seed": seed} if seed else {})
    remedy = "add images; training needs some for validation"
    raise UserError(f"the {len(dataset)} images of {shown(root)} are too few to divide; {remedy}")
