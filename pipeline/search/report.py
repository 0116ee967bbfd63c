"""Writes the page of a search: one HTML file with the Pareto front, the leaderboard and the importance of each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.reports.page import render_template
from pipeline.search.ablations import ComparisonTable, comparisons
from pipeline.search.plots import parallel_plot, pareto_plot, png, svg
from pipeline.search.results import PointResult, Rows, head, leaderboard
from pipeline.search.samplers import MIN_POINTS_FOR_IMPORTANCE, importance
from pipeline.search.space import short
from pipeline.search.spec import Search
from pipeline.search.trials import TrialLog, TrialRecord
from pipeline.storage.atomic import write_bytes, write_text

TEMPLATE = Path(__file__).with_name("search.html.jinja")


@dataclass(frozen=True)
class SearchPage:
    """The content of the page. Each plot is drawn twice, as ('wide' or 'narrow', SVG element)."""

    title: str
    search_id: str
    summary: str
    front_note: str
    columns: list[str]
    rows: Rows
    pareto: list[tuple[str, str]]
    parallel: list[tuple[str, str]]
    importance: list[tuple[str, float]]
    importance_note: str
    comparisons: list[ComparisonTable]
    failures: list[tuple[str, str]]
    metadata: dict[str, str]


def write_plots(folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> None:
    """Writes pareto.png and parallel.png into the folder."""
    write_bytes(folder / "pareto.png", png(pareto_plot(search, results, on_front)))
    write_bytes(folder / "parallel.png", png(parallel_plot(search, results)))


def write_page(log: TrialLog, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> Path:
    """Writes search.html into the search's folder."""
    page = _page(log, results, on_front)
    path = log.folder.path / "search.html"
    write_text(path, render_template(TEMPLATE, page=page))
    return path


def _page(log: TrialLog, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> SearchPage:
    search, config = log.search, log.search.config
    columns, rows = leaderboard(search, results, on_front)
    shares, note = importances(search, log.records)
    counts = ", ".join(f"{count} {state}" for state, count in log.states().items() if count)
    objectives = ", ".join(f"{head(name)} ({direction})" for name, direction in config.objectives.items())
    widths = (("wide", False), ("narrow", True))
    return SearchPage(
        title=config.name,
        search_id=log.folder.path.name,
        summary=f"{len(log.records)} trials of {', '.join(search.stages)}: {counts}.",
        front_note=f"The front holds the finished points that no other one dominates in {objectives}.",
        columns=columns,
        rows=rows,
        pareto=[
            (kind, svg(pareto_plot(search, results, on_front, narrow=narrow), f"pareto-{kind}"))
            for kind, narrow in widths
        ],
        parallel=[
            (kind, svg(parallel_plot(search, results, narrow=narrow), f"parallel-{kind}")) for kind, narrow in widths
        ],
        importance=[(short(key), share) for key, share in sorted(shares.items(), key=lambda item: -item[1])],
        importance_note=note,
        comparisons=comparisons(search, results),
        failures=[
            (f"trial {record.number}, {search.space.describe(record.point)}", record.reason)
            for record in log.records
            if record.state == "failed"
        ],
        metadata=_metadata(search),
    )


def importances(search: Search, records: Sequence[TrialRecord]) -> tuple[dict[str, float], str]:
    """{dimension: share} of the main objective's variance, and a note on the data it was computed from.

    If trials were stopped early, their CIDEr-D at the last epoch that all of them reached is used instead, because
    scores after different epochs are not comparable.
    """
    usable = [record for record in records if record.state in ("finished", "stopped") and record.reports]
    values: list[float | None]
    if any(record.state == "stopped" for record in usable):
        common_epochs = [
            epoch for epoch, _ in usable[0].reports if all(_score_at(record, epoch) is not None for record in usable)
        ]
        epoch = max(common_epochs, default=None)
        values = [None if epoch is None else _score_at(record, epoch) for record in usable]
        source = (
            "" if epoch is None else f"of CIDEr-D after epoch {epoch:g}, the last that all {len(usable)} trials reached"
        )
    else:
        values = [record.value(search.config.main_objective) for record in usable]
        source = f"of {head(search.config.main_objective)} over {len(usable)} trials"
    rated = [(record, value) for record, value in zip(usable, values, strict=True) if value is not None]
    points = [search.space.point_by_key(record.point) for record, _ in rated]
    shares = importance(search.space.by_key(), points, [value for _, value in rated])
    if not shares:
        return {}, f"Needs at least {MIN_POINTS_FOR_IMPORTANCE} trials with different scores and two dimensions."
    return shares, f"Share of the variance {source} that each dimension explains (fANOVA); unreliable for few trials."


def _score_at(record: TrialRecord, epoch: float) -> float | None:
    """The score that a trial reported after an epoch; None if it did not report then."""
    return next((score for reported, score in record.reports if reported == epoch), None)


def _metadata(search: Search) -> dict[str, str]:
    """The settings of the search, as the page lists them."""
    config, base = search.config, search.base
    budget = ", ".join(f"{name} {value}" for name, value in config.budget.model_dump().items() if value is not None)
    asha = config.scheduler
    return {
        "base": f"{config.base} ({base.name})",
        "algorithm": config.algorithm,
        "early stopping": f"ASHA from epoch {asha.grace_epochs:g}, 1/{asha.reduction:g} continue" if asha else "none",
        "budget": budget or "the whole grid",
        "seeds": ", ".join(map(str, config.seeds)),
        "resources per trial": ", ".join(f"{name} {value:g}" for name, value in config.resources.model_dump().items()),
        "epochs per trial": f"{search.total_epochs():g} of {', '.join(search.stages)}",
        "space": "; ".join(search.space.keys),
    }
