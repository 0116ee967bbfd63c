"""The paired bootstrap, and which printed scores stand beside ours."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.scoring.bootstrap import paired_difference
from pipeline.scoring.published import COCO_TEST, published_rows


def test_the_interval_is_the_normal_one_for_many_images() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 0.5, 4000), generator.normal(0.95, 0.5, 4000)
    found = paired_difference(a.tolist(), b.tolist())
    error = (a - b).std() / np.sqrt(len(a))
    assert found.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)
    assert paired_difference(a.tolist(), b.tolist()) == found, "the same numbers, another interval"


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    generator, inside = np.random.default_rng(1), 0
    for trial in range(200):
        found = paired_difference(generator.normal(0.1, 1, 80).tolist(), [0.0] * 80, resamples=500, seed=trial)
        inside += found.low <= 0.1 <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_pairs_that_do_not_match_are_refused() -> None:
    for a, b in (([1.0], []), ([], [])):
        with pytest.raises(ValueError, match="give one of each model"):
            paired_difference(a, b)


def test_printed_scores_are_comparable_only_on_their_own_split() -> None:
    uris = [f"/data/val2014/COCO_val2014_{number:012d}.jpg" for number in range(COCO_TEST)]
    assert [reason for _, reason in published_rows("expansionnet_v2", "test", uris, 5)] == ["", "", ""]
    for uris_, beam, words in ((uris[:-1], 5, "ours has 4,999"), (["a.jpg"], 5, "0 of ours"), (uris, 3, "beam 5")):
        reasons = [reason for _, reason in published_rows("expansionnet_v2", "test", uris_, beam)]
        assert all(reason.startswith("not comparable") and words in reason for reason in reasons) and reasons
    assert published_rows("transformer", "test", uris, 5) == []
    (nocaps,) = published_rows("expansionnet_v2", "near-domain", ["x.jpg"], 3)
    assert nocaps[0].scores["CIDEr-D"] == 0.792 and nocaps[1] == ""
