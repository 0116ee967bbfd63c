"""Learning rates against recorded values and the schedules' definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.config.sections import ScheduleSection
from pipeline.training.optimizer import learning_rate
from tests.conftest import ROOT

GOLDEN = Path(__file__).resolve().parents[2] / "parity" / "golden"


def test_learning_rates_of_the_four_stages() -> None:
    for record in json.loads((GOLDEN / "lr_schedules.json").read_text()).values():
        schedule = ScheduleSection(
            name="hyperbolic",
            warmup_iterations=record["warmup_iterations"],
            decay=record["anneal_coefficient"],
            decay_every_epochs=record["anneal_every_epochs"],
            min_lr=record["min_lr"],
        )
        for iteration, expected in zip(record["iterations"], record["lr"], strict=True):
            rate = learning_rate(schedule, record["base_lr"], iteration, steps_per_epoch=record["iterations_per_epoch"])
            assert rate == pytest.approx(expected, rel=1e-12)


def test_the_schedule_of_the_clustformers_code_is_noams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCAP_COCO", "/somewhere")
    stage = load_config(ROOT / "configs" / "clustformer_code_coco.yaml").stage("xe")
    assert stage.optimizer.betas == (0.9, 0.98) and stage.optimizer.eps == 1e-9
    for step in (0, 1, 999, 19_998, 19_999, 20_000, 56_643):
        count = step + 1
        expected = 512**-0.5 * min(count**-0.5, count * 20_000**-1.5)
        rate = learning_rate(stage.schedule, stage.lr, step, steps_per_epoch=2832)
        assert rate == pytest.approx(expected, rel=1e-12)


def test_inverse_square_root_peaks_at_the_warm_ups_end() -> None:
    schedule = ScheduleSection(name="inverse_sqrt", warmup_iterations=100)
    rates = [learning_rate(schedule, 2.0, step, steps_per_epoch=10) for step in range(400)]
    assert max(rates) == rates[99] == pytest.approx(2.0)
    assert rates[399] == pytest.approx(1.0) and rates[0] == pytest.approx(0.02)
