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
from raycap.pipeline.runs import initial_weights as module
from raycap.pipeline.runs.initial_weights import initial_backbone
from raycap.pipeline.runs.prepare import prepare
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
