"""The book of a search on synthetic objectives: what is tried, found, remembered after a kill, and shown."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from pipeline.config.load import load_config
from pipeline.scoring.published import ABLATION
from pipeline.search.ablations import cost_table, pairs, score_table
from pipeline.search.plots import parallel_plot, pareto_plot, png, svg
from pipeline.search.report import importances, write_page, write_plots
from pipeline.search.results import (
    front,
    leaderboard_text,
    point_results,
    trial_line,
    write_configurations,
    write_tables,
)
from pipeline.search.samplers import importance, make_proposals
from pipeline.search.spec import Search
from pipeline.search.trials import Book, SearchFolder, TrialRecord
from tests.unit.search.test_spec import LR, N_E, G, small_search

Objective = Callable[[dict[str, Any], int], dict[str, Any]]
CHOICES: dict[str, Any] = {
    G: {"groups": {str(2**k): [2**k] for k in range(2, 7)}},
    N_E: [1, 2, 4, 8, 16],
    LR: {"low": 0.001, "high": 0.004, "step": 0.001},
}


def known(changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Cost grows with G, the score with G's logarithm; N_E is best at 4 and the rate at 0.003, so that the front is
    the five groups there."""
    groups = sum(changes[G])
    score = float(np.log2(groups)) - abs(np.log2(changes[N_E] / 4)) - 1000 * abs(changes[LR] - 0.003)
    return finished(score, float(groups))


def finished(score: float, macs: float, **others: Any) -> dict[str, Any]:
    return {"state": "finished", "reports": [(1.0, score / 2), (2.0, score)], "costs": {"macs": macs}, **others}


def open_book(search: Search, folder: Path) -> Book:
    config, trials = search.config, search.num_trials()
    points = None if trials is None else trials // len(config.seeds)
    directions = list(config.objectives.values())
    proposals = make_proposals(search.space, config.algorithm, directions, config.seed, config.population, points)
    return Book(SearchFolder(folder), search, proposals)


def run_book(book: Book, objective: Objective = known, most: int = 1000) -> int:
    """Runs trials one by one; returns how many."""
    for done in range(most):
        record = book.next()
        if record is None:
            return done
        book.over(record, objective(book.search.changes(record.point), record.seed))
    return most


def front_of(book: Book) -> set[str]:
    return {result.label for result in front(point_results(book), book.search.config.objectives)}


@pytest.mark.parametrize("algorithm", ["nsga2", "tpe"])
def test_optuna_finds_the_known_front(tmp_path: Path, algorithm: str) -> None:
    """60 of 100 points; drawn at random the five of the front would all be there once in 13 times."""
    expected = {f"G {2**k}, N_E 4, xe_frozen lr 0.003" for k in range(2, 7)}
    search = small_search(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 60}, population=8)
    book = open_book(search, tmp_path / "search")
    assert run_book(book) == 60
    assert len({str(record.point) for record in book.records}) == 60, "no point is tried twice"
    assert front_of(book) == expected


@pytest.mark.parametrize("algorithm", ["grid", "random", "nsga2", "tpe"])
def test_a_search_that_was_killed_goes_on(tmp_path: Path, algorithm: str) -> None:
    """Finished trials are not run again, the one in the middle comes first, the total is what was asked."""
    search = small_search(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 20}, population=6)
    book = open_book(search, tmp_path / "search")
    run_book(book, most=7)
    cut = book.next()
    assert cut is not None
    book.reported(cut, {"epoch": 1.0, "CIDEr-D": 0.25, "run": "runs/x", "costs": {"macs": 9.0}})
    before = {record.number: record for record in book.records if record is not cut}

    again = open_book(search, tmp_path / "search")
    first = again.next()
    assert first is not None and (first.number, first.point, first.attempts) == (cut.number, cut.point, 2)
    assert first.reports == [(1.0, 0.25)]
    again.over(first, known(search.changes(first.point), first.seed))
    assert run_book(again) == 20 - 8
    assert [record.number for record in again.records] == list(range(1, 21))
    assert len({str(record.point) for record in again.records}) == 20
    assert all(record == before[record.number] for record in again.records if record.number in before)
    assert open_book(search, tmp_path / "search").next() is None, "a complete search asks for nothing"
    more = small_search(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 22}, population=6)
    assert run_book(open_book(more, tmp_path / "search")) == 2, "a raised budget goes on"


def test_nsga2_keeps_its_generations_over_a_kill(tmp_path: Path) -> None:
    search = small_search(tmp_path, space=CHOICES, algorithm="nsga2", budget={"trials": 60}, population=8)
    for _ in range(10):  # killed after every sixth trial
        run_book(open_book(search, tmp_path / "search"), most=6)
    book = open_book(search, tmp_path / "search")
    assert len(book.records) == 60
    generations = {value for r in book.records for key, value in r.attributes.items() if "generation" in key}
    assert max(generations) >= 3
    assert len(front_of(book) & {f"G {2**k}, N_E 4, xe_frozen lr 0.003" for k in range(2, 7)}) >= 4


def test_seeds_of_a_point_stand_together(tmp_path: Path) -> None:
    """Mean and spread over seeds; a failed seed does not count, a point whose seeds all failed is last."""

    def noisy(changes: dict[str, Any], seed: int) -> dict[str, Any]:
        if changes == {G: [4], N_E: 4} or (changes == {G: [8], N_E: 2} and seed == 2):
            return {"state": "failed", "reason": "out of memory: too large"}
        return finished(sum(changes[G]) + changes[N_E] + seed, 1.0)

    search = small_search(tmp_path, algorithm="grid", budget={}, seeds=[1, 2, 3])
    book = open_book(search, tmp_path / "search")
    assert run_book(book, noisy) == 18
    results = point_results(book)
    assert [result.label for result in results] == [
        "G 4 8, N_E 4", "G 4 8, N_E 2", "G 8, N_E 4", "G 8, N_E 2", "G 4, N_E 2", "G 4, N_E 4",
    ]  # fmt: skip
    assert results[0].mean("CIDEr-D") == 18 and results[0].spread("CIDEr-D") == 1.0
    assert results[3].mean("CIDEr-D") == 12 and len(results[3].counted) == 2
    text = leaderboard_text(search, results, front(results, search.config.objectives))
    assert "18.0000 ± 1.0000" in text and "2/3" in text and "0/3" in text
    assert trial_line(search, results[-1].records[0], 18).startswith("trial 4/18  failed after 0 s: out of memory")


def test_the_front_holds_what_nothing_beats(tmp_path: Path) -> None:
    values = iter([(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (0.5, 2.0), (3.0, 9.0), (9.0, 0.1)])

    def given(changes: dict[str, Any], seed: int) -> dict[str, Any]:
        score, cost = next(values)
        outcome = finished(score, cost)
        return outcome | {"state": "stopped"} if score == 9.0 else outcome

    book = open_book(small_search(tmp_path, algorithm="grid", budget={}), tmp_path / "search")
    run_book(book, given)
    results = point_results(book)
    assert [(r.mean("CIDEr-D"), r.mean("macs")) for r in front(results, book.search.config.objectives)] == [
        (3.0, 9.0), (2.0, 2.0), (1.0, 1.0),
    ]  # fmt: skip
    assert results[-1].state == "stopped", "what was stopped early is no rival"


def test_tables_and_configurations(tmp_path: Path) -> None:
    search = small_search(tmp_path, algorithm="grid", budget={})
    folder = tmp_path / "search"
    book = open_book(search, folder)
    run_book(book, lambda changes, seed: finished(sum(changes[G]) + changes[N_E], sum(changes[G])))
    results = point_results(book)
    best = front(results, search.config.objectives)
    write_tables(folder, book, best)
    table = pyarrow.parquet.read_table(folder / "trials.parquet")
    assert table.num_rows == 6 and pyarrow.csv.read_csv(folder / "trials.csv").column_names == table.column_names
    assert table[G].to_pylist()[-1] == "4 8" and table[N_E].to_pylist() == [2, 4] * 3
    assert sum(table["on_front"].to_pylist()) == len(best) == 3
    paths = write_configurations(folder, book, results, best)
    assert [path.name for path in paths] == ["best.yaml", "front-1.yaml", "front-2.yaml", "front-3.yaml"]
    for path, result in zip(paths, [results[0], *best], strict=True):
        config = load_config(path)
        assert config.model.dynamic_expansion == search.changes(result.point)[N_E]
        assert config.stages == search.base.stages and f"raycap run {path}" in path.read_text()
    assert [stage.epochs for stage in load_config(paths[0]).stages] == [0.7] * 4, "the whole recipe, not the trial's"


def test_whole_numbers_have_an_end_and_no_sampler_hangs(tmp_path: Path) -> None:
    space = {"model.num_encoder_layers": {"low": 1, "high": 4, "log": True}}
    for algorithm in ("random", "tpe"):
        search = small_search(tmp_path, space=space, algorithm=algorithm, budget={"trials": 8})
        assert search.space.size == 4
        book = open_book(search, tmp_path / algorithm)
        assert run_book(book, lambda changes, seed: {"state": "finished", "scores": {}, "costs": {}}) == 4
        assert len({str(record.point) for record in book.records}) == 4


def test_asha_follows_its_rule(tmp_path: Path) -> None:
    """At a rung (1, 2, 4 epochs; reduction 2) a trial ends when below the median of those before it."""
    from jobs.tune.schedulers import make_scheduler, take_over

    scheduler_section = {"name": "asha", "grace_epochs": 1, "reduction": 2}
    search = small_search(tmp_path, trial={"epochs": 8}, scheduler=scheduler_section)
    scheduler: Any = make_scheduler(search, [])
    generator = random.Random(0)
    trials = [SimpleNamespace(trial_id=str(n), quality=generator.random()) for n in range(40)]
    for trial in trials:
        scheduler.on_trial_add(None, trial)
    rungs: dict[int, list[float]] = {1: [], 2: [], 4: []}
    records, alive, epochs = (
        {t.trial_id: TrialRecord(int(t.trial_id), {}, 0) for t in trials},
        list(trials),
        dict.fromkeys(range(40), 0),
    )
    stopped = 0
    while alive:
        trial = generator.choice(alive)  # asynchronous: whoever comes next
        number = int(trial.trial_id)
        epochs[number] += 1
        epoch, score = epochs[number], trial.quality + 0.1 * epochs[number]
        expected = "CONTINUE"
        if epoch in rungs:
            if rungs[epoch] and score < np.percentile(rungs[epoch], 50):
                expected = "STOP"
            rungs[epoch].append(score)
        if epoch == 8:
            expected = "STOP"
        assert scheduler.on_trial_result(None, trial, {"epoch": float(epoch), "CIDEr-D": score}) == expected
        records[trial.trial_id].reports.append((float(epoch), score))
        if expected == "STOP":
            alive.remove(trial)
            stopped += epoch < 8
    assert 15 < stopped < 40
    again: Any = make_scheduler(search, list(records.values()))  # after a kill: the same cutoffs at every rung
    for (rung, ours), (other, theirs) in zip(again._brackets[0]._rungs, scheduler._brackets[0]._rungs, strict=True):
        assert rung == other and (rung == 8 or sorted(ours.values()) == sorted(theirs.values()))
    take_over(again, "trial 7", "new name")  # a trial that goes on stands where it stood, once
    for (_, ours), (_, theirs) in zip(again._brackets[0]._rungs, scheduler._brackets[0]._rungs, strict=True):
        assert "trial 7" not in ours and ours.get("new name") == theirs.get("7")


def test_what_mattered() -> None:
    from pipeline.search.spec import SearchConfig

    config = SearchConfig.model_validate({"name": "x", "base": "y", "space": CHOICES, "budget": {"trials": 4}})
    from pipeline.search.space import space_of

    space = space_of(config.space)
    points = list(space.points())[::3]
    found = importance(space, points, [float(space.changes(point)[N_E]) for point in points])
    assert max(found, key=lambda key: found[key]) == N_E and found[N_E] > 0.9
    assert importance(space, points[:3], [1.0, 2.0, 3.0]) == {} and importance(space, points, [1.0] * len(points)) == {}


def test_importance_compares_scores_of_the_same_epoch(tmp_path: Path) -> None:
    """Stopped trials have scores of fewer epochs: what is compared is the last epoch that all reached."""

    def stopping(changes: dict[str, Any], seed: int) -> dict[str, Any]:
        slow = changes[N_E] == 4
        reports = [(1.0, float(sum(changes[G])))] if slow else [(1.0, float(sum(changes[G]))), (2.0, 99.0)]
        return {"state": "stopped" if slow else "finished", "reports": reports, "costs": {"macs": 1.0}}

    book = open_book(small_search(tmp_path, algorithm="grid", budget={}), tmp_path / "search")
    run_book(book, stopping)
    shares, note = importances(book.search, book.records)
    assert "after epoch 1" in note and shares[G] > 0.9


def test_plots_and_page(tmp_path: Path) -> None:
    search = small_search(tmp_path, space=CHOICES, algorithm="random", budget={"trials": 24})
    book = open_book(search, tmp_path / "search")

    def some_stopped(changes: dict[str, Any], seed: int) -> dict[str, Any]:
        if changes[N_E] == 1:
            return {"state": "failed", "reason": "<b>odd</b>"}
        return known(changes, seed) | ({"state": "stopped"} if changes[N_E] == 16 else {})

    run_book(book, some_stopped)
    results = point_results(book)
    best = front(results, search.config.objectives)
    drawn = pareto_plot(search, results, best)
    (line,) = [each for each in drawn.axes[0].lines if each.get_label() == "Pareto front"]
    ours = sorted((result.mean("macs") / 1e6, result.mean("CIDEr-D")) for result in best)  # type: ignore[operator]
    assert np.allclose(np.array(line.get_data()).T, ours)
    labels = {text.get_text() for text in drawn.axes[0].texts}
    assert {result.label for result in best} <= labels, "every point of the front is labelled"
    assert png(drawn).startswith(b"\x89PNG")
    element = svg(parallel_plot(search, results, narrow=True), "x")
    assert element.startswith("<svg") and "var(--accent)" in element and not re.search(r"#0b6b58|#14201c", element)
    write_plots(tmp_path, search, results, best)
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
    text = write_page(book, results, best).read_text()
    assert "&lt;b&gt;odd" in text and "<b>odd" not in text
    assert text.count("<svg") == 4 and not re.search(r'(src|href)="(?!data:|#)', text)


def test_our_rows_beside_the_papers(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {G: list(row.static_expansion) if row.static_expansion else None, N_E: row.dynamic_expansion}
        for row in ABLATION[:3]
    ]
    search = small_search(tmp_path, space=None, rows=rows, algorithm="grid", budget={}, compare="expansionnet_v2")
    book = open_book(search, tmp_path / "search")
    scores = iter([1.0, 1.25, 1.5])
    run_book(
        book,
        lambda changes, seed: finished(value := next(scores), 2e9, scores={"CIDEr-D": value, "BLEU-4": value / 4}),
    )
    results = point_results(book)
    columns, table = score_table(search, results)
    assert columns[:4] == ["BLEU-4", "BLEU-4 +/-", "BLEU-4 paper", "BLEU-4 paper +/-"]
    cells = dict(zip(columns, dict(table)["G 16, N_E attention"], strict=True))
    assert (cells["CIDEr-D"], cells["CIDEr-D +/-"]) == ("1.2500", "+0.2500")
    assert (cells["CIDEr-D paper"], cells["CIDEr-D paper +/-"]) == ("1.178", "+0.020")
    assert len(table) == 12 and sum(pair.result is not None for pair in pairs(search, results)) == 3
    _, costs = cost_table(search, results)
    assert dict(costs)["G 16, N_E attention"][:4] == ["10.00", "1.000", "9.62", "1.037"]
    figure = pareto_plot(search, results, front(results, search.config.objectives))
    marks = [line for axes in figure.axes for line in axes.lines if line.get_label() == "the paper's rows"]
    assert len(marks) == 1 and len(np.atleast_1d(marks[0].get_xdata())) == 12
