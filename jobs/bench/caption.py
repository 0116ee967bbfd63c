"""`raycap bench caption`: images captioned per second with beam 5 at the paper's size."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image

from jobs.bench.measuring import median_seconds
from jobs.bench.models import FEATURE_WIDTH, IMAGE_TOKENS, paper_model, search
from jobs.bench.reference_expansionnet import MaterializedModel
from jobs.options import Threads
from models.backbone import Backbone
from models.base import Features
from models.config import BackboneConfig
from models.transform import ImageTransform
from pipeline.data.images import decode_image
from pipeline.runtime.cpu import prepare_processor

MAX_PIXELS = 10**8


@torch.no_grad()  # in inference mode autocast would convert every weight anew at every use
def bench_caption(
    images: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each after a warm-up; medians are printed.")] = 3,
    threads: Threads = None,
) -> None:
    """Images captioned per second with beam 5.

    The model has the paper's size and random weights, so that every caption has 20 tokens. It reads features, and JPEG
    files of 640 x 480 noise from memory. The prefix-recomputing form is the reference's way to decode. The precision
    is float32 except where the line says bfloat16.

    Example: raycap bench caption --images 8
    """
    prepare_processor(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = paper_model(device)
    reference, backbone = MaterializedModel(model), Backbone(BackboneConfig()).eval().to(device)
    features = Features(torch.randn(images, IMAGE_TOKENS, FEATURE_WIDTH, device=device))
    files, transform = _files(images), ImageTransform(backbone.config.image_size)

    def from_files() -> None:
        pixels = torch.stack([transform(decode_image(data, MAX_PIXELS)) for data in files]).to(device)
        search(model, Features(backbone(pixels)))

    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{images} images, beam 5 to 20 tokens, {backbone.config.name} and ExpansionNet v2; {where}; {repeats} runs")
    recomputed = _rate("features, prefix recomputed", partial(search, reference, features), images, repeats)
    for name, run in (
        ("features, cached", partial(search, model, features)),
        ("features, cached, bfloat16", _bfloat16(device, partial(search, model, features))),
    ):
        rate = _rate(name, run, images, repeats)
        print(f"{'':<34}{rate / recomputed:>9.1f}x the prefix-recomputing form")
    _rate("image files", from_files, images, repeats)
    _rate("image files, bfloat16", _bfloat16(device, from_files), images, repeats)


def _files(count: int) -> list[bytes]:
    """JPEG files of 640 x 480 smooth noise."""
    generator, files = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (30, 40, 3), np.uint8)).resize((640, 480))
        buffer = io.BytesIO()
        coarse.save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def _bfloat16(device: torch.device, run: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return run()

    return inside


def _rate(name: str, run: Callable[[], Any], images: int, repeats: int) -> float:
    """Prints and returns images per second."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    _, seconds = median_seconds(run, repeats, warm_up=1, wait=wait)
    rate = images / seconds
    print(f"{name:<34}{rate:>9.2f} images/s", flush=True)
    return rate
