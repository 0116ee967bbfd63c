"""The backbone's weights: downloaded once, with further attempts, and never where a run's weights replace them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.features.extraction import Extractor, ShardWriter
from raycap.pipeline.runs import prepare as module
from raycap.pipeline.runs.prepare import decide_order, decide_store, initial_backbone, prepare
from raycap.pipeline.runs.run_bundle import bundle_run
from raycap.pipeline.training.loop import stage_captioner
from tests.conftest import small_config


class HubError(Exception):
    """The libraries for downloads have exceptions that derive from no other."""


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attempts to download weights; each fails."""
    attempts, create_model = list[str](), timm.create_model

    def without_network(name: str, *, pretrained: bool, **settings: Any) -> Any:
        if pretrained:
            attempts.append(name)
            raise HubError("503 Service\nUnavailable")
        return create_model(name, pretrained=False, **settings)

    monkeypatch.setattr(timm, "create_model", without_network)
    return attempts


def test_weights_that_are_replaced_are_not_downloaded(tmp_path: Path, downloads: list[str]) -> None:
    """In end-to-end stages, extraction and bundles, which load the run's weights."""
    config = parse_config(small_config(tmp_path))
    folder = prepare(config)
    pretrained = replace(config.backbone, weights="pretrained", embed_dim=None, depths=None, num_heads=None)
    changed = config.model_copy(update={"backbone": replace(config.backbone, weights="pretrained")})
    folder = replace(folder, config=changed)
    (stage,) = [stage for stage in config.stages if stage.train_backbone][:1]
    stored = folder.path / "init" / "backbone.safetensors"
    captioner = stage_captioner(folder, stage, torch.device("cpu"))
    extractor = Extractor(folder.config.backbone, stored, config.features, config.data.max_pixels)
    writer = ShardWriter(config.storage_place / "features", extractor)
    initial = initial_backbone(config).state_dict()
    for backbone in (captioner.backbone, writer.computer.backbone):
        assert isinstance(backbone, Backbone)
        assert all(torch.equal(tensor, initial[name]) for name, tensor in backbone.state_dict().items())
    assert (bundle_run(folder) / "model.safetensors").is_file()
    assert not downloads
    with pytest.raises(ConnectionError, match="swin_.* could not be downloaded: 503 Service Unavailable"):
        Backbone(pretrained)
    assert len(downloads) == 1


def test_a_download_that_fails_is_repeated(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    pauses = list[float]()
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    backbone = {"name": "swin_tiny_patch4_window7_224", "weights": "pretrained", "image_size": 224}
    config = parse_config(small_config(tmp_path, backbone=backbone))
    with pytest.raises(JobFailedError, match="swin_tiny.*could not be downloaded: 503 .*; repeat the command later"):
        initial_backbone(config)
    assert pauses == list(module.DOWNLOAD_PAUSES_S) and len(downloads) == len(pauses) + 1
    assert sum("the next attempt is in" in line for line in log_lines) == len(pauses)


@pytest.mark.parametrize(
    ("features", "remote", "expected"),
    [
        ({"cache_gib": 0.001}, True, "shards"),
        ({"cache_gib": 0.001, "order": "samples"}, True, "samples"),
        ({"cache_gib": 0.001}, False, "samples"),
        ({"cache_gib": 0.05}, True, "samples"),
        ({"cache_gib": 0.05, "views": 40}, True, "shards"),
        ({"order": "shards"}, False, "shards"),
    ],
)
def test_shards_are_read_whole_where_the_features_exceed_the_cache(
    tmp_path: Path, features: dict[str, Any], remote: bool, expected: str
) -> None:
    """52 images of 2**14 numbers in float16 take 1.6 MiB, and with 40 views of each training image 60 MiB."""
    dataset = prepare(parse_config(small_config(tmp_path))).dataset
    storage: Any = {"uri": "s3://data/order"} if remote else tmp_path
    config = parse_config(small_config(storage, features={"compute_dtype": "float32"} | features))
    assert decide_order(config, dataset, 2**14) == expected


MIB = 2**20


@pytest.mark.parametrize(
    ("features", "remote", "expected"),
    [
        ({"cache_gib": 0.002}, True, True),
        ({"cache_gib": 0.001}, True, False),
        ({"cache_gib": 0.001, "store": "always"}, True, True),
        ({"cache_gib": 0.002, "store": "never"}, True, False),
        ({"cache_gib": 0.002, "views": 2}, True, False),
        ({}, False, True),
        ({"views": 4}, False, True),
        ({"views": 6}, False, False),
    ],
)
def test_features_are_stored_where_they_fit(
    tmp_path: Path,
    features: dict[str, Any],
    remote: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    log_lines: list[str],
) -> None:
    """48 training images of 2**14 numbers in float16 take 1.5 MiB in one of two stores of a run.

    The disk has 28 MiB free, half of which is 14 MiB. Features of other data on it are no room for those of this run.
    The backbone is tiny: what does not fit takes longer to read than to compute.
    """
    dataset = prepare(parse_config(small_config(tmp_path))).dataset
    monkeypatch.setattr(module, "free_bytes", lambda _: 28 * MIB)
    (tmp_path / "features" / "a" / "shards").mkdir(parents=True)
    (tmp_path / "features" / "a" / "shards" / "b.npy").write_bytes(bytes(13 * MIB))
    storage: Any = {"uri": "s3://data/order"} if remote else tmp_path
    settings = {"compute_dtype": "float32", "store": "fits"} | features
    config = parse_config(small_config(storage, features=settings))
    assert decide_store(config, dataset, 2**14) is expected
    if settings["store"] == "fits":
        assert ("training images are stored" if expected else "images are computed at each step") in log_lines[-1]
    trained = [stage.model_copy(update={"train_backbone": True}) for stage in config.stages]
    assert decide_store(config.model_copy(update={"stages": tuple(trained)}), dataset, 2**14) is (
        settings["store"] != "never"
    ), "no stage reads a store"


def test_a_run_keeps_the_decision_about_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = small_config(tmp_path, features={"store": "fits"})
    assert prepare(parse_config(values)).metadata.stores_features
    monkeypatch.setattr(module, "decide_store", lambda *_: False)
    monkeypatch.setattr(module, "decide_order", lambda *_: "shards")
    assert prepare(parse_config(values)).metadata.stores_features, "another attempt"
    metadata = prepare(parse_config(values | {"seed": 1})).metadata
    assert not metadata.stores_features and metadata.order == "samples", "no shards are read"


def test_a_run_keeps_the_order_with_which_it_was_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = small_config(tmp_path)
    assert prepare(parse_config(values)).metadata.order == "samples"
    monkeypatch.setattr(module, "decide_order", lambda *_: "shards")
    assert prepare(parse_config(values)).metadata.order == "samples", "another attempt"
    assert prepare(parse_config(values | {"seed": 1})).metadata.order == "shards"
