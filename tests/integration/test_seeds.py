"""`raycap run --seeds` and `raycap evaluate --seeds` as a user starts them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
import yaml

from raycap.jobs.cli import main
from raycap.jobs.evaluate import evaluate
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import colors_config, small_config
from tests.support.bundles import make_bundle
from tests.support.runs import (
    STAGES,
    assert_same_weights,
    best_weights,
    prepare_run,
    write_config,
)


def runs_of(storage: Path) -> dict[int, Path]:
    """The folders of the runs by seed."""
    folders = [file.parent for file in storage.glob("runs/*/run.json")]
    return {yaml.safe_load((folder / "config.yaml").read_text())["seed"]: folder for folder in folders}


@pytest.mark.proof
@pytest.mark.ray
def test_each_seed_has_a_run_and_complete_ones_are_skipped(
    tmp_path: Path, ray_session: None, capfd: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    stages = [stage | {"epochs": 0.3} for stage in small_config(storage)["stages"] if not stage.get("train_backbone")]
    values = small_config(storage, stages=stages, workers__dry_run=False)
    command = ["run", str(write_config(tmp_path / "run.yaml", values)), "--seeds", "2"]
    assert main(command) == 0
    (group,), runs = (storage / "seeds").iterdir(), runs_of(storage)
    output = "".join(capfd.readouterr())
    assert f"seeds        {group}\n" in output and output.count("finished in") == 2
    assert "images (2 seeds)" in output and " ± " in output
    summary = json.loads((group / "scores.json").read_text())
    assert summary["runs"] == {f"seed {seed}": runs[seed].name for seed in (0, 1)}
    for split in ("test", "novel", "val"):
        stored = [json.loads((runs[seed] / "scores.json").read_text())["splits"][split] for seed in (0, 1)]
        scores = [entry["scores"]["ROUGE-L"] for entry in stored]
        spread = summary["splits"][split]["scores"]["ROUGE-L"]
        assert spread["values"] == scores and scores[0] != scores[1], "the seeds give different models"
        assert spread["mean"] == pytest.approx(sum(scores) / 2) and spread["std"] == statistics.stdev(scores)

    kept = [*storage.glob("runs/*/stages/*/DONE.json")]
    written = [path.stat().st_mtime_ns for path in kept]
    assert main(command) == 0
    output = "".join(capfd.readouterr())
    assert all(f"{run.name} is complete" in output for run in runs.values())
    assert [path.stat().st_mtime_ns for path in kept] == written, "stages are trained once"


def test_training_after_another_run_in_the_same_process_gives_the_same_weights(tmp_path: Path) -> None:
    """Two stages of seed 1, before and after seed 0 was trained in this process, without Ray."""
    stages = STAGES[:2]

    def train(name: str, seed: int) -> dict[str, torch.Tensor]:
        folder, store = prepare_run(tmp_path / name, seed=seed)
        train_stages(LocalContext("cpu"), StageJob(folder, stages, store))
        return {f"{stage}/{key}": value for stage in stages for key, value in best_weights(folder.stage(stage)).items()}

    before, other, after = train("a", 1), train("b", 0), train("b", 1)
    assert_same_weights(after, before)
    assert not all(torch.equal(other[name], value) for name, value in before.items())


def test_the_bundles_of_several_seeds_are_scored_one_by_one_or_as_an_ensemble(
    tmp_path: Path, log_lines: list[str], without_ray: None
) -> None:
    config, out = write_config(tmp_path / "run.yaml", colors_config(tmp_path)), tmp_path / "out"
    bundles = [str(make_bundle(tmp_path / f"bundle-{number}", seed=number)) for number in range(2)]
    assert evaluate(config, models=bundles, seeds=2, out=str(out)) == 0
    summary = json.loads((out / "scores.json").read_text())
    single = [json.loads((out / part / "scores.json").read_text())["splits"]["test"] for part in ("model-1", "model-2")]
    values = [entry["scores"]["ROUGE-L"] for entry in single]
    assert summary["splits"]["test"]["scores"]["ROUGE-L"]["values"] == values
    assert f"seeds        {out}" in log_lines
    assert "test, 5 images (2 seeds)" in (out / "report.html").read_text()

    assert evaluate(config, models=bundles, seeds=2, ensemble=True, out=str(tmp_path / "ensemble")) == 0
    assert evaluate(config, models=bundles, out=str(tmp_path / "models")) == 0
    ensemble, plain = (json.loads((tmp_path / name / "scores.json").read_text()) for name in ("ensemble", "models"))
    assert ensemble == plain
