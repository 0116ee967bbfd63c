"""Plain-text tables, and tables and JSON of scores over several seeds."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from raycap.pipeline.evaluation.reports.tables import SeedScores, format_table


def entry(cider: float | None, main_object: float | None = None, images: int = 20) -> dict[str, Any]:
    """A split's entry in scores.json."""
    unavailable = {"CIDEr-D": "one image only"} if cider is None else {}
    scores = {"BLEU-4": 0.25, "CIDEr-D": cider}
    return {"images": images, "scores": scores, "unavailable": unavailable, "main_object": main_object}


def test_the_table_has_means_and_names_what_is_unavailable() -> None:
    scores = SeedScores.of(
        {
            "seed 3": {"test": entry(0.8, 0.5), "val": entry(0.7, images=1), "unlabeled": {"images": 4}},
            "seed 4": {"test": entry(0.9, 0.6), "val": entry(None, images=1), "unlabeled": {"images": 4}},
        }
    )
    rows = [row for split in scores.splits for row in scores.rows(split, scores.columns)]
    lines = format_table(scores.columns, rows + scores.rows_of_models("test", scores.columns)).splitlines()
    assert [line.rstrip() for line in lines] == [
        "                                  BLEU-4        CIDEr-D   main object",
        "test, 20 images (2 seeds)  0.250 ± 0.000  0.850 ± 0.071  55.0 ± 7.1 %",
        "val, 1 images (2 seeds)    0.250 ± 0.000              -",
        "  seed 3                           0.250          0.800        50.0 %",
        "  seed 4                           0.250          0.900        60.0 %",
        "CIDEr-D unavailable for 1 of 2 models: one image only",
    ]
    written = json.loads(json.dumps(scores.to_json()))
    assert written.keys() == {"test", "val"} and written["val"]["scores"]["CIDEr-D"] is None
    assert written["test"]["scores"]["CIDEr-D"] == {
        "mean": pytest.approx(0.85),
        "std": pytest.approx(statistics.stdev([0.8, 0.9])),
        "min": 0.8,
        "max": 0.9,
        "values": [0.8, 0.9],
    }


def test_one_model_has_no_spread() -> None:
    scores = SeedScores.of({"ensemble of 5": {"test": entry(0.8)}})
    assert scores.rows("test", scores.columns) == [("test, 20 images (1 seed)", ["0.250", "0.800"])]
