"""Cluster pictures of Ada-ClustFormer: patches and words of each layer, colored by cluster (Figure 5 of the paper).

`models/cluster_groups.py` defines clusters. A cluster consists of clusters of the layer below, and gets the color of
the largest one unless an adjacent cluster has that color. Adjacent clusters differ in color if the colors suffice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from models.cluster_groups import Clusters

SIDE, MARGIN, TITLE, LINE = (
    288,
    12,
    26,
    28,
)  # pixels: side of an image, margin, height of a title and of a line of words
COLUMNS = 3
COLORS = (
    "#2e86ab", "#f6c445", "#d1495b", "#3fa34d", "#8e5bb5", "#ee8434",
    "#17a398", "#d987b8", "#8d6346", "#a6c24a", "#5f6f8c", "#c9c5b1",
)  # fmt: skip
VEIL = 0.55  # opacity of the colors over the image


@dataclass(frozen=True)
class LayerColors:
    """One layer: the index into COLORS of each grid cell (rows, columns) and of each word; None without clusters.

    image_layer, word_layer: numbers of the encoder and decoder layer, 0 for none. num_cells: number of clusters of
    patches. num_words: number of clusters of words.
    """

    image_layer: int
    word_layer: int
    cells: np.ndarray | None
    words: np.ndarray | None
    num_cells: int = 0
    num_words: int = 0

    @property
    def title(self) -> str:
        parts = [_counted(self.num_cells, "patch cluster")] if self.cells is not None else []
        parts += [_counted(self.num_words, "phrase")] if self.words is not None else []
        return f"layer {self.image_layer or self.word_layer}: {', '.join(parts)}"


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")


def layer_colors(clusters: Clusters) -> list[LayerColors]:
    """Every layer with clusters of patches or words. Without a grid of image tokens, no layer has cells."""
    cells: dict[int, tuple[np.ndarray, int]] = {}
    words: dict[int, tuple[np.ndarray, int]] = {}
    if clusters.grid is not None:
        grids = [labels.reshape(clusters.grid) for labels in clusters.image.numpy()]
        cells = dict(zip(clusters.encoder_layers, _colored(grids), strict=True))
    lines = [labels[None] for labels in clusters.words.numpy()]
    words = dict(zip(clusters.decoder_layers, _colored(lines), strict=True))
    layers = []
    for number in sorted(cells.keys() | words.keys()):
        grid, num_cells = cells.get(number, (None, 0))
        line, num_words = words.get(number, (None, 0))
        word_colors = None if line is None else line[0]
        image_layer, word_layer = number if number in cells else 0, number if number in words else 0
        layers.append(LayerColors(image_layer, word_layer, grid, word_colors, num_cells, num_words))
    return layers


def _colored(layers: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int]]:
    """The colors (rows, columns) and the number of clusters of each layer, from the lowest layer up."""
    colored: list[tuple[np.ndarray, int]] = []
    for labels in layers:
        neighbors = _neighbors(labels)
        sizes = Counter(labels.ravel().tolist())
        colors: dict[int, int] = {}
        for label, _ in sizes.most_common():
            taken = {colors[other] for other in neighbors.get(label, ()) if other in colors}
            parts = Counter(colored[-1][0][labels == label].tolist()) if colored else Counter()
            preferred = [color for color, _ in parts.most_common()] or [label % len(COLORS)]
            choices = [*preferred, *((label + step) % len(COLORS) for step in range(len(COLORS)))]
            colors[label] = next((color for color in choices if color not in taken), preferred[0])
        painted = np.vectorize(colors.get, otypes=[np.int64])(labels) if labels.size else labels
        colored.append((painted, len(sizes)))
    return colored


def _neighbors(labels: np.ndarray) -> dict[int, set[int]]:
    """The labels next to each label, horizontally or vertically."""
    neighbors: dict[int, set[int]] = {}
    for one, other in ((labels[:, 1:], labels[:, :-1]), (labels[1:], labels[:-1])):
        for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True):
            if a != b:
                neighbors.setdefault(a, set()).add(b)
                neighbors.setdefault(b, set()).add(a)
    return neighbors


def cluster_picture(image: Image.Image, words: Sequence[str], clusters: Clusters) -> Image.Image:
    """One tile per layer: the image and the caption's words in the colors of their clusters."""
    layers = layer_colors(clusters)
    font, small = ImageFont.load_default(18), ImageFont.load_default(15)
    lines = _wrapped(words, font)
    columns = min(COLUMNS, max(1, len(layers)))
    width, height = SIDE + MARGIN, SIDE + TITLE + LINE * (1 + max(lines, default=0)) + MARGIN
    rows = -(-len(layers) // columns)
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for number, layer in enumerate(layers):
        left, top = MARGIN + number % columns * width, MARGIN + number // columns * height
        draw.text((left, top), layer.title, "black", small)
        sheet.paste(veiled(image, layer.cells), (left, top + TITLE))
        _write_words(draw, words, lines, layer.words, (left, top + TITLE + SIDE + 4), font)
    return sheet


def veiled(image: Image.Image, cells: np.ndarray | None) -> Image.Image:
    """The image (SIDE x SIDE) under the colors of its cells, with lines between clusters.

    The image remains unchanged without cells, or when all have one color.
    """
    picture = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if cells is None or (cells == cells.flat[0]).all():
        return picture
    palette = np.array([_rgb(color) for color in COLORS], np.uint8)
    veil = Image.fromarray(palette[cells]).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    picture = Image.blend(picture, veil, VEIL)
    draw, (rows, columns) = ImageDraw.Draw(picture), cells.shape
    for row in range(rows):
        for column in range(columns):
            x, y = column * SIDE / columns, row * SIDE / rows
            if column and cells[row, column] != cells[row, column - 1]:
                draw.line((x, y, x, y + SIDE / rows), "white", 2)
            if row and cells[row, column] != cells[row - 1, column]:
                draw.line((x, y, x + SIDE / columns, y), "white", 2)
    return picture


def _wrapped(words: Sequence[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[int]:
    """The line number of each word, so that no line is wider than a tile."""
    lines, line, used = [], 0, 0.0
    for word in words:
        width = font.getlength(word) + 10
        if used and used + width > SIDE:
            line, used = line + 1, 0.0
        lines.append(line)
        used += width
    return lines


def _write_words(
    draw: ImageDraw.ImageDraw,
    words: Sequence[str],
    lines: Sequence[int],
    colors: np.ndarray | None,
    at: tuple[float, float],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Writes words on their clusters' colors, without a gap between words of one cluster."""
    left, previous_line = 0.0, 0
    for number, (word, line) in enumerate(zip(words, lines, strict=True)):
        if line != previous_line:
            left, previous_line = 0.0, line
        width, y = font.getlength(word) + 10, at[1] + line * LINE
        color = None if colors is None else COLORS[colors[number]]
        joined = number and line == lines[number - 1] and colors is not None and colors[number] == colors[number - 1]
        if color is not None:
            draw.rectangle((at[0] + left - (1 if joined else -1), y, at[0] + left + width - 1, y + LINE - 4), color)
        draw.text((at[0] + left + 5, y + 2), word, ink_on(color), font)
        left += width


def ink_on(color: str | None) -> str:
    """Black or white, whichever has more contrast on a color (WCAG's relative luminance)."""
    if color is None:
        return "black"
    red, green, blue = ((value / 255) ** 2.2 for value in _rgb(color))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[start : start + 2], 16) for start in (1, 3, 5))


def color_table() -> Iterable[tuple[str, str]]:
    """(color, ink) of each color, for pages that draw clusters in the browser."""
    return [(color, ink_on(color)) for color in COLORS]


def write_cluster_picture(path: Path, image: Image.Image, words: Sequence[str], clusters: Clusters) -> None:
    """Writes `cluster_picture` as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cluster_picture(image, words, clusters).save(path)
