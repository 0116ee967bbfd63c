"""The runs of a storage: when each was created, how far it is, its scores and its size."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from raycap.jobs.runs.folders import (
    MAX_RECORD_BYTES,
    Scan,
    Size,
    folders,
    is_leased,
    is_locked,
    read_record,
    reason,
)
from raycap.pipeline.errors import JobFailedError, OtherVersionError, UserError
from raycap.pipeline.runs.folder import RunMetadata
from raycap.pipeline.storage.digests import DIGESTS, digests_in
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import parse_yaml, require_mapping

RUNS_AT_A_TIME, NUM_READS = 64, 8
# A run on S3 has no lock. Its workers send the journal every few seconds, but an extraction writes elsewhere for hours.
ACTIVE_S = 3600.0
TRAINED = "evaluation"  # where a run is whose stages are finished
STEP, BEST = re.compile(r"stages/[^/]+/step-\d+"), re.compile(r"stages/[^/]+/best-\d+")
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # the names of `pipeline.storage.atomic`
# What raycap writes into a run's folder. A folder with anything else may be another program's.
KNOWN = {
    "config.yaml", "run.json", "data.arrow", "vocabulary.json", "init", "stages", "log", "predictions", "scores.json",
    "report.html", "COMPLETE.json", "tokens", "distilled.arrow", "distilled-tokens", ".lock",
}  # fmt: skip
State = Literal["complete", "in progress", "interrupted", "unprepared", "of another version", "damaged", "foreign"]


@dataclass
class RunEntry:
    """A run.

    at: the stage, or `evaluation`, at which an incomplete run is. detail: the reason of the states "damaged" and
    "of another version". trial: it belongs to a search. val, test: CIDEr-D; of an incomplete run, val is the best of
    its last finished stage.
    """

    id: str
    created: str
    state: State
    at: str
    val: float | None
    test: float | None
    bytes: int
    newest: float  # the time of the last change, in Unix seconds
    trial: bool = False
    detail: str = ""
    stages: list[str] = field(default_factory=list)  # the finished ones
    parts: dict[str, Size] = field(default_factory=dict)

    @property
    def state_text(self) -> str:
        text = f"{self.state} at {self.at}" if self.at else self.state
        return f"{text} (trial)" if self.trial else text


def runs(storage: StoragePath, trials: Set[str] = frozenset()) -> Iterator[RunEntry]:
    """The runs of a storage, sorted by id. trials: the ids of runs that belong to searches.

    A complete run costs two small reads, and another one some more; several runs are read at a time.
    """
    place = storage / "runs"
    scans = ((name, Scan.of(files)) for name, files in folders(place))
    with ThreadPoolExecutor(NUM_READS) as pool:  # requests to S3 mostly wait
        while part := list(islice(scans, RUNS_AT_A_TIME)):
            for entry in pool.map(lambda item: read_run(place / item[0], item[1]), part):
                entry.trial = entry.id in trials
                yield entry


def read_run(place: StoragePath, scan: Scan) -> RunEntry:
    """The run in a folder with these files. Raises no error for damaged or foreign files, which the state names."""
    entry = RunEntry(place.name, "", "foreign", "", None, None, scan.size.bytes, scan.size.newest, parts=scan.parts)
    try:
        if "run.json" in scan.records:
            values = read_record(place / "run.json")
            entry.created = RunMetadata.parse(values, str(place / "run.json")).created
            if values.get("run_id") != place.name:
                entry.detail = f"run.json is that of {values.get('run_id')}"
                return entry
            _read_state(entry, place, scan)
        elif scan.tops and all(
            name in KNOWN or TEMPORARY.fullmatch(name) for name in scan.tops
        ):  # its creation or removal was killed
            entry.state = "in progress" if _is_active(place, scan) else "unprepared"
    except OtherVersionError as error:
        entry.state, entry.detail = "of another version", reason(error)
    except (UserError, JobFailedError, OSError, ValueError) as error:
        entry.state, entry.detail = "damaged", reason(error)
    return entry


def _is_active(place: StoragePath, scan: Scan) -> bool:
    """Whether a process works on a run. The run of a search's backbone has a lease on S3 (`jobs.tune.features`)."""
    if not place.is_remote:
        return is_locked(place)
    is_recent = time.time() - scan.size.newest < ACTIVE_S
    return is_recent or is_leased(StoragePath(f"{place}.lease.json", place.options))


def _read_state(entry: RunEntry, place: StoragePath, scan: Scan) -> None:
    """Sets the state, the stages and the scores. Raises an error for a damaged file."""
    done = [match[1] for name in scan.records if (match := re.fullmatch(r"stages/([^/]+)/DONE\.json", name))]
    if "COMPLETE.json" in scan.records:
        scores = require_mapping(read_record(place / "COMPLETE.json").get("scores"), "COMPLETE.json: scores")
        entry.state, entry.stages = "complete", sorted(done)
        names = ("val", "test") if "val_CIDEr-D" in scores and "test_CIDEr-D" in scores else _splits(_config(place))
        entry.val, entry.test = (_number(scores.get(f"{name}_CIDEr-D")) for name in names)
        return
    stages = [str(stage.get("name")) for stage in _config(place)["stages"] if isinstance(stage, dict)]
    entry.stages = [name for name in stages if name in done]
    entry.at = next((name for name in stages if name not in done), TRAINED)
    entry.state = "in progress" if _is_active(place, scan) else "interrupted"
    if entry.stages:
        entry.val = _number(read_record(place / f"stages/{entry.stages[-1]}/DONE.json").get("best_score"))


def _config(place: StoragePath) -> dict[str, Any]:
    """The plain values of a run's configuration. Raises UserError unless it has stages."""
    path = place / "config.yaml"
    values = dict(require_mapping(parse_yaml(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path)))
    if not isinstance(values.get("stages"), list):
        raise UserError(f"{path} is damaged: it has no stages")
    return values


def _splits(values: dict[str, Any]) -> tuple[str, str]:
    """The validation split and the first test split."""
    data = require_mapping(values.get("data"), "config.yaml: data")
    tests = data.get("test_splits")
    return str(data.get("val_split", "val")), str(tests[0] if isinstance(tests, list) and tests else "test")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def backbones(storage: StoragePath, run: RunEntry) -> set[str]:
    """The digests of the backbones of a run, which name the stores that it reads; empty for a run on region features.

    Raises UserError or JobFailedError for a run whose backbones are not known.
    """
    place, digests = storage / "runs" / run.id, set[str]()
    parts = ["init", *(name for name in run.parts if BEST.fullmatch(name))]
    for part in parts:
        path = place / part / DIGESTS
        try:
            files = digests_in(path.read_bytes(MAX_RECORD_BYTES), str(path))
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing") from error
        if "backbone.safetensors" in files:
            digests.add(str(files["backbone.safetensors"]))
    return digests
