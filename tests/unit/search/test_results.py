"""Records, tables, configurations, the plot and the page of a search whose trials have synthetic results."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycap.pipeline.config.load import load_config
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.search.outcome import write_outcome
from raycap.pipeline.search.records import TRIALS, SearchFolder, TrialRecord
from raycap.pipeline.search.results import PointResult, SearchResults, comparisons, trial_line
from raycap.pipeline.search.samplers import importances
from raycap.pipeline.search.spec import Search
from tests.support.searches import LR, N_E, G, failed, finished, small_search, trials_of

GRID: dict[str, Any] = {"algorithm": "grid", "budget": {}}


def noisy(changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """More groups are better on validation, and worse on test. Seeds differ by 0.1 on both, and one seed fails."""
    size, noise = float(sum(changes[G])), 0.1 * seed
    if changes == {G: [4], N_E: 4} and seed == 2:
        return failed("<b>diverged</b>")
    scores = {"BLEU-4": size / 100, "test CIDEr-D": 20 - size + noise, "test BLEU-4": noise}
    return finished(size + changes[N_E] / 50 + noise, size, scores=scores)


def test_validation_chooses_and_the_named_split_is_reported(tmp_path: Path) -> None:
    """The test split would choose another point. Every table has means and spreads of both splits."""
    changes = {"score_split": "test", "metrics": ["BLEU-4"], "seeds": 3, "compare": "expansionnet_v2"}
    search = small_search(tmp_path, **GRID, **changes)
    records = trials_of(search, noisy)
    assert write_outcome(search, SearchFolder(tmp_path), records) == 0
    results = SearchResults.of(search, records)
    first = results.points[0]
    assert first.label == "G 4 8, N_E 4" and first in results.front
    _, note, columns, rows = results.leaderboard()
    scores = ["val CIDEr-D", "test CIDEr-D", "test BLEU-4"]
    assert columns == ["state", "epochs", "seeds", *scores, "MMACs", "k parameters"]
    cells = {label: dict(zip(columns, row, strict=True)) for label, row in rows}
    expected = np.array([8.1, 8.0, 8.2])
    assert cells["G 4 8, N_E 4"]["test CIDEr-D"] == f"{expected.mean():.4f} ± {expected.std(ddof=1):.4f}"
    assert cells["G 4, N_E 4"]["seeds"] == "2/3" and cells["G 4, N_E 4"]["val CIDEr-D"] == "4.1300 ± 0.0707"
    assert "Chosen on val, with CIDEr-D over the vocabulary's tokens" in note and "Reported on test" in note
    check_files(tmp_path, search, results)
    line = trial_line(search, first.records[0])
    assert "finished at epoch 2: val CIDEr-D 12.0800, test CIDEr-D 8.0000, " in line


def check_files(folder: Path, search: Search, results: SearchResults) -> None:
    """The files of the results in the test above."""
    with (folder / "trials.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if (row[G], row[N_E], row["seed"]) == ("4 8", "4", "1"))
    values = [float(row[name]) for name in ("val CIDEr-D", "test CIDEr-D", "val BLEU-4", "macs")]
    assert values == pytest.approx([12.18, 8.1, 0.12, 12])
    assert (row["rank"], row["on_front"], row["state"]) == ("1", "True", "finished")

    best = folder / "best.yaml"
    assert "test CIDEr-D 8.1000 ± 0.1000" in best.read_text() and "seeds: 3/3" in best.read_text()
    fronts = [folder / f"front-{number}.yaml" for number in range(1, len(results.front) + 1)]
    assert sorted(folder.glob("front-*.yaml")) == fronts
    for path, result in zip([best, *fronts], [results.points[0], *results.front], strict=True):
        config = load_config(path)
        assert config.model.dynamic_expansion == search.space.changes(result.point)[N_E]
        assert config.stages == search.base.stages, "the whole recipe, not the trial's"

    ((_, note, columns, compared),) = comparisons(results)
    assert columns[-2:] == ["TMACs", "TMACs paper"] and compared[0][1][-2:] == ["", "9.28"]
    assert "means over seeds of the split test" in note and "Karpathy validation" in note
    assert not any(row[0] for _, row in compared), "no row of the paper has these groups"
    page = (folder / "search.html").read_text()
    assert "test CIDEr-D" in page and "± 0.0707" in page
    assert "&lt;b&gt;diverged" in page and "<b>diverged" not in page
    assert 'src="data:image/png;base64,' in page and (folder / "pareto.png").stat().st_size > 10_000


def slow_front(results: list[PointResult]) -> set[str]:
    """The labels of the finished points that no other one beats in score or cost without being worse in the other."""
    rated = [(each.label, each.mean("CIDEr-D"), each.mean("macs")) for each in results if each.state == "finished"]
    return {
        label
        for label, score, cost in rated
        if not any((a > score and b <= cost) or (a >= score and b < cost) for _, a, b in rated)
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_order_and_the_front_of_random_results(tmp_path: Path, seed: int) -> None:
    """Compared with slower implementations written here. Few different values give ties."""
    generator = random.Random(seed)

    def outcome(changes: dict[str, Any], _: int) -> dict[str, Any]:
        fields = finished(generator.randint(1, 4), generator.randint(1, 4))
        return fields | {"state": generator.choice(["finished"] * 4 + ["stopped", "failed"])}

    search = small_search(tmp_path, **GRID, space={N_E: list(range(1, 6)), LR: [0.1, 0.2, 0.3, 0.4]}, seeds=2)
    records = trials_of(search, outcome)
    found = SearchResults.of(search, records)
    results = found.points
    assert {result.label for result in found.front} == slow_front(results)
    states = ["finished", "stopped", "failed"]
    assert [states.index(result.state) for result in results] == sorted(states.index(each.state) for each in results)
    means = [result.mean("CIDEr-D") for result in results if result.state == "finished"]
    assert means == sorted(means, reverse=True)  # type: ignore[type-var]
    for result in results:
        counted = [
            record.reports[-1][1] for record in records if record.point == result.point and record.state == result.state
        ]
        assert result.mean("CIDEr-D") == sum(counted) / len(counted)


def test_the_importance_is_that_of_the_key_that_matters(tmp_path: Path) -> None:
    search = small_search(tmp_path, **GRID, space={N_E: [1, 2, 3, 4], LR: [0.1, 0.2, 0.3, 0.4]})
    records = trials_of(search, lambda changes, _: finished(changes[N_E] + changes[LR] / 100, 1.0))
    shares, note = importances(search, records)
    assert shares[N_E] > 0.9 and shares[N_E] + shares[LR] == pytest.approx(1) and "16 trials" in note
    assert importances(search, records[:3])[0] == {}
    stopped = [TrialRecord(each.trial_id, each.point, 0, "stopped", reports=each.reports[:1]) for each in records[:8]]
    shares, note = importances(search, stopped + records[8:])
    assert shares[N_E] > 0.9 and "after epoch 1, the last that all 16 trials reached" in note
    assert importances(search, records[8:] + stopped) == (shares, note), "the order of the trials matters"


def test_trials_are_written_and_read(tmp_path: Path) -> None:
    folder, records = SearchFolder(tmp_path), [TrialRecord("a", {N_E: 1}, 0, "finished", reports=[(1.0, 0.5)])]
    assert folder.records() == []
    folder.write(records)
    assert folder.records() == records, "reports are not lists in a list, as in JSON"
    (tmp_path / TRIALS).write_text("[{")
    with pytest.raises(DamagedError, match=r"trials\.json is damaged"):
        folder.records()


def test_pictures_that_fail_cost_no_result_and_are_made_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    search, folder = small_search(tmp_path), SearchFolder(tmp_path)
    records = trials_of(search, lambda changes, seed: finished(changes[N_E] / 10, 100.0))
    pictures = [tmp_path / name for name in ("search.html", "pareto.png")]
    with monkeypatch.context() as failing:
        failing.setattr("raycap.pipeline.search.outcome.pareto_plot", broken)
        assert write_outcome(search, folder, records) == 0
    reason = "could not be made (RuntimeError: broken on purpose); the same command makes it again"
    assert f"the page with its plot and tables {reason}" in log_lines
    assert all((tmp_path / name).is_file() for name in ("trials.csv", "best.yaml"))
    assert not any(path.exists() for path in pictures)
    assert write_outcome(search, folder, records) == 0 and all(path.is_file() for path in pictures)
    assert write_outcome(search, folder, trials_of(search, lambda *_: failed("x"))) == 1
    assert not (tmp_path / "best.yaml").exists() and "6 of 6 trials failed; trial t1: x" in log_lines[-1]
