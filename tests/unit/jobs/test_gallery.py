"""Maps for a report's pictures, from image files and from stored regions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import yaml
from ray import cloudpickle

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.evaluation.captioning.on_cluster import TaskModel, caption_on_cluster
from raycap.pipeline.evaluation.reports.page import ReportImage
from raycap.pipeline.evaluation.reports.report import add_maps, compute_maps
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config
from tests.support.bundles import make_bundle, write_images


def captioned(number: int, path: str, caption: str) -> ReportImage:
    return ReportImage(number, Path(path), caption, references=[], score=None, split="test")


def dataset_of(image_ids: list[int], uris: list[str], keys: list[str]) -> Dataset:
    columns = [image_ids, ["test"] * len(uris), uris, [["x"]] * len(uris), keys]
    return Dataset(pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA))


def test_maps_of_image_files(tmp_path: Path) -> None:
    names = write_images(tmp_path / "images", 2)
    captions = {1: (names[0], "a red cat"), 2: (names[1], "the mat"), 3: ("none.png", "a")}
    images = [captioned(number, *values) for number, values in captions.items()]
    model = TaskModel(StoredBundle(storage_path(make_bundle(tmp_path / "b"))))
    dataset = dataset_of([1, 2, 3], [*names, "none.png"], ["a", "b", "c"])
    found = dict(compute_maps(images, {("test", 2)}, model, parse_config(small_config(tmp_path)), dataset))
    assert found.keys() == {("test", 1), ("test", 2)}
    assert found["test", 1].keys() == {"attention"} and found["test", 1]["attention"].shape == (3, 16)
    assert found["test", 2]["attribution"].shape == (2, 16)
    np.testing.assert_allclose(np.abs(found["test", 2]["attribution"].sum(1)), 1, rtol=1e-4)


def test_rays_workers_get_no_password_of_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the workers that compute maps and for those that caption splits."""
    monkeypatch.setenv("TRACKER", "https://me:secret-word@host")
    tracked = tmp_path / "run.yaml"
    tracked.write_text(yaml.safe_dump(small_config(tmp_path, tracking={"uri": "${TRACKER}"})))
    config, sent = load_config(tracked), list[bytes]()

    def stream(_: StallWatch, function: object, calls: list[Any], options: object) -> Iterator[Any]:
        sent.extend(map(cloudpickle.dumps, calls))
        return iter([])

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(StallWatch, "stream", stream)
    add_maps([], TaskModel(StoredBundle(storage_path(tmp_path))), config, dataset_of([], [], []), seed="")
    caption_on_cluster([], {}, config)
    assert len(sent) == 2 and not any(b"secret-word" in data for data in sent)
    assert b"secret-word" in cloudpickle.dumps(config)
    assert config.without_tracker().stored_values()["storage"] == config.stored_values()["storage"]
