"""The final evaluation of a run: which metrics it computes on which splits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.caption_files import N_BEST, write_n_best, write_predictions
from raycap.pipeline.evaluation.scores import java
from raycap.pipeline.evaluation.scores.metrics import why_unavailable
from raycap.pipeline.evaluation.scores.split_result import SplitResult
from raycap.pipeline.runs.run_report import score_table
from raycap.pipeline.runs.run_scores import RunScores, score_run, stored_results
from raycap.pipeline.storage.atomic import write_json
from tests.conftest import small_config

CAPTIONS = {1: "a dog runs on the grass", 2: "two red cars are parked"}
REFERENCES = {1: ["a brown dog runs", "a dog on grass"], 2: ["two cars in a street", "red cars parked"]}


def scored(folder: Path, *test_splits: str, evaluation: Any = None, several: Any = None) -> RunScores:
    """The scores of a run with these test splits and the validation split "val"."""
    values = small_config(folder)
    values["data"] |= {"test_splits": list(test_splits), "synthetic": None, "root": str(folder)}
    config = parse_config(values | {"evaluation": values.get("evaluation", {}) | (evaluation or {})})
    dataset: Any = SimpleNamespace(split=lambda *_: SimpleNamespace(references=lambda: REFERENCES, uris=dict))
    results = [SplitResult(split, CAPTIONS, several=several or {}) for split in dict.fromkeys((*test_splits, "val"))]
    return score_run(
        SimpleNamespace(config=config, path=folder, delivered=lambda: None, stage=folder.joinpath), dataset, results
    )  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def without_meteor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "meteor", lambda *_: (0.25, [0.25, 0.25]))


def test_spice_is_computed_on_the_test_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process at a time, because each takes a share of the free memory."""
    running, counts = 0, []

    def stand_in(predictions: Any, *_: Any) -> tuple[list[float], dict[str, float | None]]:
        nonlocal running
        running += 1
        counts.append(running)
        time.sleep(0.05)
        running -= 1
        return [0.2, 0.4], {"Color": 0.5}

    monkeypatch.setattr(java, "spice", stand_in)
    monkeypatch.setattr("raycap.pipeline.runs.run_scores.why_unavailable", lambda _: None)
    scores = scored(tmp_path, "test", "nocaps")
    assert counts == [1, 1]
    assert scores.flat()["test_SPICE"] == scores.flat()["nocaps_SPICE"] == pytest.approx(0.3)
    assert "val_SPICE" not in scores.flat() and scores.flat()["val_METEOR"] == 0.25
    stored = json.loads((tmp_path / "scores.json").read_text())["splits"]
    assert stored["test"]["extras"]["spice_categories"] == {"Color": 0.5} and "SPICE" not in stored["val"]["scores"]
    columns, rows = score_table(scores.splits)
    assert [cells[columns.index("SPICE")] for _, cells in rows] == ["0.300", "0.300", ""]
    assert not scores.unavailable


def test_without_its_models_spice_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is complete, and no process is started for SPICE. The same command computes it later."""
    monkeypatch.setenv(java.SPICE_MODELS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(java, "java_command", lambda *_: ["java"])
    monkeypatch.setattr(java, "java_process", lambda *_, **__: pytest.fail("a process was started"))
    scores = scored(tmp_path, "test")
    assert set(scores.unavailable) == {"SPICE"} and "make spice" in scores.unavailable["SPICE"]
    assert why_unavailable("SPICE") == scores.unavailable["SPICE"]
    columns, rows = score_table(scores.splits)
    cells = [cells[columns.index("SPICE")] for _, cells in rows]
    assert cells[0].startswith("unavailable: ") and cells[1] == ""
    assert json.loads((tmp_path / "scores.json").read_text())["splits"]["test"]["unavailable"] == scores.unavailable


def test_validation_that_is_also_a_test_split_gets_spice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "spice", lambda *_: ([0.5, 0.5], {}))
    assert scored(tmp_path, "val").flat()["val_SPICE"] == 0.5


def test_a_confidence_is_fitted_on_validation_and_its_quality_measured_on_test(tmp_path: Path) -> None:
    """Half of the captions are wrong, and their log-probabilities are low. A later attempt reads the signals again."""
    config = parse_config(small_config(tmp_path, evaluation={"good_ciderd": 0.3}))
    names = ["red", "blue", "green", "black", "white"]
    references = {image: [f"a {names[image % 5]} cat sits on mat number {image}"] for image in range(60)}
    captions = {image: texts[0] if image % 2 else "two dogs" for image, texts in references.items()}
    dataset: Any = SimpleNamespace(
        split=lambda *_: SimpleNamespace(
            references=lambda: references, column=lambda _: list(references), uris=lambda: dict.fromkeys(references)
        )
    )
    signals = {image: (-0.1 - (image + 1) % 2, -1.0, 9.0, -0.9, -0.1, 0.0, 0.0, -0.2, -8.0) for image in references}
    results = [SplitResult(split, captions, signals=signals) for split in ("test", "val")]
    folder: Any = SimpleNamespace(config=config, path=tmp_path, delivered=lambda: None, stage=tmp_path.joinpath)
    folder.sizes = SimpleNamespace(max_positions=10)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("raycap.pipeline.runs.run_scores.metrics_of_split", lambda *_, **__: ("CIDEr-D",))
        patched.setattr("raycap.pipeline.runs.run_scores.main_object_hits", lambda captions, *_: {})
        scores = score_run(folder, dataset, results)
    assert scores.confidence is not None and scores.confidence.good_ciderd == 0.3
    assert json.loads(scores.confidence.search)["max_length"] == 10, "of the model's positions"
    assert scores.quality.keys() == {"test"} and scores.quality["test"].auroc == 1.0
    stored = json.loads((tmp_path / "scores.json").read_text())["splits"]
    assert stored["test"]["confidence"]["risks"][9]["risk"] == 0 and "confidence" not in stored["val"]
    for split in ("test", "val"):
        write_predictions(tmp_path / "predictions" / f"{split}.json", captions)
    assert [result.signals for result in stored_results(folder, dataset, ("test", "val"))] == [signals, signals]
    stored["val"]["signals"]["3"] = [1.0]
    (tmp_path / "scores.json").write_text(json.dumps({"splits": stored}))
    assert stored_results(folder, dataset, ("test", "val")) == []


@pytest.mark.skipif(why_unavailable("SPICE") is not None, reason=why_unavailable("SPICE") or "")
def test_spice_itself(tmp_path: Path) -> None:
    scores = scored(tmp_path, "test")
    assert 0 < scores.flat()["test_SPICE"] < 1 and not scores.unavailable


def test_a_run_computes_the_metrics_that_its_configuration_names(tmp_path: Path) -> None:
    """Their inputs come from `evaluation.inputs` and from several captions per image."""
    names = tmp_path / "names.txt"
    names.write_text("dog\ncar, bus\n")
    evaluation = {"metrics": ["CIDEr-R", "CHAIR-i", "Div-1", "CLIPScore"], "inputs": {"objects": str(names)}}
    several = {1: [CAPTIONS[1], "a dog"], 2: [CAPTIONS[2], "cars"]}
    scores = scored(tmp_path, "test", evaluation=evaluation, several=several)
    values = scores.flat()
    assert values["test_CHAIR-i"] == 0.0 and values["test_Div-1"] == pytest.approx((6 / 8 + 5 / 6) / 2)
    assert values["test_CIDEr-R"] > 0 and "val_CIDEr-R" in values
    stored = json.loads((tmp_path / "scores.json").read_text())["splits"]["test"]
    assert stored["scores"]["CLIPScore"] is None and "evaluation.inputs.clip" in stored["unavailable"]["CLIPScore"]
    assert "CLIPScore" not in scores.unavailable  # the same command would not find it


def test_stored_results_have_all_captions(tmp_path: Path) -> None:
    """An attempt that scores the captions of an earlier one finds the same inputs."""
    several = {1: ["a dog", "dogs"], 2: ["a cat", "cats"]}
    write_predictions(tmp_path / "predictions" / "test.json", {image: texts[0] for image, texts in several.items()})
    path = tmp_path / "predictions" / N_BEST.format("test")
    write_n_best(path, {image: [{"caption": text} for text in texts] for image, texts in several.items()})
    write_json(tmp_path / "scores.json", {"splits": {"test": {"alignment": None, "constraints": None}}})
    folder: Any = SimpleNamespace(path=tmp_path)
    dataset: Any = SimpleNamespace(split=lambda _: SimpleNamespace(column=lambda _: [1, 2]))
    assert [result.several for result in stored_results(folder, dataset, ["test"])] == [several]
    path.write_text("{")
    assert stored_results(folder, dataset, ["test"]) == []
    path.unlink()
    assert [result.several for result in stored_results(folder, dataset, ["test"])] == [{}]
