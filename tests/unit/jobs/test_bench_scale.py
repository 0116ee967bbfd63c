"""`raycap bench scale`: its synthetic data set is whole, and every part yields its rows of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.bench.scale import data as module
from raycap.jobs.bench.scale.command import PARTS, bench_scale
from raycap.jobs.bench.scale.data import CAPTIONS_PER_IMAGE
from raycap.jobs.bench.scale.measured import HEADER, Measurement
from raycap.jobs.bench.scale.model import Cluster, line, parts, report
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import read_dataset
from raycap.pipeline.data.vocabulary import TokenFiles
from raycap.pipeline.errors import UserError

ROWS = 1000


def test_every_part_measures_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes of their own would import torch four times."""

    def here(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    for part in ("data", "keys", "measured"):
        monkeypatch.setattr(f"raycap.jobs.bench.scale.{part}.in_new_process", here)
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
    with pytest.raises(UserError, match="--part: dta is unknown; the parts are data, keys, order, reward"):
        bench_scale(part=["dta"])


def test_a_row_of_the_table_is_as_wide_as_its_header() -> None:
    assert len(str(Measurement("data: worker's start", 10**7, 1234.5, 12.5, 12345.6, 1.5, 10**6))) == len(HEADER)


def test_the_model_continues_measurements_in_a_straight_line() -> None:
    measured = [
        Measurement("keys: new images", rows, 9.0, 1.0 + rows / 1e4, 9.0, 100 + rows / 1e3, rows // 1000)
        for rows in (10_000, 100_000)
    ]
    assert line([(10, 3.0), (20, 5.0)], 100) == 21 and line([(10, 5.0), (20, 3.0)], 100) == 3
    cluster = Cluster(nodes=4, images_per_s=10, feature_mb=0.5, cache_gib=1, latency_ms=10, gbit_per_s=8)
    found = {part.name: part for part in parts(measured, 10**6, cluster)}
    keys = found["keys: new images"]
    assert keys.puts == 1000 and keys.seconds == pytest.approx(101 + 1000 * 0.01)
    assert keys.memory_gb == pytest.approx(1.1) and keys.usd == pytest.approx(0.005)
    assert found["extraction: backbone"].seconds == 10**6 / 10 / 4
    assert found["extraction: images are read"].seconds == pytest.approx(10**6 * 0.01 / 8 / 4), "requests limit"
    assert found["extraction: features are stored"].seconds == pytest.approx(10**6 * 0.5 / 1000 / 4), "bytes limit"
    lines = list(report(measured, 10**7, cluster))
    assert lines[-1].split()[0] == "10,000,000" and lines[-1].endswith("keys: new images"), "10.1 GB"
    assert lines[-3].endswith("none") and "hold 0% of" not in lines[-1]
