"""Every tutorial does what its page says, in a short form: the page's own commands with smaller sizes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.forms import scenes, write_images
from tests.support.tutorials import run_page

TUTORIALS = ROOT / "docs" / "tutorials"


def with_keys(**values: Any) -> str:
    """Options `--set`, for stages too, by keys with `__` in place of dots."""
    return "".join(f" --set {key.replace('__', '.')}={value}" for key, value in values.items())


# Models of seconds, whose captions have at least three words however little they have learned.
SMALL_MODEL = {
    "backbone__image_size": 32,
    "backbone__embed_dim": 8,
    "backbone__window_size": 4,
    "model__d_model": 16,
    "model__d_ff": 32,
    "model__num_heads": 2,
    "evaluation__beam_size": 2,
    "evaluation__decoding__min_length": 3,
}


@pytest.mark.ray
def test_own_photographs(tmp_path: Path) -> None:
    images = scenes(tmp_path / "scenes")
    write_images(tmp_path / "photographs/images", images)
    with (tmp_path / "photographs/captions.csv").open("w", newline="") as file:
        rows = [(f"images/{image.name}", caption) for image in images for caption in image.captions]
        csv.writer(file).writerows([("image", "caption"), *rows])
    run = "raycap run photographs.yaml"
    short = with_keys(**SMALL_MODEL, stages__xe_frozen__epochs=1, stages__xe_finetune__epochs=1)
    outputs = run_page(ROOT / "docs/getting_started.md", tmp_path, {run: run + short})
    assert outputs[0].endswith("next      raycap check photographs.yaml\n          raycap run photographs.yaml\n")
    assert "fit to train on" in outputs[1].splitlines()[-1]
    assert "finished in" in outputs[2].splitlines()[-1]
    lines = [json.loads(line) for line in (tmp_path / "captions.jsonl").read_text().splitlines()]
    assert len(lines) == 60 and all(line["caption"] for line in lines)
    assert len(outputs[4].splitlines()) == 3
