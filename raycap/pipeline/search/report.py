"""Writes the page of a search: one HTML file with the Pareto front, the leaderboard and the importance of each key."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from raycap.pipeline.evaluation.reports.page import render_template
from raycap.pipeline.search.ablations import comparisons
from raycap.pipeline.search.plots import pareto_plot
from raycap.pipeline.search.records import TrialRecord, states_text
from raycap.pipeline.search.results import (
    SPREAD_TEXT,
    PointResult,
    heading,
    leaderboard,
    objectives_text,
    public_settings,
    selection_note,
)
from raycap.pipeline.search.samplers import MIN_POINTS_FOR_IMPORTANCE, importance
from raycap.pipeline.search.space import flatten, short
from raycap.pipeline.search.spec import SCORE, Search
from raycap.pipeline.storage.atomic import write_bytes, write_text

TEMPLATE = Path(__file__).with_name("search.html.jinja")


def write_page(folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> Path:
    """Writes search.html and its plot, pareto.png, into the search's folder."""
    path, records = folder / "search.html", [record for result in results for record in result.records]
    plot = pareto_plot(search, results, on_front)
    write_bytes(folder / "pareto.png", plot)
    columns, rows = leaderboard(search, results, on_front)
    shares, note = importances(search, records)
    text = render_template(
        TEMPLATE,
        title=search.config.name,
        search_id=folder.name,
        summary=f"{len(records)} trials of {', '.join(search.stages)}: {states_text(records)}.",
        selection_note=selection_note(search),
        spread_text=SPREAD_TEXT,
        front_note=f"The front holds the finished points that no other one dominates in {objectives_text(search)}.",
        columns=columns,
        rows=rows,
        pareto=base64.b64encode(plot).decode(),
        importance=[(short(key), share) for key, share in sorted(shares.items(), key=lambda item: -item[1])],
        importance_note=note,
        comparisons=comparisons(search, results),
        failures=[
            (f"trial {record.trial_id}, {search.space.describe(record.point)}", record.reason)
            for record in records
            if record.state == "failed"
        ],
        metadata={"base": search.base.name} | flatten(public_settings(search)),
    )
    write_text(path, text)
    return path


def importances(search: Search, records: Sequence[TrialRecord]) -> tuple[dict[str, float], str]:
    """{dimension: share} of the main objective's variance, and a note on the data it was computed from.

    If some trials were stopped early, the CIDEr-D of all trials after the last epoch that all of them reached is used
    instead of the main objective, because scores after different epochs are not comparable.
    """
    main = search.config.main_objective
    usable = [record for record in records if record.state in ("finished", "stopped") and record.reports]
    values = [record.value(main) for record in usable]
    source = f"of {heading(search, main)} over {len(usable)} trials"
    if any(record.state == "stopped" for record in usable):
        scores = [dict(record.reports) for record in usable]
        epoch = max(set.intersection(*map(set, scores)), default=-1.0)  # without a common epoch no trial has a value
        values = [score.get(epoch) for score in scores]
        source = f"of {heading(search, SCORE)} after epoch {epoch:g}, the last that all {len(usable)} trials reached"
    rated = [(record, value) for record, value in zip(usable, values, strict=True) if value is not None]
    shares = importance(search.space, [record.point for record, _ in rated], [value for _, value in rated])
    if not shares:
        return {}, f"Needs at least {MIN_POINTS_FOR_IMPORTANCE} trials with different scores and two dimensions."
    return shares, f"Share of the variance {source} that each dimension explains (fANOVA); unreliable for few trials."
