"""Configurations of captioners, backbones and decoding. This module does not import torch: it is read quickly.

Annotations bound a number from above, for pydantic. `__post_init__` checks all that a model needs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from annotated_types import Le, MaxLen

from raycap.models.values import (
    NUMBER,
    TEXT,
    Count,
    Decimal,
    Groups,
    Layers,
    Pixels,
    Text,
    Whole,
    Width,
    Words,
)

# a mapping of plain values by name, as YAML and JSON give it
Values = dict[str, Any]


class Identity(Enum):
    """How a configuration key enters a run's identity (`pipeline.runs.identity`). Unmarked keys enter by value."""

    IGNORED = "not at all: it decides where, when and with which resources the result is computed"
    WITH_BACKBONE = "by its value where features come from a backbone"
    WITH_REGIONS = "by its value where features come from a detector"
    FILE = "by the content of the file that it names"
    LARGE_FILE = "by the size and both ends of the file that it names"
    BUNDLE = "by the weights and the vocabulary of the bundle that it names"
    TEXT_ENCODER = "by the contents of a text encoder's files in the folder that it names"


@dataclass(frozen=True)
class ModelConfig:
    """The settings of every captioner; each system adds more. Raises ValueError for sizes that do not fit.

    `word_vectors`: a text file in GloVe's format with vectors of `word_vector_width` numbers. The decoder uses them at
    its input and output (`models/layers.py`) and trains them only with `train_word_vectors`. Bundles contain
    the vectors, so that a bundle's configuration has a width but needs no file.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str = ""
    d_model: Width = 512
    d_ff: Width = 2048
    num_heads: Count = 8
    num_encoder_layers: Layers = 3
    num_decoder_layers: Layers = 3
    max_positions: Count | None = None
    """None: the longest training caption with SOS and EOS."""
    dropout: Decimal = 0.1
    word_vectors: Annotated[Text | None, Identity.FILE] = None
    word_vector_width: Width | None = None
    train_word_vectors: bool = False

    def __post_init__(self) -> None:
        for key, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, key) not in get_args(kind):
                choices = " or ".join(repr(value) for value in get_args(kind))
                raise ValueError(f"model.{key} is {getattr(self, key)!r}; it must be {choices}")
        self._require_at_least(1, "d_model", "d_ff", "num_heads", "num_encoder_layers", "num_decoder_layers")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"model.d_model = {self.d_model} does not divide by model.num_heads = {self.num_heads} "
                f"(remainder {self.d_model % self.num_heads}); choose heads that divide the width"
            )
        self._require_at_least(1, "max_positions", message_suffix=", or null for the longest caption's")
        self._require_at_least(1, "word_vector_width", message_suffix=", or null for vectors of the model's own")
        if self.word_vectors is not None and self.word_vector_width is None:
            raise ValueError(
                "model.word_vectors needs model.word_vector_width, how many numbers its vectors have (GloVe: 50 to 300)"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def needs_boxes(self) -> bool:
        """Whether the model arranges image tokens by the boxes of regions."""
        return False

    @property
    def needs_grid(self) -> bool:
        """Whether the model takes neighboring image tokens for neighbors in the picture."""
        return False

    def check_inputs(self, regions: bool) -> None:
        """Raises ValueError when the model cannot take region features, or grid features where `regions` is False."""

    def _require_at_least(self, least: int, *keys: str, message_suffix: str = "") -> None:
        """Raises ValueError when one of the settings `keys` is set and below `least`."""
        for key in keys:
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"model.{key} is {value}; it must be {least} or more{message_suffix}")


@dataclass(frozen=True)
class ExpansionNetConfig(ModelConfig):
    """ExpansionNet v2, and the papers' baseline Transformer, which ignores the expansion settings.

    The encoder has static expansion with the groups `static_expansion` (G in the paper), or bidirectional dynamic
    expansion with `encoder_dynamic_expansion` vectors per token (N_E), or attention when both are None. The decoder has
    causal dynamic expansion with `dynamic_expansion` vectors per token, or attention when it is None. These settings
    cover all rows of the paper's Table I.

    `expansion_dropout`: "reference" drops single elements of the expanded vectors, as in the paper, and needs
    the expanded sequence in memory. "factorized" drops whole expanded vectors and takes less time and memory; no score
    of it is published. Evaluation is the same for both.
    """

    name: Literal["expansionnet_v2", "transformer"] = "expansionnet_v2"
    static_expansion: Annotated[tuple[Groups, ...], MaxLen(100)] | None = (32, 64, 128, 256, 512)
    dynamic_expansion: Count | None = 16
    encoder_dynamic_expansion: Count | None = None
    dropout: Decimal = 0.3
    expansion_dropout: Literal["reference", "factorized"] = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least(1, "dynamic_expansion", "encoder_dynamic_expansion", message_suffix=", or null for none")
        if self.static_expansion is not None:
            groups = list(self.static_expansion)
            if not groups:
                raise ValueError("model.static_expansion is an empty list; name one group or more, or null for none")
            if min(groups) < 1:
                raise ValueError(
                    f"model.static_expansion = {groups} holds {min(groups)}; every group must be 1 or more"
                )
            if self.encoder_dynamic_expansion is not None and self.name != "transformer":
                raise ValueError(
                    f"model.static_expansion = {groups} and model.encoder_dynamic_expansion = "
                    f"{self.encoder_dynamic_expansion} are both set; the encoder has one of them: set the other to null"
                )


@dataclass(frozen=True)
class MeshedMemoryConfig(ModelConfig):
    """The Meshed-Memory Transformer. Its settings cover all rows of the paper's ablations (Tables 1, 6 and 7).

    `connection`: which encoder levels a decoder layer attends to: all through gates ("meshed"), the level with the
    layer's number ("one_to_one"), or the last level ("last", as in the plain Transformer).

    `attended_regions`: every image gets this number of regions, and the attention includes those that are padding, as
    in the reference, whose published weights were trained so with 50. None masks padding.
    """

    name: Literal["meshed_memory"] = "meshed_memory"
    num_memory_slots: Count = 40
    """Learned keys and values in addition to those of the regions; 0 for none."""
    connection: Literal["meshed", "one_to_one", "last"] = "meshed"
    gates: Literal["sigmoid", "softmax"] = "sigmoid"
    """How meshed levels are weighted; softmax is over the levels."""
    attention: Literal["dot_product", "on_attention"] = "dot_product"
    """Of every attention in encoder and decoder."""
    attended_regions: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least(0, "num_memory_slots")
        self._require_at_least(1, "attended_regions", message_suffix=", or null to mask padding")
        if self.connection == "one_to_one" and self.num_encoder_layers != self.num_decoder_layers:
            raise ValueError(
                f"model.connection is 'one_to_one' with {self.num_encoder_layers} encoder and "
                f"{self.num_decoder_layers} decoder layers; it needs equally many"
            )

    def check_inputs(self, regions: bool) -> None:
        if not regions and self.attended_regions is not None:
            raise ValueError(
                f"model.attended_regions = {self.attended_regions} pads the regions of a detector, and the features "
                "are a grid; set it to null, or name the detector's file as features.hdf5"
            )


@dataclass(frozen=True)
class ClustFormerConfig(ModelConfig):
    """Ada-ClustFormer. Its settings cover all rows of the paper's ablation (Table 1); C is the clustering matrix.

    `attention`: how C is applied: "product" multiplies the attention weights, "renormalized" also makes them sum to 1
    again, "literal" takes a second softmax of the product, as equation 2 is printed.

    `decoder`: "causal", where a word attends to itself and earlier words, or "mask_token" as in the published code,
    where each word is predicted from a bidirectional pass over the words before it (`models/clustformer.py`).
    """

    name: Literal["clustformer"] = "clustformer"
    num_encoder_layers: Layers = 6
    num_decoder_layers: Layers = 6
    encoder_clusters: Literal["2d", "1d", "none"] = "2d"
    """C of the image tokens; 1d: of their rows joined to one."""
    decoder_clusters: Literal["1d", "none"] = "1d"
    """C of the words."""
    clustered_encoder_layers: tuple[Layers, ...] | None = None
    """Numbers, from 1, of the layers that have C; None: all."""
    clustered_decoder_layers: tuple[Layers, ...] | None = None
    stacking: Literal["matrix", "conditional", "none"] = "matrix"
    """What equation 6 stacks (`models/clustformer.py`)."""
    sampling: Count = 2
    """Down-up sampling rate of the encoder."""
    window: Count | None = None
    """Size of a fixed window that replaces C everywhere."""
    attention: Literal["product", "renormalized", "literal"] = "product"
    norm: Literal["pre", "post"] = "pre"
    inputs: Literal["grid", "regions"] = "grid"
    grid: tuple[Count, Count] | None = None
    """[rows, columns]; None: a square."""
    region_rows: Count = 6
    """Rows of the grid into which regions are arranged by their boxes."""
    decoder: Literal["causal", "mask_token"] = "causal"
    activation: Literal["relu", "gelu"] = "relu"
    """Of the feed-forward sublayers."""
    input_dropout: Decimal | None = None
    """Of the image tokens, also where a stage sets dropout; None: as dropout."""
    cross_attention_dropout: bool = False
    """Whether dropout reaches the weights of cross-attention too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_dropout is not None and not 0.0 <= self.input_dropout < 1.0:
            raise ValueError(
                f"model.input_dropout is {self.input_dropout}; it must be at least 0 and below 1, or null for "
                "model.dropout"
            )
        self._require_at_least(1, "sampling", "region_rows")
        self._require_at_least(0, "window", message_suffix=", or null for an adaptive one")
        for side, layers in (("encoder", self.num_encoder_layers), ("decoder", self.num_decoder_layers)):
            chosen = getattr(self, f"clustered_{side}_layers")
            if chosen is not None and (len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(1, layers + 1))):
                raise ValueError(
                    f"model.clustered_{side}_layers = {list(chosen)} must be different numbers from 1 to {layers}"
                )
        if self.grid is not None and (len(self.grid) != 2 or min(self.grid) < 1):
            raise ValueError(f"model.grid = {list(self.grid)} must be [rows, columns], both 1 or more")
        if self.inputs == "regions" and self.sampling > 1:
            raise ValueError(
                f"model.sampling = {self.sampling} with model.inputs = regions: neighbors among regions are no "
                "evenly spaced cells to pool; set model.sampling to 1"
            )
        if self.inputs == "regions" and self.grid is not None:
            raise ValueError("model.grid is for grid features; with model.inputs = regions set model.region_rows")

    @property
    def needs_boxes(self) -> bool:
        return self.inputs == "regions" and self.encoder_clusters != "none"

    @property
    def needs_grid(self) -> bool:
        return self.inputs == "grid" and self.encoder_clusters != "none"

    def check_inputs(self, regions: bool) -> None:
        if regions and self.inputs == "grid":
            raise ValueError("model.inputs = grid, and features.hdf5 brings regions; set model.inputs to regions")
        if not regions and self.inputs == "regions":
            raise ValueError(
                "model.inputs = regions needs a detector's features: name their file as features.hdf5, or set "
                "model.inputs to grid"
            )


# The systems by `model.name`. A new captioner needs a configuration class in this file, an entry here, a file with its
# model, and an entry in `models/registry.py`. Configuration files and searches can then use it.
MODEL_CONFIGS: dict[str, type[ModelConfig]] = {
    "expansionnet_v2": ExpansionNetConfig,
    "transformer": ExpansionNetConfig,
    "meshed_memory": MeshedMemoryConfig,
    "clustformer": ClustFormerConfig,
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that the data decide, and the ids of the special tokens. Raises ValueError for impossible values."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    feature_width: Width
    vocabulary_size: Words
    max_positions: Count
    sos: Whole
    eos: Whole
    pad: Whole

    def __post_init__(self) -> None:
        for key in ("feature_width", "vocabulary_size", "max_positions"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be 1 or more")
        for key in ("sos", "eos", "pad"):
            if not 0 <= getattr(self, key) < self.vocabulary_size:
                raise ValueError(
                    f"the id of {key.upper()} is {getattr(self, key)}, outside the vocabulary of "
                    f"{self.vocabulary_size} words"
                )


SWIN_PREFIX = "swin_"  # of timm's names for Swin (version 1)
PATCH_SIZE = 4  # pixels, of each swin_* of timm
NUM_SWIN_STAGES = 4  # of each swin_* of timm
MAX_BLOCKS = 200  # Swin-L has 24
MAX_STAGES = 8  # each stage doubles the width and halves the grid's sides
SIZE_KEYS = ("embed_dim", "depths", "num_heads", "window_size", "patch_size")  # replace sizes of the named model
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]*)?")


@dataclass(frozen=True)
class BackboneConfig:
    """A timm model, the source of its weights, its image tokens, and sizes that replace those of the named model.

    name: "architecture" or "architecture.tag", as timm lists them.
    weights: "none" (drawn at random), "pretrained" (downloaded by timm) or the path of a checkpoint in timm's naming or
    one that timm converts, such as the original Swin's (.safetensors, or a PyTorch file with tensors only).
    embed_dim to patch_size: `encoders.backbone` lists the families that take them. A model without stages takes one
    number of `depths` and of `num_heads`.
    prefix_tokens: "keep" puts class and register tokens, if the model has any, before those of the grid.
    pool: the side of the squares of grid tokens that are averaged to one.
    transform: "auto" (the named model's; for swin_* the reference's), "squash" (the named model's interpolation and
    statistics, without cropping) or "reference" (bilinear without cropping, ImageNet's statistics).
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    name: Annotated[str, MaxLen(100), TEXT] = "swin_large_patch4_window12_384"
    weights: Annotated[Text, Identity.FILE] = "none"
    image_size: Pixels = 384
    embed_dim: Width | None = None
    depths: Annotated[tuple[Layers, ...], MaxLen(MAX_STAGES)] | None = None
    num_heads: Annotated[tuple[Count, ...], MaxLen(MAX_STAGES)] | None = None
    window_size: Count | None = None
    drop_path: Decimal = 0.0
    gradient_checkpointing: Annotated[Literal["auto", True, False], Identity.IGNORED] = "auto"
    """Compute activations again in the backward pass instead of keeping them; auto: if the memory does not suffice."""
    patch_size: Pixels | None = None
    prefix_tokens: Literal["drop", "keep"] = "drop"
    pool: Count = 1
    transform: Literal["auto", "squash", "reference"] = "auto"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"backbone.name is {self.name!r}; expected a timm name of lower-case letters, digits and _, with a dot "
                "before a tag, such as vit_base_patch16_clip_224.openai"
            )
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"backbone.drop_path is {self.drop_path}; it must be at least 0 and below 1")
        choices: dict[str, tuple[object, ...]] = {
            "gradient_checkpointing": (True, False, "auto"),
            "prefix_tokens": ("drop", "keep"),
            "transform": ("auto", "squash", "reference"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                names = [str(choice).lower() for choice in allowed]
                raise ValueError(
                    f"backbone.{key} is {getattr(self, key)!r}; it must be {', '.join(names[:-1])} or {names[-1]}"
                )
        if self.image_size < 1 or self.pool < 1:
            raise ValueError(f"backbone.image_size is {self.image_size} and pool {self.pool}; both must be 1 or more")
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises ValueError for sizes that no model has, or that no Swin of timm has if one is named."""
        for key in SIZE_KEYS:
            value = getattr(self, key)
            numbers = value if isinstance(value, tuple | list) else (value,)
            if value is not None and (not numbers or min(numbers) < 1):
                raise ValueError(f"backbone.{key} is {value}; it must be 1 or more, or null for the named model's")
        if sum(self.depths or ()) > MAX_BLOCKS:
            raise ValueError(f"backbone.depths asks for {sum(self.depths or ())} blocks; the limit is {MAX_BLOCKS}")
        if not self.is_swin:
            return
        if self.patch_size not in (None, PATCH_SIZE):
            raise ValueError(f"backbone.patch_size is {self.patch_size}; a Swin has {PATCH_SIZE}: leave it out")
        if self.image_size < PATCH_SIZE or self.image_size % PATCH_SIZE:
            raise ValueError(f"backbone.image_size is {self.image_size}; it must be a multiple of the patches' 4 px")
        num_stages = NUM_SWIN_STAGES if self.depths is None else len(self.depths)
        num_heads = NUM_SWIN_STAGES if self.num_heads is None else len(self.num_heads)
        if num_stages > num_heads:
            raise ValueError(
                f"backbone.depths asks for {num_stages} stages, and backbone.num_heads has {num_heads} numbers; give "
                "one for each stage"
            )

    @property
    def is_swin(self) -> bool:
        """Whether the model is a Swin (version 1), the reference's backbone."""
        return self.name.startswith(SWIN_PREFIX)

    def feature_settings(self, *ignored: str) -> dict[str, Any]:
        """The keys and values, without those in `ignored`. Descriptions of stored results contain them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ignored}


SAMPLING_KEYS = ("temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True)
class Decoding:
    """Rules for words, diverse beams and sampling. Raises ValueError for values that make no sense.

    suppress_unk: no caption has UNK. min_length: no caption has fewer tokens, which count SOS and EOS. no_repeat_ngram:
    no caption has the same n tokens twice, for this n. no_open_endings: no caption ends with a word that needs another
    word after it, such as "a" or "with".

    beam_groups: the beams are this many groups, which search one after the other (Vijayakumar et al. 2016,
    arXiv 1610.02424). A group prefers other words than earlier groups: the log-probability of a word is lowered by
    `diversity` for each beam of an earlier group that has chosen it at the same step. The paper recommends a diversity
    from 0.2 to 0.8 (section 5).

    sampling: captions are drawn, without beams, from softmax(logits / temperature), restricted to the `top_k` most
    probable words and then to the fewest words whose probabilities add up to `top_p` (Holtzman et al. 2019,
    arXiv 1904.09751). The draws depend on `seed` and the image only.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    suppress_unk: bool = True
    min_length: Count = 2
    no_repeat_ngram: Count | None = None
    no_open_endings: bool = False
    beam_groups: Count = 1
    diversity: Decimal = 0.5
    sampling: bool = False
    temperature: Decimal = 1.0
    top_k: Words | None = None
    top_p: Decimal | None = None
    seed: Annotated[int, Le(2**62 - 1), NUMBER] = 0

    def __post_init__(self) -> None:
        least = {"min_length": 2, "no_repeat_ngram": 1, "beam_groups": 1, "top_k": 1, "seed": 0, "diversity": 0}
        for key, value in least.items():
            found = getattr(self, key)
            _require(found is None or value <= found < math.inf, key, found, f"{value} or more")
        _require(0 < self.temperature < math.inf, "temperature", self.temperature, "above 0")
        _require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        if self.sampling and self.beam_groups > 1:
            raise ValueError(
                "evaluation.decoding.sampling draws captions without beams, and evaluation.decoding.beam_groups is "
                f"{self.beam_groups}; set one of them only"
            )
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for key in changed & set(SAMPLING_KEYS) if not self.sampling else ():
            raise ValueError(
                f"evaluation.decoding.{key} is for drawn captions, and evaluation.decoding.sampling is false; set it "
                f"to true, or leave {key} out"
            )
        if "diversity" in changed and self.beam_groups == 1:
            raise ValueError(
                "evaluation.decoding.diversity is for groups of beams, and evaluation.decoding.beam_groups is 1; set "
                "it to 2 or more, or leave diversity out"
            )

    @property
    def signature(self) -> str:
        """The settings in words; "all words allowed" without any rule."""
        texts = {
            "no UNK": self.suppress_unk,
            f"at least {self.min_length} tokens": self.min_length > 2,
            f"no repeated {self.no_repeat_ngram}-gram": self.no_repeat_ngram is not None,
            "no open endings": self.no_open_endings,
            f"{self.beam_groups} groups of beams with diversity {self.diversity:g}": self.beam_groups > 1,
            f"drawn at temperature {self.temperature:g} with seed {self.seed}": self.sampling,
            f"from the {self.top_k} best words": self.top_k is not None,
            f"from the nucleus of {self.top_p}": self.top_p is not None,
        }
        return ", ".join(text for text, holds in texts.items() if holds) or "all words allowed"


def _require(holds: bool, key: str, found: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"evaluation.decoding.{key} is {found}; it must be {expected}")


# the search of the papers' codes, and of bundles that record no other one
PLAIN = Decoding(suppress_unk=False)
