"""Reference captions for scoring, from annotation files of any form that a configuration can name."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pyarrow.compute as pc

from raycap.pipeline.config.sections import ColumnSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.formats.source import Rows, Source, find_files
from raycap.pipeline.data.reading import read_sources
from raycap.pipeline.data.survey import find_candidates, read_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shorten, shown
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)


def read_references(place: Path | str, split: str | None = None, images: Path | None = None) -> Dataset:
    """The images with captions of an annotation file, of the files that a pattern names, or of a folder with texts.

    split: if it is None, all splits are read. images: the folder of the images that the files name. If it is None,
    these have no URI. Raises UserError for files without captions or without this split, and for ids that occur twice.
    """
    path = storage_path(place)
    if not path.is_remote and path.path.is_dir():
        root, names = path, ["."]
    else:
        folder = re.match(r"[^*?\[{]*/", path.uri)[0]  # up to the first wildcard
        root = StoragePath(folder)
        names = find_files(root, path.uri.removeprefix(folder))
    if len(names) == 1 and not (root / names[0]).exists():
        raise UserError(f"{shown(place)} does not exist; give an annotation file, or a folder of images and texts")
    candidate = next(find_candidates(names), None)
    keys = read_names(root, candidate, names)[1] if candidate is not None and candidate.form == "table" else {}
    columns = ColumnSection(**keys.get("columns", {}))
    images_folder = None if images is None else storage_path(images)
    rows = Rows()
    read_sources([Source(root / name, images_folder, name, columns=columns) for name in names], "auto", rows)
    if rows.problems:
        raise UserError(rows.problems[0])
    for sentence in rows.left_out:
        logger.warning(sentence)
    found = Dataset(rows.table(with_tokens=False))
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
