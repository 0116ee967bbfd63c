"""Model bundles with random weights, and images for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, save_bundle, store_results
from raycap.pipeline.evaluation.comparison.protocol import Protocol, confidence_search
from raycap.pipeline.storage.path import storage_path
from tests.support.confidence import make_confidence

SWIN = BackboneConfig(image_size=32, embed_dim=8, depths=(1, 2), num_heads=(1, 2), window_size=4)
WORDS = Vocabulary.build([["a", "red", "cat", "sits", "on", "the", "mat"]] * 3, 1)


def make_bundle(
    folder: Path, seed: int = 0, backbone: bool = True, width: int = 16, protocol: Protocol = Protocol()
) -> Path:
    """A bundle with random weights. Its output weights are enlarged, so that captions differ from image to image."""
    torch.manual_seed(seed)
    swin = Backbone(SWIN)
    sizes = ModelSizes(swin.width if backbone else width, len(WORDS), 12, WORDS.sos, WORDS.eos, WORDS.pad)
    config = ExpansionNetConfig(
        d_model=16, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=2, static_expansion=(4, 8)
    )
    model = build_model(config, sizes)
    with torch.no_grad():
        model.lm_head.weight *= 20  # type: ignore[operator, union-attr]
    save_bundle(folder, Captioner(model, swin if backbone else None), WORDS, name="small", protocol=protocol, info={})
    return folder


def with_confidence(folder: Path) -> Path:
    """The same bundle with a confidence in the captions of its own search."""
    bundle = load_bundle(folder)
    search = confidence_search(bundle.search, bundle.captioner.model.sizes.max_positions)
    store_results(storage_path(folder), make_confidence(search, bias=0.0))
    return folder


def without_digests(folder: Path) -> Path:
    """The same bundle without its digests, so that its files may be changed."""
    (folder / "digests.json").unlink()
    return folder


def write_images(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        pixels = generator.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).resize((40, 30)).save(folder / f"{number}.png")
    return [str(folder / f"{number}.png") for number in range(count)]
