"""The log of a search on synthetic objectives: sampling, results, resuming after a kill, plots and tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from matplotlib.container import ErrorbarContainer

from raycap.pipeline.config.load import load_config
from raycap.pipeline.search.ablations import comparisons
from raycap.pipeline.search.plots import pareto_plot, png, svg
from raycap.pipeline.search.report import write_page, write_plot
from raycap.pipeline.search.results import (
    front,
    leaderboard,
    leaderboard_text,
    point_results,
    trial_line,
    write_configurations,
    write_tables,
)
from raycap.pipeline.search.trials import TrialLog, TrialOutcome
from tests.support.searches import LR, N_E, G, finished, open_log, run_log, small_search

CHOICES: dict[str, Any] = {
    G: {"groups": {str(2**k): [2**k] for k in range(2, 7)}},
    N_E: [1, 2, 4, 8, 16],
    LR: {"low": 0.001, "high": 0.004, "step": 0.001},
}


def known_optimum(changes: dict[str, Any], seed: int) -> TrialOutcome:
    """Cost grows with G, and the score with log2(G). N_E = 4 and a rate of 0.003 are best.

    Therefore the front has the five choices of G with these two."""
    groups = sum(changes[G])
    score = float(np.log2(groups)) - abs(np.log2(changes[N_E] / 4)) - 1000 * abs(changes[LR] - 0.003)
    return finished(score, float(groups))


def front_of(log: TrialLog) -> set[str]:
    return {result.label for result in front(point_results(log), log.search.config.objectives)}


@pytest.mark.parametrize("algorithm", ["nsga2", "tpe"])
def test_optuna_finds_the_known_front(tmp_path: Path, algorithm: str) -> None:
    """It tries 60 of 100 points. A random sample would contain all five of the front with probability 1/13."""
    expected = {f"G {2**k}, N_E 4, xe_frozen lr 0.003" for k in range(2, 7)}
    search = small_search(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 60}, population=8)
    log = open_log(search, tmp_path / "search")
    assert run_log(log, known_optimum) == 60
    assert len({str(record.point) for record in log.records}) == 60, "no point is tried twice"
    assert front_of(log) == expected


@pytest.mark.parametrize("algorithm", ["grid", "random", "nsga2", "tpe"])
def test_a_killed_search_resumes(tmp_path: Path, algorithm: str) -> None:
    """Finished trials are not run again, the unfinished one runs first, and the number of trials is the budget."""
    search = small_search(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 20}, population=6)
    log = open_log(search, tmp_path / "search")
    run_log(log, known_optimum, most=7)
    cut = log.start_next()
    assert cut is not None
    log.report(cut, {"epoch": 1.0, "CIDEr-D": 0.25, "run": "runs/x", "costs": {"macs": 9.0}})
    before = {record.number: record for record in log.records if record is not cut}

    again = open_log(search, tmp_path / "search")
    first = again.start_next()
    assert first is not None and (first.number, first.point, first.attempts) == (cut.number, cut.point, 2)
    assert first.reports == [(1.0, 0.25)]
    again.end(first, known_optimum(search.space.changes(first.point), first.seed))
    assert run_log(again, known_optimum) == 20 - 8
    assert [record.number for record in again.records] == list(range(1, 21))
    assert len({str(record.point) for record in again.records}) == 20
    assert all(record == before[record.number] for record in again.records if record.number in before)
    assert open_log(search, tmp_path / "search").start_next() is None, "a complete search has no next trial"
    more = small_search(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 22}, population=6)
    assert run_log(open_log(more, tmp_path / "search"), known_optimum) == 2, "a larger budget resumes"


def test_seeds_of_a_point_are_averaged(tmp_path: Path) -> None:
    """Mean and spread over seeds; a failed seed does not count, a point whose seeds all failed is last."""

    def noisy(changes: dict[str, Any], seed: int) -> TrialOutcome:
        if changes == {G: [4], N_E: 4} or (changes == {G: [8], N_E: 2} and seed == 2):
            return TrialOutcome("failed", "out of memory: too large")
        return finished(sum(changes[G]) + changes[N_E] + seed, 1.0)

    search = small_search(tmp_path, algorithm="grid", budget={}, seeds=[1, 2, 3])
    log = open_log(search, tmp_path / "search")
    assert run_log(log, noisy) == 18
    results = point_results(log)
    assert [result.label for result in results] == [
        "G 4 8, N_E 4", "G 4 8, N_E 2", "G 8, N_E 4", "G 8, N_E 2", "G 4, N_E 2", "G 4, N_E 4",
    ]  # fmt: skip
    assert results[0].mean("CIDEr-D") == 18 and results[0].spread("CIDEr-D") == 1.0
    assert results[3].mean("CIDEr-D") == 12 and len(results[3].counted) == 2
    text = leaderboard_text(search, results, front(results, search.config.objectives))
    assert "18.0000 ± 1.0000" in text and "2/3" in text and "0/3" in text
    assert trial_line(search, results[-1].records[0], 18).startswith("trial 4/18  failed after 0 s: out of memory")


def noisy_scores(changes: dict[str, Any], seed: int) -> TrialOutcome:
    """More groups are better on validation, and worse on test. Seeds differ by 0.1 on both, and one seed fails."""
    size, noise = float(sum(changes[G])), 0.1 * seed
    if changes == {G: [4], N_E: 4} and seed == 2:
        return TrialOutcome("failed", "diverged")
    scores = {"BLEU-4": size / 100, "test CIDEr-D": 20 - size + noise, "test BLEU-4": noise}
    return finished(size + changes[N_E] / 50 + noise, size, scores=scores)


def test_validation_chooses_and_the_named_split_is_reported(tmp_path: Path) -> None:
    """The test split would choose another point; every table shows means and spreads of both splits."""
    changes = {"score_split": "test", "metrics": ["BLEU-4"], "seeds": 3, "compare": "expansionnet_v2"}
    search = small_search(tmp_path, algorithm="grid", budget={}, **changes)
    log = open_log(search, tmp_path / "search")
    assert run_log(log, noisy_scores) == 18
    results = point_results(log)
    on_front = front(results, search.config.objectives)
    assert results[0].label == "G 4 8, N_E 4" and results[0] in on_front
    assert results[0].mean("test CIDEr-D") == min(result.mean("test CIDEr-D") for result in results)  # type: ignore

    columns, rows = leaderboard(search, results, on_front)
    assert columns == [
        "state", "epochs", "seeds", "to the best",
        "val CIDEr-D", "test CIDEr-D", "test BLEU-4", "MMACs", "k parameters",
    ]  # fmt: skip
    cells = {label: dict(zip(columns, row, strict=True)) for label, row in rows}
    expected = np.array([8.1, 8.0, 8.2])
    assert cells["G 4 8, N_E 4"]["test CIDEr-D"] == f"{expected.mean():.4f} ± {expected.std(ddof=1):.4f}"
    assert [cells[label]["to the best"] for label, _ in rows] == ["best", "equal", "", "", "", ""]
    assert cells["G 4, N_E 4"]["seeds"] == "2/3" and cells["G 4, N_E 4"]["val CIDEr-D"] == "4.1300 ± 0.0707"
    text = leaderboard_text(search, results, on_front)
    assert (
        "Chosen on val, with CIDEr-D over the vocabulary's tokens: each trial's weights" in text
        and "Reported on test" in text
        and "n - 1" in text
    )

    write_tables(log, results, on_front)
    table = pyarrow.parquet.read_table(tmp_path / "search" / "trials.parquet").to_pylist()
    row = next(row for row in table if (row[G], row[N_E], row["seed"]) == ("4 8", 4, 1))
    assert (row["val CIDEr-D"], row["test CIDEr-D"]) == pytest.approx((12.18, 8.1))
    assert (row["rank"], row["seeds"], row["test CIDEr-D mean"]) == pytest.approx((1, 3, 8.1))
    assert row["val CIDEr-D std"] == pytest.approx(0.1) and row["val BLEU-4"] == pytest.approx(0.12)
    best = write_configurations(log, results, on_front)[0].read_text()
    assert "# G 4 8, N_E 4:" in best and "test CIDEr-D 8.1000 ± 0.1000" in best and "seeds: 3/3" in best

    (_, note, _, table_rows), _ = comparisons(search, results)
    assert "means over seeds of the split test" in note and "Karpathy validation" in note
    assert not any(row[0] for _, row in table_rows), "no row of the paper has these groups"
    page = write_page(log, results, on_front).read_text()
    assert "Chosen on val" in page and "test CIDEr-D" in page and "± 0.0707" in page
    axes = pareto_plot(search, results, on_front).axes[0]
    (points,) = [line for line in axes.lines if line.get_label() == "finished"]
    assert axes.get_ylabel() == "test CIDEr-D"
    assert sorted(points.get_ydata()) == sorted(result.mean("test CIDEr-D") for result in results)  # type: ignore
    assert any(isinstance(each, ErrorbarContainer) for each in axes.containers)
    line = trial_line(search, results[0].records[0], 18)
    assert "finished at epoch 2: val CIDEr-D 12.0800, test CIDEr-D 8.0000, " in line


def test_more_seeds_continue_a_search(tmp_path: Path) -> None:
    """Only the trials of new seeds run, and only those of the listed seeds count."""
    ran: list[int] = []

    def outcome(changes: dict[str, Any], seed: int) -> TrialOutcome:
        ran.append(seed)
        return finished(float(sum(changes[G]) + seed), 1.0)

    one = small_search(tmp_path, algorithm="nsga2", budget={"trials": 6}, population=4)
    assert run_log(open_log(one, tmp_path / "search"), outcome) == 6
    three = small_search(tmp_path, algorithm="nsga2", budget={"trials": 18}, population=4, seeds=[0, 5, 9])
    assert three.identity() == one.identity()
    poor = small_search(tmp_path, algorithm="nsga2", budget={"trials": 6}, population=4, seeds=[0, 5, 9])
    log = open_log(poor, tmp_path / "search")
    assert (log.num_pending, log.remaining) == (12, 0)
    ran.clear()
    log = open_log(three, tmp_path / "search")
    assert run_log(log, outcome) == 12 and sorted(ran) == [5] * 6 + [9] * 6
    assert sorted(record.number for record in log.records) == list(range(1, 19))
    assert {result.seeds_text for result in point_results(log)} == {"3/3"}
    fewer = open_log(small_search(tmp_path, algorithm="grid", budget={}, seeds=[5]), tmp_path / "search")
    assert len(fewer.records) == 6 and fewer.start_next() is None
    assert {result.seeds_text for result in point_results(fewer)} == {"1/1"}
    wider = open_log(small_search(tmp_path, algorithm="grid", budget={}, seeds=[5, 7]), tmp_path / "search")
    added = wider.start_next()
    assert added is not None and added.number == 19, "the files of seeds that do not count remain"


def test_the_front_holds_undominated_points(tmp_path: Path) -> None:
    values = iter([(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (0.5, 2.0), (3.0, 9.0), (9.0, 0.1)])

    def given(changes: dict[str, Any], seed: int) -> TrialOutcome:
        score, cost = next(values)
        outcome = finished(score, cost)
        return replace(outcome, state="stopped") if score == 9.0 else outcome

    log = open_log(small_search(tmp_path, algorithm="grid", budget={}), tmp_path / "search")
    run_log(log, given)
    results = point_results(log)
    assert [(r.mean("CIDEr-D"), r.mean("macs")) for r in front(results, log.search.config.objectives)] == [
        (3.0, 9.0), (2.0, 2.0), (1.0, 1.0),
    ]  # fmt: skip
    assert results[-1].state == "stopped", "a stopped point is not on the front"


def test_tables_and_configurations(tmp_path: Path) -> None:
    search = small_search(tmp_path, algorithm="grid", budget={})
    folder = tmp_path / "search"
    log = open_log(search, folder)
    run_log(log, lambda changes, seed: finished(sum(changes[G]) + changes[N_E], sum(changes[G])))
    results = point_results(log)
    best = front(results, search.config.objectives)
    write_tables(log, results, best)
    table = pyarrow.parquet.read_table(folder / "trials.parquet")
    assert table.num_rows == 6 and pyarrow.csv.read_csv(folder / "trials.csv").column_names == table.column_names
    assert table[G].to_pylist()[-1] == "4 8" and table[N_E].to_pylist() == [2, 4] * 3
    assert sum(table["on_front"].to_pylist()) == len(best) == 3
    paths = write_configurations(log, results, best)
    assert [path.name for path in paths] == ["best.yaml", "front-1.yaml", "front-2.yaml", "front-3.yaml"]
    for path, result in zip(paths, [results[0], *best], strict=True):
        config = load_config(path)
        assert config.model.dynamic_expansion == search.space.changes(result.point)[N_E]
        assert config.stages == search.base.stages and f"raycap run {path}" in path.read_text()
    assert [stage.epochs for stage in load_config(paths[0]).stages] == [0.7] * 4, "the whole recipe, not the trial's"


def test_plot_and_page(tmp_path: Path) -> None:
    search = small_search(tmp_path, space=CHOICES, algorithm="random", budget={"trials": 24})
    log = open_log(search, tmp_path / "search")

    def some_stopped(changes: dict[str, Any], seed: int) -> TrialOutcome:
        if changes[N_E] == 1:
            return TrialOutcome("failed", "<b>odd</b>")
        outcome = known_optimum(changes, seed)
        return replace(outcome, state="stopped") if changes[N_E] == 16 else outcome

    run_log(log, some_stopped)
    results = point_results(log)
    best = front(results, search.config.objectives)
    drawn = pareto_plot(search, results, best)
    (line,) = [each for each in drawn.axes[0].lines if each.get_label() == "Pareto front"]
    ours = sorted((result.mean("macs") / 1e6, result.mean("CIDEr-D")) for result in best)  # type: ignore[operator]
    assert np.allclose(np.array(line.get_data()).T, ours)
    labels = {text.get_text() for text in drawn.axes[0].texts}
    assert {result.label for result in best} <= labels, "every point of the front is labelled"
    assert png(drawn).startswith(b"\x89PNG")
    element = svg(drawn)
    assert element.startswith("<svg") and "var(--accent)" in element and not re.search(r"#0b6b58|#14201c", element)
    write_plot(tmp_path, search, results, best)
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
    text = write_page(log, results, best).read_text()
    assert "&lt;b&gt;odd" in text and "<b>odd" not in text
    assert text.count("<svg") == 1 and not re.search(r'(src|href)="(?!data:|#)', text)
