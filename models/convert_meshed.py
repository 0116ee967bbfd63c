"""Conversion of the Meshed-Memory Transformer's upstream checkpoints.

The first row of upstream's positions belongs to padding and is left out. Its `running_*` buffers are empty, are used
only while it decodes, and are left out as well. The table of positions is not trained, but upstream draws it at random,
so that it must come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.config import MeshedMemoryConfig
from models.convert import Inferred, check_given_positions, complete_heads, join_rows


def upstream_names(config: MeshedMemoryConfig) -> dict[str, tuple[str, ...]]:
    """For each of our tensors, the upstream tensors whose rows it consists of, in order."""
    names: dict[str, tuple[str, ...]] = {"token_embedding.weight": ("decoder.word_emb.weight",)}
    names["lm_head.weight"] = ("decoder.fc.weight",)
    names["positions"] = ("decoder.pos_emb.weight",)

    def linear(ours: str, *theirs: str) -> None:
        for part in ("weight", "bias"):
            names[f"{ours}.{part}"] = tuple(f"{name}.{part}" for name in theirs)

    def feed_forward(ours: str, theirs: str) -> None:
        linear(f"{ours}.feed_forward.inner", f"{theirs}.pwff.fc1")
        linear(f"{ours}.feed_forward.outer", f"{theirs}.pwff.fc2")
        linear(f"{ours}.feed_forward_norm", f"{theirs}.pwff.layer_norm")

    def self_attention(ours: str, theirs: str) -> None:
        linear(f"{ours}.attention.in_proj", *(f"{theirs}.attention.fc_{part}" for part in "qkv"))
        linear(f"{ours}.attention.out_proj", f"{theirs}.attention.fc_o")
        linear(f"{ours}.attention_norm", f"{theirs}.layer_norm")

    linear("input", "encoder.fc")
    linear("input_norm", "encoder.layer_norm")
    for index in range(config.num_encoder_layers):
        ours, up = f"encoder.{index}", f"encoder.layers.{index}"
        self_attention(ours, f"{up}.mhatt")
        if config.num_memory_slots:
            names[f"{ours}.attention.memory_keys"] = (f"{up}.mhatt.attention.m_k",)
            names[f"{ours}.attention.memory_values"] = (f"{up}.mhatt.attention.m_v",)
        feed_forward(ours, up)
    for index in range(config.num_decoder_layers):
        ours, up = f"decoder.{index}", f"decoder.layers.{index}"
        self_attention(ours, f"{up}.self_att")
        linear(f"{ours}.meshed.attention.query", f"{up}.enc_att.attention.fc_q")
        linear(f"{ours}.meshed.attention.key_value", *(f"{up}.enc_att.attention.fc_{part}" for part in "kv"))
        linear(f"{ours}.meshed.attention.out_proj", f"{up}.enc_att.attention.fc_o")
        linear(f"{ours}.meshed.norm", f"{up}.enc_att.layer_norm")
        for level in range(config.num_encoder_layers):
            linear(f"{ours}.meshed.gates.{level}", f"{up}.fc_alpha{level + 1}")
        feed_forward(ours, up)
    return names


def convert_meshed_memory(tensors: Mapping[str, Tensor], config: MeshedMemoryConfig) -> dict[str, Tensor]:
    """The upstream tensors under our names. Raises ValueError for missing and unknown keys."""
    weights = {name: tensor for name, tensor in tensors.items() if ".running_" not in name}
    state = join_rows(weights, upstream_names(config), "a Meshed-Memory Transformer", config)
    state["positions"] = state["positions"][1:]
    for name, tensor in state.items():
        if ".memory_" in name and tensor.shape[0] != 1:
            raise ValueError(f"the checkpoint's {name} has shape {tuple(tensor.shape)}; expected (1, slots, width)")
    return {name: tensor[0] if ".memory_" in name else tensor for name, tensor in state.items()}


def infer_meshed_memory(tensors: Mapping[str, Tensor]) -> Inferred:
    """Reads the sizes, except the number of heads, off the shapes.

    Raises ValueError for tensors that are no Meshed-Memory Transformer.
    """

    def shape(name: str, axes: int = 2) -> tuple[int, ...]:
        if name not in tensors:
            raise ValueError(
                f"the checkpoint is no Meshed-Memory Transformer: it has no {name!r} among {len(tensors)} tensors"
            )
        size = tuple(tensors[name].shape)
        if len(size) != axes or not all(size):
            raise ValueError(f"the checkpoint's {name!r} has shape {size}; expected {axes} axes, none of them empty")
        return size

    def count_layers(side: str) -> int:
        return len({name.split(".")[2] for name in tensors if name.startswith(f"{side}.layers.")})

    width, features = shape("encoder.fc.weight")
    shape("decoder.layers.0.fc_alpha1.weight")  # checks that the first gate is present
    memory = "encoder.layers.0.mhatt.attention.m_k"
    return Inferred(
        model={
            "d_model": width,
            "d_ff": shape("encoder.layers.0.pwff.fc1.weight")[0],
            "num_encoder_layers": count_layers("encoder"),
            "num_decoder_layers": count_layers("decoder"),
            "num_memory_slots": shape(memory, 3)[1] if memory in tensors else 0,
            "connection": "meshed",
            "gates": "sigmoid",
            "attention": "dot_product",
        },
        feature_width=features,
        vocabulary_size=shape("decoder.fc.weight")[0],
        max_positions=shape("decoder.pos_emb.weight")[0] - 1,
    )


def complete_meshed_config(inferred: Inferred, given: Mapping[str, Any]) -> MeshedMemoryConfig:
    """The model's configuration from the checkpoint's shapes and the user's settings `given`.

    If the width is 512, the user need not give the heads: they are the published 8. Raises ValueError when a setting
    contradicts the checkpoint, and when the heads are missing.
    """
    for key, value in given.items():
        if key in inferred.model and value != inferred.model[key]:
            raise ValueError(f"model.{key} is {value}, the checkpoint has {inferred.model[key]}; leave it out")
    heads = complete_heads(inferred.model["d_model"], given)
    check_given_positions(inferred.max_positions, given)
    rest = {key: value for key, value in given.items() if key not in ("num_heads", "max_positions")}
    return MeshedMemoryConfig(**(inferred.model | rest | {"num_heads": heads}))
