"""The backbone's weights: downloaded once, with further attempts, and never where a run's weights replace them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.runs import initial_weights as module
from raycap.pipeline.runs.initial_weights import initial_backbone
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
