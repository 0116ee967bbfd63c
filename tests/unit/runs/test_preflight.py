"""Checks before the first write: what is wrong is said in one sentence, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest

from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.reading import build_vocabulary, read_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.preflight import check_before_writing, check_storage, max_positions
from raycap.pipeline.runs.prepare import prepare
from tests.conftest import ROOT, small_config


def config_of(tmp_path: Path, **changes: Any) -> RunConfig:
    return parse_config(small_config(tmp_path / "results", **changes))


def refusal(config: RunConfig, folder: Path) -> str:
    """The sentence with which a configuration is refused."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as error:
        check_before_writing(config)
    assert sorted(folder.rglob("*")) == before, "a refusal leaves nothing behind"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_good_configuration_passes_and_writes_nothing(tmp_path: Path) -> None:
    check_before_writing(config_of(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"data__extra_vocabulary": "/nowhere/words.txt"}, "data.extra_vocabulary: /nowhere/words.txt does not exist"),
        ({"backbone__weights": "/nowhere.pth"}, "backbone.weights: /nowhere.pth does not exist or is not a file"),
        ({"evaluation__constraints": "/nowhere.jsonl"}, "constraints /nowhere.jsonl cannot be read as text"),
        ({"init_from": "/nowhere"}, "init_from: /nowhere is not a model bundle: it lacks config.yaml"),
    ],
)  # fmt: skip
def test_what_would_fail_later_is_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    assert found in refusal(config_of(tmp_path, **changes), tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"data__train_splits": ["training"]}, "data.train_splits: no image of dataset.json is in training"),
        ({"data__min_count": 10**6}, "vocabulary"),
        ({"model__max_positions": 4}, "model.max_positions = 4 is less than the longest training caption's"),
    ],
)
def test_what_does_not_fit_the_captions_is_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    config = config_of(tmp_path, data__test_splits=["val", "test"], **changes)
    with pytest.raises(UserError, match=found):
        dataset = read_data(config)
        vocabulary = build_vocabulary(dataset, config.data)
        max_positions(config, dataset, vocabulary)


def test_a_constraint_on_a_word_that_the_captions_lack_is_refused(tmp_path: Path) -> None:
    words = [json.dumps({"image_id": image, "constraints": ["zeppelin"]}) for image in (25, 27)]
    (tmp_path / "words.jsonl").write_text("\n".join(words))
    changes = {"data__test_splits": ["val", "test"], "evaluation__constraints": str(tmp_path / "words.jsonl")}
    with pytest.raises(UserError, match="needs the word 'zeppelin', which is not among the model's"):
        prepare(config_of(tmp_path, **changes))


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "vectors.txt").write_text("the 0.1 0.2 0.3\n")
    (files / "regions.h5").write_text("not HDF5")
    (files / "constraints.jsonl").write_text('{"image_id": 1}\n')
    vectors = config_of(tmp_path, model__word_vectors=str(files / "vectors.txt"), model__word_vector_width=50)
    assert "has vectors of 3 numbers, and model.word_vector_width is 50" in refusal(vectors, tmp_path)
    lines = config_of(tmp_path, evaluation__constraints=str(files / "constraints.jsonl"))
    assert "line 1 is no JSON object with image_id and a list constraints" in refusal(lines, tmp_path)
    regions = load_config(
        ROOT / "raycap" / "configs" / "demo_meshed_memory_regions.yaml",
        [f"features.hdf5={files / 'regions.h5'}", f"storage={tmp_path / 'results'}"],
    )
    assert "regions.h5 cannot be opened as HDF5" in refusal(regions, tmp_path)
    (files / "regions.h5").unlink()
    with h5py.File(files / "regions.h5", "w"):
        pass
    check_before_writing(regions)


def test_a_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"storage: .*/file/results cannot be written .Not a directory.; correct its"):
        check_storage(config_of(tmp_path / "file"))
    with pytest.raises(UserError, match="storage: .* cannot be written .File name too long.; correct its"):
        check_storage(config_of(tmp_path / ("n" * 300)))
    with pytest.raises(UserError, match="storage: /proc/storage/results cannot be written .*; correct its permissions"):
        check_storage(config_of(Path("/proc/storage")))  # root may write everywhere else
    check_storage(config_of(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left"


@pytest.mark.parametrize(
    ("storage", "variables", "found"),
    [
        ({"endpoint_url": "http://127.0.0.1:9", "retry_minutes": 0}, {}, "Unable to locate credentials; check"),
        (
            {"endpoint_url": "http://127.0.0.1:9", "retry_minutes": 0},
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
            "Could not connect to the endpoint URL.*check storage.endpoint_url",
        ),
        ({"endpoint_url": "nonsense"}, {}, "storage.endpoint_url: Invalid endpoint: nonsense; give a URL such as"),
        ({"uri": "s3://a b/c"}, {}, "s3://a b/c: storage failed: .*Invalid bucket name"),
    ],
)
def test_a_storage_on_s3_that_cannot_be_used_is_refused(
    storage: dict[str, Any], variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # a region of its own, because clients are cached
    section = {"uri": "s3://data/runs", "region": f"r{abs(hash((str(storage), str(variables)))) % 10**6}"} | storage
    with pytest.raises(UserError, match=found):
        check_storage(parse_config(small_config(section)))
