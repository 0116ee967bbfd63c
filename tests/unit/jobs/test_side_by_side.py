"""`raycap compare`: numbers, texts, JSON and page of several models, which caption in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycap.jobs.compare import compare_models
from tests.conftest import colors_config
from tests.support.bundles import WORDS, make_bundle
from tests.support.runs import write_config


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two bundles of one name in different folders, and one of another name."""
    folder = tmp_path_factory.mktemp("bundles")
    return [str(make_bundle(folder / name, seed)) for seed, name in enumerate(("a/best", "b/best", "demo-x-0123"))]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with five images to test on, whose references have words of the bundles."""
    values = colors_config(tmp_path)
    file = tmp_path / "images" / "dataset.json"
    content = json.loads(file.read_text())
    for number, image in enumerate(content["images"]):
        image["sentences"] = [{"raw": " ".join(WORDS.words[(number + place) % len(WORDS)] for place in range(5))}]
    file.write_text(json.dumps(content))
    values["evaluation"] = {"beam_size": 2, "max_length": 9, "batch_size": 2}
    return write_config(tmp_path / "run.yaml", values)


def test_three_models_side_by_side(
    tmp_path: Path, bundles: list[str], config: Path, without_ray: None, log_lines: list[str]
) -> None:
    out = tmp_path / "out"
    assert compare_models(bundles, config, out=str(out)) == 0
    content: dict[str, Any] = json.loads((out / "compare.json").read_text())
    assert list(content["models"]) == ["best (1)", "best (2)", "demo-x-0123"]
    assert content["models"]["demo-x-0123"] == bundles[2]
    each = [json.loads((out / f"model-{n}" / "scores.json").read_text())["splits"]["test"] for n in (1, 2, 3)]
    scores = [np.array(list(entry["per_image_CIDEr-D"].values())) for entry in each]
    assert len({tuple(entry["per_image_CIDEr-D"]) for entry in each}) == 1
    for name, entry in zip(content["models"], each, strict=True):
        assert content["scores"][name] == entry["scores"]
    assert list(content["differences"]) == ["best (2)", "demo-x-0123"]
    for name, own in zip(content["differences"], scores[1:], strict=True):
        difference = content["differences"][name]
        assert difference["CIDEr-D"]["mean"] == pytest.approx((own - scores[0]).mean())
        assert difference["CIDEr-D"]["low"] <= difference["CIDEr-D"]["mean"] <= difference["CIDEr-D"]["high"]
        assert "BLEU-4" not in difference, "it is no mean over images"
    assert f"comparison   {out / 'compare.html'}" in log_lines
    assert any("best (2) (this) and best (1) (other)" in line for line in log_lines)

    page = (out / "compare.html").read_text()
    for title in ("Differences", "Cost"):
        assert f"<h2>{title}</h2>" in page and f'">{title}</a>' in page
    gaps = {
        int(image): max(own[row] for own in scores) - min(own[row] for own in scores)
        for row, image in enumerate(each[0]["per_image_CIDEr-D"])
    }
    shown = {int(image): float(gap) for image, gap in re.findall(r'data-id="(\d+)".*? data-difference="([^"]+)"', page)}
    assert shown == {image: pytest.approx(gap) for image, gap in gaps.items() if gap > 0} and shown
    assert page.count("<dt>best (2), CIDEr-D ") == len(shown) == page.count("data:image/jpeg")
    assert f"The {len(shown)} of 5 images" in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_seeds_of_one_system_are_compared_together(
    tmp_path: Path, bundles: list[str], config: Path, without_ray: None, log_lines: list[str]
) -> None:
    out = tmp_path / "out"
    assert compare_models([",".join(bundles[:2]), bundles[2]], config, out=str(out)) == 0
    content = json.loads((out / "compare.json").read_text())
    values = [content["scores"][name]["ROUGE-L"] for name in ("best (1)", "best (2)", "demo-x-0123")]
    difference = content["differences"]["demo-x-0123"]["ROUGE-L"]
    assert difference["mean"] == pytest.approx(values[2] - sum(values[:2]) / 2)
    assert any("difference by image and seed" in line for line in log_lines)
    assert "Each system minus best (1), best (2), with 95 %" in (out / "compare.html").read_text()
