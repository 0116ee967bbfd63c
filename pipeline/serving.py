"""A model bundle behind `predict`: image bytes in, caption and log-probability out; what MLflow's pyfunc loads.

It imports neither Ray nor MLflow, so that a served model needs only what the bundle needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.attention import cross_attention
from models.attribution import Attribution, integrated_gradients
from models.base import Memory
from models.cluster_groups import Clusters, find_clusters
from models.decoding import Captions, beam_search
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

    def pixels(self, data: bytes) -> Tensor:
        """An image file's bytes as the backbone takes them, (3, H, W); BadImage with the reason."""
        return self.transform(decode_image(data, MAX_PIXELS))

    @torch.inference_mode()
    def caption(self, pixels: Tensor, num_results: int = 1) -> list[list[tuple[str, float]]]:
        """The best captions, best first, with their summed log-probabilities, of each of (B, 3, H, W)."""
        found = self._search(self.bundle.captioner.encode(pixels), num_results)
        sums = found.log_probs.sum(-1).tolist()
        return [
            [(self.bundle.vocabulary.decode(ids), value) for ids, value in zip(tokens, values, strict=True)]
            for tokens, values in zip(found.tokens.tolist(), sums, strict=True)
        ]

    @torch.inference_mode()
    def attention(self, pixels: Tensor, caption: str) -> Tensor:
        """(words, N): where the last layer looks in one image (3, H, W) for each word of a caption that it gave."""
        captioner, words = self.bundle.captioner, caption.split()
        ids = self.bundle.vocabulary.encode(words)
        tokens = torch.tensor([ids], device=pixels.device)
        return cross_attention(captioner.model, captioner.encode(pixels[None]), tokens)[-1, 0, : len(words)]

    def attribution(self, pixels: Tensor, caption: str, steps: int | None = None) -> Attribution:
        """What each grid cell of one image (3, H, W) adds to the log-probability of each word of a caption.

        steps: exactly so many; None for as many as its tolerance asks for.
        """
        captioner, words = self.bundle.captioner, caption.split()
        ids = torch.tensor(self.bundle.vocabulary.encode(words), device=pixels.device)
        with torch.no_grad():
            features = captioner.features(pixels[None])[0]
        ids = ids[: captioner.model.sizes.max_positions + 1]
        if steps is None:
            return integrated_gradients(captioner.model, features, ids).head(len(words))
        return integrated_gradients(captioner.model, features, ids, steps=steps, most_steps=steps).head(len(words))

    @torch.inference_mode()
    def clusters(self, pixels: Tensor, caption: str) -> Clusters | None:
        """The clusters of one image (3, H, W) and a caption's words; None for a model that makes none."""
        captioner = self.bundle.captioner
        ids = torch.tensor(self.bundle.vocabulary.encode(caption.split())[:-1], device=pixels.device)
        return find_clusters(captioner.model, captioner.features(pixels[None])[0], ids)

    def _search(self, memory: Memory, num_results: int) -> Captions:
        limit = min(self.max_length, self.bundle.captioner.model.sizes.max_positions)
        return beam_search(
            self.bundle.captioner.model,
            memory,
            beam_size=self.beam_size,
            max_length=limit,
            num_results=num_results,
        )

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """pyfunc's method: a table with a column `image` of file bytes to rows of caption and log_prob."""
        found = self.caption(torch.stack([self.pixels(data) for data in model_input["image"]]))
        return [{"caption": best[0][0], "log_prob": best[0][1]} for best in found]


def _load_pyfunc(path: str) -> CaptionService:
    return CaptionService(load_bundle(Path(path)))
