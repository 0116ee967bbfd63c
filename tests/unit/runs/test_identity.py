"""The identity of a run, and folders of runs whose files others may have written, cut or removed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from raycap.models.config import Identity
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runs import identity
from raycap.pipeline.runs.folder import StageResult
from raycap.pipeline.runs.identity import config_identity, identity_marks
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT
from tests.support.runs import empty_run

Place = tuple[str | int, ...]
Marks = tuple[Identity | None, ...]


def keys(value: Any, place: Place = (), marks: Marks = ()) -> Iterator[tuple[Place, Marks]]:
    """The place of each key that is no section, and its marks: those of the sections around it, and its own."""
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from keys(item, (*place, index), marks)
    elif isinstance(value, BaseModel) or is_dataclass(value):
        for name, mark in identity_marks(type(value)).items():
            yield from keys(getattr(value, name), (*place, name), (*marks, mark))
    else:
        yield place, marks


def changed(config: RunConfig, place: Place, value: Any) -> RunConfig:
    """A copy with another value at one place. Validators are not called."""
    config = copy.deepcopy(config)
    node: Any = config
    for part in place[:-1]:
        node = node[part] if isinstance(part, int) else getattr(node, part)
    object.__setattr__(node, str(place[-1]), value)
    return config


def regions_run() -> RunConfig:
    overrides = ["stages.scst.scst.num_samples=5", "stages.xe.plateau.factor=0.5"]
    return load_config(ROOT / "raycap" / "configs" / "demo_meshed_memory_regions.yaml", overrides)


def backbone_run() -> RunConfig:
    return load_config(ROOT / "raycap" / "configs" / "demo.yaml", ["stages.xe_frozen.plateau.factor=0.5"])


@pytest.mark.parametrize("make", [backbone_run, regions_run])
def test_each_key_counts_as_its_mark_says(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "fetched", lambda bundle: bundle)
    monkeypatch.setattr(identity, "bundle_digests", lambda bundle, names: {"uri": bundle.uri})
    monkeypatch.setattr(identity, "ends_digest", str)
    config = make()
    before, counted = config_identity(config), {True: 0, False: 0}
    assert config_identity(make()) == before
    ignored = {Identity.IGNORED, Identity.WITH_REGIONS if config.features.hdf5 is None else Identity.WITH_BACKBONE}
    for place, marks in keys(config):
        counts = not ignored & set(marks)
        counted[counts] += 1
        assert (config_identity(changed(config, place, "changed")) != before) == counts, place
    assert min(counted.values()) > 20


def test_a_file_counts_by_its_content_and_not_by_its_place(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "copy", "other")]
    for file, text in zip(files, ("words", "words", "others"), strict=True):
        file.write_text(text)
    count = {Identity.FILE: 0, Identity.LARGE_FILE: 0}
    for config in (backbone_run(), regions_run()):
        for place, marks in keys(config):
            if marks[-1] in count and (place[0] != "backbone" or config.features.hdf5 is None):
                count[marks[-1]] += 1
                one, copied, other = (config_identity(changed(config, place, str(file))) for file in files)
                assert one == copied != other, place
    assert count == {Identity.FILE: 11, Identity.LARGE_FILE: 2}
    assert config_identity(changed(regions_run(), ("features", "hdf5"), SYNTHETIC)) == config_identity(regions_run())


@pytest.mark.parametrize("token", ["../../victim", "/victim", "..", "a/b", "a\nb"])
def test_a_token_cannot_choose_the_folder_of_a_copy(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    home = StoragePath(f"s3://data/tokens/{tmp_path.name}/runs/demo-1", StorageOptions(s3))
    (home / "log/driver_token").write_bytes(token.encode())
    with pytest.raises(UserError, match="driver_token is .*, not a token"):
        empty_run(tmp_path / "storage" / "runs" / "demo-1", home).on_worker()
    assert not list(tmp_path.rglob("driver_token"))


def test_a_lost_backbone_of_a_stage_that_trained_it_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    folder = empty_run(tmp_path)
    for stage in folder.config.stages:
        write_json(folder.stage(stage.name) / "DONE.json", asdict(StageResult(2, 1, 0.5, True, "")))
        (folder.stage(stage.name) / "best-1").mkdir()
        (folder.stage(stage.name) / "best-1/model.safetensors").touch()
    (tmp_path / "init").mkdir()
    (tmp_path / "init/backbone.safetensors").touch()
    frozen, trained = folder.config.stages[:2]
    assert not frozen.train_backbone and trained.train_backbone
    assert folder.weights_after(frozen, "backbone") == tmp_path / "init/backbone.safetensors"
    with pytest.raises(DamagedError, match=r"best-1/backbone\.safetensors is missing; restore it"):
        folder.weights_after(trained, "backbone")


def test_an_incomplete_summary_is_damaged(tmp_path: Path) -> None:
    write_json(tmp_path / "COMPLETE.json", {"table": "", "scores": {}})
    with pytest.raises(DamagedError, match=r"COMPLETE\.json is damaged: it has no durations, tracked; remove it"):
        _ = empty_run(tmp_path).summary
