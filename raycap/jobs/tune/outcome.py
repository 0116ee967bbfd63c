"""Writes the results of a search at its end: the leaderboard, plot, page and configurations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.search.ablations import comparisons
from raycap.pipeline.search.records import SearchFolder, TrialRecord, count
from raycap.pipeline.search.report import importances, write_page
from raycap.pipeline.search.results import (
    front,
    leaderboard_text,
    point_results,
    result_files,
    write_configurations,
    write_tables,
)
from raycap.pipeline.search.space import short
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.search.tracking import track_search

logger = logging.getLogger(__name__)


def write_outcome(search: Search, folder: SearchFolder, records: Sequence[TrialRecord]) -> int:
    """Writes and sends all results; returns the exit code, 1 when every trial failed."""
    results = point_results(search, records)
    best = front(results, search.config.objectives)
    write_tables(folder.path, search, results, best)
    write_configurations(folder.path, search, results, best)
    folder.push()  # before the decorations, which may fail
    logger.info(f"\n{leaderboard_text(search, results, best)}\n")
    decorations = Decorations()
    with decorations.making("the comparisons"):
        for table in comparisons(search, results, (SCORE,)):
            logger.info(f"{table.title}\n{table.note}\n{format_table(table.columns, table.rows)}\n")
    with decorations.making("the importance"):
        shares, note = importances(search, records)
        if shares:
            text = ", ".join(f"{short(key)} {100 * share:.0f} %" for key, share in shares.items())
            logger.info(f"importance   {text}; {note[:1].lower()}{note[1:]}")
    with decorations.making("the page with the plot"):
        write_page(folder.path, search, results, best)
    folder.push()
    succeeded, failed = count(records, "finished", "stopped"), count(records, "failed")
    logger.info(f"results      {', '.join(path.name for path in result_files(folder.path))} in {folder.root}")
    track_search(search, folder.path, records)
    if failed:
        first = next(record for record in records if record.state == "failed")
        text = f"{failed} of {len(records)} trials failed; trial {first.trial_id}: {first.reason}"
        logger.info(f"{'warning' if succeeded else 'failed':12} {text}")
    decorations.log_failed()
    return 1 if failed and not succeeded else 0
