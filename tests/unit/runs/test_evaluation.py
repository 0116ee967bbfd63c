"""The evaluation of captions: which metrics it computes on which splits, and captions that a run has stored."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.caption_files import N_BEST
from raycap.pipeline.evaluation.evaluate import Options, evaluate
from raycap.pipeline.evaluation.reports.report import score_table
from raycap.pipeline.evaluation.results import ImageCaption, Scores, SplitScores, write_captions
from raycap.pipeline.evaluation.scores import java
from raycap.pipeline.evaluation.scores.metrics import why_unavailable
from raycap.pipeline.runs.delivery import stored_captions
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config
from tests.support.bundles import make_bundle
from tests.support.captioning import captions_of, images_of
from tests.support.runs import empty_run

CAPTIONS = {1: "a dog runs on the grass", 2: "two red cars are parked"}
REFERENCES = {1: ["a brown dog runs", "a dog on grass"], 2: ["two cars in a street", "red cars parked"]}
SIGNALS = (-1.0, 9.0, -0.9, -0.1, 0.0, 0.0, -0.2, -8.0)  # after the first one


def scored(folder: Path, *test_splits: str, evaluation: Any = None, captions: Any = None) -> Scores:
    """The scores of captions of these test splits and of the validation split "val"."""
    values = small_config(folder)
    values["data"] |= {"test_splits": list(test_splits), "synthetic": None, "root": str(folder)}
    values["features"] = {"store": "never"}
    config = parse_config(values | {"evaluation": values.get("evaluation", {}) | (evaluation or {})})
    images = {split: images_of(REFERENCES, split) for split in dict.fromkeys((*test_splits, "val"))}
    given = dict.fromkeys(images, captions_of(captions or CAPTIONS))
    bundle = storage_path(make_bundle(folder / "bundle"))
    return evaluate([bundle], images, config, None, Options(captions=given))


def test_spice_is_computed_on_the_test_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process at a time, because each takes a share of the free memory."""
    running, counts = 0, []

    def stand_in(predictions: Any, *_: Any) -> list[float]:
        nonlocal running
        running += 1
        counts.append(running)
        time.sleep(0.05)
        running -= 1
        return [0.2, 0.4]

    monkeypatch.setattr(java, "spice", stand_in)
    monkeypatch.setattr("raycap.pipeline.evaluation.evaluate.why_unavailable", lambda _: None)
    scores = scored(tmp_path, "test", "nocaps")
    assert counts == [1, 1]
    assert scores.flat()["test_SPICE"] == scores.flat()["nocaps_SPICE"] == pytest.approx(0.3)
    assert "val_SPICE" not in scores.flat() and scores.flat()["val_METEOR"] == 0.25
    stored = scores.to_json()["splits"]
    assert "SPICE" not in stored["val"]["scores"]
    columns, rows = score_table(scores.splits)
    assert [cells[columns.index("SPICE")] for _, cells in rows] == ["0.300", "0.300", ""]
    assert not scores.unavailable


def test_without_its_models_spice_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation ends, and no process is started for SPICE. The same command computes it later."""
    monkeypatch.setenv(java.SPICE_MODELS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(java, "java_command", lambda *_: ["java"])
    monkeypatch.setattr(java, "meteor", lambda *_: (0.25, [0.25, 0.25]))
    monkeypatch.setattr(java, "_with_java", lambda *_, **__: pytest.fail("a process was started"))
    scores = scored(tmp_path, "test")
    assert set(scores.unavailable) == {"SPICE"} and "make spice" in scores.unavailable["SPICE"]
    assert why_unavailable("SPICE") == scores.unavailable["SPICE"]
    columns, rows = score_table(scores.splits)
    cells = [cells[columns.index("SPICE")] for _, cells in rows]
    assert cells[0].startswith("unavailable: ") and cells[1] == ""


@pytest.mark.skipif(why_unavailable("SPICE") is not None, reason=why_unavailable("SPICE") or "")
def test_spice_itself(tmp_path: Path, real_java: None) -> None:
    scores = scored(tmp_path, "test")
    assert 0 < scores.flat()["test_SPICE"] < 1 and not scores.unavailable


def test_the_metrics_that_a_configuration_names(tmp_path: Path) -> None:
    """Their inputs come from `evaluation.inputs` and from several captions per image."""
    names = tmp_path / "names.txt"
    names.write_text("dog\ncar, bus\n")
    evaluation = {"metrics": ["CHAIR-i", "Div-1", "CLIPScore"], "inputs": {"objects": str(names)}}
    several = {1: [CAPTIONS[1], "a dog"], 2: [CAPTIONS[2], "cars"]}
    scores = scored(tmp_path, "test", evaluation=evaluation, captions=several)
    values = scores.flat()
    assert values["test_CHAIR-i"] == 0.0 and values["test_Div-1"] == pytest.approx((6 / 8 + 5 / 6) / 2)
    assert "val_CHAIR-i" in values
    stored = scores.to_json()["splits"]["test"]
    assert stored["scores"]["CLIPScore"] is None and "evaluation.inputs.clip" in stored["unavailable"]["CLIPScore"]
    assert "CLIPScore" not in scores.unavailable  # the same command would not find it


def test_stored_captions_are_those_of_the_same_bundle_and_images(tmp_path: Path, log_lines: list[str]) -> None:
    """Only captions of the same bundle and images are scored by another attempt."""
    folder, digests, images = (
        empty_run(tmp_path),
        {"model.safetensors": "a"},
        {"test": images_of(REFERENCES | {3: []})},
    )
    signals = {image: (-0.25, *SIGNALS) for image in REFERENCES}
    captions = captions_of({1: ["a dog", "dogs"], 2: ["a cat", "cats"]}, signals) | {3: ImageCaption(error="empty")}
    assert stored_captions(folder, images, digests) is None
    result = SplitScores("test", captions)
    write_captions(tmp_path / "predictions", "test", result.images, "test.json")
    write_json(tmp_path / "scores.json", {"digests": digests, "splits": {"test": result.to_json()}})
    assert stored_captions(folder, images, digests) == {"test": captions}
    assert stored_captions(folder, images, {"model.safetensors": "b"}) is None
    assert stored_captions(folder, {"test": images_of(REFERENCES)}, digests) is None
    assert log_lines == []
    path = tmp_path / "predictions" / N_BEST.format("test")
    for text in ("{", "[]\n", json.dumps({"image_id": 1})):
        path.write_text(text)
        assert stored_captions(folder, images, digests) is None
        assert log_lines.pop().endswith("; the images are captioned again")
    for text in ("", "[]", '{"splits": {"test": 3}}'):
        (tmp_path / "scores.json").write_text(text)
        assert stored_captions(folder, images, digests) is None
