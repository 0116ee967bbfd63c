"""Fonts for the words of captions in pictures: Pillow's own, matplotlib's, and those of the system."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Files of Noto, which has a font for each script, and of fonts with many scripts; Pillow looks in the system's folders.
SYSTEM_FONTS = (
    "NotoSans-Regular.ttf", "NotoSansArabic-Regular.ttf", "NotoNaskhArabic-Regular.ttf",
    "NotoSansDevanagari-Regular.ttf", "NotoSansBengali-Regular.ttf", "NotoSansTamil-Regular.ttf",
    "NotoSansThai-Regular.ttf", "NotoSansHebrew-Regular.ttf", "NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc",
    "unifont.ttf", "FreeSans.ttf",
)  # fmt: skip
_NO_CHARACTER = "\uffff"  # every font draws it as a missing character


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
