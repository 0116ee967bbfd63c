"""The captions of a run as training reads them: of which images, and of which sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.batches import CaptionTokens
from raycap.pipeline.training.loop import StageJob, StageRun
from tests.conftest import small_config, write_karpathy
from tests.support.caption_tokens import PlainCaptionTokens
from tests.support.runs import prepare_run


def plain_tokens(folder: RunFolder, captions: list[list[str]]) -> PlainCaptionTokens:
    words = folder.vocabulary
    return PlainCaptionTokens([[words.encode(words.tokenize(each)) for each in texts] for texts in captions], words.pad)


def assert_equal(captions: CaptionTokens, plain: PlainCaptionTokens) -> None:
    every = np.arange(len(plain.image_of))
    assert len(captions) == len(every) and np.array_equal(captions.first, plain.first)
    assert np.array_equal(captions.images_of(every), plain.image_of)
    assert torch.equal(captions.padded(every), plain.padded(every))


def test_cross_entropy_learns_captions_of_a_model_and_scst_rewards_those_of_people(tmp_path: Path) -> None:
    """A model's file has lines for images of all splits, and lines without a caption."""
    root = write_karpathy(tmp_path / "set", {"train": 6, "val": 2, "test": 2})
    taught = {number: f"a model says color {number}" for number in (0, 2, 3, 7, 9)}
    lines = [{"image": str(root / f"images/{number}.png"), "caption": text} for number, text in taught.items()]
    lines.append({"image": str(root / "images/1.png"), "error": "it cannot be read"})
    (root / "teacher.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources = [{"annotations": "dataset.json"}, {"annotations": "teacher.jsonl", "split": "model", "rewarded": False}]
    data = {"root": str(root), "sources": sources, "train_splits": ["train", "model"], "min_count": 1}
    config = parse_config(small_config(tmp_path / "storage") | {"data": data})
    folder = prepare(config)
    people = folder.dataset.split("train")
    keys = dict(zip(people.column("image_id"), people.column("key"), strict=True))
    model = folder.dataset.split("model")
    assert dict(zip(model.column("key"), model.column("captions"), strict=True)) == {
        keys[100 + number]: [taught[number]] for number in (0, 2, 3)
    }
    assert "says" not in folder.vocabulary.ids
    for stage in config.stages:
        images = folder.training_images(stage)
        expected = people.column("captions")
        if stage.objective == "cross_entropy":
            expected += model.column("captions")
        assert_equal(CaptionTokens.of(images, folder.vocabulary), plain_tokens(folder, expected))
        assert folder.num_samples(stage) == len(images)


@pytest.mark.parametrize(
    ("split", "train_splits"),
    [("model", ["train"]), (None, ["train"]), ("train", ["train"]), ("val", ["train", "val"])],
)
def test_captions_of_a_model_need_a_training_split_of_their_own(
    tmp_path: Path, split: str | None, train_splits: list[str]
) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 6, "val": 2, "test": 2})
    (root / "teacher.jsonl").write_text('{"image": "images/0.png", "caption": "a color"}\n')
    sources = [{"annotations": "dataset.json"}, {"annotations": "teacher.jsonl", "split": split, "rewarded": False}]
    data = {"root": str(root), "sources": sources, "train_splits": train_splits, "min_count": 1}
    with pytest.raises(UserError, match="data.sources"):
        prepare(parse_config(small_config(tmp_path / "storage") | {"data": data}))


def test_a_stage_has_the_captions_of_its_images(tmp_path: Path) -> None:
    """Some training images are left out."""
    folder, store = prepare_run(tmp_path)
    stage = folder.config.stages[0]
    keys = folder.dataset.split("train").column("key")
    excluded = keys[1:9:3]
    run = StageRun(LocalContext("cpu"), folder, stage, StageJob(folder, (stage.name,), store, tuple(excluded)))
    rows = [row for row in folder.dataset.table.to_pylist() if row["split"] == "train" and row["key"] not in excluded]
    assert_equal(run.batches.captions, plain_tokens(folder, [row["captions"] for row in rows]))
    assert len(run.batches.images) == len(rows) < len(keys)
    assert run.batches.images.image_ids.tolist() == [row["image_id"] for row in rows]
    assert [run.batches.images.uri(row) for row in range(len(rows))] == [row["uri"] for row in rows]
