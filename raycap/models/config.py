"""Configurations of captioners, backbones, decoding and views of images, and the types of their numbers and texts.

pydantic checks each value by its annotation, and `__post_init__` checks values that depend on each other. The upper
limits are far above what anyone would train, so that they refuse only mistakes. A width of a billion, for example, is
refused before memory is allocated. This module imports neither torch nor pydantic, so that it is imported quickly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

# a mapping from names to plain values, as a YAML or JSON file gives it
Values = dict[str, Any]
PYDANTIC = {"extra": "forbid", "use_attribute_docstrings": True, "allow_inf_nan": False}  # settings of every section

_WHOLE = re.compile(r"[-+]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[-+]?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][-+]?[0-9]{1,3})?")
# characters that no path, address or name may have: control characters, and halves of surrogate pairs
_NO_TEXT = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_TEXT = 1024  # bytes, the limit of S3 for a key


@dataclass(frozen=True)
class Before:
    """A mark on a type: pydantic calls `function` with a value, and then checks the type of the result strictly.

    A strict check refuses a boolean as a number, and a fraction as a whole number. pydantic finds the method of this
    class by its name.
    """

    function: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Values]) -> Values:
        schema = handler(source)
        for each in schema.get("choices", [schema]):  # all types of a union, or the only type
            each["strict"] = True
        return {"type": "function-before", "function": {"type": "no-info", "function": self.function}, "schema": schema}


def read_number(value: object) -> object:
    """Returns the number that a text spells, or any other value as it is.

    Numbers can arrive as texts: from `${NAME}` in a configuration, or if written as 1e-3, which YAML 1.1 reads as text.
    """
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return float(value)
    return value


def check_text(value: object) -> object:
    """Returns the value as it is. Raises ValueError for a text that cannot be a path, an address or a name."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the text is empty; give a value, or leave the key out")
        if _NO_TEXT.search(value):
            raise ValueError("the text has control characters or is not UTF-8; remove them")
        try:
            Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError("the text begins with ~ and names no user's home folder; give another path") from error
        if len(value.encode()) > MAX_TEXT:
            raise ValueError(f"the text has {len(value.encode())} bytes; the limit is {MAX_TEXT}")
    return value


NUMBER, TEXT = Before(read_number), Before(check_text)

Text = Annotated[str, TEXT]
Whole = Annotated[int, Ge(0), NUMBER]
Count = Annotated[int, Ge(1), Le(10_000), NUMBER]  # a number of heads, image tokens, captions, workers and the like
CountOrZero = Annotated[int, Ge(0), Le(10_000), NUMBER]
Width = Annotated[int, Ge(1), Le(2**17), NUMBER]  # a width of vectors; the widest of language models have about 50,000
Layers = Annotated[int, Ge(1), Le(200), NUMBER]  # a number of layers; captioners have 3 to 12
Groups = Annotated[int, Ge(1), Le(10**10), NUMBER]  # a number of expansion vectors; parameters are limited, too
Words = Annotated[int, Ge(1), Le(10**7), NUMBER]  # a number of words
Pixels = Annotated[int, Ge(1), Le(1024), NUMBER]  # the side of a square image; published backbones take 224 to 384
Rate = Annotated[float, Ge(0), Lt(1), NUMBER]  # a probability, as of dropout


class Identity(Enum):
    """How a key counts in a run's identity (`pipeline.runs.identity`). The value counts for a key without a mark."""

    IGNORED = "not at all: it decides where, when and with which resources the result is computed"
    WITH_BACKBONE = "by its value where features come from a backbone"
    WITH_REGIONS = "by its value where features come from a detector"
    FILE = "by the content of the file that it names"
    LARGE_FILE = "by the size and both ends of the file that it names"
    BUNDLE = "by the weights and the vocabulary of the bundle that it names"
    TEXT_ENCODER = "by the contents of a text encoder's files in the folder that it names"


@dataclass(frozen=True)
class ModelConfig:
    """The settings that all captioners share. Each system adds its own. Raises ValueError for sizes that do not fit.

    word_vectors: a text file in GloVe's format with vectors of `word_vector_width` numbers. The decoder uses them at
    its input and output (`models/layers.py`), and trains them if `train_word_vectors` is set. The configuration of a
    bundle has a width and no file, because the bundle contains the vectors.
    """

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    name: str = ""
    d_model: Width = 512
    d_ff: Width = 2048
    num_heads: Count = 8
    num_encoder_layers: Layers = 3
    num_decoder_layers: Layers = 3
    max_positions: Count | None = None
    """The largest number of tokens per caption, with SOS and EOS. By default, that of the longest training caption."""
    dropout: Rate = 0.1
    word_vectors: Annotated[Text | None, Identity.FILE] = None
    word_vector_width: Width | None = None
    train_word_vectors: bool = False

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(
                f"model.d_model = {self.d_model} does not divide by model.num_heads = {self.num_heads}; choose heads "
                "that divide the width"
            )
        if self.word_vectors is not None and self.word_vector_width is None:
            raise ValueError(
                "model.word_vectors needs model.word_vector_width, how many numbers its vectors have (GloVe: 50 to 300)"
            )

    @property
    def needs_boxes(self) -> bool:
        """True if the model arranges image tokens by the boxes of regions."""
        return False

    def check_inputs(self, regions: bool) -> None:
        """Raises ValueError if the model cannot take the features. regions: True for regions, False for a grid."""


@dataclass(frozen=True)
class ExpansionNetConfig(ModelConfig):
    """ExpansionNet v2, and the papers' baseline Transformer, which ignores the expansion settings.

    static_expansion: the sizes of the groups (G in the paper) of static expansion in the encoder.
    encoder_dynamic_expansion: the vectors per token (N_E) of bidirectional dynamic expansion in the encoder. If both
    are None, the encoder has attention. dynamic_expansion: the vectors per token of causal dynamic expansion in the
    decoder. If it is None, the decoder has attention. These settings cover all rows of the paper's Table I.

    expansion_dropout: "reference" drops single elements of the expanded vectors, as in the paper, and needs the
    expanded sequence in memory. "factorized" drops whole expanded vectors, which takes less time and memory, but no
    published score was reached with it. Both evaluate in the same way.
    """

    name: Literal["expansionnet_v2", "transformer"] = "expansionnet_v2"
    static_expansion: Annotated[tuple[Groups, ...], MinLen(1), MaxLen(100)] | None = (32, 64, 128, 256, 512)
    dynamic_expansion: Count | None = 16
    encoder_dynamic_expansion: Count | None = None
    dropout: Rate = 0.3
    expansion_dropout: Literal["reference", "factorized"] = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.static_expansion is not None and self.encoder_dynamic_expansion is not None
        if both and self.name != "transformer":
            raise ValueError(
                f"model.static_expansion = {list(self.static_expansion or ())} and model.encoder_dynamic_expansion = "
                f"{self.encoder_dynamic_expansion} are both set; the encoder has one of them: set the other to null"
            )


@dataclass(frozen=True)
class MeshedMemoryConfig(ModelConfig):
    """The Meshed-Memory Transformer. Its settings cover all rows of the paper's ablations (Tables 1, 6 and 7).

    connection: the encoder levels that a decoder layer attends to. "meshed": all levels, through gates. "one_to_one":
    the level with the layer's number. "last": the last level, as in the plain Transformer.

    attended_regions: every image is padded to this number of regions, and attention includes the padding, as in the
    reference, whose published weights were trained with 50. If it is None, padding is masked.
    """

    name: Literal["meshed_memory"] = "meshed_memory"
    num_memory_slots: CountOrZero = 40
    """The number of learned keys and values that encoder layers attend to in addition to those of the regions."""
    connection: Literal["meshed", "one_to_one", "last"] = "meshed"
    gates: Literal["sigmoid", "softmax"] = "sigmoid"
    """How the levels of "meshed" are weighted. The softmax is over the levels."""
    attention: Literal["dot_product", "on_attention"] = "dot_product"
    """The kind of attention, everywhere in encoder and decoder."""
    attended_regions: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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

    decoder: In a "causal" decoder, a word attends to itself and earlier words. In a "mask_token" decoder, as in the
    published code, each word is predicted by a bidirectional pass over the words before it (`models/clustformer.py`).
    """

    name: Literal["clustformer"] = "clustformer"
    num_encoder_layers: Layers = 6
    num_decoder_layers: Layers = 6
    encoder_clusters: Literal["2d", "1d", "none"] = "2d"
    """The kind of C of the image tokens. For 1d, the rows of the grid are joined to one sequence."""
    decoder_clusters: Literal["1d", "none"] = "1d"
    """The kind of C of the words."""
    clustered_encoder_layers: tuple[Layers, ...] | None = None
    """The layers that have C, numbered from 1. By default, all layers have it."""
    clustered_decoder_layers: tuple[Layers, ...] | None = None
    stacking: Literal["matrix", "conditional", "none"] = "matrix"
    """What equation 6 stacks: the matrix C, or the probabilities that C is made of (`models/clustformer.py`)."""
    sampling: Count = 2
    """The rate of down-up sampling in the encoder. At 1, nothing is sampled."""
    window: CountOrZero | None = None
    """The size of a fixed window that replaces C everywhere."""
    norm: Literal["pre", "post"] = "pre"
    inputs: Literal["grid", "regions"] = "grid"
    region_rows: Count = 6
    """The rows of the grid into which regions are arranged by their boxes."""
    decoder: Literal["causal", "mask_token"] = "causal"
    activation: Literal["relu", "gelu"] = "relu"
    """The activation of the feed-forward sublayers."""
    input_dropout: Rate | None = None
    """The dropout of the image tokens, which a training stage then does not change. By default, `dropout` applies."""
    cross_attention_dropout: bool = False
    """True if the weights of cross-attention have dropout, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for side, layers in (("encoder", self.num_encoder_layers), ("decoder", self.num_decoder_layers)):
            chosen = getattr(self, f"clustered_{side}_layers") or ()
            if len(set(chosen)) < len(chosen) or not all(1 <= number <= layers for number in chosen):
                raise ValueError(
                    f"model.clustered_{side}_layers = {list(chosen)} must be different numbers from 1 to {layers}"
                )
        if self.inputs == "regions" and self.sampling > 1:
            raise ValueError(
                f"model.sampling = {self.sampling} with model.inputs = regions: neighbors among regions are no "
                "evenly spaced cells to pool; set model.sampling to 1"
            )

    @property
    def needs_boxes(self) -> bool:
        return self.inputs == "regions" and self.encoder_clusters != "none"

    def check_inputs(self, regions: bool) -> None:
        if regions and self.inputs == "grid":
            raise ValueError("model.inputs = grid, and features.hdf5 brings regions; set model.inputs to regions")
        if not regions and self.inputs == "regions":
            raise ValueError(
                "model.inputs = regions needs a detector's features: name their file as features.hdf5, or set "
                "model.inputs to grid"
            )


# The configuration class of each `model.name`. A new captioner needs a class in this file, an entry here, a file with
# its model, and a row in `models/captioner.py`. Configuration files and searches can then use it.
MODEL_CONFIGS: dict[str, type[ModelConfig]] = {
    "expansionnet_v2": ExpansionNetConfig,
    "transformer": ExpansionNetConfig,
    "meshed_memory": MeshedMemoryConfig,
    "clustformer": ClustFormerConfig,
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that follow from the data, and special tokens' ids. Raises ValueError if the vocabulary lacks an id."""

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    feature_width: Width
    vocabulary_size: Words
    max_positions: Count
    sos: Whole
    eos: Whole
    pad: Whole

    def __post_init__(self) -> None:
        for key in ("sos", "eos", "pad"):
            if getattr(self, key) >= self.vocabulary_size:
                raise ValueError(
                    f"the id of {key.upper()} is {getattr(self, key)}, outside the vocabulary of "
                    f"{self.vocabulary_size} words"
                )


MAX_STAGES = 8  # far above the usual 4; each stage doubles the width and halves the sides of the grid
SIZE_KEYS = ("embed_dim", "depths", "num_heads", "window_size", "patch_size")  # keys that replace the model's own sizes
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]*)?")


@dataclass(frozen=True)
class BackboneConfig:
    """A timm model, the source of its weights, its image tokens, and sizes that replace the model's own.

    name: "architecture" or "architecture.tag", as timm lists them.
    weights: "none" (drawn at random), "pretrained" (downloaded by timm), or the path of a checkpoint. A checkpoint is a
    safetensors file, or a PyTorch file with tensors only. Its tensors have timm's names, or others that timm converts,
    such as the original Swin's.
    embed_dim to patch_size: `encoders.backbone` lists the families that take them. A model without stages takes one
    number of `depths` and of `num_heads`.
    pool: the side of the squares of grid tokens that are averaged to one token.
    transform: "auto" is the transform of the named model, or for swin_* that of the reference. "squash" uses the named
    model's interpolation and statistics without a crop. "reference" is bilinear, uses ImageNet's statistics, and does
    not crop.
    """

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    name: Annotated[str, MaxLen(100), TEXT] = "swin_large_patch4_window12_384"
    weights: Annotated[Text, Identity.FILE] = "none"
    image_size: Pixels = 384
    embed_dim: Width | None = None
    depths: Annotated[tuple[Layers, ...], MinLen(1), MaxLen(MAX_STAGES)] | None = None
    num_heads: Annotated[tuple[Count, ...], MinLen(1), MaxLen(MAX_STAGES)] | None = None
    window_size: Count | None = None
    drop_path: Rate = 0.0
    gradient_checkpointing: Annotated[bool, Identity.IGNORED] = False
    """Compute activations again in the backward pass instead of keeping them, which takes less memory and more time."""
    patch_size: Pixels | None = None
    pool: Count = 1
    transform: Literal["auto", "squash", "reference"] = "auto"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"backbone.name is {self.name!r}; expected a timm name of lower-case letters, digits and _, with a dot "
                "before a tag, such as vit_base_patch16_clip_224.openai"
            )
        if self.is_swin and self.image_size % 4:
            raise ValueError(f"backbone.image_size is {self.image_size}; it must be a multiple of the patches' 4 px")
        num_stages = len(self.depths or ())
        num_heads = len(self.num_heads) if self.num_heads else 4  # named Swin models have four stages
        if self.is_swin and num_stages > num_heads:
            raise ValueError(
                f"backbone.depths asks for {num_stages} stages, and backbone.num_heads has {num_heads} numbers; give "
                "one for each stage"
            )

    @property
    def is_swin(self) -> bool:
        """True if the model is a Swin (version 1), the reference's backbone."""
        return self.name.startswith("swin_")

    def feature_settings(self, *ignored: str) -> Values:
        """Returns the keys and values without those in `ignored`, for the description of stored results."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ignored}


@dataclass(frozen=True)
class Decoding:
    """Rules for words, diverse beams and sampling. Raises ValueError for values that make no sense.

    suppress_unk: no caption contains UNK. min_length: the smallest number of tokens, with SOS and EOS. no_repeat_ngram:
    no sequence of this many tokens occurs twice in a caption. no_open_endings: no caption ends with a word that needs
    another word after it, such as "a" or "with".

    beam_groups: the beams are divided into this many groups, which choose their words one group after the other
    (Vijayakumar et al. 2016, arXiv 1610.02424). A group prefers words that earlier groups have not chosen: a word's
    log-probability is lowered by `diversity` for each beam of an earlier group that has chosen it at the same step. The
    paper recommends a diversity from 0.2 to 0.8 (section 5).

    sampling: captions are drawn, without beams, from softmax(logits / temperature), restricted to the `top_k` most
    probable words and then to the fewest words whose probabilities add up to `top_p` (Holtzman et al. 2019,
    arXiv 1904.09751). The draws depend on `seed` and the image only.
    """

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    suppress_unk: bool = True
    min_length: Annotated[int, Ge(2), Le(10_000), NUMBER] = 2
    no_repeat_ngram: Count | None = None
    no_open_endings: bool = False
    beam_groups: Count = 1
    diversity: Annotated[float, Ge(0), NUMBER] = 0.5
    sampling: bool = False
    temperature: Annotated[float, Gt(0), NUMBER] = 1.0
    top_k: Words | None = None
    top_p: Annotated[float, Gt(0), Le(1), NUMBER] | None = None
    seed: Annotated[int, Ge(0), Lt(2**62), NUMBER] = 0

    def __post_init__(self) -> None:
        if self.sampling and self.beam_groups > 1:
            raise ValueError(
                "evaluation.decoding.sampling draws captions without beams, and evaluation.decoding.beam_groups is "
                f"{self.beam_groups}; set one of them only"
            )
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        for key in changed:
            if key in ("temperature", "top_k", "top_p", "seed") and not self.sampling:
                raise ValueError(
                    f"evaluation.decoding.{key} is for drawn captions, and evaluation.decoding.sampling is false; set "
                    f"it to true, or leave {key} out"
                )
        if "diversity" in changed and self.beam_groups == 1:
            raise ValueError(
                "evaluation.decoding.diversity is for groups of beams, and evaluation.decoding.beam_groups is 1; set "
                "it to 2 or more, or leave diversity out"
            )

    @property
    def signature(self) -> str:
        """The settings in words, or "all words allowed" if no rule is set."""
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


# decoding as in the papers' code, also for bundles that record no rules
PLAIN = Decoding(suppress_unk=False)

VIEWS_VERSION = 1  # raise it when `encoders.transform.augmented` gives other pixels, so that views are made again


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, which `models.encoders.transform.augmented` makes.

    min_area: the smallest fraction of the image's area that a crop keeps, or 1 for no crop. color: the largest relative
    change of brightness, contrast and saturation. mirror: If it is True, half of the images are mirrored, and their
    captions are wrong where they name left or right.
    """

    __pydantic_config__: ClassVar[Values] = PYDANTIC

    min_area: Annotated[float, Ge(0.01), Le(1), NUMBER] = 0.8
    color: Rate = 0.2
    mirror: bool = False


@dataclass(frozen=True)
class Views:
    """`count` augmented versions of each training image.

    as_stored: if true, a reader of image files makes only the versions that a feature store would have, and no others.
    """

    count: int
    augmentation: Augmentation
    as_stored: bool = False

    def keys(self, content_key: str) -> list[str]:
        """Returns the keys of an image's versions in a feature store. Another augmentation gives other keys."""
        return [content_key + suffix for suffix in self.suffixes]

    @cached_property
    def suffixes(self) -> list[str]:
        """The suffixes that make the keys of the versions from a content key."""
        settings = json.dumps([VIEWS_VERSION, asdict(self.augmentation)], sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        return [f"-{digest}-{number}" for number in range(self.count)]


def content_key_of(key: str) -> str:
    """Returns the content key from which `Views.keys` made a key. A content key is returned as it is."""
    return key.partition("-")[0]


def seed_of_key(key: str) -> int | None:
    """The seed of the random crop and colors (`augmented`) of the version with this key; None for the image itself."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) if "-" in key else None
