"""Clusters for pictures: hard groups of patches, regions and words, from Ada-ClustFormer's soft matrices C.

The paper's Figure 5 draws hard groups and does not say how they are made. Here they follow from the matrix of a layer:

- Words form runs from left to right. A run that starts at word s contains the next words while C[s, k] >= 0.5. As
  C[s, k] never grows with k, it contains all later words with C[s, k] >= 0.5.
- Cells of a grid (patches or arranged regions) form connected groups. The first cell without a group, row by row,
  starts one. It contains the cells with C[first, k] >= 0.5 that are connected to the first cell through such cells (up,
  down, left or right). Chains of neighbors would join cells whose C is small.

With down-up sampling, C is 1 between the cells of one pooled group, so that a cluster consists of whole pooled groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features
from raycap.models.clustformer import ClustFormer

THRESHOLD = 0.5  # tokens with a smaller C do not share a cluster


@dataclass(frozen=True)
class Clusters:
    """The clusters of one image and its caption in each layer that has a matrix, numbered from 0."""

    image: Tensor  # cluster of each image token, (layers, N) int64, in the order of the features
    words: Tensor  # cluster of each word, (layers, W) int64
    encoder_layers: tuple[int, ...]  # numbers, from 1, of the layers with a matrix; may be empty
    decoder_layers: tuple[int, ...]
    grid: tuple[int, int] | None  # (rows, columns) of the image tokens; None for regions


def sequence_groups(matrix: Tensor) -> Tensor:
    """The number (N,), from 0, of the run to which each token of a sequence belongs; `matrix` (N, N) is C.

    A token belongs to the current run if its C with the run's first token is THRESHOLD or more. Otherwise it starts
    the next run.
    """
    labels, start, label = [], 0, 0
    rows = matrix.tolist()
    for token in range(len(rows)):
        if token and rows[start][token] < THRESHOLD:
            start, label = token, label + 1
        labels.append(label)
    return torch.tensor(labels, dtype=torch.int64)


def grid_groups(matrix: Tensor, rows: int, columns: int, valid_mask: Tensor | None = None) -> Tensor:
    """The number (N,), from 0, of the group of each cell of a grid; -1 where `valid_mask` (N,) is False.

    `matrix` (N, N) is C. The first cell without a group starts the next group. It takes the connected cells whose
    C with this first cell is THRESHOLD or more.
    """
    weights = matrix.tolist()
    cells = [divmod(cell, columns) for cell in range(rows * columns)]
    free = {cell for n, cell in enumerate(cells) if valid_mask is None or valid_mask[n]}
    labels, count = dict.fromkeys(cells, -1), 0
    for first, start in enumerate(cells):
        if start not in free:
            continue
        pending = [start]
        while pending:
            row, column = cell = pending.pop()
            if cell in free and (cell == start or weights[first][row * columns + column] >= THRESHOLD):
                free.remove(cell)
                labels[cell] = count
                pending += [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        count += 1
    return torch.tensor(list(labels.values()), dtype=torch.int64)


@torch.no_grad()
def find_clusters(model: CaptionModel, features: Features, tokens: Tensor) -> Clusters | None:
    """The clusters of one image, features (1, N, C), and of the words after SOS in one caption, tokens (T,).

    Returns None for a model without adaptive clusters. The tokens must not contain EOS, nor the features padding.
    """
    if not isinstance(model, ClustFormer):
        return None
    encoder = tuple(n for n, layer in enumerate(model.encoder, 1) if layer.clusters is not None)
    decoder = tuple(n for n, layer in enumerate(model.decoder, 1) if layer.clusters is not None)
    if not encoder and not decoder:
        return None
    image, grid = _image_groups(model, features, encoder)
    matrices = model.decoder_clusters(model.encode(features), tokens[None])
    matrices = matrices[:, 0, 1:, 1:].float().cpu()  # of the only caption, without SOS
    words = [sequence_groups(matrices[number - 1]) for number in decoder]
    return Clusters(image, _stack_labels(words, len(tokens) - 1), encoder, decoder, grid)


def _image_groups(
    model: ClustFormer, features: Features, layers: tuple[int, ...]
) -> tuple[Tensor, tuple[int, int] | None]:
    """The clusters (layers, N) of the image tokens, and the grid that they form (None for regions)."""
    matrices, arrangement = model.encoder_clusters(features)
    matrices, count = matrices[:, 0].float().cpu(), features.tokens.shape[1]
    is_grid, valid_mask = model.config.encoder_clusters == "2d", None
    if arrangement is None:
        side = round(count**0.5)
        rows, columns = model.config.grid or (side, side)
        if rows * columns != count:
            rows, columns = 1, count
        position = torch.arange(count)
    else:
        rows = model.config.region_rows if is_grid else 1
        columns, valid_mask = matrices.shape[1] // rows, arrangement.valid_mask[0].cpu()
        position = arrangement.order[0].cpu().argsort()[:count]  # the cell of each region
    labels = []
    for number in layers:
        matrix = matrices[number - 1]
        groups = grid_groups(matrix, rows, columns, valid_mask) if is_grid else sequence_groups(matrix)
        labels.append(groups[position])
    return _stack_labels(labels, count), None if arrangement is not None else (rows, columns)


def _stack_labels(labels: list[Tensor], count: int) -> Tensor:
    """Labels (count,) of each layer as one tensor (layers, count), also when there are no layers."""
    return torch.stack(labels) if labels else torch.zeros(0, count, dtype=torch.int64)
