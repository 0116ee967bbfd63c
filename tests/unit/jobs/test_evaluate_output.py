"""Where `raycap evaluate` writes captions, and what its workers get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import cloudpickle

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.config.load import load_config
from raycap.pipeline.evaluation.captioning.on_cluster import caption_on_cluster
from raycap.pipeline.evaluation.reports.report import keep_captions
from raycap.pipeline.evaluation.results import ImageCaption, RankedCaption
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config


def test_captions_are_written_to_s3_before_they_are_scored(s3: str) -> None:
    place = StoragePath("s3://data/evaluated/model-1", StorageOptions(s3))
    keep_captions(place, {"test": {7: ImageCaption((RankedCaption("a cat", -1.0),))}})
    assert place.list().keys() == {"predictions-test.json", "n-best-test.jsonl"}
    assert b"a cat" in (place / "predictions-test.json").read_bytes()


def test_rays_workers_get_no_password_of_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER", "https://me:secret-word@host")
    tracked = tmp_path / "run.yaml"
    tracked.write_text(yaml.safe_dump(small_config(tmp_path, tracking={"uri": "${TRACKER}"})))
    config, sent = load_config(tracked), list[bytes]()

    def stream(_: StallWatch, function: object, calls: list[Any], options: object) -> Iterator[Any]:
        sent.extend(map(cloudpickle.dumps, calls))
        return iter([])

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(StallWatch, "stream", stream)
    caption_on_cluster([], {}, config)
    assert len(sent) == 1 and not any(b"secret-word" in data for data in sent)
    assert b"secret-word" in cloudpickle.dumps(config)
    assert config.without_tracker().stored_values()["storage"] == config.stored_values()["storage"]
