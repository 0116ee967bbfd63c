"""Where `raycap evaluate` writes its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.jobs.evaluation import Evaluation, output_folder, writing_results
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from tests.conftest import small_config
from tests.support.bundles import make_bundle


@pytest.mark.parametrize("storage", ["results", "s3://bucket/results"])
def test_the_output_folder(storage: str) -> None:
    config = parse_config(small_config({"uri": storage}))
    place, folder = output_folder(config, "a+b", None)
    assert str(place).endswith(f"{storage}/evaluations/a+b")
    assert place.is_remote or place.path == folder == config.working_path / "evaluations" / "a+b"
    assert not place.is_remote or folder.is_relative_to(cache_folder() / "evaluations")
    place, folder = output_folder(config, "a+b", "out")
    assert place.path == folder == Path("out").absolute()
    place, folder = output_folder(config, "a+b", "s3://bucket/out")
    assert str(place) == "s3://bucket/out" and place.is_remote, "the results are uploaded"
    assert folder.is_absolute() and folder != output_folder(config, "a+b", "s3://bucket/out")[1]


def test_bundles_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    config = parse_config(small_config({"uri": str(tmp_path / "results")}))

    def folder_of(*bundles: Path) -> Path:
        made = Evaluation.__new__(Evaluation)
        made.config, made.bundles, made.data_suffix, made.labels = config, [*map(storage_path, bundles)], "", []
        made.choose_place(None)
        return made.folder.relative_to(tmp_path / "results" / "evaluations")

    assert folder_of(tmp_path / "results" / "models" / "demo" / "demo-1") == Path("demo-1")
    first, second = folder_of(tmp_path / "one" / "best"), folder_of(tmp_path / "two" / "best")
    assert first != second and first.match("best-??????????") and first == folder_of(tmp_path / "one" / "best")


def evaluation(place: StoragePath, folder: Path, bundle: Path) -> Evaluation:
    made = Evaluation.__new__(Evaluation)
    made.bundles, made.place, made.folder = [storage_path(bundle)], place, folder
    made.config, made.constraints = parse_config(small_config(folder)), None
    return made


def test_a_local_folder_of_results_on_s3_is_removed_when_they_are_there(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log_lines: list[str]
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path))
    bundle = make_bundle(tmp_path / "bundle")
    config = parse_config(small_config({"uri": "results", "endpoint_url": s3, "retry_minutes": 0}))
    for split in ("val", "test"):
        place, folder = output_folder(config, "a", "s3://data/evaluated")
        with writing_results(place, folder):
            (folder / f"predictions-{split}.json").write_text("[]")
            evaluation(place, folder, bundle).write_scores({}, {})
        assert not list((tmp_path / "evaluations").iterdir())
    assert place.list().keys() == {"predictions-val.json", "predictions-test.json", "scores.json"}
    (place / "predictions-val.json").delete()
    place, folder = output_folder(config, "a", "s3://data/evaluated")
    with writing_results(place, folder):
        evaluation(place, folder, bundle).write_scores({}, {})
    assert "predictions-val.json" not in place.list(), "files of earlier evaluations are not uploaded"
    with pytest.raises(KeyboardInterrupt), writing_results(place, folder):
        raise KeyboardInterrupt
    assert not list((tmp_path / "evaluations").iterdir()), "nothing was written"
    place = StoragePath("s3://nowhere/out", StorageOptions(s3, retry_minutes=0))
    with pytest.raises((StorageError, FileNotFoundError)), writing_results(place, folder):
        evaluation(place, folder, bundle).write_scores({}, {})
    assert (folder / "scores.json").is_file()
    assert f"results      {folder}: they are not all in s3://nowhere/out; copy them, or remove this folder" in log_lines
