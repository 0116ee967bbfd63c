"""The results of a search at its end: the leaderboard, trials, configurations, plot, page, and runs in the tracker."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from pathlib import Path

from raycap.pipeline.evaluation.reports.page import render_template
from raycap.pipeline.evaluation.reports.tables import Table, format_table
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.search.ablations import comparisons
from raycap.pipeline.search.plots import pareto_plot
from raycap.pipeline.search.records import SearchFolder, TrialRecord, count, states_text
from raycap.pipeline.search.results import (
    SearchResults,
    public_settings,
    result_files,
    trial_name,
    write_configurations,
    write_trials,
)
from raycap.pipeline.search.samplers import importances
from raycap.pipeline.search.space import flatten, short
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.storage.atomic import write_bytes, write_text
from raycap.pipeline.tracking.mlflow_client import (
    experiment_of,
    get_or_create_run,
    log_metrics,
    log_params,
    public_uri,
    reason_of,
    tracking_client,
    warn_of_local_file,
)

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("search.html.jinja")


def write_outcome(search: Search, folder: SearchFolder, records: Sequence[TrialRecord]) -> int:
    """Writes and sends all results; returns the exit code, 1 when every trial failed."""
    results = SearchResults.of(search, records)
    write_trials(folder.path / "trials.csv", results)
    write_configurations(folder.path, results)
    folder.push()  # before the decorations, which may fail
    leaderboard = results.leaderboard()
    logger.info(f"\n{format_table(leaderboard.columns, leaderboard.rows)}\n{leaderboard.note}\n")
    decorations = Decorations()
    with decorations.making("the page with its plot and tables"):
        for table in comparisons(results, (SCORE,)):  # the columns of all metrics are too many for a terminal
            logger.info(f"{table.title}\n{table.note}\n{format_table(table.columns, table.rows)}\n")
        shares, note = importances(search, records)
        if shares:
            text = ", ".join(f"{short(key)} {100 * share:.0f} %" for key, share in shares.items())
            logger.info(f"importance   {text}; {note[:1].lower()}{note[1:]}")
        write_page(folder.path, results, [leaderboard, *comparisons(results)], shares, note)
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


def write_page(
    folder: Path, results: SearchResults, tables: Sequence[Table], shares: dict[str, float], note: str
) -> None:
    """Writes search.html and its plot, pareto.png, into the search's folder.

    shares, note: of `importances`.
    """
    search, records, plot = results.search, results.records, pareto_plot(results)
    write_bytes(folder / "pareto.png", plot)
    text = render_template(
        TEMPLATE,
        title=search.config.name,
        search_id=folder.name,
        summary=f"{len(records)} trials of {', '.join(search.stages)}: {states_text(records)}.",
        tables=tables,
        pareto=base64.b64encode(plot).decode(),
        importance=[(short(key), share) for key, share in shares.items()],
        importance_note=note,
        failures=[
            (f"trial {record.trial_id}, {search.space.describe(record.point)}", record.reason)
            for record in records
            if record.state == "failed"
        ],
        metadata={"base": search.base.name} | flatten(public_settings(search)),
    )
    write_text(folder / "search.html", text)


def track_search(search: Search, folder: Path, records: Sequence[TrialRecord]) -> None:
    """Sends the trials and the files of a search's local folder, unless tracking is off.

    Runs that exist are replaced. A tracker that is down does not make the search fail: the same command sends again.
    """
    config = search.base
    if not config.tracking.enabled:
        return
    warn_of_local_file(config)
    try:
        client = tracking_client(config)
        experiment, tags = experiment_of(client, config), {"raycap.search": folder.name}
        parent = get_or_create_run(client, experiment, {"mlflow.runName": folder.name}, tags)
        log_params(client, parent, public_settings(search))
        for record in records:
            match = {"mlflow.parentRunId": parent, "mlflow.runName": trial_name(search, record)}
            run_id = get_or_create_run(client, experiment, match, tags)
            log_params(client, run_id, search.space.changes(record.point) | {"seed": record.seed})
            metrics = [("validation_CIDEr-D", score, step) for step, (_, score) in enumerate(record.reports)]
            for name in dict.fromkeys([SCORE, *record.scores, *record.costs]):
                if (value := record.value(name)) is not None:
                    metrics.append((name.replace(" ", "_"), value, 0))  # as runs are tracked: test_CIDEr-D
            facts = {"state": record.state, "run_id": Path(record.run).name, "reason": record.reason[:500]}
            log_metrics(client, run_id, metrics, {f"raycap.{name}": text for name, text in facts.items() if text})
            client.set_terminated(run_id, {"finished": "FINISHED", "stopped": "KILLED"}.get(record.state, "FAILED"))
        for file in result_files(folder):
            client.log_artifact(parent, str(file))
        client.set_terminated(parent, "FINISHED" if any(record.state != "failed" for record in records) else "FAILED")
    except Exception as error:
        logger.warning(
            f"tracker: {public_uri(config)} does not accept everything ({reason_of(error)}); the results are in "
            f"{folder}, and the same command sends them"
        )
    else:
        logger.info(f"tracking     {public_uri(config)}")
