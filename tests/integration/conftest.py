"""Fixtures of several tests: a data set to retrain on, on disk and on S3, and a jobs server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs_server import stub
from tests.support.retrain_world import World

__all__ = ["stub", "world"]


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.proof)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A data set, and no champion yet."""
    world = World(tmp_path, request.getfixturevalue("s3") if request.param == "s3" else None)
    world.begin()
    return world
