"""The reader of images: which formats it opens, and that damaged, hostile and special files give a reason in words."""

from __future__ import annotations

import io
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, features

from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data import images
from raycap.pipeline.data.images import (
    FORMATS,
    MAX_SIDE,
    MAX_WEBP_SHARE,
    UNREADABLE,
    BadImage,
    decode_batch,
    decode_image,
    read_image_file,
)
from raycap.pipeline.storage.path import StoragePath
from tests.conftest import ROOT

CODECS = {"WEBP": "webp", "AVIF": "avif", "TIFF": "libtiff"}
MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "TIFF": ("1", "L", "RGB", "RGBA", "CMYK", "I;16", "F"),
    "JPEG": ("L", "RGB", "CMYK"),
}


def encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "PNG"} | options))  # type: ignore[arg-type]
    return buffer.getvalue()


def example(mode: str = "RGB", size: tuple[int, int] = (24, 18)) -> Image.Image:
    """A picture with all kinds of values of this mode."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    if mode in ("I;16", "I;16B"):
        return Image.frombytes(mode, size, noise[..., :2].tobytes())
    if mode in ("I", "F"):
        return Image.fromarray(noise[..., 0].astype({"I": np.int32, "F": np.float32}[mode]) * 200 - 100)
    return Image.fromarray(noise).convert(mode)


def files() -> list[tuple[str, bytes]]:
    """A small file of each format and mode that this Pillow can write, and a multi-picture file."""
    found = []
    for name in FORMATS:
        if name not in CODECS or features.check(CODECS[name]):
            found += [(name, encoded(example(mode), format=name)) for mode in MODES.get(name, ("RGB",))]
    found.append(("MPO", encoded(example(), format="MPO", save_all=True, append_images=[example()])))
    found.append(("TIFF", encoded(example(), format="TIFF", compression="tiff_lzw")))
    return [*found, ("JPEG", encoded(example(size=(64, 64)), format="JPEG", progressive=True))]


def test_the_formats_are_read() -> None:
    names = set()
    for name, data in files():
        image = decode_image(data, 10_000)
        assert image.mode == "RGB" and image.size in ((24, 18), (64, 64)), name
        names.add(name)
    assert {"JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "MPO"} <= names


def test_an_image_in_postscript_starts_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript for an EPS file, whatever its name. A stand-in on the PATH notices it."""
    called, tool = tmp_path / "called", tmp_path / "gs"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {called}\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    data = encoded(example(), format="EPS")
    with pytest.raises(BadImage, match="not an image in a known format"):
        decode_image(data, 10_000)
    assert not called.exists()
    with pytest.raises(Exception, match="gs"):
        Image.open(io.BytesIO(data)).load()
    assert called.exists(), "the stand-in was not on the PATH"


def chunk(kind: bytes, data: bytes, crc: int = 0) -> bytes:
    """A chunk of a PNG file. crc: bits of the check sum that are wrong."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ crc)


def segment(marker: int, data: bytes) -> bytes:
    """A segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def inserted(data: bytes, place: int, parts: Mapping[str, bytes]) -> list[bytes]:
    return [data[:place] + part + data[place:] for part in parts.values()]


LONG = zlib.compress(bytes(3 * 2**20))
# {name: parts of a file that are damaged, or longer than Pillow accepts}
PNG_PARTS = {
    "EXIF": chunk(b"eXIf", b"nonsense"),
    "check sum of EXIF": chunk(b"eXIf", b"II*\0\x08\0\0\0\0\0", crc=1),
    "EXIF in text": chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  12\nzz"),
    "long text": chunk(b"zTXt", b"workflow\0\0" + LONG),
    "long XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + LONG),
    "long profile": chunk(b"iCCP", b"p\0\0" + LONG),
    "cut profile": chunk(b"iCCP", b"p"),
    "cut gamma": chunk(b"gAMA", b""),
    "cut resolution": chunk(b"pHYs", bytes(3)),
    "check sum of the time": chunk(b"tIME", bytes(7), crc=1),
    "cut animation": chunk(b"acTL", b"") + chunk(b"fcTL", bytes(26)),
}
JPEG_PARTS = {
    "EXIF": segment(0xE1, b"Exif\0\0nonsense"),
    "cut JFIF": segment(0xE0, b"JFIF\0"),
    "cut profile": segment(0xE2, b"ICC_PROFILE\0"),
    "cut Photoshop": segment(0xED, b"Photoshop 3.0\x008BIM\3\xed"),
    "cut Adobe": segment(0xEE, b"Adobe"),
}


def with_damaged_metadata(form: str) -> list[bytes]:
    plain = encoded(example(), format=form)
    if form == "PNG":
        return [one for mark in (b"IDAT", b"IEND") for one in inserted(plain, plain.index(mark) - 4, PNG_PARTS)]
    if form == "JPEG":
        return inserted(plain, 2, JPEG_PARTS)
    return [encoded(example(), format=form, exif=b"nonsense", xmp=b"<", icc_profile=b"p")]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_damaged_metadata_hide_no_pixels(form: str) -> None:
    if form in CODECS and not features.check(CODECS[form]):
        pytest.skip(f"this Pillow has no {form}")
    for number, data in enumerate(with_damaged_metadata(form)):
        expected = decode_image(encoded(example(), format=form), 10_000)
        assert decode_image(data, 10_000).tobytes() == expected.tobytes(), number
        with pytest.raises(BadImage, match="24 x 18 pixels, more than .*431"):
            decode_image(data, 431)
        end = {"PNG": data.find(b"IDAT") + 40, "JPEG": len(data) - 40}.get(form, len(data) // 2)
        with pytest.raises(BadImage):
            decode_image(data[:end], 10_000)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_damaged_metadata_do_not_hide_the_orientation(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    data = encoded(example(), format=form, exif=exif)
    place, part = (33, PNG_PARTS["long text"]) if form == "PNG" else (2, JPEG_PARTS["cut profile"])
    assert decode_image(data[:place] + part + data[place:], 10_000).tobytes() == decode_image(data, 10_000).tobytes()


def gray_tiff(kind: str, values: list[float], photometric: int = 1) -> bytes:
    """A TIFF file of one row of gray values. kind: that of `struct`. photometric: 0 if 0 is white."""
    pixels = struct.pack(f"<{len(values)}{kind}", *values)
    entries = [(256, 4, len(values)), (257, 4, 1), (258, 3, 8 * struct.calcsize(kind)), (262, 3, photometric)]
    entries += [(273, 4, 126), (277, 3, 1), (278, 4, 1), (279, 4, len(pixels)), (339, 3, 3 if kind == "f" else 1)]
    body = b"".join(struct.pack("<HHII", tag, size, 1, value) for tag, size, value in entries)
    return (b"II*\0" + struct.pack("<IH", 8, len(entries)) + body).ljust(126, b"\0") + pixels


def png(depth: int, color: int, row: bytes, *chunks: bytes) -> bytes:
    """A PNG file of one row of two pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, color, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + b"".join(chunks)
        + chunk(b"IDAT", zlib.compress(b"\0" + row))
        + chunk(b"IEND", b"")
    )


COLORS = chunk(b"PLTE", bytes([10, 20, 30, 40, 50, 60]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (gray_tiff("f", [0.0, 0.5, 1.0]), [0, 128, 255]),
        (gray_tiff("f", [-0.1, 0.5, 1.1]), [0, 128, 255]),
        (gray_tiff("f", [math.nan, 0.5, math.inf]), [0, 128, 255]),
        (gray_tiff("f", [0.0, 128.0, 255.0]), [0, 128, 255]),
        (gray_tiff("f", [0.0, 32768.0, 65535.0]), [0, 128, 255]),
        (gray_tiff("f", [0.0, 0.5, 1.0], photometric=0), [255, 128, 0]),
        (gray_tiff("H", [0, 32768, 65535]), [0, 128, 255]),
        (gray_tiff("H", [0, 32768, 65535], photometric=0), [255, 127, 0]),
        (gray_tiff("B", [0, 128, 255], photometric=0), [255, 127, 0]),
        (png(1, 0, b"\x40"), [0, 255]),
        (png(1, 0, b"\x40", chunk(b"tRNS", b"\0\0")), [255, 255]),
        (png(16, 0, struct.pack(">HH", 0, 32768)), [0, 128]),
        (png(16, 0, struct.pack(">HH", 0, 32768), chunk(b"tRNS", b"\0\0")), [255, 128]),
        (png(8, 4, bytes([100, 255, 100, 0])), [100, 255]),
        (png(8, 3, b"\0\1", COLORS, chunk(b"tRNS", b"\xff\0")), [[10, 20, 30], 255]),
        (png(8, 3, b"\0\1", COLORS, chunk(b"tRNS", b"\xff\x80")), [[10, 20, 30], [147, 152, 157]]),
        (encoded(Image.new("CMYK", (1, 1), (255, 0, 0, 0)), format="TIFF"), [[0, 255, 255]]),
    ],
)
def test_colors_are_those_of_a_viewer(data: bytes, expected: list[Any]) -> None:
    row = np.asarray(decode_image(data, 100))[0]
    assert row.tolist() == [[value] * 3 if isinstance(value, int) else value for value in expected]


def test_a_strip_has_the_colors_of_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [encoded(example(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")]
    pictures += [encoded(example(mode), format="TIFF") for mode in ("CMYK", "F", "I;16B", "I", "RGBA")]
    pictures += [encoded(example(mode), transparency=index) for mode, index in (("P", 3), ("L", 9), ("RGB", (1, 2, 3)))]
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    pictures.append(encoded(example("RGBA"), exif=exif))
    whole = [decode_image(data, 10_000) for data in pictures]
    monkeypatch.setattr(images, "STRIP_PIXELS", 100)
    for one, other in zip(whole, [decode_image(data, 10_000) for data in pictures], strict=True):
        assert one.size == other.size and one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [
        ("I;16", "PNG", {"compress_level": 1}),
        pytest.param("RGBA", "PNG", {"compress_level": 1}, marks=pytest.mark.proof),
        pytest.param("RGBA", "TIFF", {"compression": "tiff_lzw"}, marks=pytest.mark.proof),
        pytest.param("RGBA", "WEBP", {"lossless": True, "method": 0}, marks=pytest.mark.proof),
        pytest.param("RGB", "AVIF", {"speed": 10}, marks=pytest.mark.proof),
    ],
)
def test_the_largest_image_of_a_format_needs_a_small_multiple_of_its_size(
    mode: str, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if name in CODECS and not features.check(CODECS[name]):
        pytest.skip(f"this Pillow has no {name}")
    max_pixels = 4000**2
    side = int((max_pixels * (MAX_WEBP_SHARE if name == "WEBP" else 1)) ** 0.5)
    code = (
        "import sys; from pathlib import Path; from raycap.pipeline.data.images import decode_image\n"
        "def peak(): return 1024 * int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "data = Path(sys.argv[1]).read_bytes(); decode_image(Path(sys.argv[2]).read_bytes(), 1000)\n"
        f"before = peak(); decode_image(data, {max_pixels}); print(peak() - before)\n"
    )
    large, small = tmp_path / "large", tmp_path / "small"
    for path, size in ((large, (side, side)), (small, (10, 10))):
        Image.new(mode, size).save(path, name, **options)
    done = subprocess.run(
        [sys.executable, "-c", code, large, small], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3 * 4 * max_pixels, "more memory than three copies of the image at 4 bytes per pixel"
    with pytest.raises(BadImage, match=f"{side} x {side} pixels, more than .*{side * side - 1}$"):
        decode_image(large.read_bytes(), side * side - 1)


def test_a_tile_larger_than_the_limit_is_refused() -> None:
    """A tile is decoded as a whole, although the image has only some of its pixels."""
    entries = [(256, 4, 8), (257, 4, 8), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1), (322, 4, 40_000)]
    entries += [(323, 4, 40_000), (324, 4, 0), (325, 4, 64)]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(4) + bytes(64)
    with pytest.raises(BadImage, match="40000 x 40000 pixels, more than 1000"):
        decode_image(data, 1000)


def test_a_long_comment_of_a_ppm_header_is_refused() -> None:
    before, _, rest = encoded(example(), format="PPM").partition(b"\n")
    assert decode_image(before + b" #" + 60_000 * b"x" + b"\n" + rest, 10_000).size == (24, 18)
    with pytest.raises(BadImage, match="reading header"):
        decode_image(before + b" #" + 70_000 * b"x" + b"\n" + rest, 10_000)


def test_jpeg_2000_is_refused() -> None:
    """From a file of 100 bytes without data, its decoder makes a structure of 1.6 kB for each of 360,000 pixels."""
    size = struct.pack(">HIIIIIIIIHBBB", 0, 600, 600, 0, 0, 600, 600, 0, 0, 1, 7, 1, 1)
    style = struct.pack(">BBHBBBBBBB", 1, 0, 1, 0, 0, 4, 4, 0, 1, 0)
    steps = struct.pack(">BB", 0x40, 0x40)
    parts = [(0xFF51, size), (0xFF52, style), (0xFF5C, steps), (0xFF90, struct.pack(">HIBB", 0, 0, 0, 1))]
    data = b"\xff\x4f" + b"".join(struct.pack(">HH", marker, len(body) + 2) + body for marker, body in parts)
    assert Image.open(io.BytesIO(data + b"\xff\x93\xff\xd9")).format == "JPEG2000"
    with pytest.raises(BadImage, match="not an image in a known format"):
        decode_image(data + b"\xff\x93\xff\xd9", 10**6)


@pytest.mark.parametrize("size", [(MAX_SIDE + 1, 1), (1, MAX_SIDE + 1)])
def test_a_very_long_image_is_refused(size: tuple[int, int]) -> None:
    """Resizing takes memory for each pixel of a side, even if the other side has one pixel."""
    with pytest.raises(BadImage, match=f"a side of more than {MAX_SIDE}"):
        decode_image(encoded(Image.new("1", size)), 10**8)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    """The last scan of a progressive file is repeated. Each scan is a pass over all pixels."""
    data = encoded(example(size=(64, 64)), format="JPEG", progressive=True)
    decode_image(data, 10_000)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    with pytest.raises(BadImage, match="scans, which would take long"):
        decode_image(data[:start] + 300 * data[start:end] + data[end:], 10_000)


def test_pipes_devices_and_large_files_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a process with limits, because reading such a file would wait for a writer or fill the memory."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    code = (
        "import resource, sys; from pathlib import Path; from raycap.pipeline.data.images import decode_batch\n"
        "from raycap.models.encoders.transform import ImageTransform\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))\n"
        "batch = {'uri': sys.argv[1:], 'key': sys.argv[1:]}\n"
        "print(*decode_batch(batch, ImageTransform(8), 100)['reason'], sep='\\n')\n"
    )
    names = [str(tmp_path / f"{name}.png") for name in ("pipe", "zero", "folder")]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=ROOT, timeout=120)
    reasons = [f"{UNREADABLE}: {reason}" for reason in ("not a regular file", "not a regular file", "Is a directory")]
    assert done.stdout.splitlines() == reasons, done.stderr

    (tmp_path / "large.png").write_bytes(bytes(101))
    monkeypatch.setattr("raycap.pipeline.data.images.MAX_BYTES", 100)
    with pytest.raises(OSError, match="larger than 100 bytes"):
        read_image_file(StoragePath(str(tmp_path / "large.png")))
    batch = {"uri": np.array([str(tmp_path / "large.png")]), "key": np.array(["key"])}
    assert decode_batch(batch, ImageTransform(8), 100)["reason"].tolist() == [f"{UNREADABLE}: larger than 100 bytes"]
