"""`raycap bench scale`: its synthetic data set is whole, and every part yields its rows of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.bench import scale as module
from jobs.bench.scale import CAPTIONS_PER_IMAGE, HEADER, PARTS, Measurement, bench_scale
from pipeline.data.dataset import Dataset, read_dataset
from pipeline.errors import UserError
from pipeline.language.token_files import TokenFiles

ROWS = 1000


def test_every_part_measures_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes of their own would import torch four times."""

    def here(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(module, "in_new_process", here)
    found = [measurement for part in PARTS.values() for measurement in part(ROWS, tmp_path)]
    assert found and all(each.rows == ROWS and each.seconds > 0 and each.peak_mb > 0 for each in found)
    dataset = Dataset.load(tmp_path / "data.arrow")
    read = read_dataset(module._section(tmp_path), tmp_path)
    columns = ["image_id", "split", "uri", "captions"]
    assert read.table.select(columns).equals(dataset.table.select(columns))
    assert dataset.num_captions == CAPTIONS_PER_IMAGE * ROWS and dataset.split_sizes() == {"val": 10, "train": 990}
    assert TokenFiles.open(tmp_path / "tokens").num_images == ROWS
    bench_scale(tmp_path, ["data"], [ROWS])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == HEADER and [line[:4] for line in lines[2:]] == ["data"] * 3
    assert {len(line) for line in lines[1:]} == {len(HEADER)}


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="--part: dta is unknown; the parts are data"):
        bench_scale(part=["dta"])


def test_a_row_of_the_table_is_as_wide_as_its_header() -> None:
    assert len(str(Measurement("data: worker's start", 10**7, 1234.5, 12.5, 12345.6, 1.5, 10**6))) == len(HEADER)
