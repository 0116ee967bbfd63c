"""Hidden states of texts, with the weights of a BERT (arXiv 1810.04805) or a RoBERTa (arXiv 1907.11692).

Both are Transformer encoders with normalization after each sublayer and learned positions, which RoBERTa counts from
the id of its padding + 1. The names are those of the package transformers. Shapes: B texts, T tokens, W the width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Architecture = Literal["bert", "roberta"]

MAX_TOKENS = 512  # of a text; the published models have positions for this many
# The layers whose hidden states agree best with people's judgments of translations, as the package bert-score 0.3.12
# lists them: by architecture, layers, width and pieces of the published models
PUBLISHED_LAYERS = {
    ("bert", 12, 768, 30522): 9,  # bert-base-uncased
    ("bert", 12, 768, 119547): 9,  # bert-base-multilingual-cased
    ("bert", 12, 768, 21128): 8,  # bert-base-chinese
    ("bert", 24, 1024, 30522): 18,  # bert-large-uncased
    ("roberta", 6, 768, 50265): 5,  # distilroberta-base
    ("roberta", 12, 768, 50265): 10,  # roberta-base
    ("roberta", 24, 1024, 50265): 17,  # roberta-large
}
# The largest values that a config.json may have; published models have less than half
_LIMITS = {
    "vocab_size": 10**6,
    "hidden_size": 2**13,
    "num_hidden_layers": 200,
    "num_attention_heads": 2**9,
    "intermediate_size": 2**16,
    "max_position_embeddings": 2**16,
    "type_vocab_size": 100,
}
# Parts of published files that hidden states do not need: outputs of the pretraining or of a later task, and constants
_IGNORED = re.compile(r"(pooler|cls|lm_head|classifier)\..*|embeddings\.(position_ids|token_type_ids)")


@dataclass(frozen=True)
class TextEncoderSizes:
    """The sizes in the config.json of a BERT or RoBERTa. first_position: that of the first token."""

    architecture: Architecture
    num_pieces: int
    width: int
    num_layers: int
    num_heads: int
    d_ff: int
    num_positions: int
    num_types: int
    first_position: int
    norm_eps: float

    @classmethod
    def read(cls, values: Any) -> TextEncoderSizes:
        """The sizes in a config.json. Raises ValueError for another architecture and for values beyond the limits."""
        if not isinstance(values, dict) or values.get("model_type") not in ("bert", "roberta"):
            raise ValueError("its model_type is neither bert nor roberta")
        for key, expected in {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"its {key} is not {expected}")
        for key, limit in _LIMITS.items():
            if type(values.get(key)) is not int or not 1 <= values[key] <= limit:
                raise ValueError(f"its {key} is no number from 1 to {limit}")
        pieces, width, layers, heads, d_ff, positions, types = (values[key] for key in _LIMITS)
        is_roberta = values["model_type"] == "roberta"
        # transformers' defaults of the padding, for files without it
        eps, padding = values.get("layer_norm_eps"), values.get("pad_token_id", 1 if is_roberta else 0)
        if type(eps) is not float or not 0 <= eps <= 0.1:
            raise ValueError("its layer_norm_eps is no number from 0 to 0.1")
        if width % heads:
            raise ValueError(f"its hidden_size of {width} is no multiple of {heads} num_attention_heads")
        if type(padding) is not int or not 0 <= padding <= pieces:
            raise ValueError("its pad_token_id is no id")
        first = padding + 1 if is_roberta else 0
        if positions - first < 3:
            raise ValueError(f"its {positions} max_position_embeddings are too few")
        return cls(values["model_type"], pieces, width, layers, heads, d_ff, positions, types, first, eps)

    @property
    def max_tokens(self) -> int:
        """The longest text that has positions, with its two marks."""
        return min(self.num_positions - self.first_position, MAX_TOKENS)

    @property
    def published_layer(self) -> int | None:
        """The layer for BERTScore; None for a model that is not in PUBLISHED_LAYERS."""
        return PUBLISHED_LAYERS.get((self.architecture, self.num_layers, self.width, self.num_pieces))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        width, shapes = self.width, dict[str, tuple[int, ...]]()
        for name, rows in (("word", self.num_pieces), ("position", self.num_positions), ("token_type", self.num_types)):
            shapes[f"embeddings.{name}_embeddings.weight"] = rows, width
        linear, norms = dict[str, tuple[int, int]](), ["embeddings.LayerNorm"]
        for number in range(self.num_layers):
            layer = f"encoder.layer.{number}"
            linear |= {f"{layer}.attention.self.{part}": (width, width) for part in ("query", "key", "value")}
            linear |= {f"{layer}.attention.output.dense": (width, width)}
            linear |= {f"{layer}.intermediate.dense": (self.d_ff, width), f"{layer}.output.dense": (width, self.d_ff)}
            norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name, shape in linear.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes | {f"{name}.{end}": (width,) for name in norms for end in ("weight", "bias")}

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a published file by the names of `shapes`. They may be on the device "meta".

        Raises ValueError for a missing or unknown tensor, and for one of another shape.
        """
        named = dict[str, Tensor]()
        for original, tensor in tensors.items():
            name = original.removeprefix(f"{self.architecture}.")
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            if not _IGNORED.fullmatch(name):
                if name in named:
                    raise ValueError(f"the tensor {name[:100]!r} is there twice")
                named[name] = tensor
        shapes = self.shapes()
        if missing := sorted(shapes.keys() - named.keys()):
            raise ValueError(f"it lacks the tensor {missing[0]} and {len(missing) - 1} more")
        if unknown := sorted(named.keys() - shapes.keys()):
            raise ValueError(f"the tensor {unknown[0][:100]!r} and {len(unknown) - 1} more are unknown")
        for name, shape in shapes.items():
            if tuple(named[name].shape) != shape:
                raise ValueError(f"{name} has the shape {tuple(named[name].shape)}, and config.json gives {shape}")
        return named


class TextEncoder:
    """Computes hidden states of texts, for evaluation only, in float32.

    tensors: those of a published model. layer: the layers that are computed; 0 for the embeddings alone. Raises
    ValueError for tensors that are not those of a model of these sizes, and for a layer that it does not have.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], sizes: TextEncoderSizes, layer: int, device: torch.device | str
    ) -> None:
        if not 0 <= layer <= sizes.num_layers:
            raise ValueError(f"the layer {layer} is none of its {sizes.num_layers} layers")
        later = tuple(f"encoder.layer.{number}." for number in range(layer, sizes.num_layers))
        self._tensors = {
            name: tensor.to(device, torch.float32)
            for name, tensor in sizes.named(tensors).items()
            if not name.startswith(later)
        }
        self.sizes, self.layer, self.device = sizes, layer, torch.device(device)

    @torch.inference_mode()
    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The hidden states (B, T, W) of texts, given as ids (B, T), T at most `max_tokens`.

        lengths (B,): the tokens of each text; the states of later ones have no meaning.
        """
        num_tokens, first = ids.shape[1], self.sizes.first_position
        states = self._tensors["embeddings.word_embeddings.weight"][ids]
        states = states + self._tensors["embeddings.token_type_embeddings.weight"][0]
        states = states + self._tensors["embeddings.position_embeddings.weight"][first : first + num_tokens]
        states = self._norm(states, "embeddings")
        mask = (torch.arange(num_tokens, device=ids.device) < lengths[:, None])[:, None, None]  # (B, 1, 1, T)
        for number in range(self.layer):
            layer = f"encoder.layer.{number}"
            queries, keys, values = (
                self._linear(states, f"{layer}.attention.self.{part}").unflatten(-1, (self.sizes.num_heads, -1))
                for part in ("query", "key", "value")
            )
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
            )
            attended = self._linear(attended.transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
            states = self._norm(states + attended, f"{layer}.attention.output")
            hidden = F.gelu(self._linear(states, f"{layer}.intermediate.dense"))
            states = self._norm(states + self._linear(hidden, f"{layer}.output.dense"), f"{layer}.output")
        return states

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return F.linear(inputs, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _norm(self, inputs: Tensor, name: str) -> Tensor:
        weight, bias = (self._tensors[f"{name}.LayerNorm.{end}"] for end in ("weight", "bias"))
        return F.layer_norm(inputs, inputs.shape[-1:], weight, bias, self.sizes.norm_eps)
