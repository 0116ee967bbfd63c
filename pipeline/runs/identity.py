"""The identity of a run: the hash of what decides its result, in its configuration, its data and the code."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from pipeline.captioning.bundle import WEIGHING, bundle_digests, fetched
from pipeline.config.run import RunConfig
from pipeline.config.sections import EMBEDDED
from pipeline.features.regions import ends_digest
from pipeline.storage.path import storage_path
from pipeline.version import project_root

# A change in one of these folders makes other runs; a change elsewhere (reports, tracking, storage) does not.
RESULT_ROOMS = (
    "models",
    "pipeline/captioning",
    "pipeline/config",
    "pipeline/data",
    "pipeline/features",
    "pipeline/runs",
    "pipeline/runtime",
    "pipeline/scoring",
    "pipeline/training",
)


def run_identity(config: RunConfig, fingerprint: str) -> str:
    """name-hash of configuration, data and code: equal inputs are the same run, others are another."""
    digest = hashlib.sha256(f"{config_identity(config)} {fingerprint} {code_digest()}".encode()).hexdigest()
    return f"{config.name}-{digest[:10]}"


def code_digest() -> str:
    """Hash of the sources that decide a result, those of RESULT_ROOMS."""
    digest = hashlib.sha256()
    for room in RESULT_ROOMS:
        for path in sorted((project_root() / room).rglob("*.py")):
            digest.update(str(path.relative_to(project_root())).encode() + path.read_bytes())
    return digest.hexdigest()


def config_identity(config: RunConfig) -> str:
    """Hash of what decides the result, not of where and with what it is computed.

    Left out: storage, tracking, workers, the size of pieces, how often a checkpoint is written. The data's
    content is hashed apart, wherever it lies; files that are named (weights, word vectors, more words,
    constraints) and `init_from` count by their content.
    """
    body = config.model_dump(mode="json", exclude={"storage", "tracking", "workers", "retrain"})
    body["data"]["root"] = None
    regions = config.features.hdf5
    kept = ("stored_dtype", "max_regions", "truncate_regions") if regions else ("compute_dtype", "stored_dtype")
    body["features"] = {key: body["features"][key] for key in kept}
    if regions:
        body["features"]["hdf5"] = regions if regions == EMBEDDED else ends_digest(Path(regions).expanduser())
        body.pop("backbone")
    body["evaluation"].pop("batch_size")
    for stage in body["stages"]:
        stage.pop("checkpoint_every_steps")
        stage.pop("checkpoint_every_minutes")
    for section, key in (
        ("backbone", "weights"), ("model", "word_vectors"), ("data", "extra_vocabulary"), ("evaluation", "constraints"),
    ):  # fmt: skip
        file = Path(body.get(section, {}).get(key) or "none").expanduser()
        if str(file) not in ("none", "pretrained") and file.is_file():
            body[section][key] = _digest(file, file.stat().st_size, file.stat().st_mtime_ns)
    if config.init_from is not None:
        body["init_from"] = bundle_digests(fetched(storage_path(config.init_from, config.storage.options)), WEIGHING)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@lru_cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Of a file as it is now: word vectors are gigabytes, and a run's identity is asked for often."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
