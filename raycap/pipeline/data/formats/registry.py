"""The formats of annotation files: how each is opened, read and recognized.

`FORMATS` lists them; `data.format` in `pipeline/config/sections.py` must list the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from raycap.pipeline.data.formats.coco import add_coco
from raycap.pipeline.data.formats.files import read_json
from raycap.pipeline.data.formats.karpathy import add_karpathy
from raycap.pipeline.data.formats.rows import Rows, Source
from raycap.pipeline.data.formats.table import TABLE_ENDINGS, add_table, table_entries
from raycap.pipeline.data.formats.text_files import add_text_files, read_text_files
from raycap.pipeline.data.formats.webdataset import add_samples, read_samples
from raycap.pipeline.errors import UserError

_ARCHIVES_AT_A_TIME, _NUM_THREADS = 64, 8


class Format(NamedTuple):
    """How a source is opened, and how what was opened is added to the rows. Both raise UserError."""

    open: Callable[[Source], Any]
    add: Callable[[Source, Any, Rows], None]


def _open_json(source: Source) -> Any:
    return read_json(source.annotations)


FORMATS = {
    "karpathy": Format(_open_json, add_karpathy),
    "coco": Format(_open_json, add_coco),
    "nocaps": Format(_open_json, add_coco),
    "table": Format(table_entries, add_table),
    "webdataset": Format(read_samples, add_samples),
    "text": Format(read_text_files, add_text_files),
}


def read_sources(sources: Sequence[Source], name: str, rows: Rows) -> None:
    """Adds the images of annotation files to `rows`, in their order. name: a key of `FORMATS`, or "auto"."""
    archives = [source for source in sources if (_recognized(source) if name == "auto" else name) == "webdataset"]
    if len(archives) < max(2, len(sources)):
        for source in sources:
            _read_source(source, name, rows)
        return
    # the headers of an archive on S3 are many requests, which mostly wait
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(sources), _ARCHIVES_AT_A_TIME):
            part = sources[start : start + _ARCHIVES_AT_A_TIME]
            for source, samples in zip(part, pool.map(read_samples, part), strict=True):
                _require_tokens(source, False)
                add_samples(source, samples, rows)


def _read_source(source: Source, name: str, rows: Rows) -> None:
    """Adds the images of one annotation file."""
    chosen = _recognized(source) if name == "auto" else name
    data = (_open_json if chosen is None else FORMATS[chosen].open)(source)
    if chosen is None:
        chosen = _recognized_json(source, data)
    _require_tokens(source, chosen == "karpathy")
    FORMATS[chosen].add(source, data, rows)


def _recognized(source: Source) -> str | None:
    """The format that the name of an annotation file shows; None for JSON, whose content shows it."""
    path, name = source.annotations, source.annotations_name
    if path.name.removesuffix(".gz").endswith(TABLE_ENDINGS):
        return "table"
    if path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return "webdataset"
    is_folder = name in ("", ".") or name.endswith("/") or (not path.is_remote and path.path.is_dir())
    return "text" if is_folder else None


def _recognized_json(source: Source, data: Any) -> str:
    """The format of an annotation file in JSON. Raises UserError."""
    if not isinstance(data, dict) or not isinstance(data.get("images"), list):
        expected = "Karpathy's or COCO's JSON (an object with a list 'images')"
        endings = ", ".join(TABLE_ENDINGS)
        problem = f"expected {expected}, a table that ends in {endings}, a .tar, or a folder"
        raise UserError(f"{source.annotations} has an unknown format; {problem}")
    first = data["images"][0] if data["images"] else None
    is_karpathy = not isinstance(first, dict) or bool({"filename", "sentences"} & first.keys())
    return "karpathy" if is_karpathy else "coco"


def _require_tokens(source: Source, has_tokens: bool) -> None:
    """Raises UserError if the tokens of captions are needed and the file's format has none."""
    if source.with_tokens and not has_tokens:
        raise UserError(
            f"data.tokenizer is tokens, and {source.annotations} is not in Karpathy's layout, whose sentences have "
            "tokens; set it to expansionnet or spacy"
        )
