"""Clusters for pictures: hard groups of patches, regions and words, from Ada-ClustFormer's soft matrices C.

The paper's Figure 5 draws hard groups but does not explain how they are made. Here they are made in every layer from
the stacked matrix:

- Words form runs from left to right. A run that starts at word s continues while C[s, k] >= 0.5. C[s, k] never grows
  with k, so that the run contains all later words with C[s, k] >= 0.5.
- Cells of a grid (patches or arranged regions) form connected groups. The first cell without a group, row by row,
  starts one. It contains the cells with C[first, k] >= 0.5 that are connected to the first cell through such cells (up,
  down, left or right). Comparing neighbors with each other would not work: C is near 1 between most neighbors, so that
  a chain of them would join cells whose C is small.

With down-up sampling, C is 1 between the cells of one pooled group, so that a cluster consists of whole pooled groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import CaptionModel, Features
from models.clustformer import ClustFormer

THRESHOLD = 0.5


@dataclass(frozen=True)
class Clusters:
    """The clusters of one image and its caption in each layer that has a matrix, numbered from 0.

    image: cluster of each image token, (layers, N) int64, in the order of the features.
    words: cluster of each word, (layers, W) int64.
    encoder_layers, decoder_layers: the numbers of these layers, from 1; either may be empty.
    grid: (rows, columns) of the image tokens; None for regions.
    """

    image: Tensor
    words: Tensor
    encoder_layers: tuple[int, ...]
    decoder_layers: tuple[int, ...]
    grid: tuple[int, int] | None


def sequence_groups(matrix: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """The number (N,) of each token's run, from C (N, N)."""
    labels, start, label = [], 0, 0
    rows = matrix.tolist()
    for token in range(len(rows)):
        if token and rows[start][token] < threshold:
            start, label = token, label + 1
        labels.append(label)
    return torch.tensor(labels, dtype=torch.int64)


def grid_groups(
    matrix: Tensor, rows: int, columns: int, valid_mask: Tensor | None = None, threshold: float = THRESHOLD
) -> Tensor:
    """The number (N,) of each cell's group, from C (N, N); groups are numbered in the order of their first cells.

    valid_mask (N,) is False at dummies, which are in no group and get -1.
    """
    weights = matrix.tolist()
    valid = [True] * (rows * columns) if valid_mask is None else valid_mask.tolist()
    labels, count = [-1] * (rows * columns), 0
    for first in range(rows * columns):
        if labels[first] >= 0 or not valid[first]:
            continue
        labels[first], pending = count, [first]
        while pending:
            cell = pending.pop()
            row, column = divmod(cell, columns)
            for r, c in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                if not (0 <= r < rows and 0 <= c < columns):
                    continue
                neighbor = r * columns + c
                if valid[neighbor] and labels[neighbor] < 0 and weights[first][neighbor] >= threshold:
                    labels[neighbor] = count
                    pending.append(neighbor)
        count += 1
    return torch.tensor(labels, dtype=torch.int64)


@torch.no_grad()
def find_clusters(
    model: CaptionModel, features: Features, tokens: Tensor, *, threshold: float = THRESHOLD
) -> Clusters | None:
    """The clusters of one image, features (1, N, C), and of the words after SOS in one caption, tokens (T,).

    Returns None for a model without adaptive clusters. The tokens must not contain EOS, nor the features padding.
    """
    if not isinstance(model, ClustFormer):
        return None
    encoder = tuple(n for n, layer in enumerate(model.encoder, 1) if layer.clusters is not None)
    decoder = tuple(n for n, layer in enumerate(model.decoder, 1) if layer.clusters is not None)
    if not encoder and not decoder:
        return None
    memory = model.encode(features)
    image, grid = _image_groups(model, features, encoder, threshold)
    matrices = model.decoder_clusters(memory, tokens[None])[:, 0, 1:, 1:].float().cpu()
    words = [sequence_groups(matrices[number - 1], threshold) for number in decoder]
    return Clusters(image, _stack_labels(words, len(tokens) - 1), encoder, decoder, grid)


def _image_groups(
    model: ClustFormer, features: Features, layers: tuple[int, ...], threshold: float
) -> tuple[Tensor, tuple[int, int] | None]:
    """The clusters (layers, N) of the image tokens, and the grid that they form (None for regions)."""
    matrices, arrangement = model.encoder_clusters(features)
    matrices, count = matrices[:, 0].float().cpu(), features.tokens.shape[1]
    is_grid = model.config.encoder_clusters == "2d"

    def groups(number: int, rows: int, columns: int, valid_mask: Tensor | None) -> Tensor:
        matrix = matrices[number - 1]
        if is_grid:
            return grid_groups(matrix, rows, columns, valid_mask, threshold)
        return sequence_groups(matrix, threshold)

    if arrangement is None:
        side = round(count**0.5)
        rows, columns = model.config.grid or (side, side)
        if rows * columns != count:
            rows, columns = 1, count
        labels = [groups(number, rows, columns, valid_mask=None) for number in layers]
        return _stack_labels(labels, count), (rows, columns)
    rows = model.config.region_rows if is_grid else 1
    valid_mask, order = arrangement.valid_mask[0].cpu(), arrangement.order[0].cpu()
    position = order.argsort()[:count]  # the cell of each region
    labels = [groups(number, rows, len(order) // rows, valid_mask)[position] for number in layers]
    return _stack_labels(labels, count), None


def _stack_labels(labels: list[Tensor], count: int) -> Tensor:
    """Labels (count,) of each layer as one tensor (layers, count), also when there are no layers."""
    return torch.stack(labels) if labels else torch.zeros(0, count, dtype=torch.int64)
