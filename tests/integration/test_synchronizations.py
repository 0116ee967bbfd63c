"""How often a training step and a beam search would wait for a GPU. A new place fails here, with its name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.models.decoding.search import CHECK_EVERY, Decoder, beam_search
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, StageRun
from tests.conftest import small_config
from tests.support.operations import Operations, counted
from tests.support.runs import STAGES, prepare_run

ITEM = "_local_scalar_dense"


def step_of(tmp_path: Path, name: str) -> Operations:
    """The operations of a training step, with the checks that a GPU has. Another step is made before to fill caches."""
    folder, store = prepare_run(tmp_path, stages=small_config(tmp_path)["stages"])
    run = StageRun(LocalContext("cpu"), folder, folder.config.stage(name), StageJob(folder, STAGES, store))
    run.captioner.train()
    run.finite.defers = True
    run.step(0, run.batches.at(0))
    batches = run.batches.at(1)
    with counted() as operations:
        run.step(1, batches)
    return operations


@pytest.mark.parametrize("name", STAGES[:2])
def test_a_step_of_cross_entropy_never_waits(tmp_path: Path, name: str) -> None:
    assert step_of(tmp_path, name).waits == Counter()


def test_a_step_of_scst_waits_only_for_samples_and_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "check_every", CHECK_EVERY)
    waits = step_of(tmp_path, STAGES[2]).waits
    sampling = {place: times for place, times in waits.items() if place[1].startswith("search")}
    # nine tokens at most: the ends after 4 and 8 of them, and the longest caption
    assert sampling == {(ITEM, "search.drop_finished"): 2, (ITEM, "search._roll_out"): 1}
    reward = waits.total() - sum(sampling.values())
    assert {place.split(".")[0] for _, place in waits} == {"search", "cider"}
    assert 5 <= reward <= 25, waits


def test_a_beam_search_waits_at_every_fourth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search asks at every fourth step whether all captions have ended, and finds what a search finds that asks at
    each step. The number of operations of a step is bounded."""
    torch.manual_seed(0)
    small = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 3}
    config = ExpansionNetConfig(static_expansion=(4, 8), dynamic_expansion=2, **small)  # type: ignore[arg-type]
    model = build_model(config, ModelSizes(12, 40, 30, 1, 2, 0)).double().eval()
    with torch.no_grad():
        model.lm_head.bias[2] += 0.7  # some captions end early, and images leave the batch
    memory = model.encode(Features(torch.randn(16, 9, 12, dtype=torch.float64)))
    plain = beam_search(model, memory, beam_size=3, max_length=21, num_results=3)
    assert plain.lengths.min() < 8 and plain.lengths.max() == 21
    monkeypatch.setattr(Decoder, "check_every", CHECK_EVERY)
    with counted() as operations:
        found = beam_search(model, memory, beam_size=3, max_length=21, num_results=3)
    for name in ("tokens", "log_probs", "lengths", "scores"):
        assert torch.allclose(getattr(found, name), getattr(plain, name), rtol=1e-12, atol=1e-12), name
    checks = operations.waits[ITEM, "search.drop_finished"]
    assert checks <= 5
    assert operations.waits[ITEM, "search.ranked"] == 1
    # of the images that leave: their numbers, and those of the images that remain
    leaving = {("nonzero", "search.search"), ("nonzero", "search.drop_finished"), ("index", "search.search")}
    assert all(operations.waits[place] <= checks for place in leaving)
    assert set(operations.waits) <= leaving | {(ITEM, "search.drop_finished"), (ITEM, "search.ranked")}
    assert operations.count <= 5000, operations.count
