"""The folder of an exported captioner.

encoder.onnx      images or features to what the decoder needs (`models.convert.export_graphs.EncoderGraph`)
decoder.onnx      one step of the decoder (`models.convert.export_graphs.StepGraph`)
captioner.json    how they are used (`pipeline.serving.export.description`), and the SHA-256 of each other file
vocabulary.json   the text of each token

In PyTorch's format, the graphs are encoder.pt2 and decoder.pt2. Weights of more than 1 GiB are in a file beside their
ONNX graph, encoder.onnx.data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle
from raycap.pipeline.serving.export.comparison import Differences, Exported, compare_graphs
from raycap.pipeline.serving.export.description import describe, describe_words, dump
from raycap.pipeline.serving.export.onnx_graphs import DEFAULT_OPSET, OnnxGraph, has_runtime, write_graph
from raycap.pipeline.serving.export.torch_graphs import TorchProgram, write_program
from raycap.pipeline.storage.atomic import atomic_folder
from raycap.pipeline.storage.digests import file_digest

if TYPE_CHECKING:
    from raycap.models.convert.export_graphs import EncoderGraph, StepGraph

DESCRIPTION, WORDS = "captioner.json", "vocabulary.json"
ENCODER, DECODER = "encoder", "decoder"


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
    from raycap.models.convert.export_graphs import EncoderGraph, StepGraph

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
        (temporary / WORDS).write_text(dump(describe_words(bundle.vocabulary)), encoding="utf-8")
        is_onnx = settings.format == "onnx"
        content = describe(bundle, encoder) | {
            "graphs": settings.format,
            "precision": settings.precision,
            "opset": settings.opset if is_onnx else None,
            "source": dict(settings.source),
            "files": {path.name: file_digest(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / DESCRIPTION).write_text(dump(content), encoding="utf-8")
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
        paths = folder / f"{ENCODER}.pt2", folder / f"{DECODER}.pt2"
        write_program(paths[0], encoder, encoder.inputs())
        write_program(paths[1], step, step.inputs())
        return Exported(TorchProgram(paths[0]), TorchProgram(paths[1]), step.cache)
    paths = folder / f"{ENCODER}.onnx", folder / f"{DECODER}.onnx"
    write_graph(paths[0], encoder, encoder.inputs(), [each.name for each in step.memory], settings.opset)
    write_graph(paths[1], step, step.inputs(), step.output_names, settings.opset)
    if not has_runtime():
        return None
    return Exported(OnnxGraph(paths[0]), OnnxGraph(paths[1]), step.cache)
