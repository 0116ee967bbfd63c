"""Writes the results of a search: tables while it runs; at its end the leaderboard, plots, page and configurations."""

from __future__ import annotations

import logging

from pipeline.reports.text_table import format_table
from pipeline.search.report import comparisons, importances, write_page, write_plots
from pipeline.search.results import (
    front,
    leaderboard_text,
    point_results,
    write_configurations,
    write_tables,
)
from pipeline.search.space import short
from pipeline.search.spec import SCORE
from pipeline.search.tracking import SearchTracker
from pipeline.search.trials import TrialLog
from pipeline.tracking.mlflow_client import public_uri

logger = logging.getLogger(__name__)


class Outcome:
    """Writes the results of a search after each trial and at its end."""

    def __init__(self, log: TrialLog) -> None:
        self.log = log
        self.tracker = SearchTracker(log)
        self.tracker.start()

    def update(self) -> None:
        """Writes the tables after the end of a trial."""
        results = point_results(self.log)
        write_tables(self.log, front(results, self.log.search.config.objectives))
        self.tracker.wake()

    def close(self, status: str) -> None:
        """Ends an interrupted search on the tracker."""
        self.tracker.close(status)

    def finish(self) -> int:
        """Writes all results; returns the exit code."""
        log, folder, search = self.log, self.log.folder.path, self.log.search
        results = point_results(log)
        best = front(results, search.config.objectives)
        write_tables(log, best)
        paths = write_configurations(log, results, best)
        logger.info("")
        logger.info(leaderboard_text(search, results, best))
        logger.info("")
        for table in comparisons(search, results, (SCORE,)):
            logger.info(f"{table.title}\n{table.note}\n{format_table(table.columns, table.rows)}\n")
        shares, note = importances(search, log.records)
        if shares:
            text = ", ".join(f"{short(key)} {100 * share:.0f} %" for key, share in shares.items())
            logger.info(f"importance   {text}; {note[:1].lower()}{note[1:]}")
        write_plots(folder, search, results, best)
        page = write_page(log, results, best)
        counts = log.states()
        succeeded = counts["finished"] + counts["stopped"]
        tracked = self.tracker.close("FINISHED" if succeeded else "FAILED", files=True)
        logger.info(f"tables       {folder / 'trials.parquet'} and trials.csv")
        logger.info(f"page         {page}, with pareto.png and parallel.png")
        if paths:
            logger.info(f"to run       {', '.join(path.name for path in paths)} in {folder}")
        if search.base.tracking.enabled:
            note = "" if tracked else " lacks some results; run the same command again"
            logger.info(f"tracking     {public_uri(search.base)}{note}")
        return self._exit_code()

    def _exit_code(self) -> int:
        """1 when every trial failed, else 0; logs what is left and what failed."""
        counts, log = self.log.states(), self.log
        num_left = counts["running"] + (log.remaining if log.num_trials is not None else 0)
        if num_left and not log.exhausted:
            logger.info(
                f"{'not done':12} budget.hours is used up with {num_left:.0f} trials left; the same command resumes"
            )
        failed, succeeded = counts["failed"], counts["finished"] + counts["stopped"]
        if not failed:
            return 0
        first = next(record for record in log.records if record.state == "failed")
        text = f"{failed} of {len(log.records)} trials failed; trial {first.number}: {first.reason}"
        logger.info(f"{'warning' if succeeded else 'failed':12} {text}")
        return 0 if succeeded else 1
