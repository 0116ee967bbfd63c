"""Many images through Ray Data: the captions of one process, in order, also with unreadable images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import ray.data

import raycap.jobs.caption
from raycap.jobs.caption import caption
from raycap.jobs.cli import main
from raycap.pipeline.config.sections import WorkersSection
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.evaluation.captioning.ray_data import CaptionPool
from tests.support.bundles import make_bundle, with_confidence, write_images


@pytest.mark.ray
def test_ray_data_gives_what_one_process_gives(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image has a name that is not UTF-8."""
    names, bundle = write_images(tmp_path / "images", 70), str(with_confidence(make_bundle(tmp_path / "bundle")))
    Path(names[5]).write_bytes(b"")
    names[7] = str(Path(names[7]).rename(tmp_path / "images" / "\udcff.png"))
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert caption(names, bundle, out=str(here), num_results=2) == 1
    monkeypatch.setattr(raycap.jobs.caption, "MIN_IMAGES_FOR_RAY", 70)
    assert caption(names, bundle, out=str(there), num_results=2) == 1
    for ours, theirs in zip(here.read_text().splitlines(), there.read_text().splitlines(), strict=True):
        one, other = json.loads(ours), json.loads(theirs)
        assert one["image"] == other["image"] and one.get("caption") == other.get("caption")
        assert one.get("error") == other.get("error")
        if "log_prob" in one:
            for key in ("log_prob", "confidence", "expected_ciderd"):
                assert other[key] == pytest.approx(one[key], abs=1e-3)
            assert [each["caption"] for each in one["n_best"]] == [each["caption"] for each in other["n_best"]]


@pytest.mark.ray
def test_a_cluster_that_captions_nothing_ends_the_command(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """The tasks ask for more CPUs than there are, as after the loss of all nodes. The next call continues."""
    names, out = write_images(tmp_path / "images", 3), tmp_path / "captions.jsonl"
    words = ["caption", *names, "--model", str(make_bundle(tmp_path / "bundle")), "--out", str(out)]
    with monkeypatch.context() as lost:
        lost.setattr(raycap.jobs.caption, "MIN_IMAGES_FOR_RAY", 3)
        lost.setattr(CaptionPool, "cpus", 100)
        lost.setattr(raycap.jobs.caption, "WorkersSection", lambda: WorkersSection(max_stall_minutes=0.1))
        with pytest.raises(JobFailedError) as raised:
            caption(words[1:4], words[5], out=str(out))
    assert re.fullmatch(
        r"captioning finished nothing within 0.1 min .*; nodes: .*; pending: .*\(100 CPU\).*; "
        "the same command continues from what was stored",
        str(raised.value),
    )
    assert any("captioning has finished nothing for" in line for line in log_lines)
    assert ray.data.DataContext.get_current().execution_no_progress_timeout_s == -1, "Ray Data would end it first"
    assert main(words) == 0
    assert len(out.read_text().splitlines()) == 3
