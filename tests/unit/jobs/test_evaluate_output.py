"""Where `raycap evaluate` writes its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.evaluate import output_folder
from pipeline.config.load import parse_config
from tests.conftest import small_config


@pytest.mark.parametrize("storage", ["results", "s3://bucket/results"])
def test_the_output_folder(storage: str) -> None:
    config = parse_config(small_config({"uri": storage}))
    place, folder = output_folder(config, "a+b", None)
    assert str(place).endswith(f"{storage}/evaluations/a+b") and folder == config.working_path / "evaluations" / "a+b"
    place, folder = output_folder(config, "a+b", "out")
    assert place.path == folder == Path("out").absolute()
    place, folder = output_folder(config, "a+b", "s3://bucket/out")
    assert str(place) == "s3://bucket/out" and place.is_remote, "the results are uploaded"
    assert folder.is_absolute() and folder != output_folder(config, "a+b", "s3://bucket/other")[1]
