"""Exports a captioner as a folder of ONNX graphs, for captioning without raycap and PyTorch.

encoder.onnx      computes from images what the decoder needs (`export_graphs.EncoderGraph`)
decoder.onnx      computes one step of the decoder (`export_graphs.StepGraph`)
captioner.json    the transform of images, the search, the ids of special tokens, and the SHA-256 of each other file
vocabulary.json   {"joining": HOW, "words": [...]}: the text of each token in the order of the ids

Weights of more than 1 GiB are in a file beside their graph, such as encoder.onnx.data.

HOW is the way to join the texts of tokens to a caption:
"spaces"    with a space between all texts;
"scripts"   with spaces, except before and after the tokens whose ids are listed under "without_space";
"bytes"     without spaces. Each character of the texts is one byte (Latin-1) of the caption in UTF-8.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raycap.models.convert.export_graphs import EncoderGraph, GraphTensor, StepGraph
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data.language.subwords import piece_bytes
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.vocabulary import UNK, Vocabulary
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle
from raycap.pipeline.evaluation.captioning.search import score_rules
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.serving.address import NO_BACKBONE
from raycap.pipeline.storage.atomic import atomic_folder, write_json
from raycap.pipeline.storage.digests import file_digest

FORMAT = 2
GRAPHS = ("encoder", "decoder")
RULES = ("suppress_unk", "min_length", "no_repeat_ngram", "no_open_endings", "beam_groups", "sampling")
OPSET = 20  # the version of ONNX's operators
BATCHES, BEAMS, STEPS = (1, 3), 3, 5  # of the comparison; a batch is a number of images
TOLERANCE = 1e-3  # the largest accepted difference from the model, because products are rounded in another order
MAX_EMBEDDED_BYTES = 2**30  # larger weights have their own file, because ONNX limits a graph's file to 2 GiB
Graph = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def export_captioner(bundle: Bundle, folder: Path) -> float:
    """Writes the folder atomically. Returns the largest difference between its graphs and the model.

    Raises UserError if the model has no backbone or cannot be exported, and JobFailedError if the graphs differ from
    the model by more than the tolerance. In all cases nothing is written.
    """
    transform = bundle.transform
    if transform is None:
        raise UserError(f"BUNDLE: {NO_BACKBONE}")
    with atomic_folder(folder) as temporary:
        encoder = EncoderGraph(bundle.captioner)
        step = StepGraph(encoder)
        paths = [temporary / f"{name}.onnx" for name in GRAPHS]
        write_graph(paths[0], encoder, encoder.inputs(), [each.name for each in step.memory])
        write_graph(paths[1], step, step.inputs(), step.output_names)
        write_json(temporary / "vocabulary.json", describe_words(bundle.vocabulary))
        content = describe(bundle, transform) | {
            "opset": OPSET,
            "files": {path.name: file_digest(path) for path in sorted(temporary.iterdir())},
        }
        write_json(temporary / "captioner.json", content)
        difference = compare_graphs(encoder, step, [onnx_graph(path) for path in paths])
        if difference > TOLERANCE:
            raise JobFailedError(
                f"the exported graphs differ from the model by up to {difference:.1e}; nothing was written"
            )
        return difference


def write_graph(path: Path, graph: nn.Module, inputs: Sequence[GraphTensor], output_names: Sequence[str]) -> None:
    """Writes a module as an ONNX graph with its weights. The module's inputs and outputs are tensors.

    Large weights are written to a second file with `.data` added to the name. torch's older exporter (TorchScript) is
    not used, because it would turn values that depend on the inputs' sizes into constants. Raises UserError if the
    exporter cannot translate the module.
    """
    import onnx_ir.passes.common

    for name in ("torch.onnx", "onnxscript", "onnx_ir"):  # hides their logs of progress
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # hides warnings about the names of dimensions
        try:
            program = torch.onnx.export(
                graph,
                tuple(each.example for each in inputs),
                input_names=[each.name for each in inputs],
                output_names=list(output_names),
                opset_version=OPSET,
                dynamic_shapes=(tuple(dict(each.dims) for each in inputs),),  # one tuple for the argument `*inputs`
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # the exporter raises nearly any type of error
            cause = error.__cause__ or error
            raise UserError(f"{path.name} cannot be exported ({type(cause).__name__}: {one_line(cause)})") from error
        assert program is not None
        # The exporter's stack traces in the nodes are removed, because they contain paths of this machine.
        onnx_ir.passes.common.ClearMetadataAndDocStringPass()(program.model)
        weights = sum(each.numel() * each.element_size() for each in graph.state_dict().values())
        program.save(str(path), external_data=weights > MAX_EMBEDDED_BYTES)


def onnx_graph(path: Path) -> Graph:
    """Returns a function that runs an ONNX graph on the CPU. The function takes the list of the graph's inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # logs only errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def describe(bundle: Bundle, transform: ImageTransform) -> dict[str, object]:
    """The part of captioner.json about the model: its transform of images, its search and its special tokens."""
    model, vocabulary, search = bundle.captioner.model, bundle.vocabulary, bundle.search
    sizes, of_image = model.sizes, ("image_size", "scaled_side", "keep_aspect", "interpolation", "mean", "std")
    return {
        "format": FORMAT,
        "name": bundle.config["name"],
        "system": model.config.name,
        "image": {name: getattr(transform, name) for name in of_image},
        "search": {
            "beam_size": search.beam_size,
            "max_length": min(search.max_length, sizes.max_positions),
            "ranking": search.ranking,
            "collapse_repeats": search.collapse_repeats,
            "max_positions": sizes.max_positions,
            **{key: asdict(search.decoding)[key] for key in RULES},
        },
        "tokens": {
            **{name: getattr(sizes, name) for name in ("sos", "eos", "pad")},
            "unk": vocabulary.ids[UNK],
            "open_endings": list(score_rules(search, vocabulary).open_endings),
        },
    }


def describe_words(vocabulary: Vocabulary) -> dict[str, object]:
    """The content of vocabulary.json, as the docstring of this module describes it."""
    words = list(vocabulary.words)
    if vocabulary.subwords is not None:
        return {"joining": "bytes", "words": [piece_bytes(word).decode("latin-1") for word in words]}
    parts = TOKENIZERS[vocabulary.tokenizer].parts
    # Joining a token with itself shows whether its script is written with spaces.
    without_space = [number for number, word in enumerate(words) if parts([word, word])[1] == word]
    if without_space:
        return {"joining": "scripts", "words": words, "without_space": without_space}
    return {"joining": "spaces", "words": words}


def compare_graphs(encoder: EncoderGraph, step: StepGraph, exported: Sequence[Graph]) -> float:
    """The largest absolute difference between PyTorch and the exported graphs, for random inputs.

    The encoder's results and the log-probabilities of several steps are compared. The inputs are from torch's default
    generator. exported: the graphs of the encoder and the step.
    """
    differences = [0.0]
    with torch.no_grad():
        for images in BATCHES:
            pixels = encoder.inputs(images)[0].example
            memory, exported_memory = encoder(pixels), exported[0]([pixels.numpy()])
            differences += [_difference(*pair) for pair in zip(memory, exported_memory, strict=True)]
            cache = _empty(step.cache, images)
            other_cache = [each.numpy() for each in cache]
            parents = torch.arange(images)[:, None]
            for _ in range(min(STEPS, step.model.sizes.max_positions)):
                tokens = torch.randint(step.model.sizes.vocabulary_size, parents.shape)
                log_probs, *cache = step(tokens, parents, *memory, *cache)
                beams = [tokens.numpy(), parents.numpy()]
                exported_log_probs, *other_cache = exported[1]([*beams, *exported_memory, *other_cache])
                differences.append(_difference(log_probs, exported_log_probs))
                # The cache has a row for each beam of the first image, then of the second, and so on.
                num_beams = tokens.shape[1]
                parents = torch.arange(images)[:, None] * num_beams + torch.randint(num_beams, (images, BEAMS))
    return max(differences)


def _empty(cache: Sequence[GraphTensor], images: int) -> list[Tensor]:
    """The tensors of the cache before the first step. Dynamic dimensions have size 0, because there is no token."""
    tensors = []
    for each in cache:
        shape = [0 if dim in each.dims else size for dim, size in enumerate(each.example.shape)]
        tensors.append(each.example.new_zeros(images, *shape[1:]))
    return tensors


def _difference(tensor: Tensor, exported: np.ndarray) -> float:
    """The largest absolute difference of two arrays, or infinity if a difference is NaN."""
    largest = float(np.abs(tensor.numpy().astype(np.float64) - exported.astype(np.float64)).max())
    return math.inf if math.isnan(largest) else largest
