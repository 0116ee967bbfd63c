"""What `raycap retrain` asks of the bucket with the data: one listing, and each new image once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.cli import main
from tests.support.retrain_world import World
from tests.support.s3_server import reads


class Small(World):
    """A world for the real `raycap retrain`, with a frozen and an end-to-end stage of two steps."""

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        workers = settings["workers"] | {"dry_run": False}
        return settings | {"stages": settings["stages"][:2], "workers": workers}


@pytest.mark.proof
@pytest.mark.ray
def test_a_retraining_lists_the_data_once_and_reads_each_new_image_once(
    tmp_path: Path, s3: str, ray_session: None
) -> None:
    """A retraining checks images, extracts features, trains, compares, and shows images on two pages."""
    world = Small(tmp_path, s3)
    prefix = world.data.uri.removeprefix("s3://data/")

    def requests() -> tuple[int, Counter[str]]:
        """The listings of the data folder or of a folder in it, and the reads of each image, by one retraining."""
        before = len(reads(s3))
        assert main(["retrain", str(world.path())]) == 0
        asked = [request for request in reads(s3)[before:] if prefix in request]
        # a command first asks for one name, to see whether the server answers
        listings = sum("list-type=2" in request and "max-keys=1&" not in f"{request}&" for request in asked)
        return listings, Counter(request.partition("?")[0][-8:] for request in asked if "/images/" in request)

    world.begin()
    names = [f"{number:04}.png" for number in range(44)]
    assert requests() == (1, Counter(names[:32]))
    world.add("train", 12, range(8))
    assert requests() == (1, Counter(names[32:]))
    assert requests() == (1, Counter())
    assert world.store.read().number == 2
