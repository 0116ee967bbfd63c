"""The paired bootstrap, and which printed scores are comparable with ours."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.scoring.bootstrap import paired_difference
from pipeline.scoring.published import COCO_TEST, published_rows


def test_the_interval_is_the_normal_one_for_many_images() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 0.5, 4000), generator.normal(0.95, 0.5, 4000)
    difference = paired_difference(a.tolist(), b.tolist())
    error = (a - b).std() / np.sqrt(len(a))
    assert difference.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert difference.low == pytest.approx(difference.mean - 1.96 * error, abs=0.1 * error)
    assert difference.high == pytest.approx(difference.mean + 1.96 * error, abs=0.1 * error)
    assert paired_difference(a.tolist(), b.tolist()) == difference, "equal input gives an equal interval"


def test_the_interval_covers_the_true_mean_at_its_confidence() -> None:
    generator, inside = np.random.default_rng(1), 0
    for trial in range(200):
        difference = paired_difference(generator.normal(0.1, 1, 80).tolist(), [0.0] * 80, resamples=500, seed=trial)
        inside += difference.low <= 0.1 <= difference.high
    assert 0.88 <= inside / 200 <= 0.99


def test_pairs_that_do_not_match_are_refused() -> None:
    for a, b in (([1.0], []), ([], [])):
        with pytest.raises(ValueError, match="give one score of each model"):
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
