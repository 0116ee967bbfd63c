"""Heat maps: the words of a caption over the picture, each where the model looked for it (the paper's Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE, MARGIN, LABEL, COLUMNS = 224, 8, 26, 6
LOW, HIGH = np.array([20, 24, 82], np.float64), np.array([255, 214, 64], np.float64)  # dark blue to yellow


def grid_of(weights: np.ndarray) -> np.ndarray:
    """(N,) weights over image tokens as the square grid (n, n); ValueError where N is no square (regions)."""
    side = math.isqrt(len(weights))
    if side * side != len(weights):
        raise ValueError(f"{len(weights)} image tokens are no square grid: there is no picture to lay them over")
    return weights.reshape(side, side)


def heat_map(image: Image.Image, weights: np.ndarray) -> Image.Image:
    """The image, SIDE x SIDE, with weights (N,) over it, stretched from their least to their greatest."""
    grid = grid_of(np.asarray(weights, np.float64))
    spread = grid.max() - grid.min()
    level = (grid - grid.min()) / spread if spread > 0 else np.zeros_like(grid)
    mask = Image.fromarray((level * 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    heat = np.asarray(mask, np.float64)[:, :, None] / 255
    color = LOW + (HIGH - LOW) * heat
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float64)
    return Image.fromarray((0.45 * pixels + 0.55 * color).clip(0, 255).astype(np.uint8))


def caption_picture(image: Image.Image, words: Sequence[str], maps: np.ndarray) -> Image.Image:
    """The image, then one heat map a word with the word below; maps (words, N)."""
    tiles = [(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC), "")]
    tiles += [(heat_map(image, weights), word) for word, weights in zip(words, maps, strict=True)]
    columns = min(COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    width, height = SIDE + MARGIN, SIDE + LABEL + MARGIN
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    for number, (tile, word) in enumerate(tiles):
        left, top = MARGIN + number % columns * width, MARGIN + number // columns * height
        sheet.paste(tile, (left, top))
        while word and draw.textlength(word, font) > SIDE:
            word = word.removesuffix("…")[:-1] + "…"
        draw.text((left + SIDE / 2, top + SIDE + 2), word, "black", font, anchor="ma")
    return sheet


def write_caption_picture(path: Path, image: Image.Image, words: Sequence[str], maps: np.ndarray) -> None:
    """`caption_picture` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    caption_picture(image, words, maps).save(path)
