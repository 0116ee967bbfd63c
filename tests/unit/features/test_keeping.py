"""Whether the features of training images are stored: the borders of the decision, and keys that contradict it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.keeping import CPU_RATE, GPU_RATE, computing_seconds, reading_seconds, stores_features
from tests.conftest import small_config


def test_reading_counts_what_does_not_fit() -> None:
    assert reading_seconds(total_bytes=1000, image_bytes=10, room_bytes=1000, rate=2.0) == 0
    assert reading_seconds(total_bytes=1000, image_bytes=10, room_bytes=2000, rate=2.0) == 0
    assert reading_seconds(total_bytes=1000, image_bytes=10, room_bytes=250, rate=2.0) == 0.75 * 10 / 2
    assert reading_seconds(total_bytes=1000, image_bytes=10, room_bytes=0, rate=2.0) == 5
    assert reading_seconds(total_bytes=0, image_bytes=10, room_bytes=0, rate=2.0) == 5, "no images"


def test_computing_takes_two_operations_for_each_multiply_accumulate() -> None:
    assert computing_seconds(macs=3 * 10**9, gpus=0, threads=4) == 6e9 / (4 * CPU_RATE)
    assert computing_seconds(macs=3 * 10**9, gpus=2, threads=4) == 6e9 / GPU_RATE, "one worker computes on one GPU"
    assert computing_seconds(macs=3 * 10**9, gpus=0.5, threads=4) == 6e9 / (0.5 * GPU_RATE)
    device = {"gpus": 0, "threads": 1}
    assert computing_seconds(10**9, **device, images=20, batch_size=16) == pytest.approx(1.6 * 2e9 / CPU_RATE)
    assert computing_seconds(10**9, **device, images=32, batch_size=16) == 2e9 / CPU_RATE
    assert computing_seconds(10**9, **device, images=1, batch_size=16) == 16 * 2e9 / CPU_RATE


@pytest.mark.parametrize(
    ("total", "most", "reading", "computing", "expected"),
    [
        (100, 200, 9.0, 0.0, True),  # fits exactly, whatever the times are
        (101, 200, 1.0, 1.0, True),
        (101, 200, 1.1, 1.0, False),
        (200, 200, 0.0, 1.0, True),
        (201, 200, 0.0, 1.0, False),  # exceeds the disk
        (10**12, None, 0.9, 1.0, True),
        (10**12, None, 1.1, 1.0, False),
    ],
)
def test_features_are_stored_if_they_fit_or_take_less_time_to_read(
    total: int, most: int | None, reading: float, computing: float, expected: bool
) -> None:
    assert stores_features(total, 100, most, reading, computing) is expected


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"store": "never", "order": "shards"}, r"features\.order is shards, .* features\.store = never"),
        ({"store": "never", "hdf5": "synthetic"}, r"features\.store is never, and without a backbone nothing computes"),
        ({"store": "fits", "hdf5": "synthetic"}, r"features\.store is fits, and without a backbone nothing computes"),
        ({"store": "sometimes"}, r"features\.store = 'sometimes'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path: Path, features: dict[str, Any], message: str) -> None:
    values = small_config(tmp_path, features=features)
    with pytest.raises(UserError, match=message):
        parse_config(values)
