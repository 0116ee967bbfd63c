"""Many images through Ray Data: the captions of one process, in order, also with unreadable images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jobs.caption
from jobs.caption import caption
from tests.support.bundles import make_bundle, write_images


@pytest.mark.ray
def test_ray_data_gives_what_one_process_gives(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, bundle = write_images(tmp_path / "images", 70), str(make_bundle(tmp_path / "bundle"))
    Path(names[5]).write_bytes(b"")
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert caption(names, bundle, out=str(here), num_results=2) == 1
    monkeypatch.setattr(jobs.caption, "MIN_IMAGES_FOR_RAY", 70)
    assert caption(names, bundle, out=str(there), num_results=2) == 1
    for ours, theirs in zip(here.read_text().splitlines(), there.read_text().splitlines(), strict=True):
        one, other = json.loads(ours), json.loads(theirs)
        assert one["image"] == other["image"] and one.get("caption") == other.get("caption")
        assert one.get("error") == other.get("error")
        if "log_prob" in one:
            assert other["log_prob"] == pytest.approx(one["log_prob"], abs=1e-4)
            assert [each["caption"] for each in one["n_best"]] == [each["caption"] for each in other["n_best"]]
