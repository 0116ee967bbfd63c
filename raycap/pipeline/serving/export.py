"""The folder of an exported captioner, for a runtime without raycap and PyTorch.

encoder.onnx      images or features to what the decoder needs (`models.convert.export_graphs.EncoderGraph`)
decoder.onnx      one step of the decoder (`models.convert.export_graphs.StepGraph`)
captioner.json    inputs, search and rules, ids of special tokens, and the SHA-256 of each other file
vocabulary.json   {"joining": J, "words": [...]}: the text of each token in the order of their ids

In PyTorch's format, the graphs are encoder.pt2 and decoder.pt2. Weights of more than 1 GiB are in a file beside their
ONNX graph, encoder.onnx.data.

J says how texts are joined to a caption: "spaces" between all; "scripts", as well, but not beside the tokens whose ids
are under "without_space"; "bytes", where each character of a text is one byte (Latin-1) of UTF-8.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raycap.models.convert.export_graphs import EncoderGraph, GraphTensor, StepGraph
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.language.subwords import piece_bytes
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.vocabulary import UNK, Vocabulary
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, bundle_protocol
from raycap.pipeline.evaluation.captioning.search import score_rules
from raycap.pipeline.evaluation.comparison.protocol import search_settings
from raycap.pipeline.serving.graph_formats import (
    DEFAULT_OPSET,
    OnnxGraph,
    TorchProgram,
    has_runtime,
    write_graph,
    write_program,
)
from raycap.pipeline.storage.atomic import atomic_folder
from raycap.pipeline.storage.digests import file_digest

FORMAT = 1
RULES = ("suppress_unk", "min_length", "no_repeat_ngram", "no_open_endings", "beam_groups", "sampling")
BATCHES = ((1, 4), (3, 5))  # numbers of images, and of image tokens for models of features, that are compared
BEAMS, STEPS = 3, 5
# Largest differences of a good export: rounding in another order, and for float16 rounding itself.
TOLERANCES = {"float32": 1e-3, "float16": 0.5}
Graph = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class ExportSettings:
    """The format, the precision and, for ONNX, the opset of an export. source: the SHA-256 of the bundle's files."""

    format: Literal["onnx", "torch"] = "onnx"
    precision: Literal["float32", "float16"] = "float32"
    opset: int = DEFAULT_OPSET
    source: Mapping[str, str] = field(default_factory=dict)


def export_captioner(bundle: Bundle, folder: Path, settings: ExportSettings) -> Differences | None:
    """Writes the folder atomically, and compares its graphs with the model.

    The result is None if nothing can run the graphs. Raises UserError for a model that cannot be exported,
    JobFailedError for graphs that differ from the model. In both cases nothing is written.
    """
    with atomic_folder(folder) as temporary:
        captioner = bundle.captioner
        if settings.precision == "float16":
            captioner = copy.deepcopy(captioner).half()
        try:
            encoder = EncoderGraph(captioner)
            step = StepGraph(captioner, encoder.outputs())
        except ValueError as error:
            raise UserError(str(error)) from error
        exported = _write_graphs(temporary, encoder, step, settings)
        (temporary / "vocabulary.json").write_text(dump(describe_words(bundle.vocabulary)), encoding="utf-8")
        is_onnx = settings.format == "onnx"
        content = describe(bundle, encoder) | {
            "graphs": settings.format,
            "precision": settings.precision,
            "opset": settings.opset if is_onnx else None,
            "source": dict(settings.source),
            "files": {path.name: file_digest(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / "captioner.json").write_text(dump(content), encoding="utf-8")
        if exported is None:
            return None
        if captioner is not bundle.captioner:
            encoder = EncoderGraph(bundle.captioner)
            step = StepGraph(bundle.captioner, encoder.outputs())
        differences = compare_graphs(encoder, step, exported)
        if not differences.are_small(settings.precision):
            raise JobFailedError(
                f"the exported graphs differ from the model by up to {differences}; nothing was written"
            )
        return differences


def _write_graphs(folder: Path, encoder: EncoderGraph, step: StepGraph, settings: ExportSettings) -> Exported | None:
    """Writes both graphs, and opens them if something can run them."""
    if settings.format == "torch":
        paths = folder / "encoder.pt2", folder / "decoder.pt2"
        write_program(paths[0], encoder, encoder.inputs())
        write_program(paths[1], step, step.inputs())
        return Exported(TorchProgram(paths[0]), TorchProgram(paths[1]), step.cache)
    paths = folder / "encoder.onnx", folder / "decoder.onnx"
    write_graph(paths[0], encoder, encoder.inputs(), [each.name for each in step.memory], settings.opset)
    write_graph(paths[1], step, step.inputs(), step.output_names, settings.opset)
    if not has_runtime():
        return None
    return Exported(OnnxGraph(paths[0]), OnnxGraph(paths[1]), step.cache)


def describe(bundle: Bundle, encoder: EncoderGraph) -> dict[str, object]:
    """The content of captioner.json that does not depend on the format of the graphs, as JSON values."""
    sizes, vocabulary, transform = encoder.model.sizes, bundle.vocabulary, bundle.transform
    search = search_settings(EvaluationSection(), [bundle_protocol(bundle.config)])
    open_endings = score_rules(search, vocabulary).open_endings
    image = features = None
    if transform is not None:
        image = {key: getattr(transform, key) for key in ("image_size", "keep_aspect", "interpolation")}
        image |= {"scaled_side": transform.scaled_side, "mean": list(transform.mean), "std": list(transform.std)}
    else:
        boxes = bool(getattr(encoder.model.config, "needs_boxes", False))
        features = {"width": sizes.feature_width, "boxes": boxes, "max_regions": encoder.max_image_tokens}
    return {
        "format": FORMAT,
        "name": bundle.config["name"],
        "system": encoder.model.config.name,
        "image": image,
        "features": features,
        "search": {
            "beam_size": search.beam_size,
            "max_length": min(search.max_length, sizes.max_positions),
            "ranking": search.ranking,
            "collapse_repeats": search.collapse_repeats,
            **{key: asdict(search.decoding)[key] for key in RULES},
        },
        "max_positions": sizes.max_positions,
        "tokens": {"sos": sizes.sos, "eos": sizes.eos, "pad": sizes.pad, "unk": vocabulary.ids[UNK]},
        "open_endings": list(open_endings),
        "tokenizer": vocabulary.tokenizer,
    }


def describe_words(vocabulary: Vocabulary) -> dict[str, object]:
    """The content of vocabulary.json."""
    words = list(vocabulary.words)
    if vocabulary.subwords is not None:
        return {"joining": "bytes", "words": [piece_bytes(word).decode("latin-1") for word in words]}
    parts = TOKENIZERS[vocabulary.tokenizer].parts
    # the second of two tokens has a space before it, unless the script of the token has no spaces
    without_space = [number for number, word in enumerate(words) if parts([word, word])[1] == word]
    if without_space:
        return {"joining": "scripts", "words": words, "without_space": without_space}
    return {"joining": "spaces", "words": words}


def dump(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Exported:
    """The graphs of an exported captioner, and the tensors of its cache with examples in its precision."""

    encoder: Graph
    step: Graph
    cache: Sequence[GraphTensor]


@dataclass(frozen=True)
class Differences:
    """The largest absolute differences of the encoder's result and of log-probabilities."""

    memory: float
    log_probs: float

    def are_small(self, precision: str) -> bool:
        return max(self.memory, self.log_probs) <= TOLERANCES[precision]

    def __str__(self) -> str:
        return f"{self.memory:.1e} in the encoder's result and {self.log_probs:.1e} in log-probabilities"


def compare_graphs(encoder: EncoderGraph, step: StepGraph, exported: Exported) -> Differences:
    """The differences between a captioner's graphs in PyTorch and exported ones; infinite where a number is NaN.

    Each has its own cache. The inputs are drawn by torch's default generator.
    """
    of_memory, of_log_probs = [0.0], [0.0]
    with torch.no_grad():
        for images, image_tokens in BATCHES:
            inputs = [each.example for each in encoder.inputs(images, image_tokens)]
            memory, exported_memory = encoder(*inputs), exported.encoder([each.numpy() for each in inputs])
            of_memory += [_difference(*pair) for pair in zip(memory, exported_memory, strict=True)]
            cache = _empty(step.cache, images)
            exported_cache = [each.numpy() for each in _empty(exported.cache, images)]
            parents = torch.arange(images)[:, None]
            for _ in range(min(STEPS, step.model.sizes.max_positions)):
                tokens = torch.randint(step.model.sizes.vocabulary_size, parents.shape)
                log_probs, *cache = step(tokens, parents, *memory, *cache)
                beams = [tokens.numpy(), parents.numpy()]
                exported_log_probs, *exported_cache = exported.step([*beams, *exported_memory, *exported_cache])
                of_log_probs.append(_difference(log_probs, exported_log_probs))
                chosen = torch.randint(tokens.shape[1], (images, BEAMS))
                parents = torch.arange(images)[:, None] * tokens.shape[1] + chosen
    return Differences(max(of_memory), max(of_log_probs))


def _empty(cache: Sequence[GraphTensor], images: int) -> list[Tensor]:
    """The cache before the first step."""
    shapes = ([0 if dim in each.dims else size for dim, size in enumerate(each.example.shape)] for each in cache)
    return [each.example.new_zeros(images, *shape[1:]) for each, shape in zip(cache, shapes, strict=True)]


def _difference(tensor: Tensor, exported: np.ndarray) -> float:
    largest = float(np.abs(tensor.numpy().astype(np.float64) - exported.astype(np.float64)).max())
    return math.inf if math.isnan(largest) else largest
