"""Files from elsewhere are opened in one place: every other call that parses a file is listed here with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
OWN = "raycap wrote the file"
BUNDLE = "a bundle's weights, which are checked against its configuration"
ALLOWED = {
    ("pipeline/evaluation/results_folder.py", "zipfile.ZipFile"): "writes an archive",
    ("jobs/tune/workers.py", "json.loads"): OWN,
    ("pipeline/data/language/subwords.py", "json.loads"): "a model that the package tokenizers has just trained",
    ("models/convert/tensor_files.py", "load_file"): "a checkpoint: safetensors holds numbers only",
    ("models/convert/tensor_files.py", "safe_open"): "the header of safetensors, checked before anything is read",
    (
        "models/convert/tensor_files.py",
        "torch.load",
    ): "a checkpoint, with weights_only, after its records were measured",
    ("models/convert/tensor_files.py", "zipfile.ZipFile"): "measures the records of a checkpoint",
    ("pipeline/evaluation/captioning/bundle.py", "json.loads"): "a copy of a configuration, or a bundle's file",
    ("pipeline/evaluation/captioning/bundle.py", "load_file"): BUNDLE,
    (
        "pipeline/evaluation/captioning/upstream.py",
        "pickle.Unpickler",
    ): "looks up no class, after the operations were counted",
    ("pipeline/data/dataset.py", "pa.ipc.open_file"): OWN,
    ("pipeline/data/images.py", "Image.open"): "the one place that decodes images",
    ("pipeline/features/regions.py", "h5py.File"): "the one place that reads HDF5",
    ("pipeline/features/regions.py", "zlib.decompressobj"): "measures a chunk, up to its limit",
    ("pipeline/features/store/shards.py", "np.load"): OWN,
    ("pipeline/features/store/store.py", "np.load"): OWN,
    ("pipeline/data/vocabulary.py", "np.load"): OWN,
    ("pipeline/runs/journal.py", "json.loads"): OWN,
    ("pipeline/evaluation/scores/java.py", "json.loads"): "the output of SPICE, which raycap runs",
    ("pipeline/evaluation/comparison/published.py", "yaml.safe_load"): "part of raycap",
    ("pipeline/storage/atomic.py", "json.loads"): OWN,
    ("pipeline/storage/mirror.py", "json.loads"): OWN,
    ("pipeline/storage/tables.py", "pq.ParquetFile"): OWN,
    ("pipeline/storage/tables.py", "pq.read_table"): OWN,
    ("pipeline/storage/weights.py", "load_file"): OWN,
    ("pipeline/training/stage_output.py", "torch.load"): OWN,
}


def parsers(source: str) -> Iterator[str]:
    """The calls in a module that parse a file, also where the function is only passed on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and PARSERS.fullmatch(ast.unparse(node)):
            yield ast.unparse(node)


def test_only_listed_files_parse_without_limits() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), call)
        for path in SOURCES
        for call in parsers(path.read_text(encoding="utf-8"))
        if not path.relative_to(PACKAGE).as_posix().startswith(ROOM)
    }
    assert not found - ALLOWED.keys(), (
        "read these files with pipeline/storage/untrusted/, or give the reason in this list"
    )
    assert not ALLOWED.keys() - found, "these entries have no call any more; remove them"


@pytest.mark.parametrize(
    "source",
    [
        "x = json.loads(y)",
        "import yaml\ndef f(): return yaml.safe_load(open(p))",
        "read = partial(np.load, allow_pickle=True)",
        "with gzip.open(path) as file: pass",
        "cloudpickle.loads(data)",
        "pickle.load(file)",
    ],
)
def test_the_rule_sees_parsers(source: str) -> None:
    assert list(parsers(source))
