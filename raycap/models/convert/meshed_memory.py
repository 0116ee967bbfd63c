"""Conversion of the Meshed-Memory Transformer's upstream checkpoints.

The first row of upstream's positions belongs to padding and is left out, as are the empty `running_*` buffers of its
decoding. The table of positions is not trained, but drawn at random, so that it must come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from raycap.models.config import MeshedMemoryConfig
from raycap.models.convert.upstream import Inferred, complete_settings, count_layers, join_rows, linear_names, shape_of

REFERENCE_REGIONS = 50  # to which the reference pads each image

# Our linear layers and norms, and upstream's.
_FEED_FORWARD = {
    "feed_forward.inner": "pwff.fc1",
    "feed_forward.outer": "pwff.fc2",
    "feed_forward_norm": "pwff.layer_norm",
}
_ENCODER_LAYER = {
    "attention.in_proj": "mhatt.attention.fc_q mhatt.attention.fc_k mhatt.attention.fc_v",
    "attention.out_proj": "mhatt.attention.fc_o",
    "attention_norm": "mhatt.layer_norm",
    **_FEED_FORWARD,
}
_DECODER_LAYER = {
    "attention.in_proj": "self_att.attention.fc_q self_att.attention.fc_k self_att.attention.fc_v",
    "attention.out_proj": "self_att.attention.fc_o",
    "attention_norm": "self_att.layer_norm",
    "meshed.attention.query": "enc_att.attention.fc_q",
    "meshed.attention.key_value": "enc_att.attention.fc_k enc_att.attention.fc_v",
    "meshed.attention.out_proj": "enc_att.attention.fc_o",
    "meshed.norm": "enc_att.layer_norm",
    **_FEED_FORWARD,
}


def upstream_names(config: MeshedMemoryConfig) -> dict[str, tuple[str, ...]]:
    """For each of our tensors, the upstream tensors whose rows it consists of, in order."""
    names = linear_names({"input": "encoder.fc", "input_norm": "encoder.layer_norm"})
    names["token_embedding.weight"] = ("decoder.word_emb.weight",)
    names["lm_head.weight"] = ("decoder.fc.weight",)
    names["positions"] = ("decoder.pos_emb.weight",)
    for index in range(config.num_encoder_layers):
        ours, theirs = f"encoder.{index}.", f"encoder.layers.{index}."
        names |= linear_names(_ENCODER_LAYER, ours, theirs)
        if config.num_memory_slots:
            names[f"{ours}attention.memory_keys"] = (f"{theirs}mhatt.attention.m_k",)
            names[f"{ours}attention.memory_values"] = (f"{theirs}mhatt.attention.m_v",)
    gates = {f"meshed.gates.{level}": f"fc_alpha{level + 1}" for level in range(config.num_encoder_layers)}
    for index in range(config.num_decoder_layers):
        names |= linear_names(_DECODER_LAYER | gates, f"decoder.{index}.", f"decoder.layers.{index}.")
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
    """Reads the sizes off the shapes. Raises ValueError for tensors that are no Meshed-Memory Transformer."""
    shape = partial(shape_of, tensors, "Meshed-Memory Transformer")
    width, features = shape("encoder.fc.weight")
    shape("decoder.layers.0.fc_alpha1.weight")  # checks that the first gate is present
    memory = "encoder.layers.0.mhatt.attention.m_k"
    return Inferred(
        model={
            "d_model": width,
            "d_ff": shape("encoder.layers.0.pwff.fc1.weight")[0],
            "num_encoder_layers": count_layers(tensors, "encoder.layers."),
            "num_decoder_layers": count_layers(tensors, "decoder.layers."),
            "num_memory_slots": shape(memory, axes=3)[1] if memory in tensors else 0,
            "connection": "meshed",
            "gates": "sigmoid",
            "attention": "dot_product",
        },
        feature_width=features,
        vocabulary_size=shape("decoder.fc.weight")[0],
        max_positions=shape("decoder.pos_emb.weight")[0] - 1,
    )


def complete_meshed_config(inferred: Inferred, given: Mapping[str, Any]) -> MeshedMemoryConfig:
    """The model's configuration from the checkpoint's shapes and the user's settings.

    Padding is attended unless a setting says otherwise, as when the published weights were trained. Raises ValueError
    as `complete_settings`.
    """
    regions = given.get("attended_regions", REFERENCE_REGIONS)
    return MeshedMemoryConfig(**(complete_settings(inferred, given) | {"attended_regions": regions}))
