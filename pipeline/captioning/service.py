"""Captions images with a model bundle; also the pyfunc model that MLflow loads (`predict`).

This module imports neither Ray nor MLflow, so that a served model needs few packages. The modules of raycap that it
imports are stored with the model (`serving_sources`).
"""

from __future__ import annotations

import ast
import base64
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.attention_maps import cross_attention
from models.attribution import Attribution, integrated_gradients
from models.base import Features, Memory
from models.cluster_groups import Clusters, find_clusters
from models.decoding import Captions
from pipeline.captioning.bundle import Bundle, load_bundle
from pipeline.captioning.captioning import best_signals, find_captions
from pipeline.captioning.protocols import collapsed
from pipeline.confidence.confidence import Judgement
from pipeline.data.images import BadImage, decode_image, read_image_file
from pipeline.errors import UserError
from pipeline.runtime.precision import measure_precisions
from pipeline.runtime.secrets import without_secrets
from pipeline.storage.path import StorageOptions, StoragePath, join, storage_path
from pipeline.untrusted.names import printable, relative_name
from pipeline.version import project_root

MAX_PIXELS = 100_000_000  # Larger images are refused.
MAX_IMAGE_BYTES = 32 * 2**20  # in column `image`; a decoder may take a microsecond for each byte of a hostile file
MAX_ROWS = 10_000  # of one call of `predict`; Spark sends this many at a time
BATCH_SIZE = 16  # images
PRECISIONS = ("auto", "float32", "bfloat16")
NOT_READABLE = "uri is not a readable image below uri_roots"  # one text for every reason, which may be a secret
logger = logging.getLogger(__name__)


class CaptionService:
    """Captions images with a bundle. Raises ValueError for a bundle without a backbone.

    beam_size, max_length: None for those of the bundle's protocol. search: other keys of the section `evaluation` that
    the protocol records, in place of the recorded ones, such as {"ranking": "sum", "decoding": {"min_length": 6}}.
    precision: float32, or bfloat16 for autocast in `caption`; all other methods compute in float32. With `auto`, the
    constructor times both, with one image or on a GPU with a batch, and uses the faster one. device: cpu or cuda;
    None for a GPU if torch sees one. The bundle is moved there, and the methods take pixels on any device.
    uri_roots: the local folders and s3:// prefixes below which `predict` may read images for its callers.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        beam_size: int | None = None,
        max_length: int | None = None,
        search: Mapping[str, Any] | None = None,
        precision: str = "float32",
        device: str | None = None,
        uri_roots: Sequence[str] = (),
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; expected {', '.join(PRECISIONS)}")
        if bundle.transform is None:
            raise ValueError("this bundle has no backbone: it captions stored features, not images")
        positions = bundle.captioner.model.sizes.max_positions
        given = {"beam_size": beam_size, "max_length": max_length}
        changes = dict(search or {}) | {key: value for key, value in given.items() if value is not None}
        self.bundle, self.search = bundle, bundle.changed_search(changes)
        self.search = self.search.model_copy(update={"max_length": min(self.search.max_length, positions)})
        self.transform, self.precision = bundle.transform, precision
        self.uri_roots = _roots(uri_roots)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        bundle.captioner.to(self.device)
        if precision == "auto":
            side, count = bundle.transform.image_size, BATCH_SIZE if self.device.type == "cuda" else 1
            images = torch.zeros(count, 3, side, side, device=self.device)
            times = measure_precisions(lambda: self._search(images, num_results=1), self.device, count)
            self.precision = times.fastest

    @property
    def num_prefix_tokens(self) -> int:
        """The number of image tokens before those of the grid, which `attention` and `attribution` count, too."""
        backbone = self.bundle.captioner.backbone
        return 0 if backbone is None else backbone.num_prefix_tokens

    def pixels(self, data: bytes) -> Tensor:
        """An image file's normalized pixels (3, H, W). Raises BadImage with the reason."""
        return self.transform(decode_image(data, MAX_PIXELS))

    def caption(self, pixels: Tensor, num_results: int = 1) -> list[list[tuple[str, float]]]:
        """The captions of each image (B, 3, H, W) with their log-probabilities, best first."""
        return [ranked for ranked, _ in self.judged_captions(pixels, num_results)]

    @torch.no_grad()
    def judged_captions(
        self, pixels: Tensor, num_results: int = 1
    ) -> list[tuple[list[tuple[str, float]], Judgement | None]]:
        """As `caption`, with the confidence in the best caption of each image.

        The confidence is None if the bundle has none for this search.
        """
        confidence = self.bundle.confidence(self.search.model_copy(update={"num_results": num_results}))
        signals: list[tuple[float, ...]] = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            captions, memory = self._search(pixels.to(self.device), num_results)
            if confidence is not None:
                signals = best_signals(self.bundle.captioner.model, memory, captions)
        log_probs = captions.log_probs.sum(-1).tolist()
        texts = [[self._text(ids) for ids in ranked] for ranked in captions.tokens.tolist()]
        found = [list(zip(*ranked, strict=True)) for ranked in zip(texts, log_probs, strict=True)]
        if confidence is None:
            return [(ranked, None) for ranked in found]
        return [(ranked, confidence.judge(each)) for ranked, each in zip(found, signals, strict=True)]

    def _search(self, pixels: Tensor, num_results: int) -> tuple[Captions, Memory]:
        """The best captions of each image (B, 3, H, W), and the encoded images."""
        captioner = self.bundle.captioner
        settings = self.search.model_copy(update={"num_results": num_results})
        memory = captioner.encode(Features(pixels))
        # drawn captions depend on the content of their image, and not on the other images of the batch
        contents = (hashlib.sha256(image.cpu().numpy().tobytes()).hexdigest() for image in pixels)
        return find_captions(captioner.model, memory, settings, self.bundle.vocabulary, contents), memory

    def _text(self, ids: list[int]) -> str:
        """A caption as text."""
        text = self.bundle.vocabulary.decode(ids)
        return collapsed(text) if self.search.collapse_repeats else text

    @torch.no_grad()
    def attention(self, pixels: Tensor, caption: str, head: int | None = None) -> Tensor:
        """The last layer's cross-attention (words, N) for each word of a caption of one image (3, H, W).

        head: the number of one head, from 0; None for the mean over all heads.
        """
        captioner, ids = self.bundle.captioner, self._ids(caption)
        memory = captioner.encode(Features(pixels[None].to(self.device)))
        by_head = cross_attention(captioner.model, memory, ids[None])[-1, :, 0, : len(ids) - 2]
        return by_head.mean(0) if head is None else by_head[head]

    def attribution(self, pixels: Tensor, caption: str) -> Attribution:
        """The contribution of each image token of one image (3, H, W) to the log-probability of each word."""
        captioner = self.bundle.captioner
        with torch.no_grad():
            features = captioner.features(Features(pixels[None].to(self.device)))
        ids = self._ids(caption)
        count = len(ids) - 2  # without SOS and EOS
        ids = ids[: captioner.model.sizes.max_positions + 1]
        return integrated_gradients(captioner.model, features, ids).head(count)

    @torch.no_grad()
    def clusters(self, pixels: Tensor, caption: str) -> Clusters | None:
        """The clusters of one image (3, H, W) and a caption's words; None for a model without clusters."""
        captioner, ids = self.bundle.captioner, self._ids(caption)[:-1]
        return find_clusters(captioner.model, captioner.features(Features(pixels[None].to(self.device))), ids)

    def _ids(self, caption: str) -> Tensor:
        """The ids (T,) of SOS, the caption's tokens and EOS."""
        vocabulary = self.bundle.vocabulary
        return torch.tensor(vocabulary.encode(vocabulary.tokens_of(caption)), device=self.device)

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The pyfunc interface: a caption and log_prob (natural logarithm, summed over the tokens) for each row.

        Column `image` holds the bytes of image files or base64 of them. Column `uri` holds paths and s3:// URIs below
        `uri_roots`, which are read for rows without `image`. Raises ValueError naming a row with neither, with another
        type, or with an invalid image.
        """
        captions: list[list[tuple[str, float]]] = []
        batch: list[Tensor] = []
        rows = _rows(model_input)
        for number, (image, uri) in enumerate(rows):
            batch.append(self._row_pixels(number, image, uri))
            if len(batch) == BATCH_SIZE or number == len(rows) - 1:
                captions += self.caption(torch.stack(batch))
                batch.clear()
        best = [ranked[0] for ranked in captions]
        return [{"caption": caption, "log_prob": log_prob} for caption, log_prob in best]

    def _row_pixels(self, number: int, image: Any, uri: Any) -> Tensor:
        """The pixels of a row from file bytes, base64 or a URI. ValueError naming the row when that fails."""
        try:
            return self._read_uri(uri) if image is None else self.pixels(_file_bytes(image))
        except BadImage as error:
            reason = str(error)
        raise ValueError(f"row {number}: {reason}")  # without the cause, because MLflow's answers contain all of it

    def _read_uri(self, uri: Any) -> Tensor:
        """The pixels of the image at a URI. Raises BadImage; only the log has the reason why it cannot be read."""
        if uri is None:
            raise BadImage("neither image (file bytes, in JSON as base64) nor uri (a path or s3://)")
        if not isinstance(uri, str):
            raise BadImage(f"uri is a {type(uri).__name__}; expected text")
        if not self.uri_roots:
            raise BadImage(
                "column uri is not enabled on this server; send the file's bytes in column image, or load the model "
                "with uri_roots in its model_config"
            )
        try:
            return self.pixels(read_image_file(_below_roots(uri, self.uri_roots)))
        except Exception as error:
            logger.warning(f"{printable(uri[:1000])}: {printable(without_secrets(str(error))[:1000])}")
            raise BadImage(NOT_READABLE) from error


def _rows(table: Any) -> list[tuple[Any, Any]]:
    """Each row's values in the columns image and uri; None for a missing value."""
    try:
        columns = {name: list(table[name]) for name in ("image", "uri") if name in table}
    except (TypeError, ValueError, KeyError, IndexError):
        columns = {}
    if not columns:
        raise ValueError("the input needs a column image (file bytes, in JSON as base64) or uri (a path or s3://)")
    num_rows = max(len(column) for column in columns.values())
    if num_rows > MAX_ROWS:
        raise ValueError(f"the input has {num_rows} rows; send at most {MAX_ROWS} at a time")
    if any(len(column) != num_rows for column in columns.values()):
        raise ValueError("the columns image and uri have different lengths")
    images, uris = ([_value(each) for each in columns.get(name, [None] * num_rows)] for name in ("image", "uri"))
    return list(zip(images, uris, strict=True))


def _value(value: Any) -> Any:
    """None for a value that is missing: pandas has NaN for it."""
    is_missing = isinstance(value, float) and math.isnan(value)
    return None if is_missing or (isinstance(value, (str, bytes, bytearray)) and not value) else value


def _file_bytes(image: Any) -> bytes:
    """The bytes of a value of column image. Raises BadImage for other types, and for too many bytes."""
    if not isinstance(image, (str, bytes, bytearray, memoryview)):
        raise BadImage(f"image is a {type(image).__name__}; expected file bytes, in JSON as base64")
    if len(image) > (4 * MAX_IMAGE_BYTES / 3 + 4 if isinstance(image, str) else MAX_IMAGE_BYTES):
        raise BadImage(f"image is larger than {MAX_IMAGE_BYTES} bytes")
    if not isinstance(image, str):
        return bytes(image)
    try:
        return base64.b64decode(image, validate=True)
    except ValueError as error:
        raise BadImage("image is text but no base64; a path belongs to column uri") from error


def _roots(roots: Any) -> tuple[StoragePath, ...]:
    """The folders and prefixes of `uri_roots`. Raises ValueError for anything else."""
    if not isinstance(roots, (list, tuple)) or not all(isinstance(root, str) and root.strip() for root in roots):
        raise ValueError(f"uri_roots is {roots!r}; expected a list of folders and s3:// prefixes")
    return tuple(storage_path(root, StorageOptions().hasty) for root in roots)


def _below_roots(uri: str, roots: Sequence[StoragePath]) -> StoragePath:
    """The place of a URI below one of the roots. Raises UserError or OSError if it is elsewhere, also through a link.

    Nothing is opened for a URI that does not begin with a root.
    """
    place = uri.removeprefix("file://")
    for root in roots:
        prefix = join(root.uri, "")
        if place.startswith(prefix):
            path = root / relative_name(place.removeprefix(prefix), "uri")
            if path.is_remote:
                return path
            resolved = path.path.resolve(strict=True)
            if resolved.is_relative_to(root.path.resolve()):
                return StoragePath(str(resolved))
    raise UserError("it is not below uri_roots")


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
