"""The page of a search: one HTML file with the front, the leaderboard and what mattered; it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.scoring.published import ABLATION_COLUMNS
from pipeline.search import ablations as ablation
from pipeline.search import plots as search_plots
from pipeline.search.ablations import tables_beside
from pipeline.search.results import PointResult, head, leaderboard
from pipeline.search.samplers import IMPORTANCE_FEWEST, importance
from pipeline.search.space import short
from pipeline.search.spec import Search
from pipeline.search.trials import Book, SearchFolder, TrialRecord
from pipeline.storage.atomic import write_bytes, write_text

TEMPLATE = Path(__file__).with_name("search.html.jinja")
Rows = list[tuple[str, list[str]]]


@dataclass(frozen=True)
class SearchPage:
    """What the page shows; drawings are (wide or narrow, svg)."""

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
    comparisons: list[tuple[str, str, list[str], Rows]]
    failures: list[tuple[str, str]]
    facts: dict[str, str]


def write_plots(folder: Path, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> None:
    """pareto.png and parallel.png."""
    write_bytes(folder / "pareto.png", search_plots.png(search_plots.pareto_plot(search, results, on_front)))
    write_bytes(folder / "parallel.png", search_plots.png(search_plots.parallel_plot(search, results)))


def write_page(book: Book, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> Path:
    """search.html of a search's folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,  # names and reasons are anyone's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = _page(book, results, on_front)
    path = book.folder.path / "search.html"
    write_text(path, environment.get_template(TEMPLATE.name).render(page=page))
    return path


def _page(book: Book, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> SearchPage:
    search, config = book.search, book.search.config
    columns, rows = leaderboard(search, results, on_front)
    shares, note = importances(search, book.records)
    counts = ", ".join(f"{count} {state}" for state, count in book.states().items() if count)
    objectives = ", ".join(f"{head(name)} ({direction})" for name, direction in config.objectives.items())
    drawn = {
        kind: (
            search_plots.svg(search_plots.pareto_plot(search, results, on_front, narrow=narrow), f"pareto-{kind}"),
            search_plots.svg(search_plots.parallel_plot(search, results, narrow=narrow), f"parallel-{kind}"),
        )
        for kind, narrow in (("wide", False), ("narrow", True))
    }
    return SearchPage(
        title=config.name,
        search_id=book.folder.path.name,
        summary=f"{len(book.records)} trials of {', '.join(search.stages)}: {counts}.",
        front_note=f"The front holds the finished points that no other beats in {objectives}.",
        columns=columns,
        rows=rows,
        pareto=[(kind, pair[0]) for kind, pair in drawn.items()],
        parallel=[(kind, pair[1]) for kind, pair in drawn.items()],
        importance=[(short(key), share) for key, share in sorted(shares.items(), key=lambda item: -item[1])],
        importance_note=note,
        comparisons=comparisons(search, results),
        failures=[
            (f"trial {record.number}, {search.space.describe(record.point)}", record.reason)
            for record in book.records
            if record.state == "failed"
        ],
        facts=_facts(book.folder, search),
    )


def importances(search: Search, records: Sequence[TrialRecord]) -> tuple[dict[str, float], str]:
    """{dimension: share} of the main objective's variance, and a sentence on what it was computed from.

    Where trials were stopped early, of their CIDEr-D after the last epoch that all of them reached: scores after
    different times would tell of time.
    """
    told = [record for record in records if record.state in ("finished", "stopped") and record.reports]
    if any(record.state == "stopped" for record in told):
        epoch = max((e for e, _ in told[0].reports if all(_at(r, e) is not None for r in told)), default=None)
        found = [(record, _at(record, epoch)) for record in told] if epoch is not None else []
        when = f"of CIDEr-D after epoch {epoch:g}, the last that all {len(told)} trials reached" if found else ""
    else:
        name = search.config.main_objective
        found, when = [(record, record.value(name)) for record in told], f"of {head(name)} over {len(told)} trials"
    points = [search.space.point_by_key(record.point) for record, value in found if value is not None]
    shares = importance(search.space.by_key(), points, [value for _, value in found if value is not None])
    if not shares:
        return {}, f"Told from {IMPORTANCE_FEWEST} trials and two dimensions on, whose scores differ."
    return shares, f"Share of the variance {when} that each dimension explains (fANOVA); few trials tell little."


def _at(record: TrialRecord, epoch: float | None) -> float | None:
    return next((score for reported, score in record.reports if reported == epoch), None)


def comparisons(
    search: Search, results: Sequence[PointResult], metrics: Sequence[str] = ABLATION_COLUMNS
) -> list[tuple[str, str, list[str], Rows]]:
    """(title, note, columns, rows) of the tables beside a paper's; on a terminal fewer `metrics` have room."""
    if search.config.compare is None:
        return []
    if search.config.compare != "expansionnet_v2":
        return tables_beside(search, results, metrics)
    note = (
        "Means of the validation captions beside the paper's (first cross-entropy stage, Karpathy validation, beam 3); "
        "+/- is the difference to the baseline row, attention in encoder and decoder."
    )
    costs = (
        "1e12 multiply-accumulates of 5,000 images with a caption of 12.5 tokens each, in the paper's accounting and "
        "as executed here."
    )
    return [
        ("Table I beside the paper's", note, *ablation.score_table(search, results, metrics)),
        ("Table VI beside the paper's", costs, *ablation.cost_table(search, results)),
    ]


def _facts(folder: SearchFolder, search: Search) -> dict[str, str]:
    config, base = search.config, search.base
    budget = ", ".join(f"{name} {value}" for name, value in config.budget.model_dump().items() if value is not None)
    asha = config.scheduler
    return {
        "base": f"{config.base} ({base.name})",
        "algorithm": config.algorithm,
        "early stopping": f"ASHA from epoch {asha.grace_epochs:g}, 1/{asha.reduction:g} go on" if asha else "none",
        "budget": budget or "the whole grid",
        "seeds": ", ".join(map(str, config.seeds)),
        "a trial's resources": ", ".join(f"{name} {value:g}" for name, value in config.resources.model_dump().items()),
        "epochs a trial": f"{search.total_epochs():g} of {', '.join(search.stages)}",
        "space": "; ".join(search.space.keys),
    }
