"""The demo, trained once: its captions under autocast, and its confidence in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from raycap.models.base import Features
from raycap.models.captioner import Captioner
from raycap.models.decoding.search import beam_search
from raycap.pipeline.config.load import read_values
from raycap.pipeline.evaluation.captioning.bundle import load_bundle

ROOT = Path(__file__).parents[2]


pytestmark = [pytest.mark.proof, pytest.mark.ray]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a run of the demo."""
    folder = tmp_path_factory.mktemp("demo")
    config = folder / "demo.yaml"
    values = read_values(ROOT / "raycap" / "configs" / "demo.yaml") | {"storage": str(folder / "results")}
    config.write_text(yaml.safe_dump(values))
    subprocess.run([sys.executable, "-m", "raycap", "run", str(config)], cwd=ROOT, check=True)
    return folder / "results"


def test_the_confidence_is_lower_on_novel_objects(results: Path) -> None:
    """On the test split it is calibrated, and the risk is monotone.

    With 300 images, chance alone gives a calibration error of 0.04."""
    (scores,) = results.glob("runs/demo-*/scores.json")
    test, novel = (json.loads(scores.read_text())["splits"][split]["confidence"] for split in ("test", "novel"))
    print(f"mean {test['mean']:.3f} and {novel['mean']:.3f}, calibration error {test['calibration_error']:.3f}")
    assert novel["mean"] < test["mean"] - 0.03
    assert test["calibration_error"] < 0.07 and test["auroc"] > 0.65


@torch.no_grad()
def test_the_demos_captions_in_bfloat16(results: Path) -> None:
    """The test split: captions equal in 95 % of the images, every logit within 3e-2 of its row's largest."""
    (folder,) = (results / "models" / "demo").iterdir()
    bundle = load_bundle(folder)
    (dataset,) = (results / "data").glob("*/dataset.json")
    names = [row["filename"] for row in json.loads(dataset.read_text())["images"] if row["split"] == "test"]
    assert len(names) == 300 and bundle.transform is not None
    images = [Image.open(dataset.parent / "images" / name).convert("RGB") for name in names]
    inputs = torch.stack([bundle.transform(image) for image in images])
    captioner = bundle.captioner.eval()

    tokens = captions(captioner, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = captions(captioner, inputs)
    equal = sum(a == b for a, b in zip(tokens, rounded, strict=True))
    print(f"{equal} of {len(names)} captions are equal")
    assert equal >= 0.95 * len(names)

    sizes = captioner.model.sizes
    longest = max(map(len, tokens))
    padded = torch.tensor([row + [sizes.pad] * (longest - len(row)) for row in tokens])
    features = captioner.features(Features(inputs))  # in float32: the Swin's own rounding is not the captioner's
    exact = captioner.model(features, padded[:, :-1])
    with torch.autocast("cpu", torch.bfloat16):
        close = captioner.model(features, padded[:, :-1]).float()
    errors = ((close - exact).abs().amax(-1) / exact.abs().amax(-1))[padded[:, 1:] != sizes.pad]
    print(f"{len(errors)} rows of logits: off by {errors.median():.1e} (median), {errors.max():.1e} (greatest)")
    assert errors.max() < 3e-2


def captions(captioner: Captioner, inputs: Tensor) -> list[list[int]]:
    """Tokens of the best of 5 beams, without padding."""
    found = []
    for part in inputs.split(16):
        tokens = beam_search(captioner.model, captioner.encode(Features(part)), beam_size=5, max_length=20).tokens[:, 0]
        found += [[token for token in row if token != captioner.model.sizes.pad] for row in tokens.tolist()]
    return found
