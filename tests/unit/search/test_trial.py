"""One trial in this process: its scores are those of the weights that it keeps, and nothing is done twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raycap.jobs.tune.command import extract_once
from raycap.models.captioner import build_model
from raycap.models.decoding.search import beam_search
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.features.model_inputs import Images, on_device
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runs.folder import RunFolder, open_folder
from raycap.pipeline.search.records import SearchPlan, TrialRecord
from raycap.pipeline.search.spec import Search, SearchConfig
from raycap.pipeline.search.trial import TrialTask, decides, run_trial, split_captions
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.training.loop import StageJob, StageRun
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL


def region_search(storage: Path) -> Search:
    """Two stages on the synthetic data set's regions, of which the second one destroys the weights."""
    values = small_config(storage, model=SMALL_MODEL | MESHED_MEMORY)
    values["features"] = {"hdf5": "synthetic", "max_regions": 3}
    del values["backbone"]
    first = values["stages"][0] | {"epochs": 3, "validate_every_epochs": 1, "lr": 3e-3}
    values["stages"] = [first, first | {"name": "worse", "epochs": 1, "lr": 1.0, "keep_if_better": True}]
    section = {"name": "slots", "base": "base.yaml", "space": {"model.num_memory_slots": [0, 2]}, "algorithm": "grid"}
    section |= {"objectives": {"CIDEr-D": "max"}, "score_split": "test", "metrics": ["BLEU-4"]}
    search = Search(SearchConfig.model_validate(section | {"trial": {"stages": ["xe_frozen", "worse"]}}), values)
    search.check()
    return search


def test_a_trial_captions_the_named_split_once_with_the_weights_that_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage is not kept. An interruption while the split is captioned repeats only that.

    The scores are those of a beam search written here, with the first stage's best weights."""
    search = region_search(tmp_path / "storage")
    store, bad = extract_once(search, search.base, find_data(search.base)[0], None, lambda: None)
    task = TrialTask(SearchPlan(search, None, store, bad), "t1", search.space.first(), 0)
    steps, step = list[int](), StageRun.step

    def counted_step(self: StageRun, number: int, batches: Any) -> Any:
        steps.append(number)
        return step(self, number, batches)

    monkeypatch.setattr(StageRun, "step", counted_step)
    with pytest.raises(SystemExit):
        run_trial(task, ignore, caption=stop)
    assert steps
    steps.clear()
    outcome = run_trial(task, ignore)
    assert outcome.state == "finished"
    assert not steps, "no step is repeated"
    assert run_trial(replace(task, trial_id="t2"), ignore, stop, stop) == replace(outcome, trial_id="t2")

    run = open_folder(Path(outcome.run))
    kept, worse = run.result("xe_frozen"), run.result("worse")
    assert kept is not None and worse is not None and not worse.kept and worse.best_score < kept.best_score
    assert outcome.reports[-1] == (4.0, kept.best_score)
    weights = run.stage("xe_frozen") / f"best-{kept.best_step}"
    expected: dict[str, float] = {}
    for split, metrics in (("test", ("CIDEr-D", "BLEU-4")), ("val", ("BLEU-4",))):
        captions = captions_by_hand(run, weights, str(store), split)
        if split == "test":
            assert captions == split_captions(StageJob(run, (), storage_path(store)), "test")
        scores = score_captions(run.dataset.split(split).references(), captions, metrics=metrics).values
        expected |= {search.reported(name) if split == "test" else name: scores[name] for name in metrics}
    assert outcome.scores == expected


def stop(*_: Any) -> None:
    raise SystemExit


def ignore(record: TrialRecord, _: object) -> None:
    assert record.state == "running"


def captions_by_hand(run: RunFolder, weights: Path, store: str, split: str) -> dict[int, str]:
    """The captions of a split by image id, one image at a time."""
    model = build_model(run.config.model, run.metadata.sizes)
    model.load_state_dict(load_file(weights / "model.safetensors"))
    model.eval()
    images = run.dataset.split(split)
    features = open_store(storage_path(store), run.config.features)
    captions = {}
    for row, image in enumerate(images.column("image_id")):
        inputs = on_device(Images(images, features, 10**6, 1).load(np.array([row])), torch.device("cpu"))
        settings = run.config.evaluation
        with torch.inference_mode():
            memory = model.encode(inputs)
            found = beam_search(model, memory, beam_size=settings.beam_size, max_length=settings.max_length)
        captions[image] = run.vocabulary.decode(found.tokens[0, 0].tolist())
    return captions


def test_states_are_handed_over_when_ray_tune_decides() -> None:
    """Also if decisions fall between validations: the second one counts from the first one, not from epoch 2."""
    epochs = [0.75, 1.5, 2.25, 3.0, 3.75, 4.5, 5.25, 6.0, 6.75]
    decided = [epochs[n] for n in range(len(epochs)) if decides(epochs[: n + 1], 2)]
    assert decided == [2.25, 4.5, 6.75]
    assert [decides([1.0, 2.0], 1), decides([1.0, 2.0], 2), decides([2.0, 3.0], 2), decides([], 1)] == [1, 1, 0, 0]
