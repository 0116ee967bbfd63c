"""Captions images with a model bundle; also the pyfunc model that MLflow loads (`predict`).

This module imports neither Ray nor MLflow, so that a served model needs few packages. The modules of raycap that it
imports are stored with the model (`serving_sources`).
"""

from __future__ import annotations

import ast
import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.attention_maps import cross_attention
from models.attribution import Attribution, integrated_gradients
from models.base import Features
from models.cluster_groups import Clusters, find_clusters
from models.decoding import beam_search
from pipeline.captioning.bundle import Bundle, load_bundle
from pipeline.config.sections import SEARCH_DEFAULTS
from pipeline.data.images import BadImage, decode_image
from pipeline.storage.path import storage_path
from pipeline.version import project_root

MAX_PIXELS = 100_000_000  # Larger images are refused.
BATCH_SIZE = 16  # images
PRECISIONS = ("float32", "bfloat16")


class CaptionService:
    """Captions images with a bundle. Raises ValueError for a bundle without a backbone.

    precision: float32, or bfloat16 for autocast in `caption`; all other methods compute in float32. device: cpu or
    cuda; None for a GPU if torch sees one. The bundle is moved there, and the methods take pixels on any device.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        beam_size: int = SEARCH_DEFAULTS.beam_size,
        max_length: int = SEARCH_DEFAULTS.max_length,
        precision: str = SEARCH_DEFAULTS.precision,
        device: str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; expected {' or '.join(PRECISIONS)}")
        if bundle.transform is None:
            raise ValueError("this bundle has no backbone: it captions stored features, not images")
        self.bundle, self.beam_size, self.max_length = bundle, beam_size, max_length
        self.transform, self.precision = bundle.transform, precision
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        bundle.captioner.to(self.device)

    def pixels(self, data: bytes) -> Tensor:
        """An image file's normalized pixels (3, H, W). Raises BadImage with the reason."""
        return self.transform(decode_image(data, MAX_PIXELS))

    @torch.no_grad()
    def caption(self, pixels: Tensor, num_results: int = 1) -> list[list[tuple[str, float]]]:
        """The captions of each image (B, 3, H, W) with their log-probabilities, best first."""
        captioner = self.bundle.captioner
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            captions = beam_search(
                captioner.model,
                captioner.encode(Features(pixels.to(self.device))),
                beam_size=self.beam_size,
                max_length=min(self.max_length, captioner.model.sizes.max_positions),
                num_results=num_results,
            )
        log_probs = captions.log_probs.sum(-1).tolist()
        texts = [[self.bundle.vocabulary.decode(ids) for ids in ranked] for ranked in captions.tokens.tolist()]
        return [list(zip(*ranked, strict=True)) for ranked in zip(texts, log_probs, strict=True)]

    @torch.no_grad()
    def attention(self, pixels: Tensor, caption: str) -> Tensor:
        """The last layer's cross-attention (words, N) for each word of a caption of one image (3, H, W)."""
        captioner, ids = self.bundle.captioner, self._ids(caption)
        memory = captioner.encode(Features(pixels[None].to(self.device)))
        return cross_attention(captioner.model, memory, ids[None])[-1, 0, : len(caption.split())]

    def attribution(self, pixels: Tensor, caption: str) -> Attribution:
        """The contribution of each grid cell of one image (3, H, W) to the log-probability of each word."""
        captioner = self.bundle.captioner
        with torch.no_grad():
            features = captioner.features(Features(pixels[None].to(self.device)))
        ids = self._ids(caption)[: captioner.model.sizes.max_positions + 1]
        return integrated_gradients(captioner.model, features, ids).head(len(caption.split()))

    @torch.no_grad()
    def clusters(self, pixels: Tensor, caption: str) -> Clusters | None:
        """The clusters of one image (3, H, W) and a caption's words; None for a model without clusters."""
        captioner, ids = self.bundle.captioner, self._ids(caption)[:-1]
        return find_clusters(captioner.model, captioner.features(Features(pixels[None].to(self.device))), ids)

    def _ids(self, caption: str) -> Tensor:
        """The ids (T,) of SOS, the caption's words and EOS."""
        return torch.tensor(self.bundle.vocabulary.encode(caption.split()), device=self.device)

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The pyfunc interface: a caption and log_prob (natural logarithm, summed over the tokens) for each row.

        Column `image` holds the bytes of image files or base64 of them; column `uri` holds local paths or s3:// URIs,
        which are read for rows without `image`. Raises ValueError naming a row with neither, or with an invalid image.
        """
        files = list(_files(model_input))
        captions: list[list[tuple[str, float]]] = []
        for start in range(0, len(files), BATCH_SIZE):
            pixels = [self._row_pixels(*row) for row in enumerate(files[start : start + BATCH_SIZE], start)]
            captions += self.caption(torch.stack(pixels))
        best = [ranked[0] for ranked in captions]
        return [{"caption": caption, "log_prob": log_prob} for caption, log_prob in best]

    def _row_pixels(self, number: int, source: bytes | str) -> Tensor:
        """The pixels of a row from file bytes or a URI. ValueError naming the row when that fails."""
        try:
            return self.pixels(source if isinstance(source, bytes) else storage_path(_path(source)).read_bytes())
        except (BadImage, OSError, ImportError) as error:
            origin = "" if isinstance(source, bytes) else f" ({source})"
            raise ValueError(f"row {number}{origin}: {error}") from error


def _files(table: Any) -> Iterable[bytes | str]:
    """Each row's file bytes, or its URI."""
    columns = [list(table[name]) if name in table else None for name in ("image", "uri")]
    if columns == [None, None]:
        raise ValueError("the input needs a column image (file bytes, in JSON as base64) or uri (a path or s3://)")
    num_rows = max(len(column) for column in columns if column is not None)
    images, uris = (column or [None] * num_rows for column in columns)
    for number, (image, uri) in enumerate(zip(images, uris, strict=True)):
        if isinstance(image, (bytes, bytearray, memoryview)) and len(image):
            yield bytes(image)
        elif isinstance(image, str) and image:
            try:
                yield base64.b64decode(image, validate=True)
            except ValueError as error:
                raise ValueError(f"row {number}: image is text but no base64; a path belongs to column uri") from error
        elif isinstance(uri, str) and uri:
            yield uri
        else:
            raise ValueError(f"row {number}: neither image (file bytes, in JSON as base64) nor uri (a path or s3://)")


def _path(uri: str) -> str:
    """Returns a local path or s3:// URI. Other schemes are refused, so that clients cannot make a server fetch URLs."""
    scheme, separator, rest = uri.partition("://")
    if separator and scheme not in ("file", "s3"):
        raise BadImage(f"{scheme}:// is not read here; send the file's bytes in column image, or a path or s3:// URI")
    return rest if scheme == "file" and separator else uri


def serving_sources() -> list[Path]:
    """The files of raycap that a served model imports, directly or through other modules.

    Imports inside functions count, because the model may call these functions.
    """
    root = project_root()
    sources: set[Path] = set()
    waiting = [Path(__file__).resolve()]
    while waiting:
        path = waiting.pop()
        if path in sources or not path.is_file():
            continue
        sources.add(path)
        waiting += [folder / "__init__.py" for folder in path.parents if root in folder.parents]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                waiting += [root / f"{name.replace('.', '/')}.py" for name in names]
    return sorted(sources)


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> CaptionService:
    """The function by which MLflow loads the model; MLflow fixes its name and arguments."""
    return CaptionService(load_bundle(Path(path)), **(model_config or {}))
