"""What a search leaves: tables while it runs; at its end the leaderboard, plots, the page and configurations to run."""

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
from pipeline.search.trials import Book
from pipeline.tracking.mlflow_client import public_uri

logger = logging.getLogger(__name__)


class Outcome:
    """Writes what a search has found, now and then and at its end."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.tracker = SearchTracker(book)
        self.tracker.start()

    def changed(self) -> None:
        """A trial is over."""
        results = point_results(self.book)
        write_tables(self.book.folder.path, self.book, front(results, self.book.search.config.objectives))
        self.tracker.wake()

    def close(self, status: str) -> None:
        """The search ends before it is done."""
        self.tracker.close(status)

    def finish(self) -> int:
        """Everything that a search leaves; returns the exit code."""
        book, folder, search = self.book, self.book.folder.path, self.book.search
        results = point_results(book)
        best = front(results, search.config.objectives)
        write_tables(folder, book, best)
        paths = write_configurations(folder, book, results, best)
        logger.info("")
        logger.info(leaderboard_text(search, results, best))
        logger.info("")
        for title, note, columns, rows in comparisons(search, results, (SCORE,)):
            logger.info(f"{title}\n{note}\n{format_table(columns, rows)}\n")
        shares, note = importances(search, book.records)
        if shares:
            told = ", ".join(f"{short(key)} {100 * share:.0f} %" for key, share in shares.items())
            logger.info(f"importance   {told}; {note[:1].lower()}{note[1:]}")
        write_plots(folder, search, results, best)
        page = write_page(book, results, best)
        counts = book.states()
        alive = counts["finished"] + counts["stopped"]
        tracked = self.tracker.close("FINISHED" if alive else "FAILED", files=True)
        logger.info(f"tables       {folder / 'trials.parquet'} and trials.csv")
        logger.info(f"page         {page}, with pareto.png and parallel.png")
        if paths:
            logger.info(f"to run       {', '.join(path.name for path in paths)} in {folder}")
        if search.base.tracking.enabled:
            told = "" if tracked else " did not take everything; run again"
            logger.info(f"tracking     {public_uri(search.base)}{told}")
        return self._verdict()

    def _verdict(self) -> int:
        counts = self.book.states()
        left = counts["running"] + (self.book.remaining if self.book.asked is not None else 0)
        if left and not self.book.exhausted:
            logger.info(f"{'not done':12} budget.hours are over with {left:.0f} trials left; the same command goes on")
        failed, others = counts["failed"], counts["finished"] + counts["stopped"]
        if not failed:
            return 0
        first = next(record for record in self.book.records if record.state == "failed")
        told = f"{failed} of {len(self.book.records)} trials failed; trial {first.number}: {first.reason}"
        logger.info(f"{'warning' if others else 'failed':12} {told}")
        return 0 if others else 1
