"""`init_from`: a run begins with a bundle's weights and words, and what is new in its data begins fresh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.identity import config_identity
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config

SYSTEMS: dict[str, dict[str, Any]] = {
    "expansionnet_v2": {"static_expansion": [4, 8], "dynamic_expansion": 2},
    "meshed_memory": {"name": "meshed_memory", "num_memory_slots": 2},
    "clustformer": {"name": "clustformer"},
}


def values(storage: Path, **changes: Any) -> dict[str, Any]:
    return small_config(storage, **changes)


def prepared(settings: dict[str, Any]) -> RunFolder:
    return prepare(parse_config(settings))


def system(settings: dict[str, Any], name: str) -> dict[str, Any]:
    if name != "expansionnet_v2":
        common = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
        settings["model"] = common | SYSTEMS[name]
    return settings


def initial(folder: RunFolder) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{key}": value
        for part in ("model", "backbone")
        for key, value in load_file(folder.path / "init" / f"{part}.safetensors").items()
    }


@pytest.mark.parametrize("name", SYSTEMS)
def test_weights_and_words_are_taken_over_and_new_rows_begin_fresh(tmp_path: Path, name: str) -> None:
    few = system(values(tmp_path, data__min_count=14), name)
    before = prepared(few)
    bundle = bundle_run(before)
    more = system(values(tmp_path, seed=5, evaluation={"beam_size": 2, "max_length": 30, "batch_size": 8}), name)
    fresh = prepared(more)
    after = prepared(more | {"init_from": str(bundle)})
    known, words = before.vocabulary.words, after.vocabulary.words
    assert words[: len(known)] == known and len(words) > len(known)
    assert set(words) == set(fresh.vocabulary.words) | set(known)
    assert after.metadata.sizes.max_positions > before.metadata.sizes.max_positions
    old, new, drawn = initial(before), initial(after), initial(fresh)
    assert old.keys() == new.keys()
    grown = 0
    for key, tensor in old.items():
        block = tuple(slice(size) for size in tensor.shape)
        assert torch.equal(new[key][block], tensor), key
        if new[key].shape != tensor.shape:
            grown += 1
            rest = new[key][tensor.shape[0] :]
            assert torch.equal(rest, drawn[key][tensor.shape[0] :]) and rest.abs().sum() > 0, key
    assert grown >= 2
    assert any(not torch.equal(tensor, drawn[key][: len(tensor)]) for key, tensor in old.items() if tensor.dim())


def test_a_run_is_known_by_what_it_began_with_wherever_that_lies(tmp_path: Path) -> None:
    settings = values(tmp_path)
    bundle = bundle_run(prepared(settings))
    copy = tmp_path / "elsewhere"
    shutil.copytree(bundle, copy)
    plain = config_identity(parse_config(settings))
    there, moved = (config_identity(parse_config(settings | {"init_from": str(each)})) for each in (bundle, copy))
    assert there == moved != plain
    vocabulary = Vocabulary.load(copy / "vocabulary.json")
    Vocabulary((*vocabulary.words, "another"), vocabulary.tokenizer).save(copy / "vocabulary.json")
    assert config_identity(parse_config(settings | {"init_from": str(copy)})) != moved


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    settings = values(tmp_path)
    bundle = bundle_run(prepared(settings))
    folder = prepared(settings | {"init_from": str(bundle), "stages": settings["stages"][1:2]})
    train_stages(LocalContext("cpu"), StageJob(folder, ("xe_finetune",), None))
    assert folder.result("xe_finetune")
