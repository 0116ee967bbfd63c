"""Parameters that a stage does not train: which names a pattern matches, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.models.captioner import Captioner
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.preflight import require_possible
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, StageRun
from tests.conftest import small_config
from tests.support.backbones import small_captioner
from tests.support.runs import STAGES, prepare_run


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return small_captioner("vit")


def frozen(captioner: Captioner, *patterns: str) -> set[str]:
    parameters = {id(each) for each in captioner.frozen_by(patterns)}
    return {name for name, each in captioner.named_parameters() if id(each) in parameters}


def is_match(name: str, pattern: str) -> bool:
    """True if * and ? of a pattern can be filled so that it becomes the name, or the name of a module around it."""
    if not pattern:
        return name == "" or name.startswith(".")
    if pattern[0] == "*":
        return any(is_match(name[cut:], pattern[1:]) for cut in range(len(name) + 1))
    return name != "" and pattern[0] in ("?", name[0]) and is_match(name[1:], pattern[1:])


def test_patterns_match_as_a_plain_matcher_says(captioner: Captioner) -> None:
    """Random names of modules and parameters in which parts are replaced by * and ?."""
    generator, names = random.Random(0), [name for name, _ in captioner.named_parameters()]
    for _ in range(200):
        parts = generator.choice(names).split(".")
        pattern = ".".join(parts[: generator.randint(1, len(parts))])
        for _ in range(generator.randint(0, 2)):
            start = generator.randrange(len(pattern))
            end = generator.randint(start, len(pattern))
            pattern = pattern[:start] + generator.choice(["*", "?"]) + pattern[end:]
        expected = {name for name in names if is_match(name, pattern)}
        if not expected or len(expected) == len(names):
            with pytest.raises(ValueError, match="matches no parameter" if not expected else "nothing is left"):
                frozen(captioner, pattern)
        else:
            assert frozen(captioner, pattern) == expected, pattern


@pytest.mark.parametrize(
    ("stage", "patterns", "found"),
    [
        (1, ["model.encodr"], r"'model.encodr', which matches no parameter; names are .*model.encoder"),
        (0, ["backbone"], r"stages.xe_frozen: freeze names 'backbone', which matches no parameter"),
        (0, ["model"], r"stages.xe_frozen: freeze names model, and nothing is left to train; name fewer"),
    ],
)
def test_patterns_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, stage: int, patterns: list[str], found: str
) -> None:
    values = small_config(tmp_path)
    values["stages"][stage]["freeze"] = patterns
    for check in (require_possible, prepare):
        with pytest.raises(UserError, match=found) as error:
            check(parse_config(values))
        assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_a_frozen_part_of_the_backbone_stays_as_it_is(tmp_path: Path) -> None:
    """Activations are computed again. The other parameters get the same gradients as if nothing were frozen."""
    frozen_part = "backbone.swin.layers.0"
    gradients: list[dict[str, Any]] = []
    for number, patterns in enumerate(([], [frozen_part, "backbone.swin.patch_embed"])):
        stages = small_config(tmp_path)["stages"]
        stages[1] |= {"freeze": patterns, "ema": 0.5, "max_grad_norm": None}
        folder, store = prepare_run(tmp_path / str(number), stages=stages, backbone__gradient_checkpointing=True)
        run = StageRun(LocalContext("cpu"), folder, folder.config.stages[1], StageJob(folder, STAGES, store))
        before = {name: each.detach().clone() for name, each in run.captioner.named_parameters()}
        run.step(0, run.batches.at(0))
        weights = dict(run.captioner.named_parameters())
        gradients.append({name: each.grad for name, each in weights.items() if each.grad is not None})
        names = {name for name in before if name.startswith((frozen_part, "backbone.swin.patch_embed"))}
        assert all(torch.equal(before[name], weights[name]) for name in names) == bool(patterns)
        assert gradients[-1].keys() == before.keys() - (names if patterns else set())
        assert run.average is not None and run.average.weights.keys() == gradients[-1].keys()
        run.output.close()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], msg=name)
