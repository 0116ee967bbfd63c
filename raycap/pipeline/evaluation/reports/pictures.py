"""Pictures of what a model saw: heat maps for the words of a caption, and the clusters of Ada-ClustFormer.

Heat maps show attention and attribution over the picture, one per word of a caption (ExpansionNet v2, Figure 4).

Cluster pictures show the patches and words of each layer, colored by cluster (Figure 5 of Ada-ClustFormer's paper).
`explain/cluster_groups.py` defines clusters. A cluster consists of clusters of the layer below, and gets the color of
the largest one unless an adjacent cluster has that color. Adjacent clusters differ in color if the colors suffice.

Words are drawn with Pillow's own font, matplotlib's, or one of the system.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

if TYPE_CHECKING:
    from raycap.models.explain.cluster_groups import Clusters


MAP_SIDE, MAP_MARGIN, LABEL = 224, 8, 26  # pixels: side of an image, margin, height of a label
MAP_COLUMNS = 6
RASTER = 24  # region features are drawn on a grid with this many cells per side
NOTE = """attention: where the last
layer looked for the word

attribution: what made it more
probable (integrated gradients)

yellow is most, blue is least"""
LOW, HIGH = np.array([20, 24, 82], np.float64), np.array([255, 214, 64], np.float64)  # dark blue to yellow
TILE_SIDE, TILE_MARGIN, TITLE = 288, 12, 26  # pixels: side of an image, margin, height of a title
LINE = 28  # pixels: height of a line of words
TILE_COLUMNS = 3
COLORS = (
    "#2e86ab", "#f6c445", "#d1495b", "#3fa34d", "#8e5bb5", "#ee8434",
    "#17a398", "#d987b8", "#8d6346", "#a6c24a", "#5f6f8c", "#c9c5b1",
)  # fmt: skip
OPACITY = 0.55  # opacity of the colors over the image
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
# Files of Noto, which has a font for each script, and of fonts with many scripts; Pillow looks in the system's folders.
SYSTEM_FONTS = (
    "NotoSans-Regular.ttf", "NotoSansArabic-Regular.ttf", "NotoNaskhArabic-Regular.ttf",
    "NotoSansDevanagari-Regular.ttf", "NotoSansBengali-Regular.ttf", "NotoSansTamil-Regular.ttf",
    "NotoSansThai-Regular.ttf", "NotoSansHebrew-Regular.ttf", "NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc",
    "unifont.ttf", "FreeSans.ttf",
)  # fmt: skip
_NO_CHARACTER = "\uffff"  # every font draws it as a missing character


def region_maps(weights: np.ndarray, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Weights (W, N) of regions as grids (W, RASTER * RASTER). A cell gets the largest weight of its regions.

    boxes (N, 4): corners x0 y0 x1 y1, in pixels of a picture of `size` (width, height). Boxes without a number above 1
    are shares of the picture. A cell that no region covers gets the smallest weight.
    """
    width, height = size if boxes.max(initial=0.0) > 1 else (1, 1)
    centers = (np.arange(RASTER) + 0.5) / RASTER
    inside_x = (boxes[:, None, 0] <= centers * width) & (centers * width <= boxes[:, None, 2])  # (N, RASTER)
    inside_y = (boxes[:, None, 1] <= centers * height) & (centers * height <= boxes[:, None, 3])
    covered = (inside_y[:, :, None] & inside_x[:, None]).reshape(len(boxes), -1)
    least = weights.min(1, initial=np.inf, keepdims=True)
    return np.where(covered, weights[:, :, None], least[:, :, None]).max(1)


def heat_map(image: Image.Image, weights: np.ndarray) -> Image.Image:
    """The image (MAP_SIDE x MAP_SIDE) under a map of weights (N,), colored from the smallest to the largest.

    Raises ValueError when N is not a square, as for region features.
    """
    side = math.isqrt(len(weights))
    if side * side != len(weights):
        raise ValueError(f"{len(weights)} image tokens form no square grid; use region_maps for region features")
    grid = np.asarray(weights, np.float64).reshape(side, side)
    spread = grid.max() - grid.min()
    level = (grid - grid.min()) / spread if spread > 0 else np.zeros_like(grid)
    mask = Image.fromarray((level * 255).astype(np.uint8)).resize((MAP_SIDE, MAP_SIDE), Image.Resampling.BICUBIC)
    heat = np.asarray(mask, np.float64)[:, :, None] / 255
    color = LOW + (HIGH - LOW) * heat
    # The photograph is gray, so that its colors are not mistaken for the map's.
    pixels = np.asarray(image.convert("L").resize((MAP_SIDE, MAP_SIDE), Image.Resampling.BICUBIC), np.float64)[
        :, :, None
    ]
    return Image.fromarray((0.5 * pixels + 0.5 * color).clip(0, 255).astype(np.uint8))


def caption_picture(
    image: Image.Image, words: Sequence[str], attention: np.ndarray, attribution: np.ndarray
) -> Image.Image:
    """The image, then for each word its heat maps of `attention` and `attribution` (words, N), with the word below."""
    kinds = {"attention": attention, "attribution": attribution}
    columns = min(MAP_COLUMNS, 1 + len(words))
    tile = MAP_SIDE + MAP_MARGIN
    height = len(kinds) * tile + LABEL  # of a line: one heat map above the other, and the word
    num_lines = math.ceil((1 + len(words)) / columns)  # the image is the first tile
    sheet = Image.new("RGB", (LABEL + columns * tile + MAP_MARGIN, num_lines * height + MAP_MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    words, word_font = drawable(words, 18)
    sheet.paste(
        image.convert("RGB").resize((MAP_SIDE, MAP_SIDE), Image.Resampling.BICUBIC), (LABEL + MAP_MARGIN, MAP_MARGIN)
    )
    note_font = ImageFont.load_default(15)
    draw.multiline_text((LABEL + MAP_MARGIN, 2 * MAP_MARGIN + MAP_SIDE), NOTE, "dimgray", note_font, spacing=6)
    for row, (kind, maps) in enumerate(kinds.items()):
        label = Image.new("RGB", (MAP_SIDE, LABEL), "white")
        ImageDraw.Draw(label).text((MAP_SIDE / 2, LABEL / 2), kind, "dimgray", font, anchor="mm")
        for line in range(num_lines):
            sheet.paste(label.rotate(90, expand=True), (MAP_MARGIN // 2, MAP_MARGIN + line * height + row * tile))
        for number, weights in enumerate(maps, 1):
            left, top = LABEL + MAP_MARGIN + number % columns * tile, MAP_MARGIN + number // columns * height
            sheet.paste(heat_map(image, weights), (left, top + row * tile))
    for number, word in enumerate(words, 1):
        center = LABEL + MAP_MARGIN + number % columns * tile + MAP_SIDE / 2
        while draw.textlength(word, word_font) > MAP_SIDE:  # shortens a word that is wider than its tile
            word = word.removesuffix("…")[:-1] + "…"
        draw.text((center, (number // columns + 1) * height - LABEL + 2), word, "black", word_font, anchor="ma")
    return sheet


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
    columns = min(TILE_COLUMNS, max(1, len(layers)))
    rows = math.ceil(len(layers) / columns)
    width, height = TILE_SIDE + TILE_MARGIN, TILE_SIDE + TITLE + LINE * num_lines + TILE_MARGIN
    sheet = Image.new("RGB", (columns * width + TILE_MARGIN, rows * height + TILE_MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for number, layer in enumerate(layers):
        left, top = TILE_MARGIN + number % columns * width, TILE_MARGIN + number // columns * height
        draw.text((left, top), layer.title, "black", small)
        sheet.paste(color_cells(image, layer.cells), (left, top + TITLE))
        for index, (word, (line, offset, length)) in enumerate(zip(words, boxes, strict=True)):
            x, y = left + offset, top + TITLE + TILE_SIDE + 4 + line * LINE
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
    """The image (TILE_SIDE x TILE_SIDE) under the colors of its cells, with lines between clusters.

    The image remains unchanged without cells, or when all have one color.
    """
    picture = image.convert("RGB").resize((TILE_SIDE, TILE_SIDE), Image.Resampling.BICUBIC)
    if cells is None or (cells == cells.flat[0]).all():
        return picture
    palette = np.array([ImageColor.getrgb(color) for color in COLORS], np.uint8)
    overlay = Image.fromarray(palette[cells]).resize((TILE_SIDE, TILE_SIDE), Image.Resampling.NEAREST)
    picture = Image.blend(picture, overlay, OPACITY)
    draw, (rows, columns) = ImageDraw.Draw(picture), cells.shape
    for row in range(rows):
        for column in range(columns):
            x, y = column * TILE_SIDE / columns, row * TILE_SIDE / rows
            if column and cells[row, column] != cells[row, column - 1]:
                draw.line((x, y, x, y + TILE_SIDE / rows), "white", 2)
            if row and cells[row, column] != cells[row - 1, column]:
                draw.line((x, y, x + TILE_SIDE / columns, y), "white", 2)
    return picture


def _lay_out_words(words: Sequence[str], font: Any) -> list[tuple[int, float, float]]:
    """The line, left edge and width of each word, so that no line is wider than a tile."""
    boxes, line, left = [], 0, 0.0
    for word in words:
        width = font.getlength(word) + 10  # 5 pixels on each side
        if left and left + width > TILE_SIDE:
            line, left = line + 1, 0.0
        boxes.append((line, left, width))
        left += width
    return boxes


def text_color(color: str) -> str:
    """Black or white, whichever has more contrast on a color (WCAG's relative luminance)."""
    red, green, blue = ((value / 255) ** 2.2 for value in ImageColor.getrgb(color))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if luminance > 0.18 else "white"  # at about 0.18 both have the same contrast


def drawable(words: Sequence[str], size: int) -> tuple[Sequence[str], Font]:
    """The words with a font for them; where this machine has none, numbers in their places ("word 1").

    The page of a run shows words in every script, with the fonts of the reader's machine.
    """
    font = font_for("".join(words), size)
    if font is not None:
        return words, font
    return [f"word {number}" for number in range(1, len(words) + 1)], ImageFont.load_default(size)


def font_for(text: str, size: int) -> Font | None:
    """The first font that has all characters of a text; None if there is none on this machine."""
    characters = {char for char in text if not char.isspace() and char.isprintable()}
    return next((font for font in _fonts(size) if _has(font, characters)), None)


def _fonts(size: int) -> Iterator[Font]:
    """Fonts in the order in which they are tried."""
    yield ImageFont.load_default(size)
    spec = importlib.util.find_spec("matplotlib")
    folders = [] if spec is None or not spec.submodule_search_locations else spec.submodule_search_locations
    names = [str(Path(folder) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf") for folder in folders]
    for name in (*names, *SYSTEM_FONTS):
        try:
            yield ImageFont.truetype(name, size)
        except OSError:  # the machine does not have it
            continue


def _has(font: Font, characters: set[str]) -> bool:
    """Whether a font has all these characters: it draws none of them as a missing one."""
    missing = _drawn(font, _NO_CHARACTER)
    return all(_drawn(font, char) != missing for char in characters)


def _drawn(font: Font, char: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(char)
    pixels = bytes(mask.getpixel((x, y)) for y in range(mask.size[1]) for x in range(mask.size[0]))
    return mask.size, pixels
