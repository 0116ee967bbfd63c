"""Heat maps: the words of a caption over the picture, each where the model looked for it (the paper's Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE, MARGIN, LABEL, COLUMNS = 224, 8, 26, 6
RASTER = 24  # cells along a side of a picture of regions
NOTE = """attention: where the last
layer looked for the word

attribution: what made it more
probable (integrated gradients)

yellow is most, blue is least"""
LOW, HIGH = np.array([20, 24, 82], np.float64), np.array([255, 214, 64], np.float64)  # dark blue to yellow


def grid_of(weights: np.ndarray) -> np.ndarray:
    """(N,) weights over image tokens as the square grid (n, n); ValueError where N is no square (regions)."""
    side = math.isqrt(len(weights))
    if side * side != len(weights):
        raise ValueError(f"{len(weights)} image tokens are no square grid: there is no picture to lay them over")
    return weights.reshape(side, side)


def region_maps(weights: np.ndarray, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Weights (W, N) of regions as grids (W, RASTER * RASTER): a cell has the greatest of the regions that cover it.

    boxes (N, 4), corners x0 y0 x1 y1 in pixels of a picture of `size` (width, height), or in shares of it where none is
    above 1; cells that no region covers have the least weight of all.
    """
    wide, high = size if boxes.max(initial=0.0) > 1 else (1, 1)
    places = (np.arange(RASTER) + 0.5) / RASTER
    across = (boxes[:, None, 0] <= places * wide) & (places * wide <= boxes[:, None, 2])  # (N, RASTER)
    along = (boxes[:, None, 1] <= places * high) & (places * high <= boxes[:, None, 3])
    covered = (along[:, :, None] & across[:, None]).reshape(len(boxes), -1)
    least = weights.min(1, initial=np.inf, keepdims=True)
    return np.where(covered, weights[:, :, None], least[:, :, None]).max(1)


def heat_map(image: Image.Image, weights: np.ndarray) -> Image.Image:
    """The image, SIDE x SIDE, with weights (N,) over it, stretched from their least to their greatest."""
    grid = grid_of(np.asarray(weights, np.float64))
    spread = grid.max() - grid.min()
    level = (grid - grid.min()) / spread if spread > 0 else np.zeros_like(grid)
    mask = Image.fromarray((level * 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    heat = np.asarray(mask, np.float64)[:, :, None] / 255
    color = LOW + (HIGH - LOW) * heat
    # in gray, so that the photograph's own colors cannot be taken for the map's
    pixels = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float64)[:, :, None]
    return Image.fromarray((0.5 * pixels + 0.5 * color).clip(0, 255).astype(np.uint8))


def caption_picture(
    image: Image.Image, words: Sequence[str], maps: np.ndarray, attribution: np.ndarray | None = None
) -> Image.Image:
    """The image, then one heat map a word with the word below; maps (words, N).

    With an attribution (words, N) its heat maps stand in a second row below the first, both with their names.
    """
    picture = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    rows = [("attention", maps)] + ([("attribution", attribution)] if attribution is not None else [])
    named = LABEL if attribution is not None else 0
    columns = min(COLUMNS, 1 + len(words))
    lines = -(-(1 + len(words)) // columns)
    width, height = SIDE + MARGIN, len(rows) * (SIDE + MARGIN) + LABEL
    sheet = Image.new("RGB", (named + columns * width + MARGIN, lines * height + MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    sheet.paste(picture, (named + MARGIN, MARGIN))
    if named:
        draw.multiline_text((named + MARGIN, 2 * MARGIN + SIDE), NOTE, "dimgray", ImageFont.load_default(15), spacing=6)
    for line in range(lines if named else 0):
        for row, (name, _) in enumerate(rows):
            _upright(sheet, name, MARGIN + line * height + row * (SIDE + MARGIN), font)
    for number, word in enumerate(words, 1):
        left, top = named + MARGIN + number % columns * width, MARGIN + number // columns * height
        for row, (_, weights) in enumerate(rows):
            sheet.paste(heat_map(image, weights[number - 1]), (left, top + row * (SIDE + MARGIN)))
        while draw.textlength(word, font) > SIDE:
            word = word.removesuffix("…")[:-1] + "…"
        draw.text((left + SIDE / 2, top + height - LABEL - MARGIN + 2), word, "black", font, anchor="ma")
    return sheet


def _upright(sheet: Image.Image, text: str, top: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> None:
    """A row's name at the left edge, read from below."""
    strip = Image.new("RGB", (SIDE, LABEL), "white")
    ImageDraw.Draw(strip).text((SIDE / 2, LABEL / 2), text, "dimgray", font, anchor="mm")
    sheet.paste(strip.rotate(90, expand=True), (MARGIN // 2, top))


def write_caption_picture(
    path: Path, image: Image.Image, words: Sequence[str], maps: np.ndarray, attribution: np.ndarray | None = None
) -> None:
    """`caption_picture` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    caption_picture(image, words, maps, attribution).save(path)
