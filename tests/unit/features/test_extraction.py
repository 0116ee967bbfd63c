"""The precision of features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.config import BackboneConfig
from pipeline.config.sections import FeatureSection
from pipeline.features import extraction
from pipeline.features.extraction import Extractor


@pytest.mark.parametrize("processor", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "as the processor"),
        ({"gpus_per_actor": 0.5}, "bfloat16"),
        ({"compute_dtype": "bfloat16"}, "bfloat16"),
        ({"compute_dtype": "float32", "gpus_per_actor": 1}, "float32"),
    ],
)
def test_actors_with_gpus_do_not_compute_as_the_processor_of_the_driver(
    settings: dict[str, Any], expected: str, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "resolve_dtype", lambda name: processor if name == "auto" else name)
    extractor = Extractor(BackboneConfig(), Path("weights"), FeatureSection(**settings), 1)
    assert extractor.compute_dtype == (processor if expected == "as the processor" else expected)
