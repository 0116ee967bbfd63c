"""The precision of features: on a cluster it does not depend on the processor of the driver's machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import parse_config
from pipeline.features import extraction, source
from pipeline.features.extraction import Extractor
from pipeline.storage.weights import save_weights
from tests.conftest import small_config


@pytest.mark.parametrize("processor", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("settings", "on_cluster", "expected"),
    [
        ({}, False, "as the processor"),
        ({}, True, "float32"),
        ({"gpus_per_actor": 1}, False, "bfloat16"),
        ({"gpus_per_actor": 0.5}, True, "bfloat16"),
        ({"compute_dtype": "bfloat16"}, True, "bfloat16"),
        ({"compute_dtype": "float32", "gpus_per_actor": 1}, True, "float32"),
    ],
)
def test_the_precision_of_a_store(
    settings: dict[str, Any],
    on_cluster: bool,
    expected: str,
    processor: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the driver computes it for the store's key. The actors get the same value."""
    monkeypatch.setattr(extraction, "resolve_dtype", lambda name: processor if name == "auto" else name)
    values = small_config(tmp_path)
    config = parse_config(values | {"features": values.get("features", {}) | settings})
    extractors: list[Extractor] = []
    monkeypatch.setattr(source, "extract", lambda *arguments: (extractors.append(arguments[2]), {}))
    save_weights(SimpleNamespace(state_dict=dict), tmp_path / "weights.safetensors")  # type: ignore[arg-type]
    dataset: Any = None
    source.extract_features(config, dataset, tmp_path / "weights.safetensors", lambda: dataset, on_cluster=on_cluster)
    compute = extractors[0].describe()["compute"]
    assert compute == extractors[0].compute_dtype == (processor if expected == "as the processor" else expected)
