"""Imports models of other projects: reads their checkpoints and vocabularies.

The vocabularies are pickles, which are read as plain values, so that no code in them is executed.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from raycap.models.base import CaptionModel
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes, Values
from raycap.models.convert import upstream as convert
from raycap.models.convert.tensor_files import bounded, load_strictly, read_tensors
from raycap.models.encoders.backbone import Backbone, load_tensors
from raycap.pipeline.config.load import parse_section
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shown
from raycap.pipeline.storage.untrusted.documents import read_regular_file

ALLOWED = "a vocabulary holds dict, list, str and int only"
MAX_BYTES = 64 * 2**20  # the published vocabulary has 10,000 words and 0.24 MB


class _Unpickler(pickle.Unpickler):
    """Unpickles plain values. Classes and functions are never imported, so no code of the file is executed.

    stand_ins: harmless objects that replace classes and functions. A key is the last part of the module's name and the
    name of the class or function, such as "vocab.Vocab". A name without a stand-in raises UnpicklingError.
    """

    stand_ins: Mapping[str, object] = {}

    def find_class(self, module_name: str, global_name: str) -> object:
        key = f"{module_name.split('.')[-1]}.{global_name}"
        if key not in self.stand_ins:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
        return self.stand_ins[key]

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_harmless_pickle(path: Path, stand_ins: Mapping[str, object] = {}) -> Any:
    """Reads a pickle without executing any of its code. Raises ValueError if the file is damaged or names other code.

    stand_ins: see `_Unpickler`.
    """
    if not path.is_file():
        raise ValueError(f"the vocabulary file {path} does not exist; give the path of a pickle")
    try:
        unpickler = _Unpickler(io.BytesIO(read_regular_file(path, MAX_BYTES)))
        unpickler.stand_ins = stand_ins
        return unpickler.load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {shown(error)}; {ALLOWED}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} is no readable pickle: {type(error).__name__}: {shown(error)}") from error


_MESHED_SPECIALS = {"<unk>": "UNK", "<pad>": "PAD", "<bos>": "SOS", "<eos>": "EOS"}


@bounded(".json")
def read_meshed_vocabulary(path: Path) -> Vocabulary:
    """Reads the vocabulary pickle of the Meshed-Memory Transformer's reference, or raycap's vocabulary.json.

    The pickle contains an object with the tables `itos` and `stoi`, and names four classes and functions. Stand-ins
    replace the classes and functions, so no code of the file is executed. <unk>, <pad>, <bos> and <eos> get raycap's
    names and keep their ids. Raises ValueError for other content, and if the two tables contradict each other.
    """
    if path.suffix == ".json":
        return Vocabulary.load(path)

    # The stand-ins are defined anew for each file, because a file can set their attributes. A stand-in copies nothing,
    # because a small file with many copies of one large Counter would need gigabytes.
    class Table:
        """A stand-in for the vocabulary object. attributes: those in the file."""

        attributes: Any = None

        def __setstate__(self, state: object) -> None:
            self.attributes = state

    def lookup(content: object = None) -> dict[Any, Any]:
        """A stand-in for Counter and defaultdict. Returns a Counter's dict, and ignores a defaultdict's factory."""
        return content if type(content) is dict else {}

    stand_ins = {"collections.Counter": lookup, "collections.defaultdict": lookup, "vocab.Vocab": Table}
    content = read_harmless_pickle(path, stand_ins | {"vocab._default_unk_index": None})
    tables = content.attributes if type(content) is Table else None
    words = _checked_words(tables, "itos", "stoi", path, "vocabulary of a Meshed-Memory Transformer")
    missing = [special for special in _MESHED_SPECIALS if special not in words]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it must hold {', '.join(_MESHED_SPECIALS)}")
    return Vocabulary(tuple(_MESHED_SPECIALS.get(word, word) for word in words), "spacy")


@bounded()
def read_expansionnet_vocabulary(path: Path) -> Vocabulary:
    """Reads the vocabulary pickle of ExpansionNet v2's reference.

    Its keys are `word2idx_dict`, `idx2word_list`, `sos_str` and `eos_str`. Raises ValueError for other content, and if
    the two tables contradict each other.
    """
    content = read_harmless_pickle(path)
    words = _checked_words(content, "idx2word_list", "word2idx_dict", path, "ExpansionNet v2 vocabulary")
    num_ids = len(content["word2idx_dict"])
    if num_ids != len(words):
        raise ValueError(f"{path}: its two tables contradict each other: {len(words)} words, {num_ids} ids")
    vocabulary = Vocabulary(tuple(words))
    start, end = content.get("sos_str"), content.get("eos_str")
    if (start, end) != ("SOS", "EOS"):
        found = f"start with {quoted(start)} and end with {quoted(end)}"
        raise ValueError(f"{path}: captions {found}; expected 'SOS' and 'EOS'")
    return vocabulary


def _checked_words(content: object, words_key: str, ids_key: str, path: Path, label: str) -> list[str]:
    """The words of a vocabulary in the order of their ids. Raises ValueError if the table of ids contradicts them.

    The table of ids may contain more words, because it is a defaultdict in which each look-up of an unknown word adds
    an entry. label: the kind of vocabulary, for the error message.
    """
    tables = content if isinstance(content, dict) else {}
    words, ids = tables.get(words_key), tables.get(ids_key)
    if not isinstance(words, list) or not isinstance(ids, dict) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path} is no {label}: expected {words_key!r} and {ids_key!r}")
    for index, word in enumerate(words):
        if ids.get(word) != index:
            raise ValueError(
                f"{path}: its two tables contradict each other: word {index} is {quoted(word)} in one only"
            )
        if re.search("[\ud800-\udfff]", word):
            raise ValueError(f"{path} is refused: {quoted(word)} is no text (half of a surrogate pair)")
    return words


class ImportRequest(NamedTuple):
    """A model to import. tokens: the vocabulary. settings: what the user set in the sections `model` and `backbone`."""

    checkpoint: Path
    tokens: Path
    settings: dict[str, Values]
    backbone_file: Path | None


# The imported model, its vocabulary, and two texts for the user: the model's sizes, and the features that it needs
Imported = tuple[Captioner, Vocabulary, str, str]


def _import_expansionnet(request: ImportRequest) -> Imported:
    """Imports an ExpansionNet v2 checkpoint. The backbone is its own Swin, or the Swin of --backbone, or missing."""
    vocabulary, tensors = read_expansionnet_vocabulary(request.tokens), read_tensors(request.checkpoint)
    # if the checkpoint contains the backbone, a Swin, the names of its tensors start with a prefix
    swin_names = [name for name in tensors if name.startswith(convert.SWIN_PREFIX)]
    swin = {name.removeprefix(convert.SWIN_PREFIX): tensors.pop(name) for name in swin_names}
    if swin and request.backbone_file is not None:
        raise UserError(f"{request.checkpoint} contains a Swin ({len(swin)} tensors); leave --backbone out")
    inferred = convert.infer_expansionnet(tensors)
    config = parse_section(ExpansionNetConfig, convert.complete_settings(inferred, request.settings["model"]), "model")
    groups, total = list(config.static_expansion or ()), inferred.total_expansion
    if sum(groups) != total:
        raise ValueError(
            f"model.static_expansion = {groups} sums to {sum(groups)}, and the checkpoint holds {total} expansion "
            f"vectors; give --set model.static_expansion=[...] with groups that sum to {total}"
        )
    tensors = convert.join_rows(tensors, convert.upstream_names(config), "an ExpansionNet v2", config)
    model = _build(request, config, inferred, vocabulary, tensors)
    sizes = f"G = {groups}, N_E = {config.dynamic_expansion}"
    if request.backbone_file is not None:
        swin = read_tensors(request.backbone_file)
    if swin:
        backbone = _build_backbone(swin, request.settings["backbone"], inferred.feature_width)
        features = f"Backbone: {backbone.config.name} at {backbone.config.image_size} px, {backbone.num_tokens} tokens"
        return Captioner(model, backbone), vocabulary, sizes, features
    for key in request.settings["backbone"]:
        raise UserError(
            f"--set backbone.{key}: {request.checkpoint} holds no Swin; add --backbone FILE or leave it out"
        )
    features = (
        f"No backbone: the bundle captions stored features of width {inferred.feature_width}; raycap caption needs "
        "images, so import again with --backbone FILE for it"
    )
    return Captioner(model), vocabulary, sizes, features


def _import_meshed_memory(request: ImportRequest) -> Imported:
    """Imports a checkpoint of the Meshed-Memory Transformer, which has no backbone."""
    if request.backbone_file is not None or request.settings["backbone"]:
        raise UserError(
            "the Meshed-Memory Transformer works on region features; leave --backbone out, and its settings"
        )
    vocabulary, tensors = read_meshed_vocabulary(request.tokens), read_tensors(request.checkpoint)
    inferred = convert.infer_meshed_memory(tensors)
    given = request.settings["model"]
    # by default padding is attended, because it was in the training of the published weights
    regions = {"attended_regions": given.get("attended_regions", convert.MESHED_REGIONS)}
    config = parse_section(MeshedMemoryConfig, convert.complete_settings(inferred, given) | regions, "model")
    model = _build(request, config, inferred, vocabulary, convert.convert_meshed_memory(tensors, config))
    features = f"No backbone: the bundle captions stored region features of width {inferred.feature_width}"
    return Captioner(model), vocabulary, f"{config.num_memory_slots} memory slots", features


def _build(
    request: ImportRequest,
    config: ModelConfig,
    inferred: convert.Inferred,
    vocabulary: Vocabulary,
    tensors: dict[str, Tensor],
) -> CaptionModel:
    """Builds the model and loads `tensors`, which have raycap's names. Raises ValueError if they do not fit."""
    if len(vocabulary) != inferred.vocabulary_size:
        raise ValueError(
            f"the vocabulary has {len(vocabulary)} words, the checkpoint predicts {inferred.vocabulary_size}; "
            "they do not belong together"
        )
    special = (vocabulary.sos, vocabulary.eos, vocabulary.pad)
    sizes = ModelSizes(inferred.feature_width, len(vocabulary), inferred.max_positions, *special)
    model = build_model(config, sizes)
    load_strictly(model, tensors, str(request.checkpoint))
    return model


def _build_backbone(swin: dict[str, Tensor], settings: Values, feature_width: int) -> Backbone:
    """Builds the published Swin-L, or a Swin with the sizes in `settings`, and loads its tensors.

    feature_width: the width of the features that the captioner takes. Raises UserError if the Swin's width differs, or
    if the file was made with other settings, and ValueError if its tensors have other sizes.
    """
    backbone = Backbone(parse_section(BackboneConfig, settings | {"weights": "none"}, "backbone"))
    if backbone.width != feature_width:
        raise UserError(
            f"the backbone gives features of width {backbone.width}, the captioner takes {feature_width}; they do not "
            "belong together, unless the Swin has other sizes: give them as --set backbone.embed_dim=N and the like"
        )
    _check_window(backbone, swin, settings)
    load_tensors(backbone, swin)
    return backbone


def _check_window(backbone: Backbone, swin: dict[str, Tensor], settings: Values) -> None:
    """Raises UserError if the file's Swin has another window, or if its image size is not the default and was not set.

    Without this check, timm would resize the tables of positions, and captions would be worse without a message. The
    image size is known only for files with the original names, because only these files have a mask for each window of
    the shifted attention.
    """
    table = swin.get("layers.0.blocks.0.attn.relative_position_bias_table")  # (2 window - 1)^2 rows
    if not backbone.config.is_swin or table is None or table.ndim != 2:
        return
    window = (math.isqrt(table.shape[0]) + 1) // 2
    ours, _ = backbone.network.layers[0].blocks[0].window_size
    if window != ours:
        raise UserError(
            f"backbone.window_size is {ours}, and the file's Swin has {window}; give --set "
            f"backbone.window_size={window}, and its --set backbone.image_size=N"
        )
    mask = swin.get("layers.0.blocks.1.attn_mask")  # one entry per window
    if mask is None or not mask.ndim:
        return
    size = 4 * window * math.isqrt(len(mask))  # a patch has 4 x 4 pixels
    if size != backbone.config.image_size and "image_size" not in settings:
        raise UserError(
            f"backbone.image_size is {backbone.config.image_size}, and the file's Swin was trained at {size}; give "
            f"--set backbone.image_size={size}"
        )


# {format: (name of the project, function that imports its files)}
FORMATS: dict[str, tuple[str, Callable[[ImportRequest], Imported]]] = {
    "expansionnet_v2": ("ExpansionNet v2", _import_expansionnet),
    "meshed_memory": ("Meshed-Memory Transformer", _import_meshed_memory),
}
