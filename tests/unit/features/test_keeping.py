"""Keys that contradict `features.store` are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from tests.conftest import small_config


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"store": "never", "hdf5": "synthetic"}, r"features\.store is never, and without a backbone nothing computes"),
        ({"store": "sometimes"}, r"features\.store = 'sometimes'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path: Path, features: dict[str, Any], message: str) -> None:
    values = small_config(tmp_path, features=features)
    with pytest.raises(UserError, match=message):
        parse_config(values)
