"""Heat maps of attention and attribution over a picture, for each word of a caption (ExpansionNet v2, Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

TILE, SPACE = 2.4, 0.05  # the side of a picture and the space below it, in inches
COLUMNS = 6
# Matplotlib takes each character from the first of these fonts that has it. DejaVu Sans is part of matplotlib.
FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Unifont", "FreeSans")


def draw_word_maps(
    path: Path, image: Image.Image, words: Sequence[str], maps: dict[str, np.ndarray], grid: tuple[int, int]
) -> None:
    """Writes a PNG file with the image and, for each word, its heat maps, one below the other.

    maps: {name, such as "attention": (words, rows * columns)}. grid: (rows, columns) of the image tokens. The colors of
    each map range from its smallest value (dark) to its largest value (yellow). Neither Ray nor torch is needed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    columns = min(COLUMNS, 1 + len(words))
    rows = math.ceil((1 + len(words)) / columns) * len(maps)
    figure = Figure(figsize=(columns * TILE, rows * (TILE * 1.2 + SPACE)))
    figure.set_layout_engine("constrained", h_pad=SPACE)
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots(rows, columns, squeeze=False)
    installed = {font.name for font in fontManager.ttflist}
    fonts = [name for name in FONTS if name in installed]
    for axis in axes.flat:
        axis.axis("off")
    axes[0, 0].imshow(image.convert("RGB"), extent=(0, 1, 0, 1))
    gray = image.convert("L")  # gray, so that colors of the image are not mistaken for those of the map
    for row, (name, weights) in enumerate(maps.items()):
        for number, word in enumerate(words, 1):
            line, column = divmod(number, columns)
            axis = axes[line * len(maps) + row, column]
            axis.imshow(gray, "gray", vmin=0, vmax=255, extent=(0, 1, 0, 1))
            level = weights[number - 1].reshape(grid)
            axis.imshow(level, "plasma", extent=(0, 1, 0, 1), alpha=0.55, interpolation="bicubic")
            axis.set_title(f"{word}\n{name}", parse_math=False, fontsize=9, fontfamily=fonts)
    figure.savefig(path, dpi=96)
