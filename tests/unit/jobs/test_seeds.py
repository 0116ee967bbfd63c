"""The configurations of several seeds, and the comparison of systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from raycap.jobs.seeds import seed_configs
from raycap.jobs.submit import parse_arguments
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.comparison.bootstrap import compare, paired_difference
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.evaluation.scores.metrics import MetricScores, Score
from raycap.pipeline.runs.identity import run_identity
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


def test_submitted_commands_take_seeds() -> None:
    config = ROOT / "raycap" / "configs" / "demo.yaml"
    values = parse_arguments("evaluate", [str(config), "--seeds", "3", "--ensemble"])
    assert (values["seeds"], values["ensemble"]) == (3, True)
    with pytest.raises(UserError, match="raycap run refuses these options: .*--seeds"):
        parse_arguments("run", [str(config), "--seeds", "0"])


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
