"""Embeddings of images and texts in one space, with the weights of a CLIP (Radford et al. 2021, arXiv 2103.00020).

Both towers are Transformers with normalization before each sublayer. The image tower embeds patches and a class token,
whose final vector is projected. The text tower is causal, and the vector at the last token is projected. All sizes
follow from the shapes of the tensors. Shapes: B images or texts, T tokens, W the width of a tower, D embeddings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raycap.models.encoders.transform import ImageTransform

Activation = Literal["quick_gelu", "gelu"]

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP's training images
MAX_IMAGE_SIZE = 4096
MAX_GRID = 64  # patches in a row; published models have 37 at most
# Heads are 64 wide, except in the image towers of open_clip's ViT-H, ViT-g and ViT-bigG, here by the tower's width.
HEAD_WIDTH = 64
IMAGE_HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
# Values in published files that embeddings do not need
IGNORED = re.compile(r"logit_(scale|bias)|input_resolution|context_length|vocab_size|.*position_ids|(.*\.)?attn_mask")

# The names of the package transformers, and OpenAI's, which open_clip also uses
_TOWERS = {"vision_model.": "visual.", "text_model.": ""}
_RENAMED = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.": "conv1.",
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding.": "token_embedding.",
    "pre_layrnorm.": "ln_pre.",
    "post_layernorm.": "ln_post.",
    "final_layer_norm.": "ln_final.",
    "encoder.layers.": "transformer.resblocks.",
    "self_attn.": "attn.",
    "layer_norm1.": "ln_1.",
    "layer_norm2.": "ln_2.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
}


class DualEncoder:
    """Computes unit vectors (B, D) of images and of texts, for evaluation only.

    tensors: those of a published CLIP with Transformers as towers, with the names of OpenAI, open_clip or transformers.
    activation: OpenAI's models have quick_gelu, most of open_clip's gelu; the tensors do not tell. The computation is
    in float32. Raises ValueError for tensors that are no such model.
    """

    def __init__(self, tensors: Mapping[str, Tensor], activation: Activation, device: torch.device | str) -> None:
        self._activation, self._used = activation, set[str]()
        self.device = torch.device(device)
        try:
            named = {key: tensor for key, tensor in _with_openai_names(tensors).items() if not IGNORED.fullmatch(key)}
            self._tensors = {name: tensor.to(device, torch.float32) for name, tensor in named.items()}
            self._patch = self["visual.conv1.weight"].shape[-1]
            grid = math.isqrt(len(self["visual.positional_embedding"]) - 1)
            self.image_size = grid * self._patch
            self.num_positions, self.num_pieces = len(self["positional_embedding"]), len(self["token_embedding.weight"])
            if not 1 <= self.image_size <= MAX_IMAGE_SIZE:
                raise ValueError(f"images of {self.image_size} px; the limit is {MAX_IMAGE_SIZE}")
            if grid > MAX_GRID:
                raise ValueError(f"{grid} x {grid} patches; the limit is {MAX_GRID} x {MAX_GRID}")
            self.encode_images(torch.zeros(1, 3, self.image_size, self.image_size, device=device))
            self.encode_texts(torch.zeros(1, self.num_positions, dtype=torch.long, device=device))
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ValueError(f"the tensors are not those of a CLIP with Transformers as towers ({reason})") from error
        if unknown := sorted(named.keys() - self._used):
            raise ValueError(
                f"the tensors are not those of a CLIP: {unknown[0]} and {len(unknown) - 1} more are unknown"
            )

    def __getitem__(self, name: str) -> Tensor:
        self._used.add(name)
        return self._tensors[name]

    @property
    def transform(self) -> ImageTransform:
        """CLIP's transform: the shorter side bicubically to `image_size`, then the square in the middle."""
        return ImageTransform(self.image_size, MEAN, STD, "bicubic", self.image_size, keep_aspect=True)

    @torch.inference_mode()
    def encode_images(self, images: Tensor) -> Tensor:
        """The unit vectors (B, D) of normalized images (B, 3, H, W), with H and W of `image_size`."""
        patches = F.conv2d(images, self["visual.conv1.weight"], stride=self._patch).flatten(2).mT  # (B, patches, W)
        class_token = self["visual.class_embedding"].expand(len(images), 1, -1)
        tokens = torch.cat((class_token, patches), 1) + self["visual.positional_embedding"]
        head_width = IMAGE_HEAD_WIDTHS.get(tokens.shape[-1], HEAD_WIDTH)
        tokens = self._layers(self._norm(tokens, "visual.ln_pre"), "visual.transformer", head_width, is_causal=False)
        return F.normalize(self._norm(tokens[:, 0], "visual.ln_post") @ self["visual.proj"], dim=-1)

    @torch.inference_mode()
    def encode_texts(self, tokens: Tensor) -> Tensor:
        """The unit vectors (B, D) of texts, given as ids (B, T). The end of a text is the largest id in its row."""
        embedded = self["token_embedding.weight"][tokens] + self["positional_embedding"][: tokens.shape[1]]
        states = self._norm(self._layers(embedded, "transformer", HEAD_WIDTH, is_causal=True), "ln_final")
        ends = states[torch.arange(len(tokens), device=tokens.device), tokens.argmax(-1)]
        return F.normalize(ends @ self["text_projection"], dim=-1)

    def _layers(self, tokens: Tensor, name: str, head_width: int, *, is_causal: bool) -> Tensor:
        """The Transformer `name` of a tower: tokens (B, T, W) to (B, T, W)."""
        number = 0
        while (block := f"{name}.resblocks.{number}") + ".ln_1.weight" in self._tensors:
            normed = self._norm(tokens, f"{block}.ln_1")
            products = F.linear(normed, self[f"{block}.attn.in_proj_weight"], self[f"{block}.attn.in_proj_bias"])
            queries, keys, values = products.unflatten(-1, (3, -1, head_width)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
            tokens = tokens + self._linear(attended.transpose(1, 2).flatten(2), f"{block}.attn.out_proj")
            hidden = self._linear(self._norm(tokens, f"{block}.ln_2"), f"{block}.mlp.c_fc")
            hidden = hidden * torch.sigmoid(1.702 * hidden) if self._activation == "quick_gelu" else F.gelu(hidden)
            tokens = tokens + self._linear(hidden, f"{block}.mlp.c_proj")
            number += 1
        return tokens

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return F.linear(inputs, self[f"{name}.weight"], self[f"{name}.bias"])

    def _norm(self, inputs: Tensor, name: str) -> Tensor:
        return F.layer_norm(inputs, inputs.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"])


def _with_openai_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with OpenAI's names and shapes. Those that have these names already are unchanged."""
    if not any(name.startswith(tuple(_TOWERS)) for name in tensors):
        return dict(tensors)
    named = {}
    for name, tensor in tensors.items():
        for old, new in (_TOWERS | _RENAMED).items():
            name = name.replace(old, new)
        named[name] = tensor
    projections = {"visual_projection.weight": "visual.proj", "text_projection.weight": "text_projection"}
    for old, new in projections.items():
        if old in named:
            named[new] = named.pop(old).mT
    for name in [name for name in named if ".attn.q_proj." in name]:
        parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
        if named.keys() >= set(parts):
            named[name.replace(".q_proj.", ".in_proj_")] = torch.cat([named.pop(part) for part in parts])
    return named
