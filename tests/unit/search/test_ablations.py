"""A search's points next to the ablation tables of the other two systems' papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raycap.pipeline.search.results import SearchResults, comparisons
from raycap.pipeline.search.spec import load_search
from tests.conftest import small_config
from tests.support.searches import trials_of, write_search

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
METRICS = ["BLEU-4", "CIDEr-D", "SPICE"]


def results_of(tmp_path: Path, model: dict[str, Any], scores: list[float], **changes: Any) -> SearchResults:
    """A search over a system, and its results: trial n has the n-th score and n million multiply-accumulates."""
    settings: dict[str, Any] = {"algorithm": "grid", "budget": {}, "space": None, "compare": model["name"]}
    settings |= {"objectives": {"CIDEr-D": "max", "macs_executed": "min"}, "metrics": METRICS}
    path = write_search(tmp_path, **(settings | changes))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(small_config(tmp_path / "storage", model=SIZES | model)))
    search = load_search(path)
    numbered_scores = iter(enumerate(scores, 1))

    def outcome(changes: dict[str, Any], seed: int) -> dict[str, Any]:
        number, score = next(numbered_scores)
        return {
            "state": "finished",
            "reports": [(1.0, score)],
            "scores": {"CIDEr-D": score, "BLEU-4": score / 4},
            "costs": {"macs_executed": 1e6 * number, "parameters": 2e3},
        }

    return SearchResults.of(search, trials_of(search, outcome))


def test_memory_slots_next_to_table_6(tmp_path: Path) -> None:
    space = {"model.num_memory_slots": [0, 20, 30]}
    results = results_of(tmp_path, {"name": "meshed_memory"}, [1.0, 1.5, 0.5], space=space)
    ((title, note, columns, rows),) = comparisons(results)  # one slot count of the paper's layers: no Table 7
    assert "Table 6" in title and "the row 0 slots" in note and "SPICE" not in columns
    cells = {label: dict(zip(columns, row, strict=True)) for label, row in rows}
    assert list(cells) == ["0 slots", "20 slots", "40 slots", "60 slots", "80 slots"]
    assert (cells["20 slots"]["CIDEr-D"], cells["20 slots"]["CIDEr-D +/-"]) == ("1.5000", "+0.5000")
    assert (cells["20 slots"]["CIDEr-D paper"], cells["20 slots"]["CIDEr-D paper +/-"]) == ("1.299", "+0.005")
    assert cells["20 slots"]["BLEU-4"] == "0.3750" and cells["20 slots"]["MMACs executed"] == "2.0"
    assert cells["40 slots"]["CIDEr-D"] == "" and cells["40 slots"]["CIDEr-D paper"] == "1.312"
    ((_, _, short, _),) = comparisons(results, ("CIDEr-D",))
    assert not any(name.startswith("BLEU") for name in short)


def test_rows_of_clustformer_are_found_by_all_their_settings(tmp_path: Path) -> None:
    """Sampling 1 is no row of the paper."""
    rows: list[dict[str, Any]] = [{"model.encoder_clusters": "none", "model.decoder_clusters": "none"}]
    rows += [{"model.window": 2}, {"model.sampling": 4}, {"model.sampling": 1}, {"model.sampling": 2}]
    results = results_of(tmp_path, {"name": "clustformer"}, [1.0, 1.2, 1.1, 1.9, 1.4], space={"row": rows})
    ((title, _, columns, table),) = comparisons(results)
    assert "Table 1 (Ada-ClustFormer)" in title
    scores = {label: row[columns.index("CIDEr-D")] for label, row in table}
    names = ["base", "decoder only", "encoder 2-D only", "encoder 1-D only", "without equation 6"]
    assert list(scores) == [*names, "sampling 4", "fixed window 2", "full"]
    assert list(scores.values()) == ["1.0000", "", "", "", "", "1.1000", "1.2000", "1.4000"]
