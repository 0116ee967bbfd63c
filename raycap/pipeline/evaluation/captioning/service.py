"""Captions images with a model bundle, and explains captions, for every command, server and API.

A served model has few packages, so this module imports neither Ray nor MLflow.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from raycap.models.base import Features, Memory
from raycap.models.decoding.search import Captions
from raycap.models.explain.attribution import cross_attention, integrated_gradients, shares
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.image_sources import ImageSource, load_image
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle
from raycap.pipeline.evaluation.captioning.search import best_signals, collapsed, find_captions
from raycap.pipeline.evaluation.results import Explanation, ImageCaption, RankedCaption
from raycap.pipeline.storage.s3 import StorageOptions

BATCH_SIZE = 16  # images
NUM_DECODE_THREADS = 4
PRECISIONS = ("float32", "bfloat16")


class CaptionService:
    """Captions images with a bundle. Raises ValueError for a bundle without a backbone.

    beam_size, max_length: if they are None, the bundle's protocol decides. search: other keys of the section
    `evaluation` that replace recorded ones, such as {"ranking": "sum", "decoding": {"min_length": 6}}. precision: of
    `caption`, float32 or bfloat16 (autocast). Other methods compute in float32. device: cpu or cuda, to which the
    bundle is moved. If it is None, the GPU is used if torch sees one. The methods take pixels on any device.

    Several threads may call the methods, but only one computes at a time, because hooks of the model record attention.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        beam_size: int | None = None,
        max_length: int | None = None,
        search: Mapping[str, object] | None = None,
        precision: str = "float32",
        device: str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise UserError(f"precision is {precision!r}; expected {', '.join(PRECISIONS)}")
        if bundle.transform is None:
            raise ValueError("this bundle has no backbone: it captions stored features, not images")
        self.bundle, self.transform, self.precision = bundle, bundle.transform, precision
        given = {"beam_size": beam_size, "max_length": max_length}  # win over the same keys in `search`
        changes = dict(search or {}) | {key: value for key, value in given.items() if value is not None}
        self.search = self._limited(bundle.changed_search(changes))
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._computing = threading.RLock()
        bundle.captioner.to(self.device)

    def changed_search(self, changes: Mapping[str, object], num_results: int = 1) -> EvaluationSection:
        """The search of this service with changed keys and `num_results` captions per image. Raises UserError."""
        search = self.bundle.changed_search(changes, self.search)
        is_above_beam = num_results > search.beam_size and not search.decoding.sampling
        if num_results < 1 or is_above_beam:
            raise UserError(f"num_results is {num_results}; expected 1 to the beam's size, {search.beam_size}")
        return self._limited(search.model_copy(update={"num_results": num_results}))

    def _limited(self, search: EvaluationSection) -> EvaluationSection:
        """The search with `max_length` lowered to the model's number of positions."""
        positions = self.bundle.captioner.model.sizes.max_positions
        return search.model_copy(update={"max_length": min(search.max_length, positions)})

    def pixels(self, source: ImageSource, options: StorageOptions = StorageOptions()) -> Tensor:
        """The normalized pixels (3, H, W) of an image. source: see `load_image`. Raises BadImage with the reason."""
        return self.transform(load_image(source, options=options))

    def caption_images(
        self,
        sources: Iterable[ImageSource],
        search: EvaluationSection | None = None,
        *,
        batch_size: int | None = None,
        options: StorageOptions = StorageOptions(),
    ) -> Iterator[ImageCaption]:
        """Yields the captions of each image, in order. If an image cannot be read, `error` has the reason.

        search: a result of `changed_search`, by default the search of the service. batch_size: images per forward pass,
        by default BATCH_SIZE. Raises StorageError if the storage does not answer.
        """

        def load(source: ImageSource) -> Tensor | str:
            try:
                return self.pixels(source, options)
            except BadImage as error:
                return str(error)

        remaining = iter(sources)
        with ThreadPoolExecutor(NUM_DECODE_THREADS) as pool:
            while batch := list(itertools.islice(remaining, batch_size or BATCH_SIZE)):
                loaded = list(pool.map(load, batch))
                readable = [pixels for pixels in loaded if not isinstance(pixels, str)]
                captions = iter(self.caption(torch.stack(readable), search) if readable else [])
                for pixels in loaded:
                    yield ImageCaption(error=pixels) if isinstance(pixels, str) else next(captions)

    def caption(self, pixels: Tensor, search: EvaluationSection | None = None) -> list[ImageCaption]:
        """The captions of each image (B, 3, H, W), with the confidence in the best one if the bundle has it."""
        search = search or self.search
        with self._computing, torch.no_grad():
            # not inference mode, because autocast would then convert each weight again at every use
            confidence = self.bundle.confidence(search)
            signals: list[tuple[float, ...]] = []
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                captions, memory = self._search(pixels.to(self.device), search)
                if confidence is not None:
                    signals = best_signals(self.bundle.captioner.model, memory, captions)
            tokens, log_probs = captions.tokens.tolist(), captions.log_probs.sum(-1).tolist()
        found = []
        for image in range(len(tokens)):
            ranked = tuple(map(partial(self._ranked, search), tokens[image], log_probs[image]))
            judgement = None if confidence is None else confidence.judge(signals[image])
            found.append(ImageCaption(ranked) if judgement is None else ImageCaption(ranked, *judgement))
        return found

    def _search(self, pixels: Tensor, search: EvaluationSection) -> tuple[Captions, Memory]:
        """The best captions of each image (B, 3, H, W), and the encoded images."""
        captioner = self.bundle.captioner
        memory = captioner.encode(Features(pixels))
        # the digest of an image seeds its drawn captions, so that they do not depend on other images of the batch
        contents = (hashlib.sha256(image.cpu().numpy().tobytes()).hexdigest() for image in pixels)
        return find_captions(captioner.model, memory, search, self.bundle.vocabulary, contents), memory

    def _ranked(self, search: EvaluationSection, ids: list[int], log_prob: float) -> RankedCaption:
        text = self.bundle.vocabulary.decode(ids)
        text = collapsed(text) if search.collapse_repeats else text
        return RankedCaption(text, log_prob, self._words(text))

    def _words(self, caption: str) -> tuple[str, ...]:
        """The texts of a caption's tokens, words or pieces of words."""
        return tuple(part.strip() for part in self.bundle.vocabulary.parts(caption))

    def explain(
        self, pixels: Tensor, caption: str, head: int | None = None, with_attribution: bool = True
    ) -> Explanation:
        """Computes where the model looks in one image (3, H, W) for each word of a caption.

        head: the index, from 0, of the head whose attention is shown. If it is None, the mean over all heads is shown.
        with_attribution: also compute integrated gradients, which take minutes of a CPU core. Raises UserError if the
        model lacks the head, or if the caption has too many tokens.
        """
        model, backbone = self.bundle.captioner.model, self.bundle.captioner.backbone
        assert backbone is not None
        num_heads, max_tokens = model.config.num_heads, model.sizes.max_positions - 1
        vocabulary, words = self.bundle.vocabulary, self._words(caption)
        ids = torch.tensor(vocabulary.encode(vocabulary.tokens_of(caption)), device=self.device)  # with SOS and EOS
        count = len(ids) - 2
        if head is not None and not 0 <= head < num_heads:
            raise UserError(f"head is {head}; expected 0 to {num_heads - 1}")
        if count > max_tokens:
            raise UserError(f"caption has more than the {max_tokens} tokens that this model explains")
        with self._computing:
            with torch.no_grad():
                features = self.bundle.captioner.features(Features(pixels[None].to(self.device)))
                by_head = cross_attention(model, model.encode(features), ids[None])[-1, :, 0, :count]
            chosen = by_head.mean(0) if head is None else by_head[head]
            explanation = Explanation(caption, words, backbone.grid, chosen.float().cpu().numpy())
            if not with_attribution:
                return explanation
            attribution = shares(integrated_gradients(model, features, ids)[:count])
        return replace(explanation, attribution=attribution.cpu().numpy())
