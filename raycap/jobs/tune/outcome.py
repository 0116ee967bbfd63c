"""Writes the results of a search at its end: the leaderboard, plot, page and configurations."""

from __future__ import annotations

import logging

from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.search.ablations import comparisons
from raycap.pipeline.search.report import importances, write_page, write_plot
from raycap.pipeline.search.results import front, leaderboard_text, point_results, write_configurations, write_tables
from raycap.pipeline.search.space import short
from raycap.pipeline.search.spec import SCORE
from raycap.pipeline.search.tracking import SearchTracker
from raycap.pipeline.search.trials import TrialLog
from raycap.pipeline.tracking.mlflow_client import public_uri

logger = logging.getLogger(__name__)


def write_outcome(log: TrialLog, tracker: SearchTracker) -> int:
    """Writes and sends all results; returns the exit code, 1 when every trial failed."""
    folder, place, search = log.folder.path, log.folder.root, log.search
    results = point_results(log)
    best = front(results, search.config.objectives)
    write_tables(log, results, best)
    paths = write_configurations(log, results, best)
    log.folder.push()  # before the decorations, which may fail
    logger.info(f"\n{leaderboard_text(search, results, best)}\n")
    decorations = Decorations()
    with decorations.making("the comparisons"):
        for table in comparisons(search, results, (SCORE,)):
            logger.info(f"{table.title}\n{table.note}\n{format_table(table.columns, table.rows)}\n")
    with decorations.making("the importance"):
        _log_importance(log)
    with decorations.making("the plot"):
        write_plot(folder, search, results, best)
    with decorations.making("the page"):
        write_page(log, results, best)
    log.folder.push()
    succeeded, failed = log.count("finished", "stopped"), log.count("failed")
    tracked = tracker.close("FINISHED" if succeeded else "FAILED", files=True)
    logger.info(f"tables       {place / 'trials.parquet'} and trials.csv")
    pictures = [name for name in ("search.html", "pareto.png") if (folder / name).is_file()]
    logger.info(f"pages        {', '.join(pictures) or 'none'} in {place}")
    if paths:
        logger.info(f"to run       {', '.join(path.name for path in paths)} in {place}")
    if search.base.tracking.enabled:
        note = "" if tracked else " lacks some results; run the same command again"
        logger.info(f"tracking     {public_uri(search.base)}{note}")
    num_left = log.count("running") + (log.remaining if log.num_trials is not None else 0)
    if num_left and not log.exhausted:
        logger.info(f"not done     budget.hours is used up with {num_left:.0f} trials left; the same command resumes")
    if failed:
        first = next(record for record in log.records if record.state == "failed")
        text = f"{failed} of {len(log.records)} trials failed; trial {first.number}: {first.reason}"
        logger.info(f"{'warning' if succeeded else 'failed':12} {text}")
    decorations.log_failed()
    return 1 if failed and not succeeded else 0


def _log_importance(log: TrialLog) -> None:
    """Logs the share of the variance that each dimension explains, if there are enough trials."""
    shares, note = importances(log.search, log.records)
    if shares:
        text = ", ".join(f"{short(key)} {100 * share:.0f} %" for key, share in shares.items())
        logger.info(f"importance   {text}; {note[:1].lower()}{note[1:]}")
