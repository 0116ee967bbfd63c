"""The configurations of several seeds, the summary of their runs, and the comparison of systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from raycap.jobs.evaluate import evaluate
from raycap.jobs.seeds import group_id, seed_configs, summarize_runs
from raycap.jobs.submit import parse_arguments
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.comparison.bootstrap import compare, paired_difference
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.evaluation.scores.metrics import MetricScores, Score
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.identity import run_identity
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.path import storage_path
from tests.conftest import ROOT, small_config
from tests.support.captioning import captions_of


def test_the_configurations_differ_only_in_the_seed(tmp_path: Path) -> None:
    config = parse_config(small_config(tmp_path, seed=7))
    configs = seed_configs(config, 3)
    assert configs == [parse_config(small_config(tmp_path, seed=seed)) for seed in (7, 8, 9)]
    alone = parse_config(small_config(tmp_path, seed=8))
    assert run_identity(configs[1], "data") == run_identity(alone, "data") != run_identity(config, "data")
    with pytest.raises(UserError, match="--seeds 2: the last seed would be 4611686018427387904; lower seed"):
        seed_configs(parse_config(small_config(tmp_path, seed=2**62 - 1)), 2)


def test_ensembles_need_seeds_and_submitted_commands_take_them(tmp_path: Path) -> None:
    config = ROOT / "raycap" / "configs" / "demo.yaml"
    with pytest.raises(UserError, match="--ensemble joins the models of several seeds; give --seeds"):
        evaluate(config, ensemble=True)
    values = parse_arguments("evaluate", [str(config), "--seeds", "3", "--ensemble"])
    assert (values["seeds"], values["ensemble"]) == (3, True)
    with pytest.raises(UserError, match="raycap run refuses these options: .*--seeds"):
        parse_arguments("run", [str(config), "--seeds", "0"])


class Run:
    """As much of a complete run's folder as a summary reads."""

    def __init__(self, config: RunConfig, path: Path, cider: float) -> None:
        self.config, self.path, self.run_id = config, path, path.name
        entry = {"images": 3, "scores": {"CIDEr-D": cider}, "unavailable": {}, "per_image_CIDEr-D": {}}
        write_json(path / "scores.json", {"splits": {"val": entry}, "validation_by_stage": {"xe_frozen": cider / 2}})

    def delivered(self) -> StageSection:
        return self.config.stages[-1 if self.config.seed else self.first_kept]

    first_kept = -1  # of the first seed


def runs(folder: Path, ciders: Sequence[float]) -> tuple[list[RunConfig], list[RunFolder]]:
    configs = seed_configs(parse_config(small_config(folder)), len(ciders))
    made = [Run(config, folder / f"demo-{number}", ciders[number]) for number, config in enumerate(configs)]
    return configs, cast(list[RunFolder], made)


def test_the_summary_of_runs(tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configs, folders = runs(tmp_path, (0.8, 0.9))
    summarize_runs(configs, folders)
    place = storage_path(tmp_path / "seeds" / group_id("demo", ["demo-0", "demo-1"]))
    assert [line.strip() for line in "".join(log_lines).splitlines() if line.strip()] == [
        "validation CIDEr-D (PTB tokens)  xe_frozen 0.4250 ± 0.0354",
        "CIDEr-D",
        "val, 3 images (2 seeds)  0.850 ± 0.071",
        f"seeds        {place}",
    ]
    written = json.loads((place / "scores.json").read_bytes())
    assert written["runs"] == {"seed 0": "demo-0", "seed 1": "demo-1"} and written["protocol"]["objective"] == "scst"
    monkeypatch.setattr(Run, "first_kept", 0)  # the first seed ended with cross entropy
    summarize_runs(configs, folders)
    assert json.loads((place / "scores.json").read_bytes())["protocol"]["objective"] is None
    assert written["splits"]["val"]["scores"]["CIDEr-D"]["values"] == [0.8, 0.9]
    assert written["validation_by_stage"]["xe_frozen"]["mean"] == pytest.approx(0.425)
    page = (place / "report.html").read_bytes().decode()
    assert "0.850 ± 0.071" in page and "seed 1" in page


def result(per_image: np.ndarray, images: Sequence[int]) -> SplitScores:
    by_name = {"BLEU-4": Score(0.3), "CIDEr-D": Score(float(per_image.mean()), per_image.tolist())}
    scores = MetricScores(by_name, list(images), "signature", {})
    return SplitScores("test", captions_of(dict.fromkeys(images, "a cat")), scores=scores)


def test_systems_are_compared_over_images_and_seeds(log_lines: list[str]) -> None:
    generator, images = np.random.default_rng(0), range(30)
    ours, theirs = generator.normal(1, 0.2, (3, 30)), generator.normal(0.8, 0.2, (2, 30))
    sides = [[result(scores, images) for scores in side] for side in (ours, theirs)]
    assert compare(*sides) == {"CIDEr-D": paired_difference(ours.tolist(), theirs.tolist())}
    assert "difference by image and seed" in log_lines[0] and " ± " in log_lines[1]
    with pytest.raises(JobFailedError, match="some images could be read for one model and not for another"):
        compare(sides[0], [result(theirs[0], range(1, 31))])
