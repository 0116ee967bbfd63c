"""Small searches over the shrunken demo configuration, and their trials with synthetic outcomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from raycap.pipeline.search.spec import Search, load_search
from raycap.pipeline.search.trials import SearchFolder, TrialLog, TrialOutcome
from tests.conftest import small_config

G, N_E, LR = "model.static_expansion", "model.dynamic_expansion", "stages.xe_frozen.lr"
SPACE = {G: {"generate": {"groups": [1, 2], "smallest": 4, "largest": 8}}, N_E: [2, 4]}
Objective = Callable[[dict[str, Any], int], TrialOutcome]  # the outcome of a trial's changes and seed


def search_values(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The plain values of a small search. Its base configuration is written to `tmp_path`.

    changes: values by key, of which None removes the key."""
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    values: dict[str, Any] = {"name": "small", "base": "base.yaml", "space": SPACE, "budget": {"trials": 4}}
    return {key: value for key, value in (values | changes).items() if value is not None}


def write_search(tmp_path: Path, **changes: Any) -> Path:
    """Writes a small search and returns its path."""
    path = tmp_path / "search.yaml"
    path.write_text(yaml.safe_dump(search_values(tmp_path, **changes), sort_keys=False))
    return path


def small_search(tmp_path: Path, **changes: Any) -> Search:
    return load_search(write_search(tmp_path, **changes))


def open_log(search: Search, folder: Path) -> TrialLog:
    return TrialLog(SearchFolder(folder), search)


def finished(score: float, macs: float, **fields: Any) -> TrialOutcome:
    """A trial that reported half of its score after epoch 1 and the score after epoch 2."""
    return TrialOutcome("finished", reports=[(1.0, score / 2), (2.0, score)], costs={"macs": macs}, **fields)


def run_log(log: TrialLog, objective: Objective, most: int = 1000) -> int:
    """Runs up to `most` trials one by one. Returns how many have run."""
    for done in range(most):
        record = log.start_next()
        if record is None:
            return done
        log.end(record, objective(log.search.space.changes(record.point), record.seed))
    return most
