"""A model bundle behind `predict`: image bytes in, caption and log-probability out; what MLflow's pyfunc loads.

It imports neither Ray nor MLflow, so that a served model needs only what the bundle needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.decoding import beam_search
from pipeline.bundle import Bundle, load_bundle
from pipeline.images import decode_image

MAX_PIXELS = 100_000_000


class CaptionService:
    """Captions images with a bundle that has a backbone; ValueError without one, or for bytes that are no image."""

    def __init__(self, bundle: Bundle, *, beam_size: int = 5, max_length: int = 20) -> None:
        if bundle.transform is None:
            raise ValueError("this bundle has no backbone: it captions stored features, not images")
        self.bundle, self.beam_size, self.max_length = bundle, beam_size, max_length
        self.transform = bundle.transform

    @torch.inference_mode()
    def caption(self, images: Sequence[bytes]) -> list[tuple[str, float]]:
        """(caption, summed log-probability) of each image file's bytes."""
        captioner = self.bundle.captioner
        pixels = torch.stack([self.transform(decode_image(data, MAX_PIXELS)) for data in images])
        limit = min(self.max_length, captioner.model.sizes.max_positions)
        found = beam_search(captioner.model, captioner.encode(pixels), beam_size=self.beam_size, max_length=limit)
        texts = [self.bundle.vocabulary.decode(ids) for ids in found.tokens[:, 0].tolist()]
        return list(zip(texts, found.log_probs[:, 0].sum(1).tolist(), strict=True))

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """pyfunc's method: a table with a column `image` of file bytes to rows of caption and log_prob."""
        return [{"caption": text, "log_prob": value} for text, value in self.caption(list(model_input["image"]))]


def _load_pyfunc(path: str) -> CaptionService:
    return CaptionService(load_bundle(Path(path)))
