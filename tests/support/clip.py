"""A tiny CLIP with random weights, and the merges of its tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor

MERGES = [("d", "e"), ("d", "o"), ("do", "g</w>"), ("r", "e"), ("re", "d</w>"), ("i", "n"), ("o", "n</w>")]
MERGES += [("p", "h"), ("ph", "o"), ("t", "o</w>"), ("pho", "to</w>")]
NUM_PIECES = 2 * 256 + len(MERGES) + 2
WIDTH, LAYERS, PATCH, IMAGE_SIZE, EMBEDDING, POSITIONS = 128, 2, 8, 32, 24, 16


def clip_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Tensors with OpenAI's names: both towers have 2 layers and 2 heads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + (0.02 if len(shape) == 1 else 0)

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + draw(WIDTH), f"{name}.bias": draw(WIDTH)}

    def block(name: str) -> dict[str, Tensor]:
        tensors = norm(f"{name}.ln_1") | norm(f"{name}.ln_2")
        tensors |= {f"{name}.attn.in_proj_weight": 3 * draw(3 * WIDTH, WIDTH)}
        tensors |= {f"{name}.attn.in_proj_bias": draw(3 * WIDTH)}
        sizes = {"attn.out_proj": (WIDTH, WIDTH), "mlp.c_fc": (4 * WIDTH, WIDTH), "mlp.c_proj": (WIDTH, 4 * WIDTH)}
        for part, shape in sizes.items():
            tensors |= {f"{name}.{part}.weight": 2 * draw(*shape), f"{name}.{part}.bias": draw(shape[0])}
        return tensors

    tensors = {
        "visual.class_embedding": draw(WIDTH),
        "visual.positional_embedding": draw((IMAGE_SIZE // PATCH) ** 2 + 1, WIDTH),
        "visual.conv1.weight": draw(WIDTH, 3, PATCH, PATCH),
        "visual.proj": draw(WIDTH, EMBEDDING),
        "token_embedding.weight": draw(NUM_PIECES, WIDTH),
        "positional_embedding": draw(POSITIONS, WIDTH),
        "text_projection": draw(WIDTH, EMBEDDING),
        "logit_scale": torch.tensor(4.6),
    }
    for name in ("visual.ln_pre", "visual.ln_post", "ln_final"):
        tensors |= norm(name)
    for number in range(LAYERS):
        tensors |= block(f"visual.transformer.resblocks.{number}") | block(f"transformer.resblocks.{number}")
    return tensors


def with_transformers_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model as the package transformers stores it."""
    named: dict[str, Tensor] = {"logit_scale": tensors["logit_scale"]}
    named["visual_projection.weight"] = tensors["visual.proj"].mT
    named["text_projection.weight"] = tensors["text_projection"].mT
    for tower, ours in (("vision_model", "visual."), ("text_model", "")):
        embeddings = f"{tower}.embeddings"
        named[f"{embeddings}.position_embedding.weight"] = tensors[f"{ours}positional_embedding"]
        named[f"{embeddings}.position_ids"] = torch.arange(5)
        for number in range(LAYERS):
            layer, block = f"{tower}.encoder.layers.{number}", f"{ours}transformer.resblocks.{number}"
            for end in ("weight", "bias"):
                parts = tensors[f"{block}.attn.in_proj_{end}"].chunk(3)
                named |= {f"{layer}.self_attn.{name}_proj.{end}": part for name, part in zip("qkv", parts, strict=True)}
                for theirs, name in (
                    ("self_attn.out_proj", "attn.out_proj"),
                    ("layer_norm1", "ln_1"),
                    ("layer_norm2", "ln_2"),
                    ("mlp.fc1", "mlp.c_fc"),
                    ("mlp.fc2", "mlp.c_proj"),
                ):
                    named[f"{layer}.{theirs}.{end}"] = tensors[f"{block}.{name}.{end}"]
    for end in ("weight", "bias"):
        named[f"vision_model.pre_layrnorm.{end}"] = tensors[f"visual.ln_pre.{end}"]
        named[f"vision_model.post_layernorm.{end}"] = tensors[f"visual.ln_post.{end}"]
        named[f"text_model.final_layer_norm.{end}"] = tensors[f"ln_final.{end}"]
    named["vision_model.embeddings.class_embedding"] = tensors["visual.class_embedding"]
    named["vision_model.embeddings.patch_embedding.weight"] = tensors["visual.conv1.weight"]
    named["text_model.embeddings.token_embedding.weight"] = tensors["token_embedding.weight"]
    return named
