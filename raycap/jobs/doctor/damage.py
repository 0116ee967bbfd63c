"""Finds the damaged files of a storage by reading all of them: runs, bundles, features and tables.

It uses no marks of earlier checks and changes nothing. Files without a digest are only parsed. Logs, pages,
pictures, and weights without a digest are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.features.store.index import MANIFEST
from raycap.pipeline.runs.folder import DISTILLED, DISTILLED_TOKENS, TOKENS, RunMetadata
from raycap.pipeline.runs.journal import num_damaged_lines
from raycap.pipeline.storage.atomic import decode_json
from raycap.pipeline.storage.digests import DIGESTS, find_damage, stored_digest
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import from_bytes, read_table
from raycap.pipeline.storage.untrusted.documents import parse_yaml

NUM_READS = 4  # files read at the same time


def find_damaged_files(storage: StoragePath, *more_rules: Rule) -> Iterator[tuple[str, str]]:
    """Yields (sentence, remedy) for each damaged file below a storage or a folder with digests.

    more_rules: for files that other rooms write, in the form of RULES.
    """
    rules = (*more_rules, *RULES)
    names = sorted(name for name in storage.list() if "/." not in f"/{name}")

    def check(name: str) -> list[tuple[str, str]]:
        _, find, remedy = next((rule for rule in rules if re.fullmatch(rule[0], name)), ("", _nothing, ""))
        try:
            return [(damage, remedy) for damage in find(storage / name)]
        except FileNotFoundError:  # removed since it was listed
            return []
        except (JobFailedError, UserError) as error:
            return [(str(error), remedy)]

    with ThreadPoolExecutor(NUM_READS) as pool:  # reading and hashing release the interpreter's lock
        for found in pool.map(check, names):
            yield from found


def _nothing(path: StoragePath) -> list[str]:
    """Finds no damage, in a file of any other kind."""
    return []


def _in_folder(digests: StoragePath) -> list[str]:
    """The damages of the files of a folder with digests."""
    return find_damage(StoragePath(digests.uri.removesuffix(f"/{DIGESTS}"), digests.options))


def _in_shard(manifest: StoragePath) -> Iterator[str]:
    """The damages of the shard with this manifest. Raises DamagedError for a damaged manifest."""
    store = manifest.uri.rsplit("/manifest/", 1)[0]
    for row in read_table(manifest, MANIFEST).slice(0, 1).to_pylist():
        for suffix, digest in (("npy", row["sha256"]), ("boxes.npy", row["boxes_sha256"])):
            path = StoragePath(f"{store}/shards/{row['shard']}.{suffix}", manifest.options)
            try:
                if digest and stored_digest(path) != digest:
                    yield f"{path} does not have the digest in its manifest"
            except FileNotFoundError:
                manifest.stat()  # raises FileNotFoundError if an extraction has removed the shard
                yield f"{path} is missing"


def _in_table(path: StoragePath) -> list[str]:
    """Raises DamagedError for a damaged Parquet file."""
    from_bytes(path.read_bytes(), None, str(path))
    return []


def _in_document(path: StoragePath) -> list[str]:
    """Raises UserError or DamagedError for a file that is neither JSON nor YAML, according to its name."""
    if path.name.endswith(".json"):
        decode_json(path.read_bytes(), str(path))
    else:
        parse_yaml(path.read_bytes(), str(path))
    return []


def _in_weights(digest_file: StoragePath) -> Iterator[str]:
    """The damage of the file whose digest this file contains."""
    path = StoragePath(digest_file.uri.removesuffix(SHA256), digest_file.options)
    if stored_digest(path) != digest_file.read_bytes().decode(errors="replace"):
        yield f"{path} is damaged: it does not have the digest in {digest_file.name}"


def _in_journal(path: StoragePath) -> Iterator[str]:
    """The damage of a part of a journal."""
    if count := num_damaged_lines(path.read_bytes()):
        yield f"{path} has damaged lines ({count})"


def _in_run(path: StoragePath) -> Iterator[str]:
    """The damages of a run's vocabulary and teacher's captions. Raises DamagedError for a damaged run.json."""
    metadata = RunMetadata.parse(decode_json(path.read_bytes(), str(path)), str(path))
    digests = {"vocabulary.json": metadata.vocabulary, DISTILLED: metadata.distilled and metadata.distilled.sha256}
    for name, digest in digests.items():
        file = StoragePath(f"{path.uri.rsplit('/', 1)[0]}/{name}", path.options)
        try:
            if digest and stored_digest(file) != digest:
                yield f"{file} is damaged: it does not have the digest in run.json"
        except FileNotFoundError:
            path.stat()  # raises FileNotFoundError if the run was removed
            yield f"{file} is missing"


def _in_data(path: StoragePath) -> list[str]:
    """Raises DamagedError for a damaged data set."""
    Dataset.parse(pa.BufferReader(path.read_bytes()), str(path))
    return []


Check = Callable[[StoragePath], "list[str] | Iterator[str]"]
Rule = tuple[str, Check, str]
REPEATED = "restore it from a copy, or remove the folder of its stage, and `raycap run` repeats the stage"
SHA256 = ".sha256"  # the ending of a file with the digest of the file beside it
AGAIN = "remove it, and the next command that needs it makes it again"
# The name of each kind of file in the storage, the check and the remedy. The first row that matches a name counts.
RULES: tuple[Rule, ...] = (
    (
        r"features/\w+/manifest/\w+\.parquet",
        _in_shard,
        "remove the shard's file in manifest/, and the next extraction computes its features again",
    ),
    (
        r"(features/\w+/(index/)?\w+|manifests/\w+(\.parquet\.parts/[\w-]+)?|distilled/\w+/\w+)\.parquet",
        _in_table,
        AGAIN,
    ),
    (rf"backbones/.+{SHA256}", _in_weights, AGAIN),
    (r"searches/[^/]+/\w+\.parquet", _in_table, AGAIN),
    (r"retrain/[^/]+/(snapshots|held-out)/.+\.parquet", _in_table, "restore it from a copy"),
    (
        r"runs/[^/]+/log/(journal/\w+|metrics)\.jsonl",
        _in_journal,
        "restore it from a copy; raycap skips these lines",
    ),
    (rf"runs/.+/step-\d+/{DIGESTS}", _in_folder, "the stage resumes from an earlier state"),
    (rf"runs/.+/best-\d+/{DIGESTS}", _in_folder, REPEATED),
    (rf"runs/[^/]+/({TOKENS}|{DISTILLED_TOKENS})/{DIGESTS}", _in_folder, AGAIN),
    (rf".+/{DIGESTS}", _in_folder, "restore it from a copy"),
    (r"runs/[^/]+/data\.arrow", _in_data, AGAIN),
    (r"runs/[^/]+/(COMPLETE|scores)\.json|runs/[^/]+/predictions/.+\.json", _in_document, AGAIN),
    (r"runs/[^/]+/run\.json", _in_run, "restore it from a copy"),
    (r"runs/.+/DONE\.json", _in_document, REPEATED),
    (r"(runs|models|retrain)/.+(\.json|/config\.yaml)", _in_document, "restore it from a copy"),
)
