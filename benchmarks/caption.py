"""Images captioned per second with beam 5 at the paper's size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer

from raycap.models.base import Features
from raycap.models.config import BackboneConfig
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.pipeline.data.images import decode_image
from raycap.pipeline.runtime.processor import prepare_processor

from measuring import Threads, median_seconds, noise_jpegs
from models import FEATURE_WIDTH, IMAGE_TOKENS, paper_model, search
from reference_expansionnet import MaterializedModel

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

    Example: python benchmarks/caption.py --images 8
    """
    prepare_processor(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = paper_model(device)
    backbone = Backbone(BackboneConfig()).eval().to(device)
    features = Features(torch.randn(images, IMAGE_TOKENS, FEATURE_WIDTH, device=device))
    files, transform = list(noise_jpegs(images, rows=30, columns=40)), image_transform(backbone.config)

    def caption_files() -> None:
        pixels = torch.stack([transform(decode_image(data, MAX_PIXELS)) for data in files]).to(device)
        search(model, Features(backbone(pixels)))

    def print_rate(name: str, run: Callable[[], Any]) -> float:
        """Measures `run`; prints and returns its images per second."""
        _, seconds = median_seconds(run, repeats, warm_up=1, device=device)
        print(f"{name:<34}{images / seconds:>9.2f} images/s", flush=True)
        return images / seconds

    in_bfloat16 = torch.autocast(device.type, torch.bfloat16)  # used as a decorator
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(
        f"{images} images, beam 5 to 20 tokens, {backbone.config.name} and ExpansionNet v2; {hardware}; {repeats} runs"
    )
    recomputed = print_rate("features, prefix recomputed", partial(search, MaterializedModel(model), features))
    cached = partial(search, model, features)
    for name, run in (("features, cached", cached), ("features, cached, bfloat16", in_bfloat16(cached))):
        print(f"{'':<34}{print_rate(name, run) / recomputed:>9.1f}x the prefix-recomputing form")
    print_rate("image files", caption_files)
    print_rate("image files, bfloat16", in_bfloat16(caption_files))


if __name__ == "__main__":
    typer.run(bench_caption)
