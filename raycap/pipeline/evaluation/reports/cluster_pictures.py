"""Cluster pictures of Ada-ClustFormer: patches and words of each layer, colored by cluster (Figure 5 of the paper).

`explain/cluster_groups.py` defines clusters. A cluster consists of clusters of the layer below, and gets the color of
the largest one unless an adjacent cluster has that color. Adjacent clusters differ in color if the colors suffice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from raycap.pipeline.evaluation.reports.fonts import drawable

if TYPE_CHECKING:  # it imports torch, which no caller of `COLORS` needs
    from raycap.models.explain.cluster_groups import Clusters

SIDE, MARGIN, TITLE = 288, 12, 26  # pixels: side of an image, margin, height of a title
LINE = 28  # pixels: height of a line of words
COLUMNS = 3
COLORS = (
    "#2e86ab", "#f6c445", "#d1495b", "#3fa34d", "#8e5bb5", "#ee8434",
    "#17a398", "#d987b8", "#8d6346", "#a6c24a", "#5f6f8c", "#c9c5b1",
)  # fmt: skip
OPACITY = 0.55  # opacity of the colors over the image


@dataclass(frozen=True)
class LayerColors:
    """One layer: the index into COLORS of each grid cell (rows, columns) and of each word; None without clusters."""

    title: str
    cells: np.ndarray | None
    words: np.ndarray | None

    def for_page(self) -> dict[str, Any]:
        """The layer for the report's script; one hex digit for the color of each cell (row by row) and word."""
        cells, words = (() if colors is None else colors for colors in (self.cells, self.words))
        return {
            "title": self.title,
            "rows": len(cells),
            "cells": "".join(f"{color:x}" for color in np.ravel(cells)),
            "words": "".join(f"{color:x}" for color in words),
        }


def layer_colors(clusters: Clusters) -> list[LayerColors]:
    """Every layer with clusters of patches or words. Without a grid of image tokens, no layer has cells."""
    cells: dict[int, tuple[np.ndarray, int]] = {}
    if clusters.grid is not None:
        cells = _choose_colors(
            clusters.encoder_layers, [labels.reshape(clusters.grid) for labels in clusters.image.numpy()]
        )
    words = _choose_colors(clusters.decoder_layers, [labels[None] for labels in clusters.words.numpy()])
    layers = []
    for number in sorted(cells.keys() | words.keys()):
        grid, num_cells = cells.get(number, (None, 0))
        line, num_words = words.get(number, (None, 0))
        counts = [_count(num_cells, "patch cluster")] if grid is not None else []
        counts += [_count(num_words, "phrase")] if line is not None else []
        title = f"layer {number}: {', '.join(counts)}"
        layers.append(LayerColors(title, grid, None if line is None else line[0]))
    return layers


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _choose_colors(numbers: Sequence[int], layers: Sequence[np.ndarray]) -> dict[int, tuple[np.ndarray, int]]:
    """{layer number: (indices into COLORS (rows, columns), number of clusters)}.

    numbers, layers: the number and the cluster labels (rows, columns) of each layer, the lowest layer first. Larger
    clusters choose first. A cluster takes the first color that no adjacent cluster has: of the colors that its cells
    have in the layer below, the most frequent one first, and then of all others.
    """
    colored: dict[int, tuple[np.ndarray, int]] = {}
    below = None  # the colors of the layer below
    for number, labels in zip(numbers, layers, strict=True):
        neighbors = _find_neighbors(labels)
        sizes = Counter(labels.ravel().tolist())
        colors: dict[int, int] = {}
        for label, _ in sizes.most_common():
            taken = {colors[other] for other in neighbors[label] if other in colors}
            colors_below: list[int] = [] if below is None else below[labels == label].tolist()
            preferred = [color for color, _ in Counter(colors_below).most_common()] or [label % len(COLORS)]
            choices = [*preferred, *((label + step) % len(COLORS) for step in range(len(COLORS)))]
            colors[label] = next((color for color in choices if color not in taken), preferred[0])
        below = np.vectorize(colors.get, otypes=[np.int64])(labels) if labels.size else labels
        colored[number] = below, len(sizes)
    return colored


def _find_neighbors(labels: np.ndarray) -> dict[int, set[int]]:
    """The labels next to each label, horizontally or vertically."""
    neighbors: dict[int, set[int]] = defaultdict(set)
    for one, other in ((labels[:, 1:], labels[:, :-1]), (labels[1:], labels[:-1])):
        for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True):
            if a != b:
                neighbors[a].add(b)
                neighbors[b].add(a)
    return neighbors


def cluster_picture(image: Image.Image, words: Sequence[str], clusters: Clusters) -> Image.Image:
    """One tile per layer: the image and the caption's words in the colors of their clusters."""
    layers = layer_colors(clusters)
    (words, font), small = drawable(words, 18), ImageFont.load_default(15)
    boxes = _lay_out_words(words, font)
    num_lines = max((line for line, _, _ in boxes), default=0) + 1
    columns = min(COLUMNS, max(1, len(layers)))
    rows = math.ceil(len(layers) / columns)
    width, height = SIDE + MARGIN, SIDE + TITLE + LINE * num_lines + MARGIN
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for number, layer in enumerate(layers):
        left, top = MARGIN + number % columns * width, MARGIN + number // columns * height
        draw.text((left, top), layer.title, "black", small)
        sheet.paste(color_cells(image, layer.cells), (left, top + TITLE))
        for index, (word, (line, offset, length)) in enumerate(zip(words, boxes, strict=True)):
            x, y = left + offset, top + TITLE + SIDE + 4 + line * LINE
            font_color = "black"
            if layer.words is not None:
                color = COLORS[layer.words[index]]
                font_color = text_color(color)
                # There is no gap between words of one cluster.
                is_joined = offset > 0 and layer.words[index] == layer.words[index - 1]
                draw.rectangle((x - (1 if is_joined else -1), y, x + length - 1, y + LINE - 4), color)
            draw.text((x + 5, y + 2), word, font_color, font)
    return sheet


def color_cells(image: Image.Image, cells: np.ndarray | None) -> Image.Image:
    """The image (SIDE x SIDE) under the colors of its cells, with lines between clusters.

    The image remains unchanged without cells, or when all have one color.
    """
    picture = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if cells is None or (cells == cells.flat[0]).all():
        return picture
    palette = np.array([ImageColor.getrgb(color) for color in COLORS], np.uint8)
    overlay = Image.fromarray(palette[cells]).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    picture = Image.blend(picture, overlay, OPACITY)
    draw, (rows, columns) = ImageDraw.Draw(picture), cells.shape
    for row in range(rows):
        for column in range(columns):
            x, y = column * SIDE / columns, row * SIDE / rows
            if column and cells[row, column] != cells[row, column - 1]:
                draw.line((x, y, x, y + SIDE / rows), "white", 2)
            if row and cells[row, column] != cells[row - 1, column]:
                draw.line((x, y, x + SIDE / columns, y), "white", 2)
    return picture


def _lay_out_words(words: Sequence[str], font: Any) -> list[tuple[int, float, float]]:
    """The line, left edge and width of each word, so that no line is wider than a tile."""
    boxes, line, left = [], 0, 0.0
    for word in words:
        width = font.getlength(word) + 10  # 5 pixels on each side
        if left and left + width > SIDE:
            line, left = line + 1, 0.0
        boxes.append((line, left, width))
        left += width
    return boxes


def text_color(color: str) -> str:
    """Black or white, whichever has more contrast on a color (WCAG's relative luminance)."""
    red, green, blue = ((value / 255) ** 2.2 for value in ImageColor.getrgb(color))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if luminance > 0.18 else "white"  # at about 0.18 both have the same contrast
