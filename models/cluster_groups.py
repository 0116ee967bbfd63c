"""Clusters that can be shown: groups of patches, regions and words that Ada-ClustFormer's matrices C hold together.

C is soft; its paper's Figure 5 draws hard groups without saying how. Here, in every layer and on the stacked matrix:

- words form runs from left to right: a run that starts at word s continues while C[s, k] >= 0.5. C does not
  grow with k for one s, so the run is all that its first word is held together with;
- cells of a grid (patches, or regions as they are arranged) join the first of them, row by row, in the
  same way: those with C[first, k] >= 0.5 that a path of such neighbors, up, down, left or right, leads to. Neighbors
  alone would not do: C is near 1 between most of them, so that a chain of them joins what C holds apart.

With down-up sampling cells of one group have C = 1, so that a cluster is made of whole groups.
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
    """Of one image and its caption: for each layer that has a matrix, the number of each token's cluster, from 0.

    image (layers, N) int64, in the order of the features; words (layers, W) int64. `encoder_layers` and
    `decoder_layers` number the layers, from 1; either may be empty. `grid` (rows, columns) of the image tokens; None
    for regions.
    """

    image: Tensor
    words: Tensor
    encoder_layers: tuple[int, ...]
    decoder_layers: tuple[int, ...]
    grid: tuple[int, int] | None


def sequence_groups(matrix: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """(N,) the run of each token, from C (N, N)."""
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
    """(N,) the group of each cell, from C (N, N), in the order of their first cells.

    valid_mask (N,) False at dummies, which are in no group: -1.
    """
    joined = matrix.tolist()
    valid = [True] * (rows * columns) if valid_mask is None else valid_mask.tolist()
    labels, count = [-1] * (rows * columns), 0
    for first in range(rows * columns):
        if labels[first] >= 0 or not valid[first]:
            continue
        labels[first], pending = count, [first]
        while pending:
            cell = pending.pop()
            row, column = divmod(cell, columns)
            beside = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
            for r, c in beside:
                other = r * columns + c
                inside = 0 <= r < rows and 0 <= c < columns
                if inside and valid[other] and labels[other] < 0 and joined[first][other] >= threshold:
                    labels[other] = count
                    pending.append(other)
        count += 1
    return torch.tensor(labels, dtype=torch.int64)


@torch.no_grad()
def find_clusters(
    model: CaptionModel,
    features: Features,
    tokens: Tensor,
    *,
    threshold: float = THRESHOLD,
) -> Clusters | None:
    """The clusters of one image, features (1, N, C), and one caption, tokens (T,) with SOS: words are those behind it.

    None for a model without adaptive clusters. Leave out EOS, and PAD of the features.
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
    return Clusters(image, _stacked(words, len(tokens) - 1), encoder, decoder, grid)


def _image_groups(
    model: ClustFormer, features: Features, layers: tuple[int, ...], threshold: float
) -> tuple[Tensor, tuple[int, int] | None]:
    matrices, arrangement = model.encoder_clusters(features)
    matrices, count = matrices[:, 0].float().cpu(), features.tokens.shape[1]
    two = model.config.encoder_clusters == "2d"
    if arrangement is None:
        rows, columns = model.config.grid or (round(count**0.5), round(count**0.5))
        rows, columns = (rows, columns) if rows * columns == count else (1, count)
        labels_by_layer = [
            grid_groups(matrices[n - 1], rows, columns, None, threshold)
            if two
            else sequence_groups(matrices[n - 1], threshold)
            for n in layers
        ]
        return _stacked(labels_by_layer, count), (rows, columns)
    rows = model.config.region_rows if two else 1
    valid_mask, order = arrangement.valid_mask[0].cpu(), arrangement.order[0].cpu()
    labels_by_layer = [
        grid_groups(matrices[n - 1], rows, len(order) // rows, valid_mask, threshold)
        if two
        else sequence_groups(matrices[n - 1], threshold)
        for n in layers
    ]
    return _stacked([labels[order.argsort()][:count] for labels in labels_by_layer], count), None


def _stacked(labels: list[Tensor], count: int) -> Tensor:
    return torch.stack(labels) if labels else torch.zeros(0, count, dtype=torch.int64)
