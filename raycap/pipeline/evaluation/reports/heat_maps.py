"""Heat maps of attention and attribution over the picture, one per word of a caption (ExpansionNet v2, Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from raycap.pipeline.evaluation.reports.fonts import drawable

SIDE, MARGIN, LABEL = 224, 8, 26  # pixels: side of an image, margin, height of a label
COLUMNS = 6
RASTER = 24  # region features are drawn on a grid with this many cells per side
NOTE = """attention: where the last
layer looked for the word

attribution: what made it more
probable (integrated gradients)

yellow is most, blue is least"""
LOW, HIGH = np.array([20, 24, 82], np.float64), np.array([255, 214, 64], np.float64)  # dark blue to yellow


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
    """The image (SIDE x SIDE) under a map of weights (N,), whose colors extend from the smallest to the largest.

    Raises ValueError when N is not a square, as for region features.
    """
    side = math.isqrt(len(weights))
    if side * side != len(weights):
        raise ValueError(f"{len(weights)} image tokens form no square grid; use region_maps for region features")
    grid = np.asarray(weights, np.float64).reshape(side, side)
    spread = grid.max() - grid.min()
    level = (grid - grid.min()) / spread if spread > 0 else np.zeros_like(grid)
    mask = Image.fromarray((level * 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    heat = np.asarray(mask, np.float64)[:, :, None] / 255
    color = LOW + (HIGH - LOW) * heat
    # The photograph is gray, so that its colors are not mistaken for the map's.
    pixels = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float64)[:, :, None]
    return Image.fromarray((0.5 * pixels + 0.5 * color).clip(0, 255).astype(np.uint8))


def caption_picture(
    image: Image.Image, words: Sequence[str], attention: np.ndarray, attribution: np.ndarray
) -> Image.Image:
    """The image, then for each word its heat maps of `attention` and `attribution` (words, N), with the word below."""
    kinds = {"attention": attention, "attribution": attribution}
    columns = min(COLUMNS, 1 + len(words))
    tile = SIDE + MARGIN
    height = len(kinds) * tile + LABEL  # of a line: one heat map above the other, and the word
    num_lines = math.ceil((1 + len(words)) / columns)  # the image is the first tile
    sheet = Image.new("RGB", (LABEL + columns * tile + MARGIN, num_lines * height + MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    words, word_font = drawable(words, 18)
    sheet.paste(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC), (LABEL + MARGIN, MARGIN))
    note_font = ImageFont.load_default(15)
    draw.multiline_text((LABEL + MARGIN, 2 * MARGIN + SIDE), NOTE, "dimgray", note_font, spacing=6)
    for row, (kind, maps) in enumerate(kinds.items()):
        label = Image.new("RGB", (SIDE, LABEL), "white")
        ImageDraw.Draw(label).text((SIDE / 2, LABEL / 2), kind, "dimgray", font, anchor="mm")
        for line in range(num_lines):
            sheet.paste(label.rotate(90, expand=True), (MARGIN // 2, MARGIN + line * height + row * tile))
        for number, weights in enumerate(maps, 1):
            left, top = LABEL + MARGIN + number % columns * tile, MARGIN + number // columns * height
            sheet.paste(heat_map(image, weights), (left, top + row * tile))
    for number, word in enumerate(words, 1):
        center = LABEL + MARGIN + number % columns * tile + SIDE / 2
        while draw.textlength(word, word_font) > SIDE:  # shortens a word that is wider than its tile
            word = word.removesuffix("…")[:-1] + "…"
        draw.text((center, (number // columns + 1) * height - LABEL + 2), word, "black", word_font, anchor="ma")
    return sheet
