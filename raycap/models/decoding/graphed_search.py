"""Beam search on a GPU as a CUDA graph: the processor starts one graph in place of thousands of operations.

The graph has the whole search and not a single step, because a step's shapes depend on its number. A captured search
cannot ask the GPU which captions have ended, so that it takes all steps and keeps all images. The captions are the same
as those of `beam_search`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Memory, map_tensors
from raycap.models.decoding.search import Beams, Captions, Decoder, ScoreRules, beam_search, search, start_beams

logger = logging.getLogger(__name__)

MAX_GRAPHS = 4  # few, because each graph keeps the memory of a search
Shape = tuple[tuple[str, torch.Size, torch.dtype], ...]  # name, shape and dtype of each tensor in the memories


@dataclass(frozen=True)
class SearchGraph:
    """A captured search. `replay` reads `inputs` and writes the results to `beams`."""

    inputs: list[Memory]
    beams: Beams
    replay: Callable[[], object]


@dataclass
class GraphedSearch:
    """Does what `beam_search` does, but captures the search at a shape's second batch and replays it for later batches.

    The first batch of a shape is searched without a graph. Batches of new shapes have no graph, either, once there are
    `max_graphs` graphs or a capture has failed. Weights may change in place. Autocast must be the same at each call.
    """

    models: Sequence[CaptionModel]
    beam_size: int
    max_length: int
    num_results: int = 1
    rules: ScoreRules = field(default_factory=ScoreRules)
    max_graphs: int = MAX_GRAPHS
    seen: set[Shape] = field(default_factory=set)
    graphs: dict[Shape, SearchGraph] = field(default_factory=dict)

    def __call__(self, memories: Sequence[Memory]) -> Captions:
        """Returns the best captions, as `beam_search` does."""
        shape = tuple((name, tensor.shape, tensor.dtype) for memory in memories for name, tensor in _tensors(memory))
        if shape not in self.graphs and shape in self.seen and len(self.graphs) < self.max_graphs:
            self._capture(shape, [map_tensors(memory, torch.clone) for memory in memories])
        self.seen.add(shape)
        graph = self.graphs.get(shape)
        if graph is None:
            limits = {"beam_size": self.beam_size, "max_length": self.max_length, "num_results": self.num_results}
            return beam_search(self.models, memories, rules=self.rules, **limits)
        for memory, static in zip(memories, graph.inputs, strict=True):
            for name, tensor in _tensors(memory):
                getattr(static, name).copy_(tensor)
        graph.replay()
        captions, _ = graph.beams.ranked(self.num_results, self.rules.length_normalization)
        return captions

    def _capture(self, shape: Shape, inputs: list[Memory]) -> None:
        """Adds the graph of a shape. If the capture fails, no further one is tried."""
        try:
            self.graphs[shape] = captured(inputs, lambda: self._all_steps(inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # some operation, of the search or of another thread, prevents a capture
            logger.warning(f"searches are not captured: {error}")
            self.max_graphs = len(self.graphs)

    @torch.no_grad()
    def _all_steps(self, memories: Sequence[Memory]) -> Beams:
        """Returns the beams after all steps of a search that never reads results from the GPU."""
        decoder = Decoder(self.models, memories, self.beam_size, self.max_length, keeps_images=True)
        beams = start_beams(decoder, self.max_length, self.rules.decoding)
        return search(decoder, beams, self.max_length, self.rules)


def _tensors(memory: Memory) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in vars(memory).items() if tensor is not None]


def captured(inputs: list[Memory], run: Callable[[], Beams]) -> SearchGraph:
    """Captures `run`, which reads `inputs`. Calls `run` once before, so that libraries are initialized."""
    # The cache is cleared, because weights that autocast converts outside of the graph are freed before its replay.
    torch.clear_autocast_cache()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.clear_autocast_cache()
    graph = torch.cuda.CUDAGraph()
    # only this thread is restricted, because others may prepare batches in page-locked memory during the capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        beams = run()
    torch.clear_autocast_cache()
    return SearchGraph(inputs, beams, graph.replay)
