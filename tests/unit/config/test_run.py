"""Configurations: typed, frozen, mistakes answered in one sentence that names the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml

from raycap.jobs.config import config_schema
from raycap.pipeline.config.load import (
    dump_config,
    load_config,
    parse_config,
    parse_stored_config,
    read_values,
    shown_values,
    with_data,
)
from raycap.pipeline.config.sections import DataSection, FurtherMetric
from raycap.pipeline.config.variables import expand_variables
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.metrics import DEFAULT_METRICS, METRICS
from raycap.pipeline.runs.identity import config_identity
from tests.conftest import ROOT, small_config
from tests.support.checkout import own

DATA_FILES = own((ROOT / "raycap" / "configs" / "data").glob("*.yaml"))
SHIPPED = [path for path in own((ROOT / "raycap" / "configs").glob("*.yaml")) if not path.name.startswith("search_")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_is_read_stored_and_printed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "COCO", "SWIN", "REGIONS", "GLOVE", "CLASSES"):
        monkeypatch.setenv(f"RAYCAP_{name}", "/somewhere")
    config = load_config(path)
    assert parse_stored_config(yaml.safe_load(dump_config(config)), config.variables) == config
    changes = shown_values(config, only_changes=True)
    assert parse_config(expand_variables(changes)) == config
    assert "retrain" not in changes or path.stem.startswith("retrain")
    header = path.read_text().split("\nname:")[0]
    assert re.search(rf"^#.* raycap \w+ {path.stem}\b", header, re.MULTILINE), "its header names its command"
    jsonschema.Draft202012Validator(config_schema()).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("name", "width", "words", "count"),
    [
        ("meshed_memory_coco", 2048, 10_201, 38_439_424 - 28_160),  # the reference's, less its frozen table
        ("meshed_memory_published_coco", 2048, 10_201, 38_439_424 - 28_160),
        # given vectors in place of an embedding and an output layer: 300 x words, a map from and a map to their width
        ("nocaps_meshed_memory", 2048, 10_201, 38_411_264 + 10_201 * (300 - 2 * 512) + 2 * 300 * 512 + 512 + 300),
        ("clustformer_coco", 1536, 9487, 54_670_113),
        ("clustformer_regions_coco", 2054, 9487, 54_935_329),
        # d_ff of 512 instead of 2048 in 12 layers, and three layers without their two maps of C
        ("clustformer_code_coco", 1536, 9487, 54_670_113 - 12 * 1536 * (2 * 512 + 1) - 3 * 2 * 1025),
    ],
)
def test_the_other_systems_build_on_the_meta_device(
    name: str, width: int, words: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from raycap.models.captioner import build_model
    from raycap.models.config import ModelSizes

    for variable in ("COCO", "REGIONS", "GLOVE", "CLASSES"):
        monkeypatch.setenv(f"RAYCAP_{variable}", "/somewhere")
    config = load_config(ROOT / "raycap" / "configs" / f"{name}.yaml")
    positions = config.model.max_positions or 52
    with torch.device("meta"):
        model = build_model(config.model, ModelSizes(width, words, positions, 2, 0, 1))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert (config.features.hdf5 is None) == ("backbone" in config.model_fields_set)


@pytest.mark.parametrize("path", DATA_FILES, ids=lambda path: path.name)
def test_every_shipped_data_file_gives_images_to_the_configurations_on_its_features(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COCO", "NOCAPS", "REGIONS", "NOCAPS_REGIONS", "SERVER_REGIONS", "GLOVE", "CLASSES"):
        monkeypatch.setenv(f"RAYCAP_{name}", f"/{name}")
    assert path.read_text().startswith("# ")
    grid, regions = (
        load_config(ROOT / "raycap" / "configs" / f"{name}_coco.yaml") for name in ("expansionnet_v2", "meshed_memory")
    )
    own, other = (regions, grid) if path.stem.endswith("_regions") else (grid, regions)
    changed = with_data(own, path)
    assert changed.data.test_splits in (("in-domain", "near-domain", "out-domain", "all"), ("test2014", "val2014"))
    assert changed.has_backbone == own.has_backbone and changed.features.hdf5 not in ("/REGIONS",)
    assert changed.evaluation.max_length == own.evaluation.max_length
    same = {"data": True, "features": {"hdf5"}, "evaluation": {"beam_size"}}
    assert changed.model_dump(exclude=same) == own.model_dump(exclude=same)
    with pytest.raises(UserError, match=r"features\.hdf5 is"):
        with_data(other, path)


def test_a_data_file_has_images_and_nothing_of_the_model(tmp_path: Path) -> None:
    config, path = parse_config(small_config(tmp_path)), tmp_path / "data.yaml"
    for text, message in (
        ("evaluation: {beam_size: 2}", "key data is missing in .*data.yaml; add"),
        (
            "{data: {root: a}, model: {d_model: 8}}",
            "unknown key model in .*data.yaml; a data file has data, features, evaluation",
        ),
        ("data:", "data = None"),
        ("{data: {root: a, annotation: b}}", "unknown key data.annotation: did you mean annotations"),
        ("{data: {root: a}, features: 5}", "features = 5"),
        ("{data: {root: a}, evaluation: {beam_size: 0}}", "evaluation.beam_size = 0"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            with_data(config, path)
    path.write_text("{data: {root: a}, evaluation: {beam_size: 9}}")
    changed = with_data(config, path)
    assert changed.data == DataSection(root="a"), "the synthetic data set's keys are not merged"
    assert changed.evaluation == config.evaluation.model_copy(update={"beam_size": 9})


def test_identity_is_of_the_result_alone(tmp_path: Path) -> None:
    """Another storage or number of workers does not make another run. Another learning rate does."""
    base = parse_config(small_config(tmp_path))
    assert config_identity(parse_config(small_config(tmp_path / "b", workers__num_workers=2))) == config_identity(base)
    assert config_identity(parse_config(small_config(tmp_path, seed=5))) != config_identity(base)


def test_keys_at_their_defaults_are_the_same_run() -> None:
    path = ROOT / "raycap" / "configs" / "demo_clustformer.yaml"
    defaults = ["model.decoder=causal", "model.activation=relu", "model.input_dropout=null"]
    defaults += [
        "model.cross_attention_dropout=false",
        "stages.xe_frozen.max_grad_value=null",
        "data.tokenizer=expansionnet",
        "stages.xe_finetune.freeze=[]",
        *(f"stages.xe_finetune.optimizer.{each}" for each in ("layer_decay=1", "decayed_weights=all")),
        "stages.xe_finetune.optimizer.backbone_lr_factor=1.0",
        *("backbone.patch_size=null", "backbone.pool=1", "backbone.transform=auto"),
    ]
    others = ["model.decoder=mask_token", "model.activation=gelu", "model.input_dropout=0.5"]
    others += ["backbone.pool=2", "backbone.transform=squash", "model.encoder_clusters=none"]
    others += [f"stages.xe_finetune.optimizer.{each}" for each in ("layer_decay=0.9", "decayed_weights=linear")]
    others += ["stages.xe_finetune.optimizer.backbone_lr_factor=0.5", "stages.xe_finetune.freeze=[model.input]"]
    others += ["stages.xe_frozen.schedule.name=cosine"]
    others += ["model.cross_attention_dropout=true", "stages.xe_frozen.max_grad_value=0.1", "data.tokenizer=tokens"]
    base = config_identity(load_config(path))
    assert config_identity(load_config(path, defaults)) == base
    assert len({base, *(config_identity(load_config(path, [each])) for each in others)}) == 1 + len(others)


def test_any_batch_that_gives_every_worker_a_sample_is_accepted() -> None:
    data = read_values(ROOT / "raycap" / "configs" / "demo.yaml")
    data["workers"] |= {"num_workers": 3, "min_workers": 2}
    for stage in data["stages"]:
        stage["batch_size"] = 12
    data["stages"][0] |= {"batch_size": 7, "gradient_accumulation_steps": 2}
    config = parse_config(data)
    assert list(config.workers.counts) == [2, 3]
    assert config.micro_batch_sizes(config.stages[0]) == (1, 2), "7 = 2 x 3 + 1 = 2 x 2 x 2 - 1"
    assert config.micro_batch_sizes(config.stages[1]) == (4, 6)


def test_further_metrics_are_those_of_the_table() -> None:
    assert get_args(FurtherMetric) == tuple(name for name in METRICS if name not in DEFAULT_METRICS)


def test_tokenizers_are_those_of_the_languages() -> None:
    assert get_args(DataSection.model_fields["tokenizer"].annotation) == tuple(TOKENIZERS)
