"""The stored weights of a backbone, which every extraction uses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.extract import initial_weights
from raycap.pipeline.config.load import parse_config
from tests.conftest import small_config
from tests.support.damage import flip


@pytest.mark.parametrize("is_remote", [False, True])
def test_damaged_weights_of_a_backbone_are_made_again(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str], is_remote: bool
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    storage: Any = tmp_path / "storage"
    if is_remote:
        storage = {"uri": f"s3://data/backbones/{tmp_path.name}", "endpoint_url": s3}
    config = parse_config(small_config(storage))

    def weights(name: str) -> bytes:
        (tmp_path / name).mkdir()
        return initial_weights(config, tmp_path / name).read_bytes()

    whole = weights("first")
    (name, digest_name) = sorted(config.storage_place.list())
    assert name.endswith(".safetensors") and digest_name == f"{name}.sha256"
    stored = config.storage_place / name
    (tmp_path / "flipped").write_bytes(whole)
    flip(tmp_path / "flipped", random.Random(0))
    stored.write_bytes((tmp_path / "flipped").read_bytes())
    assert weights("second") == whole == stored.read_bytes() and weights("third") == whole
    assert log_lines == [f"damaged   {stored} does not have the digest in {stored.name}.sha256; it is made again"]
    (config.storage_place / digest_name).delete()  # as an older version has left it
    assert weights("fourth") == whole and len(log_lines) == 1
    assert (config.storage_place / digest_name).exists()
