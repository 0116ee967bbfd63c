"""A captioner as two functions of tensors, which can be exported: an encoder, and one step of the decoder.

The encoder computes once what all steps need of the images: the keys and values of each decoder layer's
cross-attention. A step reads this result and the decoder's cache, and returns log-probabilities and the cache with one
more token.

Shapes: B images, K beams per image, R = B*K rows (row b*K+k is beam k of image b), P rows of the step before,
t tokens in the cache before the step, N image tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import Features
from raycap.models.captioner import Captioner
from raycap.models.clustformer import ClusterCache, ClustFormer, MaskTokenClustFormer
from raycap.models.decoding.cache import RowSlots, TreeCache
from raycap.models.layers import EncoderDecoder

# Sizes of the example tensors. All sizes differ, so that the exporter cannot mistake one dimension for another. No size
# is 0 or 1, because torch.export would take these sizes for constants.
IMAGES, BEAMS, CACHED_ROWS, LENGTH = 2, 3, 5, 4


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of a graph. dims: names for the dimensions whose sizes may differ from the example's."""

    name: str
    example: Tensor
    dims: Mapping[int, str]


class EncoderGraph(nn.Module):
    """Computes what the steps need from pixels (B, 3, H, W) float32.

    The result is key_I and value_I (B, ..., H, N, D / H) for each decoder layer I. Raises ValueError for a captioner
    without a backbone.
    """

    def __init__(self, captioner: Captioner) -> None:
        super().__init__()
        if captioner.backbone is None:
            raise ValueError("a captioner without a backbone cannot be exported")
        self.captioner, self.model = captioner, cast(EncoderDecoder, captioner.model)
        self.side = captioner.backbone.config.image_size

    def inputs(self, images: int = IMAGES) -> list[GraphTensor]:
        """Returns the input with random pixels (torch's default generator)."""
        return [GraphTensor("image", torch.randn(images, 3, self.side, self.side), {0: "images"})]

    @torch.no_grad()
    def outputs(self) -> list[GraphTensor]:
        """Returns the tensors of the result."""
        names = [f"{kind}_{index}" for index in range(len(self.model.decoder)) for kind in ("key", "value")]
        found = self(self.inputs()[0].example)
        return [GraphTensor(name, each, {0: "images"}) for name, each in zip(names, found, strict=True)]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        (pixels,) = inputs
        memory = self.captioner.encode(Features(pixels.to(self.model.lm_head.weight.dtype)))
        return [part.contiguous() for layer in self.model.decoder for part in layer.project(memory.states)]


class StepGraph(nn.Module):
    """One decoding step: reads the newest token of each beam, and returns log-probabilities of the next words.

    The inputs are tokens (B, K), parents (B, K), the encoder's result, and the cache, whose tensors are (P, t, ...).
    A beam's parent is the row of the cache that the beam continues. Before the first step, the cache has B rows of 0
    tokens. The results are log-probabilities (B, K, V) in float32, and the new cache with tensors (R, t + 1, ...).
    """

    def __init__(self, encoder: EncoderGraph) -> None:
        super().__init__()
        self.model, self.memory = encoder.model, encoder.outputs()
        self.cache = self._find_cache()

    @torch.no_grad()
    def _find_cache(self) -> list[GraphTensor]:
        """Returns the tensors of the cache. Two steps are run to find the dimensions that grow with each step."""
        tokens = torch.zeros(IMAGES, 1, dtype=torch.int64)
        memory = {each.name: each.example for each in self.memory}
        _, first = self._step(tokens, memory, {})
        _, second = self._step(tokens, memory, first)
        found = []
        for name, each in first.items():
            sizes = zip(each.shape, second[name].shape, strict=True)
            grows = {index: "length" for index, (one, other) in enumerate(sizes) if index and one != other}
            shape = [LENGTH if index in grows else size for index, size in enumerate(each.shape)]
            example = each.new_zeros([CACHED_ROWS, *shape[1:]])
            found.append(GraphTensor(name, example, {0: "cached_rows"} | grows))
        return found

    def inputs(self) -> list[GraphTensor]:
        """Returns the inputs with examples."""
        beams = [  # each has a tensor of its own, because the exporter would join inputs that share a tensor
            GraphTensor(name, torch.zeros(IMAGES, BEAMS, dtype=torch.int64), {0: "images", 1: "beams"})
            for name in ("tokens", "parents")
        ]
        cache = [GraphTensor(f"cache_{each.name}", each.example, each.dims) for each in self.cache]
        return [*beams, *self.memory, *cache]

    @property
    def output_names(self) -> list[str]:
        return ["log_probs", *(f"next_{each.name}" for each in self.cache)]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        tokens, parents, *others = inputs
        memory = {each.name: tensor for each, tensor in zip(self.memory, others, strict=False)}
        cache = zip(self.cache, others[len(memory) :], strict=True)
        cached = {each.name: tensor.index_select(0, parents.flatten()) for each, tensor in cache}
        log_probs, new = self._step(tokens, memory, cached)
        return [log_probs, *(new[each.name] for each in self.cache)]

    def _step(
        self, tokens: Tensor, memory: Mapping[str, Tensor], cached: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns log-probabilities (B, K, V) and the new cache by name. cached: {} before the first step.

        The names in the cache are those of a layer's slots after the layer's index, such as 0_key_value.
        """
        layers, rows = range(len(self.model.decoder)), tokens.numel()
        slots = [RowSlots({}) for _ in layers]
        for key, each in cached.items():
            number, _, name = key.partition("_")
            slots[int(number)].cached[name] = each
        length = next(iter(cached.values())).shape[1] if cached else 0
        cross = [(memory[f"key_{index}"], memory[f"value_{index}"]) for index in layers]
        path = torch.arange(length, device=tokens.device).expand(rows, 1, -1)
        cache = TreeCache(rows, 1, cross, None, list(slots), path, length, length)
        logits, cache = self.model.step(tokens.flatten(), self._with_clusters(cache, cached))
        new = {f"{index}_{name}": each for index in layers for name, each in slots[index].cached.items()}
        if isinstance(cache, ClusterCache):
            for index, layer in enumerate(cast(ClustFormer, self.model).decoder):
                if layer.clusters is not None:
                    new |= {f"{index}_sums": cache.sums[index][:, 1:], f"{index}_row": cache.rows[index]}
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return log_probs.unflatten(0, tuple(tokens.shape)), new

    def _with_clusters(self, cache: TreeCache, cached: Mapping[str, Tensor]) -> TreeCache:
        """Returns the cache of a step. For Ada-ClustFormer, the cache also has the sums and rows of C in `cached`."""
        if not isinstance(self.model, ClustFormer) or isinstance(self.model, MaskTokenClustFormer):
            return cache
        key = cache.cross[0][0]
        empty = key.new_zeros(cache.images, 0, dtype=torch.promote_types(key.dtype, torch.float32))
        layers = range(len(cache.layers))
        sums = [F.pad(cached.get(f"{index}_sums", empty), (1, 0)) for index in layers]
        rows = [cached.get(f"{index}_row", empty) for index in layers]
        return ClusterCache(**vars(cache), sums=sums, rows=rows, window=self.model.config.window)
