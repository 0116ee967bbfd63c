"""The Swin backbone, and random versions of training images."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from raycap.models.captioner import Captioner, build_model
from raycap.models.config import (
    Augmentation,
    BackboneConfig,
    ExpansionNetConfig,
    ModelSizes,
    Views,
    content_key_of,
    seed_of_key,
)
from raycap.models.encoders.backbone import (
    Backbone,
    TensorDropPath,
)
from raycap.models.encoders.transform import augmented
from tests.support.models import (
    SMALL_SWIN,
)


@pytest.mark.proof
@torch._dynamo.config.patch(recompile_limit=2)  # monkeypatch would delete it afterwards
def test_every_block_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles a limited number of forms of a piece of code, which is set to two here."""
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        def run(*arguments: torch.Tensor) -> object:
            calls.append("block")
            return graph.forward(*arguments)

        return run

    plain_compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: plain_compile(module, backend=backend))
    backbone = Backbone(BackboneConfig(**vars(SMALL_SWIN) | {"depths": (1, 3), "drop_path": 0.1}))
    sizes = ModelSizes(backbone.width, 12, 8, 1, 2, 0)
    captioner = Captioner(build_model(ExpansionNetConfig(d_model=8, d_ff=8, num_heads=2), sizes), backbone)
    captioner.compile_layers()
    captioner.train()
    backbone(torch.randn(2, 3, 32, 32))
    assert len(calls) >= 4, f"only {len(calls)} of 4 blocks are compiled"


def test_a_drop_path_with_its_rate_in_a_tensor() -> None:
    torch.manual_seed(0)
    layer, x = TensorDropPath(0.25, torch.device("cpu")), torch.ones(4000, 2, 3)
    assert torch.equal(layer.eval()(x), x) and not layer.state_dict()
    dropped = layer.train()(x)
    assert dropped.mean().item() == pytest.approx(1, abs=0.05) and set(dropped[:, 0, 0].tolist()) == {
        0.0,
        x.new_tensor(1 / 0.75).item(),
    }
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))


WIDTH, HEIGHT = 200, 120
KEY = hashlib.sha256(b"image").hexdigest()
SEEDS = range(400)


def coordinates() -> Image.Image:
    """An image whose red is the column and whose green is the row."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return Image.fromarray(np.stack([columns, rows, np.full_like(rows, 7)], 2).astype(np.uint8))


def changed(image: Image.Image, augmentation: Augmentation, seed: int) -> np.ndarray:
    """The augmented image, which is not resized."""
    return augmented(image, augmentation, seed, np.asarray)


def crop_of(pixels: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, width and height of a crop of `coordinates()`."""
    assert (np.diff(pixels[0, :, 0].astype(int)) == 1).all() and (np.diff(pixels[:, 0, 1].astype(int)) == 1).all()
    return int(pixels[0, 0, 0]), int(pixels[0, 0, 1]), pixels.shape[1], pixels.shape[0]


@pytest.mark.parametrize("min_area", [0.3, 0.8])
def test_crops(min_area: float) -> None:
    """Inside the image, with areas from `min_area` to 1, and at any place."""
    crops = [crop_of(changed(coordinates(), Augmentation(min_area, color=0.0), seed)) for seed in SEEDS]
    areas = np.array([width * height / (WIDTH * HEIGHT) for _, _, width, height in crops])
    ratios = np.array([(width / WIDTH) / (height / HEIGHT) for _, _, width, height in crops])
    assert ((ratios > 3 / 4 - 0.02) & (ratios < 4 / 3 + 0.02)).all() and ratios.min() < 0.88 and ratios.max() > 1.12
    assert (areas > min_area - 0.02).all() and areas.min() < min_area + 0.02 < 0.98 < areas.max() <= 1
    free = [(left, WIDTH - width) for left, _, width, _ in crops if width < WIDTH]
    places = np.array([left / room for left, room in free if room > 5])
    assert abs(places.mean() - 0.5) < 0.06 and places.min() < 0.1 and places.max() > 0.9
    assert len(set(crops)) > 0.9 * len(crops)


def test_colors_change_by_at_most_the_given_share() -> None:
    gray = Image.new("RGB", (8, 8), (100, 100, 100))  # contrast and saturation do not change it
    values = [changed(gray, Augmentation(min_area=1.0, color=0.3), seed).mean() / 100 for seed in SEEDS]
    assert 0.69 < min(values) < 0.75 and 1.25 < max(values) < 1.31


def test_mirrors_on_request_only() -> None:
    image, whole = coordinates(), Augmentation(min_area=1.0, color=0.0)
    mirrored = 0
    for seed in SEEDS:
        plain = changed(image, whole, seed)
        other = changed(image, Augmentation(min_area=1.0, color=0.0, mirror=True), seed)
        if not np.array_equal(other, plain):
            mirrored += 1
            assert np.array_equal(other, plain[:, ::-1])
    assert 0.4 < mirrored / len(SEEDS) < 0.6


def test_the_keys_of_views() -> None:
    first, more = Views(2, Augmentation()), Views(4, Augmentation())
    assert more.keys(KEY)[:2] == first.keys(KEY), "more views add to those that are stored"
    others = [Augmentation(0.5), Augmentation(color=0.1), Augmentation(mirror=True)]
    keys = [*more.keys(KEY), *itertools.chain.from_iterable(Views(4, each).keys(KEY) for each in others)]
    assert len(set(keys)) == len({seed_of_key(key) for key in keys}) == 16
    assert {content_key_of(key) for key in (*keys, KEY)} == {KEY}
    assert seed_of_key(KEY) is None
