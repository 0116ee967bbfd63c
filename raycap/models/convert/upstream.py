"""Conversion of upstream checkpoints (ExpansionNet v2, Swin, the Meshed-Memory Transformer) to our names and shapes.

The references have a weight for each linear layer. Here linear layers that read the same input share one weight, whose
row blocks are in the order of the tables below.

The Meshed-Memory Transformer's table of positions must come from the checkpoint, because it was drawn at random. Its
first row, which belongs to padding, is left out. The empty buffers `running_*` are left out, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raycap.models.config import ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, Values, read_number
from raycap.models.convert.tensor_files import MAX_REASON, name_problems

PUBLISHED_HEADS = 8
PUBLISHED_WIDTH = 512
SWIN_PREFIX = "swin_transf."
MESHED_REGIONS = 50  # the number of regions to which the Meshed-Memory reference pads each image

# the names of our linear layers and norms, with those of the references whose rows they join
_FEED_FORWARD = {"feed_forward.inner": "ff.linear_1", "feed_forward.outer": "ff.linear_2"}
_ENCODER_LAYER = {
    "mixer.in_proj": "stc_exp.key_embed stc_exp.class_a_embed stc_exp.class_b_embed stc_exp.selector_embed",
    "mixer_norm": "norm_1",
    "feed_forward_norm": "norm_2",
    **_FEED_FORWARD,
}
_DECODER_LAYER = {
    "mixer.in_proj": "dyn_exp.cond_embed dyn_exp.key_linear dyn_exp.class_a_embed dyn_exp.class_b_embed "
    "dyn_exp.selector_embed",
    "mixer_norm": "norm_1",
    "cross_norm": "norm_2",
    "feed_forward_norm": "norm_3",
    "cross.query": "mha.Wq",
    "cross.key_value": "mha.Wk mha.Wv",
    "cross.out_proj": "mha.out_linear",
    **_FEED_FORWARD,
}
_MESHED_FEED_FORWARD = {
    "feed_forward.inner": "pwff.fc1",
    "feed_forward.outer": "pwff.fc2",
    "feed_forward_norm": "pwff.layer_norm",
}
_MESHED_ENCODER_LAYER = {
    "attention.in_proj": "mhatt.attention.fc_q mhatt.attention.fc_k mhatt.attention.fc_v",
    "attention.out_proj": "mhatt.attention.fc_o",
    "attention_norm": "mhatt.layer_norm",
    **_MESHED_FEED_FORWARD,
}
_MESHED_DECODER_LAYER = {
    "attention.in_proj": "self_att.attention.fc_q self_att.attention.fc_k self_att.attention.fc_v",
    "attention.out_proj": "self_att.attention.fc_o",
    "attention_norm": "self_att.layer_norm",
    "meshed.attention.query": "enc_att.attention.fc_q",
    "meshed.attention.key_value": "enc_att.attention.fc_k enc_att.attention.fc_v",
    "meshed.attention.out_proj": "enc_att.attention.fc_o",
    "meshed.norm": "enc_att.layer_norm",
    **_MESHED_FEED_FORWARD,
}


def linear_names(table: Mapping[str, str], ours: str = "", theirs: str = "") -> dict[str, tuple[str, ...]]:
    """Returns the upstream names for each of our weights and biases, from a table of layers and the names' prefixes."""
    return {
        f"{ours}{layer}.{part}": tuple(f"{theirs}{name}.{part}" for name in names.split())
        for layer, names in table.items()
        for part in ("weight", "bias")
    }


def upstream_names(config: ExpansionNetConfig) -> dict[str, tuple[str, ...]]:
    """Returns, for each parameter of our ExpansionNet v2, the upstream parameters whose rows it joins, in order."""
    names = linear_names({"input": "input_linear", "lm_head": "vocab_linear"})
    for side in ("encoder", "decoder"):
        names |= linear_names({"map": "reduce_group", "norm": "reduce_norm"}, f"{side}_sum.", f"{side[:3]}_")
    names["token_embedding.weight"] = ("out_embedder.embed.weight",)
    names["positions.weight"] = ("pos_encoder.weight",)
    for side, expansion, table, num_layers in (
        ("encoder", "stc_exp", _ENCODER_LAYER, config.num_encoder_layers),
        ("decoder", "dyn_exp", _DECODER_LAYER, config.num_decoder_layers),
    ):
        for index in range(num_layers):
            ours, theirs = f"{side}.{index}.", f"{side}s.{index}."
            names |= linear_names(table, ours, theirs)
            names[f"{ours}mixer.queries"] = (f"{theirs}{expansion}.query_exp_vectors.weight",)
            names[f"{ours}mixer.biases"] = (f"{theirs}{expansion}.bias_exp_vectors.weight",)
    return names


def join_rows(
    tensors: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], what: str, config: ModelConfig
) -> dict[str, Tensor]:
    """Builds our tensors. names: for each tensor, the upstream tensors whose rows it joins.

    what: the system's name for messages. Raises ValueError for missing or unknown names, and for rows that do not fit.
    """
    expected = {name for parts in names.values() for name in parts}
    problems = name_problems(expected, tensors.keys())
    if problems:
        raise ValueError(
            f"the checkpoint {problems}; expected the {len(expected)} tensors of {what} with "
            f"{config.num_encoder_layers} encoder and {config.num_decoder_layers} decoder layers"
        )
    state = {}
    for ours, parts in names.items():
        try:
            state[ours] = torch.cat([tensors[part] for part in parts])
        except RuntimeError as error:
            first = parts[0]
            raise ValueError(
                f"the checkpoint's {first!r} has shape {tuple(tensors[first].shape)}, which does not go with {what}"
            ) from error
    return state


@dataclass(frozen=True)
class Inferred:
    """The settings and sizes that an upstream captioner's tensors show, which are all but the groups and heads."""

    model: Values
    feature_width: int
    vocabulary_size: int
    max_positions: int
    total_expansion: int = 0  # number of static expansion vectors in all groups of an ExpansionNet v2


def shape_of(tensors: Mapping[str, Tensor], system: str, name: str, axes: int = 2) -> tuple[int, ...]:
    """Returns a tensor's shape. Raises ValueError if the tensor is missing or empty, or has another number of axes."""
    if name not in tensors:
        found = f"{len(tensors)} tensors (first {min(tensors, default='none')[:MAX_REASON]!r})"
        raise ValueError(
            f"the checkpoint lacks {name!r} of {system}; its {found} are of another system, or only a part"
        )
    shape = tuple(tensors[name].shape)
    if len(shape) != axes or not all(shape):
        raise ValueError(f"the checkpoint's {name!r} has shape {shape}; expected {axes} axes, none of them empty")
    return shape


def count_layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Counts the layers whose names are the prefix and a number."""
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})


def infer_expansionnet(tensors: Mapping[str, Tensor]) -> Inferred:
    """Infers the settings from the shapes. Raises ValueError if the tensors are not those of an ExpansionNet v2."""
    shape = partial(shape_of, tensors, "ExpansionNet v2")
    width, features = shape("input_linear.weight")
    return Inferred(
        model={
            "d_model": width,
            "d_ff": shape("encoders.0.ff.linear_1.weight")[0],
            "num_encoder_layers": count_layers(tensors, "encoders."),
            "num_decoder_layers": count_layers(tensors, "decoders."),
            "dynamic_expansion": shape("decoders.0.dyn_exp.query_exp_vectors.weight")[0],
        },
        total_expansion=shape("encoders.0.stc_exp.query_exp_vectors.weight")[0],
        feature_width=features,
        vocabulary_size=shape("vocab_linear.weight")[0],
        max_positions=shape("pos_encoder.weight")[0],
    )


def complete_settings(inferred: Inferred, given: Mapping[str, object]) -> Values:
    """Joins the checkpoint's and the given settings. Raises ValueError if they differ, or if the heads are unknown."""
    known = inferred.model | {"max_positions": inferred.max_positions}
    for key, value in given.items():
        if key in known and value is not None and read_number(value) != known[key]:
            raise ValueError(f"model.{key} is {value}, the checkpoint has {known[key]}; leave it out")
    width = inferred.model["d_model"]
    if given.get("num_heads") is None and width != PUBLISHED_WIDTH:
        raise ValueError(
            f"model.num_heads is missing: a checkpoint does not hold it, and its width {width} is "
            f"not the published {PUBLISHED_WIDTH} with {PUBLISHED_HEADS} heads; give --set model.num_heads=N"
        )
    settings = {key: value for key, value in given.items() if value is not None and key != "max_positions"}
    return {"num_heads": PUBLISHED_HEADS} | inferred.model | settings


def meshed_memory_names(config: MeshedMemoryConfig) -> dict[str, tuple[str, ...]]:
    """Returns, for each tensor of our Meshed-Memory Transformer, the upstream tensors whose rows it joins, in order."""
    names = linear_names({"input": "encoder.fc", "input_norm": "encoder.layer_norm"})
    names["token_embedding.weight"] = ("decoder.word_emb.weight",)
    names["lm_head.weight"] = ("decoder.fc.weight",)
    names["positions"] = ("decoder.pos_emb.weight",)
    for index in range(config.num_encoder_layers):
        ours, theirs = f"encoder.{index}.", f"encoder.layers.{index}."
        names |= linear_names(_MESHED_ENCODER_LAYER, ours, theirs)
        if config.num_memory_slots:
            names[f"{ours}attention.memory_keys"] = (f"{theirs}mhatt.attention.m_k",)
            names[f"{ours}attention.memory_values"] = (f"{theirs}mhatt.attention.m_v",)
    gates = {f"meshed.gates.{level}": f"fc_alpha{level + 1}" for level in range(config.num_encoder_layers)}
    for index in range(config.num_decoder_layers):
        names |= linear_names(_MESHED_DECODER_LAYER | gates, f"decoder.{index}.", f"decoder.layers.{index}.")
    return names


def convert_meshed_memory(tensors: Mapping[str, Tensor], config: MeshedMemoryConfig) -> dict[str, Tensor]:
    """Converts the upstream tensors to our names and shapes. Raises ValueError for missing and unknown names."""
    weights = {name: tensor for name, tensor in tensors.items() if ".running_" not in name}
    state = join_rows(weights, meshed_memory_names(config), "a Meshed-Memory Transformer", config)
    state["positions"] = state["positions"][1:]
    for name in [name for name in state if ".memory_" in name]:
        shape = tuple(state[name].shape)
        if shape[0] != 1:
            raise ValueError(f"the checkpoint's {name} has shape {shape}; expected (1, slots, width)")
        state[name] = state[name][0]
    return state


def infer_meshed_memory(tensors: Mapping[str, Tensor]) -> Inferred:
    """Infers the settings from the shapes. Raises ValueError if the tensors are not a Meshed-Memory Transformer's."""
    shape = partial(shape_of, tensors, "Meshed-Memory Transformer")
    width, features = shape("encoder.fc.weight")
    shape("decoder.layers.0.fc_alpha1.weight")  # raises ValueError if there is no gate
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
