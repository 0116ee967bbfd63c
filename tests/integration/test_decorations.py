"""Pages, pictures and registration that fail end no command, and the same command makes them later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raycap.pipeline.evaluation.evaluate
from raycap.jobs.run import run
from raycap.pipeline.evaluation.captioning.bundle import read_confidences, store_results
from raycap.pipeline.runs.delivery import bundle_place, local_bundle
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.support.confidence import make_confidence
from tests.support.runs import FROZEN_STAGES, MESHED_MEMORY, prepare_region_run


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def spice(predictions: list[Any], *_: Any) -> list[float]:
    return [0.5] * len(predictions)


@pytest.fixture
def trained(tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with trained stages, which lacks its evaluation."""
    monkeypatch.setattr("raycap.pipeline.evaluation.scores.java.spice", spice)
    monkeypatch.setattr("raycap.jobs.run.why_unavailable", lambda name: None)  # as where Java is installed
    folder, store = prepare_region_run(tmp_path, MESHED_MEMORY, tracking={"enabled": True})
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    return folder


def summary(folder: RunFolder) -> dict[str, Any]:
    return dict(json.loads((folder.path / "COMPLETE.json").read_text()))


@pytest.mark.ray
def test_a_run_without_its_decorations_is_complete_and_repaired(
    trained: RunFolder, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    config, report = trained.config, trained.path / "report.html"
    monkeypatch.setattr(
        "raycap.pipeline.evaluation.evaluate.fit_split", lambda result, search, _: make_confidence(search)
    )
    (checkpoint := trained.path / f"stages/{FROZEN_STAGES[0]}/step-3").mkdir()  # as after a kill at the stage's end
    with monkeypatch.context() as failing:
        failing.setattr("raycap.jobs.run.report_html", broken)
        failing.setattr("raycap.pipeline.tracking.run_tracker.register_model", broken)
        failing.setattr("raycap.pipeline.evaluation.scores.java.meteor", broken)
        run(config)
    reason = "RuntimeError: broken on purpose"
    assert summary(trained)["missing"] == {"METEOR": reason, "the report": reason}
    assert summary(trained)["tracked"] is False and not report.exists() and not checkpoint.exists()
    scores = json.loads((trained.path / "scores.json").read_text())["splits"]
    assert scores["test"]["scores"]["CIDEr-D"] is not None and scores["test"]["unavailable"] == {"METEOR": reason}
    assert f"the report could not be made ({reason}); the same command makes it again" in log_lines
    assert any("does not accept everything (broken on purpose)" in line for line in log_lines)
    (own,) = read_confidences(local_bundle(trained))
    evaluated = make_confidence("a search of raycap evaluate")
    store_results(bundle_place(trained), evaluated)

    monkeypatch.setattr(raycap.pipeline.evaluation.evaluate, "caption_on_cluster", broken)  # the captions are there
    with monkeypatch.context() as failing:
        failing.setattr("raycap.pipeline.tracking.run_tracker.log_results", broken)
        run(config)
    assert any("complete except for METEOR, the report" in line for line in log_lines)
    assert summary(trained)["missing"] == {} and report.is_file()
    repaired = json.loads((trained.path / "scores.json").read_text())["splits"]
    assert repaired["test"]["scores"]["METEOR"] == 0.25 and not repaired["test"]["unavailable"]
    repaired["test"]["scores"]["METEOR"] = None
    assert repaired["test"]["scores"] == scores["test"]["scores"], "the other scores are the same"
    assert summary(trained)["tracked"] is False, "the scores are missing there"
    assert read_confidences(local_bundle(trained)) == (own, evaluated), "the bundle has what was added"

    page = report.stat().st_mtime_ns
    run(config)
    assert summary(trained)["tracked"] is True and report.stat().st_mtime_ns == page
    assert any("nothing to do" in line for line in log_lines)


@pytest.mark.ray
def test_ctrl_c_in_a_decoration_ends_the_run(trained: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("raycap.jobs.run.report_html", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(trained.config)
    assert not (trained.path / "COMPLETE.json").exists() and (trained.path / "scores.json").is_file()
