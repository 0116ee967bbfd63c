"""Makes the configurations of runs that differ only in their seed, and summarizes the scores of these runs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import Seed
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.comparison.bootstrap import Spread
from raycap.pipeline.evaluation.comparison.protocol import Protocol, common_protocol, run_protocol
from raycap.pipeline.evaluation.comparison.published import published_rows
from raycap.pipeline.evaluation.reports.report import published_table, write_summary
from raycap.pipeline.evaluation.reports.tables import Rows, SeedScores
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.storage.atomic import read_json

logger = logging.getLogger(__name__)

SCORES_KEYS = frozenset(["splits", "validation_by_stage"])  # keys that the scores.json of a complete run has


def seed_configs(config: RunConfig, count: int) -> list[RunConfig]:
    """The configuration with `count` seeds, from its own upwards. Raises UserError if the last seed is too large."""
    try:
        TypeAdapter(Seed).validate_python(config.seed + count - 1)
    except ValidationError as error:
        raise UserError(f"--seeds {count}: the last seed would be {config.seed + count - 1}; lower seed") from error
    return [config.model_copy(update={"seed": config.seed + number}) for number in range(count)]


def group_id(name: str, members: Sequence[str]) -> str:
    """NAME-HASH, a name for several runs or bundles. The hash is that of `members`, so equal members have one name."""
    return f"{name}-{hashlib.sha256(' '.join(members).encode()).hexdigest()[:10]}"


def summarize_runs(configs: Sequence[RunConfig], folders: Sequence[RunFolder]) -> None:
    """Prints the mean scores of complete runs with their spread, and writes them to seeds/NAME-HASH in the storage.

    configs, folders: of each run. Raises DamagedError if a run's scores.json is damaged.
    """
    group = group_id(configs[0].name, [folder.run_id for folder in folders])
    place = configs[0].storage_place / f"seeds/{group}"
    stored = {f"seed {config.seed}": _stored_scores(folder) for config, folder in zip(configs, folders, strict=True)}
    scores = SeedScores.of({label: content["splits"] for label, content in stored.items()})
    protocol = common_protocol([run_protocol(folder.config, folder.delivered()) for folder in folders])
    published = {
        split: _published(protocol, folders[0], scores.columns, split, scores.splits[split][0])
        for split in scores.splits.keys() & set(configs[0].data.test_splits)
    }
    by_run = [content["validation_by_stage"] for content in stored.values()]
    stages = [stage for stage in by_run[0] if all(stage in values for values in by_run)]
    validation = {stage: Spread.of([values[stage] for values in by_run]) for stage in stages}
    content = {
        "runs": {label: folder.run_id for label, folder in zip(stored, folders, strict=True)},
        "validation_by_stage": {name: asdict(spread) for name, spread in validation.items()},
    }
    texts = ", ".join(f"{name} {spread.text(digits=4)}" for name, spread in validation.items())
    logger.info(f"\nvalidation CIDEr-D ({protocol.tokenizer} tokens)  {texts}")
    metadata = {"runs": ", ".join(folder.run_id for folder in folders), "validation CIDEr-D": texts}
    write_summary(place, scores, protocol, content, metadata, published)


def _stored_scores(folder: RunFolder) -> Values:
    """The content of a complete run's scores.json. Raises DamagedError if the file is missing or damaged."""
    path = folder.path / "scores.json"
    try:
        content: Values = read_json(path)
        if not isinstance(content, dict) or not content.keys() >= SCORES_KEYS:
            raise DamagedError(f"{path} is damaged: it lacks scores")
    except (DamagedError, FileNotFoundError) as error:
        remedy = f"remove {folder.path / 'COMPLETE.json'}, and the same command scores the captions again"
        raise DamagedError(f"{error}; {remedy}") from error
    return content


def _published(protocol: Protocol, folder: RunFolder, columns: list[str], split: str, entry: Mapping[str, Any]) -> Rows:
    """The rows with published scores of the protocol's system for a split of this name.

    The label of a row says what cannot be compared, such as other images.

    protocol: common to all runs. entry: the entry of the split in the scores.json of `folder`.
    """
    part = folder.dataset.split(split)
    scored = entry["per_image_CIDEr-D"]  # by image id as text, because keys in JSON are texts
    uris = [uri for image, uri in part.uris().items() if str(image) in scored]
    return published_table(columns, published_rows(protocol, split, uris))
