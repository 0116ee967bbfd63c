"""The end of a trial: which errors are its own, and what it leaves on its machine."""

from __future__ import annotations

import errno
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raycap.jobs.tune.features import extract_once
from raycap.models.captioner import build_model
from raycap.models.decoding.search import beam_search
from raycap.pipeline.data.caption_files import read_predictions
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.features.model_inputs import Images, on_device
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runs.folder import RunFolder, StageResult, open_folder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.search import trial as module
from raycap.pipeline.search.spec import Search, SearchConfig
from raycap.pipeline.search.trial import TrialTask, run_trial
from raycap.pipeline.search.trials import SearchPlan
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import OutageError
from raycap.pipeline.training.loop import StageRun
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL, prepare_run


def test_an_outage_is_not_a_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point is not at fault, so that the trial is repeated."""
    error: Exception = ValueError("two heads do not divide 5")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_run_trial", fail)
    task: Any = None
    outcome = run_trial(task, lambda _: None)
    assert (outcome.state, outcome.reason) == ("failed", "two heads do not divide 5")
    full = OSError(errno.ENOSPC, "No space left", "/x")
    for problem in (OutageError("s3://bucket/x: storage failed for 600 s"), full):
        error = problem
        with pytest.raises(OutageError):
            run_trial(task, lambda _: None)


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_captions_of_the_weights_that_were_kept_are_scored(tmp_path: Path, split: str) -> None:
    """The last stage made captions worse, and its weights were dropped. `test` is captioned by the kept weights."""
    folder, _ = prepare_run(tmp_path)
    validation = folder.dataset.split(folder.config.data.val_split)
    right = {image: captions[0] for image, captions in validation.references().items()}
    names = [stage.name for stage in folder.config.stages]
    for name in names:
        folder.stage(name).mkdir(parents=True)
        is_last = name == names[-1]
        result = StageResult(4, 4, 0.1, kept=not is_last, ended_early="")
        write_json(folder.stage(name) / "DONE.json", asdict(result))
        rows = [{"image_id": image, "caption": "nothing" if is_last else text} for image, text in right.items()]
        write_json(folder.stage(name) / "predictions-val.json", rows)
    section = {"name": "x", "base": "base.yaml", "space": {"model.dynamic_expansion": [2, 4]}, "score_split": split}
    search = Search(
        SearchConfig.model_validate(section | {"metrics": ["BLEU-1"], "algorithm": "grid"}), small_config(tmp_path)
    )
    if split == "test":
        rows = [
            {"image_id": image, "caption": captions[0]}
            for image, captions in folder.dataset.split("test").references().items()
        ]
        write_json(folder.path / "predictions/test.json", rows[1:])
        with pytest.raises(RuntimeError, match="has no captions of test"):
            module.scores_of(folder, search, [])  # one image is missing
        write_json(folder.path / "predictions/test.json", rows)
    assert folder.delivered() == folder.config.stages[-2]
    scores = module.scores_of(folder, search, [])
    assert scores["BLEU-1"] > 0.9
    if split == "test":
        assert scores.keys() == {"BLEU-1", "test BLEU-1", "test CIDEr-D"} and scores["test BLEU-1"] > 0.9
    write_json(folder.stage(names[-1]) / "DONE.json", asdict(replace(result, kept=True)))
    assert module.scores_of(folder, search, [])["BLEU-1"] < 0.1


SECTION: dict[str, Any] = {
    "name": "slots",
    "base": "base.yaml",
    "space": {"model.num_memory_slots": [0, 2]},
    "algorithm": "grid",
    "objectives": {"CIDEr-D": "max"},
}


def region_values(storage: str | dict[str, Any]) -> dict[str, Any]:
    """A configuration of one stage with two validations, on the synthetic data set's regions."""
    values = small_config(storage, model=SMALL_MODEL | MESHED_MEMORY)  # type: ignore[arg-type]
    values["features"] = {"hdf5": "synthetic", "max_regions": 3}
    del values["backbone"]
    values["stages"] = values["stages"][:1]
    values["stages"][0] |= {"epochs": 2, "validate_every_epochs": 1}
    return values


def test_a_trial_captions_the_named_split_once_with_the_weights_that_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage destroys the weights and is not kept. An interruption while the split is captioned repeats
    only that. The score is that of a beam search written here, with the first stage's best weights."""
    values = region_values(str(tmp_path / "storage"))
    first = values["stages"][0] | {"epochs": 3, "lr": 3e-3}
    values["stages"] = [first, first | {"name": "worse", "epochs": 1, "lr": 1.0, "keep_if_better": True}]
    section = SECTION | {"score_split": "test", "metrics": ["BLEU-4"], "trial": {"stages": ["xe_frozen", "worse"]}}
    search = Search(SearchConfig.model_validate(section), values)
    search.check()
    store, bad = extract_once(search, find_data(search.base)[0], None, lambda: None)
    task = TrialTask(SearchPlan(search, None, None, store, bad), search.space.first(), 0)
    steps: list[int] = []
    step = StageRun.step

    def counted_step(self: StageRun, number: int, batches: Any) -> Any:
        steps.append(number)
        return step(self, number, batches)

    monkeypatch.setattr(StageRun, "step", counted_step)
    with monkeypatch.context() as interrupted:
        interrupted.setattr("raycap.pipeline.training.loop.write_predictions", stop)
        with pytest.raises(SystemExit):
            run_trial(task, lambda _: None)
    assert steps
    steps.clear()
    outcome = run_trial(task, lambda _: None)
    assert outcome.state == "finished" and outcome.scores is not None, outcome
    assert not steps, "no step is repeated"
    assert run_trial(task, lambda _: None, stop).scores == outcome.scores, "nothing is repeated"

    assert outcome.run is not None and outcome.reports is not None
    run = open_folder(Path(outcome.run))
    kept, worse = run.result("xe_frozen"), run.result("worse")
    assert kept is not None and worse is not None and not worse.kept and worse.best_score < kept.best_score
    assert outcome.reports[-1] == (4.0, kept.best_score)
    captions = captions_by_hand(run, run.stage("xe_frozen") / f"best-{kept.best_step}", str(store))
    assert captions == read_predictions(run.path / "predictions/test.json")
    scores = score_captions(run.dataset.split("test").references(), captions, metrics=("CIDEr-D", "BLEU-4")).values
    assert {"test CIDEr-D", "test BLEU-4", "BLEU-4"} == outcome.scores.keys()
    assert outcome.scores["test CIDEr-D"] == scores["CIDEr-D"] and outcome.scores["test BLEU-4"] == scores["BLEU-4"]
    texts = [entry["text"] for entry in read_journal(run.journal) if entry["kind"] == "event"]
    assert texts[-1].startswith("captions of test: meshed_memory, region features, cross entropy, beam 2, at most 12")


def stop(*_: Any) -> None:
    raise SystemExit


def captions_by_hand(run: RunFolder, weights: Path, store: str) -> dict[int, str]:
    """The test split's captions by image id, one image at a time."""
    model = build_model(run.config.model, run.metadata.sizes)
    model.load_state_dict(load_file(weights / "model.safetensors"))
    model.eval()
    images = run.dataset.split("test")
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
