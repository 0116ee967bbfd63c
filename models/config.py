"""What a captioner and its backbone are, as plain values: no torch here, so that reading a configuration is instant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar, Literal


class Identity(Enum):
    """How a configuration key enters the identity of a run (`pipeline.runs.identity`); without a mark by its value."""

    IGNORED = "not at all: it decides where, when and with which resources the result is computed"
    WITH_BACKBONE = "by its value where features come from a backbone"
    WITH_REGIONS = "by its value where features come from a detector"
    FILE = "by the content of the file that it names"
    LARGE_FILE = "by the size and both ends of the file that it names"
    BUNDLE = "by the weights and the vocabulary of the bundle that it names"


@dataclass(frozen=True)
class ModelConfig:
    """What every captioner has, apart from what the data decide (`ModelSizes`); each system adds its own keys.

    `word_vectors`: a text file in GloVe's form whose vectors, `word_vector_width` numbers wide, are the words' on both
    ends of the decoder (`models/token_embeddings.py`); they are trained on only with `train_word_vectors`. A width
    without a file is a model that was built so before: its bundle holds the vectors.

    Raises ValueError for sizes that do not fit.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for pydantic

    name: str = ""
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    num_encoder_layers: int = 3
    num_decoder_layers: int = 3
    dropout: float = 0.1
    max_positions: int | None = None  # None: the longest training caption with SOS and EOS
    word_vectors: Annotated[str | None, Identity.FILE] = None
    word_vector_width: int | None = None
    train_word_vectors: bool = False

    def __post_init__(self) -> None:
        self._at_least(1, "d_model", "d_ff", "num_heads", "num_encoder_layers", "num_decoder_layers")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"model.d_model = {self.d_model} does not divide by model.num_heads = {self.num_heads} "
                f"(remainder {self.d_model % self.num_heads}); choose heads that divide the width"
            )
        self._at_least(1, "max_positions", also=", or null for the longest caption's")
        self._at_least(1, "word_vector_width", also=", or null for vectors of the model's own")
        if self.word_vectors is not None and self.word_vector_width is None:
            raise ValueError(
                "model.word_vectors needs model.word_vector_width, how many numbers its vectors have (GloVe: 50 to 300)"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}; it must be at least 0 and below 1")

    def _at_least(self, least: int, *keys: str, also: str = "") -> None:
        for key in keys:
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"model.{key} is {value}; it must be {least} or more{also}")

    def _one_of(self, key: str, *known: str) -> None:
        if getattr(self, key) not in known:
            listed = " or ".join(repr(value) for value in known)
            raise ValueError(f"model.{key} is {getattr(self, key)!r}; it must be {listed}")


@dataclass(frozen=True)
class ExpansionNetConfig(ModelConfig):
    """ExpansionNet v2, and the papers' baseline Transformer, to which the expansion settings do not apply.

    Encoder: `static_expansion` G, or `encoder_dynamic_expansion` N_E (bidirectional), or attention when both are None.
    Decoder: `dynamic_expansion` N_E (causal), or attention when it is None. All rows of the paper's Table I are here.

    `expansion_dropout`: "reference" drops single elements of the expanded vectors, as the paper's recipes were trained;
    it forces the long form (the expanded sequence exists in memory). "factorized" drops whole expanded vectors with the
    same probability, which keeps the short form in training: faster and leaner, but another regularizer, with no
    published score. Evaluation is the same for both.
    """

    name: Literal["expansionnet_v2", "transformer"] = "expansionnet_v2"
    static_expansion: tuple[int, ...] | None = (32, 64, 128, 256, 512)
    dynamic_expansion: int | None = 16
    encoder_dynamic_expansion: int | None = None
    dropout: float = 0.3
    expansion_dropout: Literal["reference", "factorized"] = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "dynamic_expansion", "encoder_dynamic_expansion", also=", or null for none")
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
        self._one_of("expansion_dropout", "reference", "factorized")


@dataclass(frozen=True)
class MeshedMemoryConfig(ModelConfig):
    """The Meshed-Memory Transformer; the rows of the paper's ablations (Tables 1, 6 and 7) are settings.

    `num_memory_slots`: learned keys and values beside the regions' own, 0 for none. `connection`: which encoder levels
    a decoder layer attends to: all of them through gates ("meshed"), the one of its own number ("one_to_one"), or the
    last ("last", the plain Transformer's). `gates` of the meshed connection: "sigmoid", or "softmax" over the levels.
    `attention`: "on_attention" is the attention-on-attention baseline, in every attention of encoder and decoder.
    """

    name: Literal["meshed_memory"] = "meshed_memory"
    num_memory_slots: int = 40
    connection: Literal["meshed", "one_to_one", "last"] = "meshed"
    gates: Literal["sigmoid", "softmax"] = "sigmoid"
    attention: Literal["dot_product", "on_attention"] = "dot_product"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "num_memory_slots")
        self._one_of("connection", "meshed", "one_to_one", "last")
        self._one_of("gates", "sigmoid", "softmax")
        self._one_of("attention", "dot_product", "on_attention")
        if self.connection == "one_to_one" and self.num_encoder_layers != self.num_decoder_layers:
            raise ValueError(
                f"model.connection is 'one_to_one' with {self.num_encoder_layers} encoder and "
                f"{self.num_decoder_layers} decoder layers; it needs equally many"
            )


@dataclass(frozen=True)
class ClustFormerConfig(ModelConfig):
    """Ada-ClustFormer; the rows of the paper's ablation (Table 1) are settings.

    `encoder_clusters`: the clustering matrix of the image tokens, "2d", "1d" (row by row) or "none" (the base
    Transformer); `decoder_clusters` of the words. `stacking`: equation 6 on the matrices, on the conditionals, or not.
    `sampling`: down-up sampling rate of the encoder. `window`: a fixed window in place of both matrices.
    `attention`: how C acts: "product" multiplies the attention weights, "renormalized" makes them sum to 1 again,
    "literal" takes a second softmax of the product, as equation 2 is printed. `clustered_encoder_layers` and
    `clustered_decoder_layers`: the numbers, from 1, of the layers that have C; null for all.
    `inputs`: "grid" features (`grid` [rows, columns], null for a square) or "regions", arranged by their boxes into a
    grid of `region_rows` rows.
    """

    name: Literal["clustformer"] = "clustformer"
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    encoder_clusters: Literal["2d", "1d", "none"] = "2d"
    decoder_clusters: Literal["1d", "none"] = "1d"
    clustered_encoder_layers: tuple[int, ...] | None = None
    clustered_decoder_layers: tuple[int, ...] | None = None
    stacking: Literal["matrix", "conditional", "none"] = "matrix"
    sampling: int = 2
    window: int | None = None
    attention: Literal["product", "renormalized", "literal"] = "product"
    norm: Literal["pre", "post"] = "pre"
    inputs: Literal["grid", "regions"] = "grid"
    grid: tuple[int, int] | None = None
    region_rows: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("encoder_clusters", "2d", "1d", "none")
        self._one_of("decoder_clusters", "1d", "none")
        self._one_of("stacking", "matrix", "conditional", "none")
        self._one_of("attention", "product", "renormalized", "literal")
        self._one_of("norm", "pre", "post")
        self._one_of("inputs", "grid", "regions")
        self._at_least(1, "sampling", "region_rows")
        self._at_least(0, "window", also=", or null for an adaptive one")
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


# what `model.name` may be in a configuration, and the keys that go with it
MODEL_CONFIGS: dict[str, type[ModelConfig]] = {
    "expansionnet_v2": ExpansionNetConfig,
    "transformer": ExpansionNetConfig,
    "meshed_memory": MeshedMemoryConfig,
    "clustformer": ClustFormerConfig,
}


@dataclass(frozen=True)
class ModelSizes:
    """What the data decide: widths and the ids of the special tokens. Raises ValueError for ids outside."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for pydantic

    feature_width: int
    vocabulary_size: int
    max_positions: int
    sos: int
    eos: int
    pad: int

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


@dataclass(frozen=True)
class BackboneConfig:
    """A timm `swin_*` by name, where its weights come from, and overrides for small ones.

    weights: "none" (drawn at random), "pretrained" (timm's, over the network) or the path of a checkpoint in timm's or
    the original Swin naming (.safetensors, or a PyTorch file with tensors only).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for pydantic

    name: str = "swin_large_patch4_window12_384"
    weights: Annotated[str, Identity.FILE] = "none"
    image_size: int = 384
    embed_dim: int | None = None
    depths: tuple[int, ...] | None = None
    num_heads: tuple[int, ...] | None = None
    window_size: int | None = None
    drop_path: float = 0.0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if not self.name.startswith("swin_"):
            raise ValueError(f"backbone.name is {self.name!r}; expected a timm name that starts with 'swin_'")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"backbone.drop_path is {self.drop_path}; it must be at least 0 and below 1")
