"""`raycap soup`: the written bundle, what is refused, and a front whose points are captioned in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import raycap.jobs.soup_front
from raycap.jobs.cli import main
from raycap.jobs.cluster_captions import SplitTask
from raycap.jobs.evaluation import Evaluation
from raycap.jobs.soup import soup
from raycap.models.captioner import Captioner
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import bundle_source, load_bundle, save_bundle
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.features.extraction import Extracted
from raycap.pipeline.features.model_inputs import Images, on_device
from raycap.pipeline.features.store.store import write_shard
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config, write_karpathy
from tests.support.bundles import make_bundle
from tests.support.captioning import Captioning
from tests.support.models import (
    one_thread,  # noqa: F401
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bundles")
    return [str(make_bundle(folder / name, seed)) for seed, name in enumerate("ab")]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with four images to validate on."""
    write_karpathy(tmp_path / "data", {"train": 3, "val": 4, "test": 2})
    values = small_config(tmp_path / "results")
    values["data"] = {"root": str(tmp_path / "data"), "annotations": "dataset.json", "images": ".", "min_count": 1}
    values["data"] |= {"train_splits": ["train"], "val_split": "val", "test_splits": ["test"]}
    values["evaluation"] = {"beam_size": 2, "max_length": 9, "batch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


@pytest.fixture
def captioning(monkeypatch: pytest.MonkeyPatch) -> Captioning:
    """Replaces Ray."""
    captioning = Captioning()
    monkeypatch.setattr(raycap.jobs.soup_front, "caption_on_cluster", captioning)
    monkeypatch.setattr(raycap.jobs.soup_front, "start_ray", lambda *_: None)
    return captioning


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "front.json").read_text())


def test_a_soup_is_written_with_its_sources(
    tmp_path: Path, bundles: list[str], log_lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "soup"
    assert main(["soup", *bundles, "--weights", "0.25,0.75", "-o", str(out)]) == 0
    assert f"source    0.25 of {bundles[0]}" in log_lines and log_lines[-1] == f"bundle    {out}"
    joined, *members = (load_bundle(Path(folder)) for folder in (str(out), *bundles))
    info = joined.config["info"]
    assert (info["source 2"], info["weight 2"]) == (bundles[1], 0.75) and len(info["sha256 2"]) == 64
    name = "model.lm_head.weight"
    ours, a, b = (bundle.captioner.state_dict()[name] for bundle in (joined, *members))
    torch.testing.assert_close(ours, 0.25 * a + 0.75 * b, rtol=1e-6, atol=1e-6)
    assert main(["soup", *bundles, "-o", str(out)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give the folder of the new bundle as -o"),
        ({"out": "x", "weights": "0.5;0.5"}, "--weights 0.5;0.5: give numbers with commas"),
        ({"out": "x", "weights": "1"}, "there are 2 bundles"),
        ({"out": "x", "split": "val"}, "are for --front"),
        ({"front": 2}, "--front needs --config"),
        ({"front": 2, "weights": "0.5,0.5"}, "leave one of them out"),
    ],
)
def test_options_that_do_not_fit_are_refused(bundles: list[str], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        soup(bundles, **options)
    with pytest.raises(UserError, match="1 bundle is given"):
        soup(bundles[:1], **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": "cider"}, "--metrics cider: give two of bleu1, "),
        ({"metrics": "cider,CIDEr-D"}, "give two of"),
        ({"metrics": "cider,none"}, "give two of"),
        ({"metrics": "cider,CHAIR-s"}, "give two of"),  # of CHAIR less is better
        ({"split": "none"}, "--split none: no image is in it"),
        ({"front": 1000}, "--front 1000 has more than 1000 points for 2 bundles"),
    ],
)
def test_fronts_that_cannot_be_scored_are_refused(
    bundles: list[str], config: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        soup(bundles, config=config, **({"front": 2} | options))


def test_bundles_that_do_not_fit_are_refused(tmp_path: Path, bundles: list[str], config: Path) -> None:
    features = str(make_bundle(tmp_path / "features", backbone=False))
    with pytest.raises(UserError, match=f"{bundles[0]} and {features} cannot be joined: one has a backbone"):
        soup([bundles[0], features], out=str(tmp_path / "soup"))
    assert not (tmp_path / "soup").exists()
    (tmp_path / "features" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="does not have the digest"):
        soup([bundles[0], features], front=2, config=config)


def test_a_front_is_resumed_and_extended(
    tmp_path: Path, bundles: list[str], config: Path, captioning: Captioning, log_lines: list[str]
) -> None:
    options: dict[str, Any] = {"config": config, "metrics": "cider,bleu1", "out": str(tmp_path / "front")}
    captioning.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        soup(bundles, front=2, **options)
    assert [point["weights"] for point in content(tmp_path / "front")["points"]] == [[1.0, 0.0], [0.5, 0.5]]
    assert soup(bundles, front=2, **options) == 0
    assert captioning.num_calls == 4 and log_lines[-1] == f"front        {tmp_path / 'front'}"
    assert "points    3, of which 2 have scores" in log_lines
    points = content(tmp_path / "front")["points"]
    a, middle, b = ([point["scores"][name] for name in ("CIDEr-D", "BLEU-1")] for point in points)
    assert points[1]["chord"] == {
        "CIDEr-D": pytest.approx((a[0] + b[0]) / 2), "BLEU-1": pytest.approx((a[1] + b[1]) / 2)
    }  # fmt: skip
    assert a != b and [point["on_front"] for point in points] == [
        not any(all(x >= y for x, y in zip(other, own, strict=True)) and other != own for other in (a, middle, b))
        for own in (a, middle, b)
    ]
    with Image.open(tmp_path / "front" / "front.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 400
    assert (tmp_path / "front" / "front.svg").read_bytes().startswith(b"<?xml")
    assert soup(bundles, front=4, **options) == 0 and captioning.num_calls == 6
    assert len(content(tmp_path / "front")["points"]) == 5
    assert soup(bundles, front=4, **options | {"metrics": "cider,rouge"}) == 0
    assert captioning.num_calls == 11, "scores of other metrics are other inputs"


def test_the_ends_of_a_front_are_the_members(
    tmp_path: Path, bundles: list[str], config: Path, captioning: Captioning
) -> None:
    """Their scores beside captions of the bundles themselves."""
    assert soup([*bundles, bundles[0]], front=1, config=config, metrics="cider,bleu1", out=str(tmp_path / "out")) == 0
    points = content(tmp_path / "out")["points"]
    assert [point["weights"] for point in points] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert points[0]["scores"] == points[2]["scores"] != points[1]["scores"]
    evaluation = Evaluation(load_config(config), [bundles[1]], None, None, None)
    evaluation.find_images(["val"], evaluation.config, None)
    task = {"val": SplitTask(evaluation.images_by_split["val"])}
    model = bundle_source(evaluation.bundles[0], evaluation.config)
    best = captioning([model], task, evaluation.config, store=None, with_alignment=False)["val"].best
    captions = {image: each.caption for image, each in best.items()}
    scores = score_captions(task["val"].images.references(), captions, metrics=("CIDEr-D", "BLEU-1"))
    assert points[1]["scores"] == scores.values


def test_one_extraction_serves_bundles_with_the_same_backbone(
    tmp_path: Path, bundles: list[str], config: Path, captioning: Captioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (load_bundle(Path(folder)) for folder in bundles)
    twin = Captioner(second.captioner.model, first.captioner.backbone)
    save_bundle(tmp_path / "twin", twin, second.vocabulary, name="twin", info={})
    calls = []

    def extracted(config: RunConfig, dataset: Dataset, weights: Path, *_: Any) -> Extracted:
        calls.append(weights)
        images = Images(dataset, None, first.transform, max_pixels=10**6, threads=1, options=config.storage.options)
        pixels = images.load(np.arange(len(dataset)))
        assert first.transform is not None
        with torch.no_grad():
            features = first.captioner.features(
                on_device(pixels, torch.device("cpu"), transform=first.transform)
            ).tokens.numpy()
        store = storage_path(tmp_path / "store")
        write_shard(store, dataset.column("key"), features.astype(np.float32))
        return Extracted(store, {})

    options: dict[str, Any] = {"front": 1, "config": config, "metrics": "cider,bleu1"}
    monkeypatch.setattr(raycap.jobs.soup_front, "extract_features", extracted)
    assert soup([bundles[0], str(tmp_path / "twin")], out=str(tmp_path / "shared"), **options) == 0
    assert len(calls) == 1
    monkeypatch.setattr(raycap.jobs.soup_front, "have_one_backbone", lambda _: False)
    assert soup([bundles[0], str(tmp_path / "twin")], out=str(tmp_path / "own"), **options) == 0
    assert len(calls) == 1
    shared, own = (content(tmp_path / name)["points"] for name in ("shared", "own"))
    assert [point["scores"] for point in shared] == [point["scores"] for point in own]


def test_points_of_other_images_are_not_compared(
    tmp_path: Path, bundles: list[str], config: Path, captioning: Captioning
) -> None:
    options: dict[str, Any] = {"config": config, "metrics": "cider,bleu1", "out": str(tmp_path / "front")}
    assert soup(bundles, front=1, **options) == 0
    (tmp_path / "data" / "images" / "4.png").write_bytes(b"")
    with pytest.raises(JobFailedError, match="some images could be read for one model and not for another"):
        soup(bundles, front=2, **options)
    (tmp_path / "front" / "front.json").write_text("{")
    assert soup(bundles, front=1, **options) == 1, "an image could not be read"
    assert [point["unreadable"] for point in content(tmp_path / "front")["points"]] == [[104], [104]]
