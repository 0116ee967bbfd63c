"""Files from elsewhere are opened in one place: every other call that parses a file is listed here with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "raycap"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ROOM = "pipeline/storage/untrusted/"  # where strangers' files are read with limits

# Calls that parse a file and have no limits of their own.
PARSERS = re.compile(
    r"(json\.loads?|yaml\.(safe_load|load|safe_load_all|load_all|SafeLoader)|gzip\.\w+|zlib\.decompress\w*|bz2\.\w+"
    r"|lzma\.\w+|Image\.open|pq\.(read_table|ParquetFile|ParquetDataset|read_metadata)|pa\.ipc\.open_\w+|tarfile\.open"
    r"|((ray\.)?cloud)?pickle\.(loads?|Unpickler)|h5py\.File|np\.(load|loadtxt|genfromtxt|fromfile)|torch\.load"
    r"|load_file|safe_open|zipfile\.ZipFile|shutil\.unpack_archive)"
)
# Files of raycap's own, or with limits of their own.
ALLOWED = [
    "models/convert/tensor_files.py",
    "pipeline/data/dataset.py",
    "pipeline/data/formats/webdataset.py",
    "pipeline/data/images.py",
    "pipeline/data/language/subwords.py",
    "pipeline/data/vocabulary.py",
    "pipeline/evaluation/captioning/bundle.py",
    "pipeline/evaluation/captioning/ray_data.py",
    "pipeline/evaluation/captioning/upstream.py",
    "pipeline/evaluation/comparison/published.py",
    "pipeline/evaluation/results.py",
    "pipeline/evaluation/scores/encoders.py",
    "pipeline/evaluation/scores/java.py",
    "pipeline/features/regions.py",
    "pipeline/features/store.py",
    "pipeline/runs/journal.py",
    "pipeline/storage/atomic.py",
    "pipeline/storage/mirror.py",
    "pipeline/storage/tables.py",
    "pipeline/storage/weights.py",
    "pipeline/training/stage_output.py",
]


def parsers(source: str) -> Iterator[str]:
    """The calls in a module that parse a file, also where the function is only passed on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and PARSERS.fullmatch(ast.unparse(node)):
            yield ast.unparse(node)


def test_only_listed_files_parse_without_limits() -> None:
    names = {path.relative_to(PACKAGE).as_posix(): path for path in SOURCES}
    found = {name for name, path in names.items() if any(parsers(path.read_text(encoding="utf-8")))}
    others = {name for name in found if not name.startswith(ROOM)}.difference(ALLOWED)
    assert not others, "read these files with pipeline/storage/untrusted/, or add the module to this list"
