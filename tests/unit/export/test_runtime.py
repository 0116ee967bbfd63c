"""The runtime without PyTorch: its search, rules, images and words beside raycap's, and hostile folders."""

from __future__ import annotations

import ast
import copy
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import raycap_onnx.images
from raycap.models.base import Features
from raycap.models.config import Decoding
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data.images import BadImage, decode_image
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.evaluation.captioning.search import score_rules
from raycap.pipeline.serving.export import describe_words
from raycap_onnx import Captioner, CaptionerError
from raycap_onnx.__main__ import main
from raycap_onnx.description import Words
from raycap_onnx.images import Transform, load_image
from tests.conftest import ROOT
from tests.support.exports import WORDS, Export, make_captioner_bundle, make_images, torch_captions

SOURCES = sorted((ROOT / "raycap_onnx").glob("*.py"))


def test_it_imports_only_its_three_packages() -> None:
    allowed = {"PIL", "numpy", "onnxruntime", "raycap_onnx", *sys.stdlib_module_names}
    assert len(SOURCES) > 3
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_it_captions_in_a_process_without_torch_and_raycap(exported: Export, tmp_path: Path) -> None:
    """The package is copied elsewhere, and torch and the rest of raycap are blocked. One of two files is no image."""
    folder, _ = exported("expansionnet")
    shutil.copytree(ROOT / "raycap_onnx", tmp_path / "raycap_onnx")
    (image,) = make_images(1)
    image.save(tmp_path / "a.png")
    (tmp_path / "b\x07.png").write_text("no image")
    code = (
        "import sys\n"
        "for name in ('torch', 'raycap', 'timm', 'ray'): sys.modules[name] = None\n"
        "from raycap_onnx.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [str(folder), "a.png", "b\x07.png", "--threads", "1"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, env={})
    (expected,) = Captioner(folder, threads=1).caption([image])
    problem = "it is not an image in a known format"
    assert done.stdout == f"a.png: {expected.text}\nb\\x07.png: {problem}\n" and done.returncode == 1, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--json"], cwd=tmp_path, capture_output=True, text=True, env={}
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {"image": "a.png", "caption": expected.text, "log_prob": pytest.approx(expected.log_prob, abs=1e-5)}
    assert second == {"image": "b\x07.png", "error": problem}


RULES: dict[str, dict[str, Any]] = {
    "no UNK": {"decoding": Decoding(suppress_unk=True)},
    "long": {"decoding": Decoding(min_length=9)},
    "no repeated words": {"decoding": Decoding(no_repeat_ngram=1)},
    "no repeated pairs": {"decoding": Decoding(no_repeat_ngram=2, min_length=10)},
    "no open endings": {"decoding": Decoding(no_open_endings=True), "max_length": 5},
    "sum": {"ranking": "sum"},
    "length penalty": {"ranking": 0.7, "beam_size": 5},
    "collapsed": {"collapse_repeats": True},
    "more beams than words": {"beam_size": 20},
}


@pytest.mark.parametrize("name", RULES)
def test_rules_and_rankings(name: str, exported: Export) -> None:
    folder, _ = exported("expansionnet")
    captioner, bundle = Captioner(folder, threads=1), make_captioner_bundle("expansionnet")
    values = RULES[name]
    search = bundle.search.model_copy(update=values)
    if name == "no UNK":  # a word that the captions have
        bundle.vocabulary = copy.copy(WORDS)
        object.__setattr__(bundle.vocabulary, "ids", WORDS.ids | {"UNK": 8})
        captioner.words = replace(captioner.words, unk=8)
    plain = {key: value for key, value in values.items() if key != "decoding"}
    keys = ("suppress_unk", "min_length", "no_repeat_ngram", "no_open_endings")
    captioner.search = replace(captioner.search, **plain, **{key: getattr(search.decoding, key) for key in keys})
    assert captioner.words.open_endings == list(score_rules(search, WORDS).open_endings)
    images = make_images(12)
    ours = captioner.caption(images, batch_size=12)
    assert bundle.transform is not None
    pixels = torch.stack([bundle.transform(image) for image in images])
    theirs = torch_captions(bundle, Features(pixels), 12, lambda _: search)
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    np.testing.assert_allclose([each.log_prob for each in ours], [each.log_prob for each in theirs], atol=1e-4)
    if name not in ("collapsed", "more beams than words"):  # of which the first changes only the text
        unchanged = Captioner(folder, threads=1).caption(images, batch_size=12)
        assert [each.tokens for each in unchanged] != [each.tokens for each in ours], "the rule changes captions"


TRANSFORMS = {
    "reference": ImageTransform(32),
    "squashed": ImageTransform(30, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic"),
    "cropped square": ImageTransform(28, interpolation="bicubic", resize_to=32),
    "timm's crop": ImageTransform(28, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), "bicubic", 32, True),
    "lanczos": ImageTransform(28, interpolation="lanczos", resize_to=28, keep_aspect=True),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_are_those_of_the_transform(name: str) -> None:
    transform = TRANSFORMS[name]
    keys = ("image_size", "scaled_side", "keep_aspect", "interpolation", "mean", "std")
    values = {key: getattr(transform, key) for key in keys}
    ours = Transform(**json.loads(json.dumps(values)))
    sizes = [(57, 43), (20, 90), (32, 32), (700, 20), (3, 1)]
    images = [Image.fromarray(np.random.default_rng(1).integers(0, 256, (h, w, 3), np.uint8)) for h, w in sizes]
    for image in images:
        assert np.array_equal(ours(image), transform(image).numpy())


def test_images_are_decoded_as_raycap_decodes_them(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rgb = Image.fromarray(generator.integers(0, 256, (9, 14, 3), np.uint8))
    rgba = Image.fromarray(generator.integers(0, 256, (9, 14, 4), np.uint8))
    deep = Image.fromarray(generator.integers(0, 65536, (9, 14), np.uint16))
    rotated = rgb.getexif()
    rotated[0x0112] = 6
    palette = rgb.quantize(8)
    cases: list[tuple[Image.Image, dict[str, Any]]] = [
        (rgb, {"format": "PNG"}), (rgb.convert("L"), {"format": "PNG"}), (rgba, {"format": "PNG"}),
        (rgba.convert("LA"), {"format": "PNG"}), (palette, {"format": "PNG", "transparency": 3}),
        (rgb.convert("CMYK"), {"format": "JPEG"}), (rgb, {"format": "JPEG", "exif": rotated}),
        (deep, {"format": "PNG"}), (rgb.convert("1"), {"format": "PNG"}), (rgb, {"format": "WEBP", "lossless": True}),
        (rgb.convert("F"), {"format": "TIFF"}), (palette, {"format": "GIF"}),
    ]  # fmt: skip
    for number, (image, options) in enumerate(cases):
        image.save(buffer := io.BytesIO(), **options)
        path = tmp_path / str(number)
        path.write_bytes(buffer.getvalue())
        expected = decode_image(buffer.getvalue(), 10**6)
        for source in (str(path), path, buffer.getvalue(), Image.open(path)):
            assert np.array_equal(load_image(source), expected), (number, type(source))
    assert load_image(tmp_path / "6").size == (9, 14), "rotated"


def test_images_that_raycap_refuses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycap_onnx.images, "MAX_PIXELS", 100)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 14, 3), np.uint8))
    noise.save(large := io.BytesIO(), "PNG")
    noise.resize((8, 8)).save(webp := io.BytesIO(), "WEBP")
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 40_000, 323: 40_000, 324: 0, 325: 64}
    tiled = b"II*\0" + struct.pack("<IH", 8, len(tags))
    tiled += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()) + bytes(68)
    noise.resize((8, 8)).save(jpeg := io.BytesIO(), "JPEG")
    cases = {
        "14 x 9 pixels; the limit is 100": large.getvalue(),
        "8 x 8 pixels; the limit is 50": webp.getvalue(),
        "40000 x 40000 pixels; the limit is 100": tiled,
        "not an image in a known format": b"x",
        "cannot be decoded": jpeg.getvalue()[:200],
    }
    for message, data in cases.items():
        with pytest.raises(CaptionerError, match=message):
            load_image(data)
        with pytest.raises(BadImage):
            decode_image(data, 100)
    with pytest.raises(CaptionerError, match=r"missing\.png: it cannot be read: No such file"):
        load_image(tmp_path / "missing.png")
    with pytest.raises(CaptionerError, match="it is not a file"):
        load_image(tmp_path)


def vocabularies() -> dict[str, tuple[Vocabulary, list[str]]]:
    """A vocabulary of each way to join words, and texts."""
    texts = {
        "spaces": ["a red cat", ""],
        "scripts": ["红猫 sits 在 a mat 上", "cat", "猫"],
        "bytes": ["ein süßer Hund", "två röda kåtor 猫"],
    }
    spaces = Vocabulary.build([text.split() for text in texts["spaces"]], 1)
    tokens = [[*"红猫在上", "sits", "a", "mat", "cat"]]
    scripts = Vocabulary.build(tokens, 1, "characters")
    subwords = Vocabulary.train_subwords(texts["bytes"] * 3, 290, 1)
    return {name: (each, texts[name]) for name, each in zip(texts, (spaces, scripts, subwords), strict=True)}


@pytest.mark.parametrize("joining", ["spaces", "scripts", "bytes"])
def test_words_are_joined_as_raycap_joins_them(joining: str) -> None:
    vocabulary, texts = vocabularies()[joining]
    content: dict[str, Any] = json.loads(json.dumps(describe_words(vocabulary)))
    assert content["joining"] == joining
    special = {"sos": vocabulary.sos, "eos": vocabulary.eos, "pad": vocabulary.pad, "unk": vocabulary.ids["UNK"]}
    words = Words(**content, **special, open_endings=[])
    for text in texts:
        ids = vocabulary.encode(vocabulary.tokenize(text))
        assert words.decode(ids) == vocabulary.decode(ids)
    generator = np.random.default_rng(0)
    for _ in range(50):
        ids = [index for index in generator.integers(0, len(vocabulary), 8).tolist() if index != vocabulary.eos]
        assert words.decode(ids) == vocabulary.decode(ids)


Craft = Callable[[dict[str, Any], Path], object]


def setting(key: str, value: Any) -> Craft:
    """Sets a dotted key of captioner.json."""

    def craft(content: dict[str, Any], folder: Path) -> None:
        *parents, last = key.split(".")
        for part in parents:
            content = content[part]
        content[last] = value

    return craft


HOSTILE: dict[str, Craft] = {
    r"format is 1, not 2; export the model again": setting("format", 1),
    r"describes no captioner \(TypeError: .*; export the model again": setting("search", [1]),
    r"beam_size is 1000000000": setting("search.beam_size", 10**9),
    r"max_length is 13": setting("search.max_length", 13),
    r"ranking is nan": setting("search.ranking", float("nan")),
    r"suppress_unk is \[1, 2, 3\]; it must be true or false": setting("search.suppress_unk", [1, 2, 3]),
    r"keep_aspect is 'false'": setting("image.keep_aspect", "false"),
    r"words must be a list": lambda content, folder: (folder / "vocabulary.json").write_text(
        '{"joining": "spaces", "words": {"a": 0}}'
    ),
    r"mean and std must be 3 numbers": setting("image.mean", [10**400, 0, 0]),
    r"draws captions or has groups": setting("search.beam_groups", 2),
    r"interpolation is 'cubic'": setting("image.interpolation", "cubic"),
    r"the id of a token is -1": setting("tokens.eos", -1),
    r"the id of a token is 'a'": setting("tokens.open_endings", ["a"]),
    r"encoder\.onnx is damaged": lambda content, folder: (folder / "encoder.onnx").write_bytes(b"x"),
    r"encoder\.onnx is missing": lambda content, folder: (
        (folder / "encoder.onnx").unlink(),
        os.mkfifo(folder / "encoder.onnx"),
    ),
    r"encoder\.onnx\.data is damaged": lambda content, folder: (folder / "encoder.onnx.data").write_bytes(b"x"),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_descriptions_are_refused_in_one_sentence(message: str, exported: Export, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(exported("expansionnet")[0], folder)
    content = json.loads((folder / "captioner.json").read_text())
    HOSTILE[message](content, folder)
    (folder / "captioner.json").write_text(json.dumps(content))
    with pytest.raises(CaptionerError, match=message) as caught:
        Captioner(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_hostile_files_are_refused(exported: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptionerError, match=r"captioner\.json: it cannot be read"):
        Captioner(tmp_path)
    for data, message in (
        (b"[" * 100_000, "not JSON"), (b"\xff", "not JSON"), (b" " * 2**21, "more than"),
        (b'{"format": ' + b"9" * 5000 + b"}", "not JSON"),
    ):  # fmt: skip
        (tmp_path / "captioner.json").write_bytes(data)
        with pytest.raises(CaptionerError, match=message):
            Captioner(tmp_path)
    assert main([str(tmp_path), "a.png"]) == 2
    assert capsys.readouterr().err.startswith("raycap_onnx: ")
    folder = tmp_path / "sealed"
    shutil.copytree(exported("expansionnet")[0], folder)
    (folder / "encoder.onnx").write_bytes(b"no graph")
    content = json.loads((folder / "captioner.json").read_text())
    content["files"]["encoder.onnx"] = hashlib.sha256(b"no graph").hexdigest()
    (folder / "captioner.json").write_text(json.dumps(content))
    with pytest.raises(CaptionerError, match="the graphs cannot be opened"):
        Captioner(folder)


def test_arguments_out_of_range(exported: Export) -> None:
    captioner = Captioner(exported("expansionnet")[0], threads=1)
    (image,) = make_images(1)
    assert captioner.caption([], beam_size=np.int64(3)) == []
    for search in ({"beam_size": 0}, {"max_length": 13}, {"batch_size": 0}):
        with pytest.raises(CaptionerError, match=f"{next(iter(search))} is"):
            captioner.caption([image], **search)
