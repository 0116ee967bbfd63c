"""The results of a search at its end: the leaderboard, trials, configurations, plot, page, and runs in the tracker."""

from __future__ import annotations

import base64
import io
import logging
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.evaluation.comparison.bootstrap import Spread
from raycap.pipeline.evaluation.reports.page import render_template
from raycap.pipeline.evaluation.reports.tables import Table, format_table
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.search.records import SearchFolder, TrialRecord, count
from raycap.pipeline.search.results import (
    STATES,
    PointResult,
    SearchResults,
    comparisons,
    heading,
    public_settings,
    result_files,
    trial_name,
    write_configurations,
    write_trials,
)
from raycap.pipeline.search.samplers import importances
from raycap.pipeline.search.space import flatten, short
from raycap.pipeline.search.spec import COSTS, SCORE, Search
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
FINISHED, FRONT, STOPPED, RULE = "#0b6b58", "#b5401f", "#52605a", "#d5dcd9"  # colors of the plot
LABEL_WIDTH = 36  # characters of a line in the plot's legend


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
    states = [f"{number} {state}" for state in STATES if (number := count(records, state))]
    write_bytes(folder / "pareto.png", plot)
    text = render_template(
        TEMPLATE,
        title=search.config.name,
        search_id=folder.name,
        summary=f"{len(records)} trials of {', '.join(search.stages)}: {', '.join(states)}.",
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


def pareto_plot(results: SearchResults) -> bytes:
    """A PNG file with scores over costs: finished points, stopped points as rings, and the Pareto front as steps.

    The points of the front have the numbers of their files front-N.yaml, which the legend explains. Bars are standard
    deviations over the seeds. The axes are the first cost and the first score among the objectives, else
    multiply-accumulates and CIDEr-D. The scores are those of the reported split. If another split has chosen the front,
    its points are not connected.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    search, objectives = results.search, results.search.config.objectives
    cost = next((name for name in objectives if name in COSTS), search.cost)
    score = search.reported(next((name for name in objectives if name not in COSTS), SCORE))
    shown = [point for point in results.points if point.values(cost) and point.values(score)]
    figure = Figure(figsize=(8.6, 5.4), dpi=160)
    axes = figure.subplots()

    def place(point: PointResult) -> tuple[float, float, float]:
        """The cost in the unit that `heading` names, the score, and its spread, 0 for one seed."""
        spread = Spread.of(point.values(score))
        return Spread.of(point.values(cost)).mean / COSTS[cost].unit, spread.mean, spread.std or 0.0

    def draw(points: Sequence[PointResult], label: str, **style: Any) -> None:
        if points:
            costs, scores, spreads = zip(*sorted(map(place, points)), strict=True)
            bars, style = spreads if any(spreads) else None, {"fmt": "o"} | style
            axes.errorbar(costs, scores, bars, label=label, capsize=3, elinewidth=1, **style)

    finished = [point for point in shown if point.state == "finished"]
    stopped = [point for point in shown if point.state == "stopped"]
    front = [point for point in finished if point in results.front]
    draw([point for point in finished if point not in front], "finished", ms=8, color=FINISHED, mec="white")
    draw(stopped, "stopped early (score so far)", ms=6, color=STOPPED, mfc="none")
    line: dict[str, Any] = {"fmt": "o-", "drawstyle": "steps-post", "lw": 1.6} if search.reports_validation else {}
    chosen_on = "" if search.reports_validation else f", chosen on {search.base.data.val_split}"
    draw(front, f"Pareto front{chosen_on}: N of front-N.yaml", ms=14, color=FRONT, mec="white", zorder=3, **line)
    explained = list[Any](axes.containers)
    for number, point in enumerate(results.front, 1):
        if point in front:
            middle: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 8, "color": "white"}
            axes.annotate(str(number), place(point)[:2], zorder=4, **middle)
            label = textwrap.fill(point.label, LABEL_WIDTH).replace("$", r"\$")  # `$` begins a formula
            explained += axes.plot([], [], marker=f"${number}$", color=FRONT, mew=0, ls="", label=label)
    costs = [place(point)[0] for point in shown]
    if costs and 0 < 3 * min(costs) < max(costs):  # so that cheap points do not overlap
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_xlabel(heading(search, cost) + (" per image" if cost.startswith("macs") else ""))
    axes.set_ylabel(("validation " if search.reports_validation else "") + heading(search, score))
    axes.margins(0.08, 0.1)
    axes.grid(color=RULE)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(handles=explained, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", bbox_inches="tight")  # with the whole legend
    return data.getvalue()
