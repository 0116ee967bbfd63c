"""The dual encoder against timm's image tower and a plain text tower."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

from raycap.models.encoders.dual_encoder import DualEncoder
from tests.support.clip import (
    EMBEDDING,
    IMAGE_SIZE,
    LAYERS,
    NUM_PIECES,
    PATCH,
    POSITIONS,
    WIDTH,
    clip_tensors,
    with_transformers_names,
)

BEGIN, END = NUM_PIECES - 2, NUM_PIECES - 1


def texts(lengths: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.zeros(len(lengths), POSITIONS, dtype=torch.long)
    for row, length in zip(tokens, lengths, strict=True):
        row[0], row[length + 1] = BEGIN, END
        row[1 : length + 1] = torch.randint(0, BEGIN, (length,), generator=generator)
    return tokens


@pytest.mark.parametrize(
    ("activation", "name"),
    [("quick_gelu", "vit_base_patch32_clip_quickgelu_224"), ("gelu", "vit_base_patch32_clip_224")],
)
def test_the_image_tower_is_timms(activation: Any, name: str) -> None:
    tensors = clip_tensors()
    network = timm.create_model(
        name, img_size=IMAGE_SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=LAYERS, num_heads=2, num_classes=EMBEDDING
    ).eval()
    network.load_state_dict(checkpoint_filter_fn(dict(tensors), network))
    images = torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(2))
    encoder = DualEncoder(tensors, activation, "cpu")
    with torch.no_grad():
        expected = torch.nn.functional.normalize(network(images), dim=-1)
    assert encoder.image_size == IMAGE_SIZE
    torch.testing.assert_close(encoder.encode_images(images), expected, rtol=1e-4, atol=1e-5)
    other = DualEncoder(tensors, "gelu" if activation == "quick_gelu" else "quick_gelu", "cpu")
    assert (other.encode_images(images) - expected).abs().max() > 1e-4


def plain_text(tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The embedding of one text: token by token, head by head, in float64."""
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centered = x - x.mean()
        return centered / (centered.square().mean() + 1e-5).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return t[f"{name}.weight"] @ x + t[f"{name}.bias"]

    end = tokens.index(END)
    states = [t["token_embedding.weight"][token] + t["positional_embedding"][i] for i, token in enumerate(tokens)]
    for number in range(LAYERS):
        block = f"transformer.resblocks.{number}"
        products = [
            t[f"{block}.attn.in_proj_weight"] @ norm(state, f"{block}.ln_1") + t[f"{block}.attn.in_proj_bias"]
            for state in states
        ]
        for i, state in enumerate(states):
            heads = []
            for head in range(WIDTH // 64):
                part = slice(64 * head, 64 * head + 64)
                query = products[i][part]
                scores = torch.stack([query @ products[j][WIDTH:][part] / math.sqrt(64) for j in range(i + 1)])
                weights = scores.softmax(0)
                heads.append(sum(weights[j] * products[j][2 * WIDTH :][part] for j in range(i + 1)))
            states[i] = state + linear(torch.cat(heads), f"{block}.attn.out_proj")
        for i, state in enumerate(states):
            hidden = linear(norm(state, f"{block}.ln_2"), f"{block}.mlp.c_fc")
            states[i] = state + linear(hidden / (1 + (-1.702 * hidden).exp()), f"{block}.mlp.c_proj")
    embedding = norm(states[end], "ln_final") @ t["text_projection"]
    return embedding / embedding.norm()


def test_the_text_tower_follows_its_definition() -> None:
    tensors, tokens = clip_tensors(), texts([0, 3, 9, POSITIONS - 2])
    found = DualEncoder(tensors, "quick_gelu", "cpu").encode_texts(tokens)
    expected = torch.stack([plain_text(tensors, row.tolist()) for row in tokens])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_positions_after_the_end_do_not_matter() -> None:
    encoder, tokens = DualEncoder(clip_tensors(), "quick_gelu", "cpu"), texts([2, 4])
    torch.testing.assert_close(encoder.encode_texts(tokens[:, :6]), encoder.encode_texts(tokens))


def test_names_of_the_package_transformers() -> None:
    tensors, tokens = clip_tensors(), texts([2, 5])
    ours = DualEncoder(tensors, "quick_gelu", "cpu")
    theirs = DualEncoder(with_transformers_names(tensors), "quick_gelu", "cpu")
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert torch.equal(ours.encode_texts(tokens), theirs.encode_texts(tokens))
    assert torch.equal(ours.encode_images(images), theirs.encode_images(images))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_projection": None}, "it lacks 'text_projection'"),
        ({"visual.conv1.weight": None}, "it lacks 'visual.conv1.weight'"),
        ({"visual.positional_embedding": torch.zeros(11, WIDTH)}, "not those of a CLIP"),
        ({"visual.positional_embedding": torch.zeros(10**6, 1)}, "the limit is 4096"),
        ({"visual.positional_embedding": torch.tensor(1.0)}, "not those of a CLIP"),
        (
            {"visual.conv1.weight": torch.zeros(8, 3, 1, 1), "visual.positional_embedding": torch.zeros(66**2 + 1, 1)},
            "64",
        ),
        (
            {
                f"text_model.encoder.layers.0.self_attn.{part}_proj.weight": torch.zeros(3, 3 + i)
                for i, part in enumerate("qkv")
            },
            "not those of a CLIP",
        ),
        ({"text_projection": torch.zeros(3, 3)}, "not those of a CLIP"),
        ({"visual.layer1.0.conv1.weight": torch.zeros(3)}, "visual.layer1.0.conv1.weight and 0 more are unknown"),
    ],
)
def test_other_tensors_are_refused(change: dict[str, Tensor | None], words: str) -> None:
    tensors = {name: tensor for name, tensor in (clip_tensors() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=words):
        DualEncoder(tensors, "quick_gelu", "cpu")
