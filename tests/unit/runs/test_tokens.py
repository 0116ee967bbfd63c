"""The token files of a run: made with it, made again where they are missing or damaged, and what a worker selects."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.distilled import with_distilled_captions
from raycap.pipeline.runs.folder import DISTILLED_TOKENS, TOKENS, RunFolder
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.batches import CaptionTokens
from raycap.pipeline.training.loop import StageJob, StageRun
from tests.conftest import small_config
from tests.support.bundles import make_bundle
from tests.support.caption_tokens import PlainCaptionTokens
from tests.support.damage import cut, flip_any
from tests.support.distillation import store_captions
from tests.support.runs import prepare_run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def plain_tokens(folder: RunFolder, captions: list[list[str]]) -> PlainCaptionTokens:
    words = folder.vocabulary
    return PlainCaptionTokens([[words.encode(words.tokenize(each)) for each in texts] for texts in captions], words.pad)


def assert_equal(captions: CaptionTokens, plain: PlainCaptionTokens) -> None:
    every = np.arange(len(plain.image_of))
    assert len(captions) == len(every) and np.array_equal(captions.first, plain.first)
    assert np.array_equal(captions.images_of(every), plain.image_of)
    assert torch.equal(captions.padded(every), plain.padded(every))


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


@pytest.mark.parametrize("damage", [cut, flip_any, Path.unlink])
@pytest.mark.parametrize("name", ["ids.npy", "digests.json"])
def test_damaged_token_files_are_named_and_written_again(
    tmp_path: Path, damage: Callable[[Path], None], name: str, log_lines: list[str]
) -> None:
    config = parse_config(small_config(tmp_path))
    folder = prepare(config)
    before, stage = contents(folder.path / TOKENS), config.stages[0]
    damage(folder.path / TOKENS / name)
    with pytest.raises(DamagedError, match=r"tokens/\S+ is .*; `raycap run` writes it again"):
        CaptionTokens.of_stage(folder, stage, folder.dataset.split("train"))
    assert_equal(
        CaptionTokens.of_stage(prepare(config), stage, folder.dataset.split("train")),
        plain_tokens(folder, folder.dataset.split("train").column("captions")),
    )
    assert contents(folder.path / TOKENS) == before
    assert sum(f"damaged   {folder.path / TOKENS}" in line for line in log_lines) == 1


def test_a_run_of_an_older_version_gets_token_files(tmp_path: Path, log_lines: list[str]) -> None:
    """Also those of a teacher. A complete run needs none."""
    make_bundle(tmp_path / "teacher")
    distill = {"model": str(tmp_path / "teacher"), "captions_per_image": 2}
    config = parse_config(small_config(tmp_path / "storage") | {"distill": distill})
    store_captions(config, ["a big red circle", "a green triangle"])
    folder = with_distilled_captions(prepare(config))
    before = {name: contents(folder.path / name) for name in (TOKENS, DISTILLED_TOKENS)}
    for name in before:
        shutil.rmtree(folder.path / name)
    (folder.path / "COMPLETE.json").write_text("{}")
    prepare(config)
    assert not any((folder.path / name).exists() for name in before)
    (folder.path / "COMPLETE.json").unlink()
    prepare(config)
    assert {name: contents(folder.path / name) for name in before} == before
    assert not any("damaged" in line for line in log_lines)


def test_token_files_of_other_images_are_refused(tmp_path: Path) -> None:
    folder, _ = prepare_run(tmp_path)
    shorter = type(folder.dataset)(folder.dataset.table.slice(1))
    shorter.save(folder.path / "data.arrow")
    with pytest.raises(DamagedError, match=r"tokens is damaged: it has \d+ of \d+ images; `raycap run` writes it"):
        replace(folder).tokens(TOKENS)
