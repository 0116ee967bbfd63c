"""Where `raycap evaluate` writes its results, and what its workers get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import cloudpickle

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.evaluation.captioning.on_cluster import caption_on_cluster
from raycap.pipeline.evaluation.reports.report import ResultsFolder
from raycap.pipeline.storage.path import StoragePath, cache_folder
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from tests.conftest import small_config


@pytest.mark.parametrize("storage", ["results", "s3://bucket/results"])
def test_the_output_folder(storage: str) -> None:
    config = parse_config(small_config({"uri": storage}))
    folder = ResultsFolder.of(config, "a+b", None)
    place, path = folder.place, folder.path
    assert str(place).endswith(f"{storage}/evaluations/a+b")
    assert place.is_remote or place.path == path == config.working_path / "evaluations" / "a+b"
    assert not place.is_remote or path.is_relative_to(cache_folder() / "evaluations")
    folder = ResultsFolder.of(config, "a+b", "out")
    assert folder.place.path == folder.path == Path("out").absolute()
    folder = ResultsFolder.of(config, "a+b", "s3://bucket/out")
    assert str(folder.place) == "s3://bucket/out" and folder.place.is_remote, "the results are uploaded"
    assert folder.path.is_absolute() and folder.path != ResultsFolder.of(config, "a+b", "s3://bucket/out").path


def test_a_local_folder_of_results_on_s3_is_removed_when_they_are_there(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log_lines: list[str]
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path))
    config = parse_config(small_config({"uri": "results", "endpoint_url": s3, "retry_minutes": 0}))
    for split in ("val", "test"):
        folder = ResultsFolder.of(config, "a", "s3://data/evaluated")
        with folder.writing():
            (folder.path / f"predictions-{split}.json").write_text("[]")
            folder.write_scores({}, {})
        assert not list((tmp_path / "evaluations").iterdir())
    place = folder.place
    assert place.list().keys() == {"predictions-val.json", "predictions-test.json", "scores.json"}
    (place / "predictions-val.json").delete()
    folder = ResultsFolder.of(config, "a", "s3://data/evaluated")
    with folder.writing():
        folder.write_scores({}, {})
    assert "predictions-val.json" not in place.list(), "files of earlier evaluations are not uploaded"
    with pytest.raises(KeyboardInterrupt), folder.writing():
        raise KeyboardInterrupt
    assert not list((tmp_path / "evaluations").iterdir()), "nothing was written"
    place = StoragePath("s3://nowhere/out", StorageOptions(s3, retry_minutes=0))
    folder = ResultsFolder(place, folder.path)
    with pytest.raises((StorageError, FileNotFoundError)), folder.writing():
        folder.write_scores({}, {})
    assert (folder.path / "scores.json").is_file()
    assert (
        f"results      {folder.path}: they are not all in s3://nowhere/out; copy them, or remove this folder"
        in log_lines
    )


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
