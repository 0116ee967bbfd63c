"""Small searches over the shrunken demo configuration, and their trials without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from raycap.pipeline.search.records import TrialRecord
from raycap.pipeline.search.spec import Search, load_search
from tests.conftest import small_config

G, N_E, LR = "model.static_expansion", "model.dynamic_expansion", "stages.xe_frozen.lr"
SPACE = {G: [[4], [8], [4, 8]], N_E: [2, 4]}


def write_search(tmp_path: Path, **changes: Any) -> Path:
    """Writes a small search and its base configuration, and returns its path.

    changes: values by key, of which None removes the key."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    values: dict[str, Any] = {"name": "small", "base": "base.yaml", "space": SPACE, "budget": {"trials": 4}} | changes
    path = tmp_path / "search.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False))
    return path


def small_search(tmp_path: Path, **changes: Any) -> Search:
    return load_search(write_search(tmp_path, **changes))


Outcome = Callable[[dict[str, Any], int], dict[str, Any]]  # a record's fields, by the trial's changes and seed


def finished(score: float, macs: float, **fields: Any) -> dict[str, Any]:
    """A trial that reported half of its score after epoch 1 and the score after epoch 2."""
    return {"state": "finished", "reports": [(1.0, score / 2), (2.0, score)], "costs": {"macs": macs}} | fields


def failed(reason: str) -> dict[str, Any]:
    return {"state": "failed", "reason": reason}


def trials_of(search: Search, outcome: Outcome, points: Iterable[dict[str, Any]] | None = None) -> list[TrialRecord]:
    """The trials of the points (None: all of the space) with each seed of the search."""
    tried = [
        (point, seed) for point in (search.space.points() if points is None else points) for seed in search.config.seeds
    ]
    return [
        TrialRecord(f"t{number}", point, seed, **outcome(search.space.changes(point), seed))
        for number, (point, seed) in enumerate(tried, 1)
    ]
