"""Plain-text tables."""

from __future__ import annotations

from raycap.pipeline.evaluation.reports.tables import format_table


def test_columns_are_aligned_and_reasons_follow_once() -> None:
    rows = [("test", ["1.0", "unavailable: no java"]), ("a long name", ["12.25", "unavailable: no java"])]
    assert format_table(["BLEU-4", "SPICE"], rows).splitlines() == [
        "             BLEU-4  SPICE",
        "test            1.0      -",
        "a long name   12.25      -",
        "SPICE unavailable: no java",
    ]
