"""Tiny captioners of every system as bundles, and their inputs, for tests of exports."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.evaluation.captioning.bundle import Bundle
from raycap.pipeline.evaluation.captioning.search import find_captions
from raycap.pipeline.serving.export import export_captioner
from raycap_onnx import Caption
from tests.support.bundles import SWIN
from tests.support.models import select_images

MAX_POSITIONS = 12
WORDS = Vocabulary.build([["a", "red", "cat", "sits", "on", "the", "mat", "with", "two", "dogs"]] * 3, 1)
SIZES: dict[str, Any] = {
    "d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2,
}  # fmt: skip

SYSTEMS: dict[str, ModelConfig] = {
    "expansionnet": ExpansionNetConfig(**SIZES, static_expansion=(4, 8), dynamic_expansion=3),
    "transformer": replace(ExpansionNetConfig(**SIZES), name="transformer"),
    "meshed memory": MeshedMemoryConfig(**SIZES | {"num_encoder_layers": 2}, num_memory_slots=3),
    "clustformer": ClustFormerConfig(**SIZES),
    "mask token": ClustFormerConfig(**SIZES, decoder="mask_token"),
}


def make_captioner(model: ModelConfig, seed: int = 0) -> Captioner:
    """A captioner with random weights, in evaluation mode. Its output weights make captions differ, also in length."""
    torch.manual_seed(seed)
    swin = Backbone(SWIN)
    captioner = Captioner(
        build_model(model, ModelSizes(swin.width, len(WORDS), MAX_POSITIONS, WORDS.sos, WORDS.eos, WORDS.pad)), swin
    )
    with torch.no_grad():
        captioner.model.lm_head.weight.mul_(8)  # type: ignore[union-attr, operator]
        if captioner.model.lm_head.bias is not None:  # type: ignore[union-attr]
            captioner.model.lm_head.bias[WORDS.eos] += 3  # type: ignore[index, operator, union-attr]
    return captioner.eval()


def make_captioner_bundle(name: str, protocol: dict[str, Any] | None = None) -> Bundle:
    """The bundle of a system, as `load_bundle` gives it. protocol: keys of its search."""
    model = SYSTEMS[name]
    captioner = make_captioner(model)
    recorded = {"beam_size": 3, "max_length": MAX_POSITIONS} | (protocol or {})
    config = {"name": name, "model": vars(model) | {"word_vectors": None}, "protocol": recorded}
    return Bundle(captioner, WORDS, image_transform(SWIN), config)


Export = Callable[[str], tuple[Path, float]]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function of a system's name that gives the folder of its export, and how far its graphs differ from the model.

    An export takes many seconds, so that the processes of pytest-xdist share it.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def export(name: str) -> tuple[Path, float]:
        folder = root / f"export {name}"
        record = root / f"export {name}.json"
        with (root / f"export {name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not record.exists():
                record.write_text(json.dumps(export_captioner(make_captioner_bundle(name), folder)))
        return folder, json.loads(record.read_text())

    return export


def make_images(count: int, seed: int = 0) -> list[Image.Image]:
    """Images of noise that differ in size."""
    generator = np.random.default_rng(seed)
    sizes = [(int(height), int(width), 3) for height, width in generator.integers(20, 60, (count, 2))]
    return [Image.fromarray(generator.integers(0, 256, size, np.uint8)) for size in sizes]


@torch.no_grad()
def torch_captions(
    bundle: Bundle, inputs: Features, batch_size: int, change: Callable[[Any], Any] | None = None
) -> list[Caption]:
    """The best captions by raycap's search in batches. change: of the search."""
    search = bundle.search if change is None else change(bundle.search)
    captions = []
    for start in range(0, len(inputs.tokens), batch_size):
        rows = torch.arange(start, min(start + batch_size, len(inputs.tokens)))
        memory = bundle.captioner.encode(select_images(inputs, rows))
        found = find_captions(bundle.captioner.model, memory, search, bundle.vocabulary, ())
        log_probs = found.log_probs[:, 0].sum(-1).tolist()
        for tokens, length, log_prob in zip(
            found.tokens[:, 0].tolist(), found.lengths[:, 0].tolist(), log_probs, strict=True
        ):
            captions.append(Caption(bundle.vocabulary.decode(tokens), log_prob, tuple(tokens[:length])))
    return captions
