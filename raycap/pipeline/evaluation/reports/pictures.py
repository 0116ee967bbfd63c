"""Pictures of what a model saw: heat maps for the words of a caption, and the clusters of Ada-ClustFormer.

Heat maps show attention and attribution over the picture, one per word of a caption (ExpansionNet v2, Figure 4).
Cluster pictures show the patches and words of each layer, colored by cluster (Figure 5 of Ada-ClustFormer's paper).
`explain/cluster_groups.py` defines clusters. Matplotlib draws both as files; the page of an evaluation draws its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from raycap.pipeline.evaluation.reports.page import COLORS, layer_colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raycap.models.explain.cluster_groups import Clusters

TILE = 2.4  # inches
WORD_COLUMNS, LAYER_COLUMNS = 6, 3
LINE_LENGTH = 28  # characters of a line of words below a tile
# Matplotlib takes each character from the first of these fonts that has it. The first one is its own.
FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Unifont", "FreeSans")


def draw_word_maps(
    path: Path, image: Image.Image, words: Sequence[str], maps: dict[str, np.ndarray], grid: tuple[int, int]
) -> None:
    """Writes a PNG file with the image and, for each word, its heat maps, one below the other.

    maps: by name, such as "attention"; (words, rows * columns) over the `grid` of (rows, columns) image tokens. Each
    map has the colors from its smallest value (dark) to its largest one (yellow). Ray and torch are not needed.
    """
    columns = min(WORD_COLUMNS, 1 + len(words))
    figure = _figure(math.ceil((1 + len(words)) / columns) * len(maps), columns)
    axes = np.array(figure.axes).reshape(-1, columns)
    axes[0, 0].imshow(image.convert("RGB"), extent=(0, 1, 0, 1))
    gray = image.convert("L")  # so that its colors are not mistaken for those of the map
    for row, (name, weights) in enumerate(maps.items()):
        for number, word in enumerate(words, 1):
            line, column = divmod(number, columns)
            axis = axes[line * len(maps) + row, column]
            axis.imshow(gray, "gray", vmin=0, vmax=255, extent=(0, 1, 0, 1))
            level = weights[number - 1].reshape(grid)
            axis.imshow(level, "plasma", extent=(0, 1, 0, 1), alpha=0.55, interpolation="bicubic")
            axis.set_title(f"{word}\n{name}", parse_math=False, fontsize=9)
    _save(figure, path)


def draw_clusters(path: Path, image: Image.Image, words: Sequence[str], clusters: Clusters) -> None:
    """Writes a PNG file with one tile per layer: the image and the caption's words in the colors of their clusters."""
    layers = layer_colors(clusters)
    columns = min(LAYER_COLUMNS, max(1, len(layers)))
    places, line, left = list[tuple[float, int]](), 1, 0
    for word in words:
        if left and left + len(word) > LINE_LENGTH:
            line, left = line + 1, 0
        places.append((left / LINE_LENGTH, line))
        left += len(word) + 1
    figure = _figure(math.ceil(len(layers) / columns), columns, 0.25 * line)
    for axis, layer in zip(figure.axes, layers, strict=False):
        axis.set_title(layer.title, fontsize=9)
        axis.imshow(image.convert("RGB"), extent=(0, 1, 0, 1))
        if layer.rows and len(set(layer.cells)) > 1:  # a single cluster needs no color
            rgb = [[int(COLORS[int(digit, 16)][start : start + 2], 16) for start in (1, 3, 5)] for digit in layer.cells]
            cells = np.array(rgb, np.uint8).reshape(layer.rows, -1, 3)
            axis.imshow(cells, extent=(0, 1, 0, 1), alpha=0.55, interpolation="nearest")
        for index, (word, (across, line)) in enumerate(zip(words, places, strict=True)):
            color = COLORS[int(layer.words[index], 16)] if layer.words else "white"
            text = axis.text(across, -0.11 * line, word, transform=axis.transAxes, parse_math=False, fontsize=8)
            text.set(backgroundcolor=color, in_layout=False)
    _save(figure, path)


def _figure(rows: int, columns: int, below: float = 0.05) -> Figure:
    """A figure with rows x columns empty, square axes, which needs no display. below: inches below each row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * TILE, rows * (TILE * 1.2 + below)))
    figure.set_layout_engine("constrained", h_pad=below)
    FigureCanvasAgg(figure)
    for axis in figure.subplots(rows, columns, squeeze=False).flat:
        axis.axis("off")
    return figure


def _save(figure: Figure, path: Path) -> None:
    """Writes a figure, with the fonts of FONTS that this machine has."""
    from matplotlib.font_manager import fontManager

    names = {font.name for font in fontManager.ttflist}
    for axis in figure.axes:
        for text in (axis.title, *axis.texts):
            text.set_fontfamily([name for name in FONTS if name in names])
    figure.savefig(path, dpi=96)
