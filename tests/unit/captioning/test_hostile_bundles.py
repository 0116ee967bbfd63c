"""Bundles and pickles from strangers: refused in one sentence, in bounded memory, without opening anything else."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from raycap.models.convert import tensor_files
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, seal
from raycap.pipeline.evaluation.captioning.upstream import read_expansionnet_vocabulary, read_meshed_vocabulary
from raycap.pipeline.evaluation.confidence import dump_confidences
from tests.support.bundles import make_bundle
from tests.support.confidence import make_confidence

Craft = Callable[[Path], None]
GIB = 2**30
DEEP = 20_000


class TooLongError(BaseException):
    """Raised by the clock; code that catches every Exception does not catch it."""


@pytest.fixture
def bounded() -> Iterator[None]:
    """Limits what the test may allocate to 2 GiB, and its time to a minute."""

    def ring(*_: Any) -> None:
        raise TooLongError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GIB, before[1]))
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small")


def setting(key: str, value: Any) -> Craft:
    """Sets a dotted key of config.yaml."""

    def craft(folder: Path) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        node, parts = config, key.split(".")
        for part in parts[:-1]:
            node = node[part]
        node[parts[-1]] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    return craft


def without(key: str) -> Craft:
    """Removes a key of config.yaml."""

    def craft(folder: Path) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        del config[key]
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    return craft


def text(name: str, content: str | bytes) -> Craft:
    """Replaces the content of a file."""

    def craft(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return craft


def transform(key: str, value: Any) -> Craft:
    """Sets a key of preprocessing.json."""
    return text("preprocessing.json", json.dumps(asdict(ImageTransform(32)) | {key: value}))


def both(*crafts: Craft) -> Craft:
    def craft(folder: Path) -> None:
        for each in crafts:
            each(folder)

    return craft


def pipe(name: str) -> Craft:
    def craft(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return craft


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Craft:
    """Changes the tensors of model.safetensors."""

    def craft(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return craft


def sparse(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 2**40)


def header(content: bytes, size: int = 64, length: int | None = None) -> Craft:
    """A safetensors file with this header and `size` bytes of data. length: of the header, as the file claims."""
    claimed = len(content) if length is None else length
    return text("model.safetensors", claimed.to_bytes(8, "little") + content + bytes(size))


def entry(offsets: list[int], shape: list[int], dtype: str = "F32", name: str = "model.x") -> bytes:
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


def enlarge_windows(weights: dict[str, torch.Tensor]) -> None:
    """The tables of position biases for windows of 128 x 128 tokens."""
    for name, tensor in weights.items():
        if name.endswith("bias_table"):
            weights[name] = torch.zeros(255**2, tensor.shape[1])


def confidence(bias: str) -> str:
    """confidence.json with this text as the bias of the log-odds."""
    return dump_confidences([make_confidence(bias=0.25)]).replace("0.25", bias)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)) + "format: 2\n"
LONG_TEXT = f"format: 2\na: &a x://u:{'a/' * 90_000}@h\nmodel: [{'*a, ' * 10_000}]\n"
TWICE = (
    b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"b":{"dtype":"F32","shape":[8],"data_offsets":[16,48]}}'
)
LARGE = 10**9
LIMIT = "at most|less than or equal"  # of a bundle, or of the configuration's key
UNFIT = "cannot be built|this configuration|must be|less than or equal"

CASES: dict[str, tuple[Craft, str]] = {
    # what the configuration may open or fetch
    "pretrained weights": (setting("backbone.weights", "pretrained"), "backbone.weights is 'pretrained'; a bundle"),
    "word vectors": (
        both(setting("model.word_vectors", "/dev/zero"), setting("model.word_vector_width", 5)),
        "model.word_vectors is '/dev/zero'",
    ),
    # sizes that decide memory or time
    "vocabulary_size": (setting("sizes.vocabulary_size", LARGE), f"config.yaml says 1000000000|{LIMIT}"),
    "max_positions": (setting("sizes.max_positions", LARGE), LIMIT),
    "static_expansion": (setting("model.static_expansion", [10**12]), UNFIT),
    "depths that cancel": (setting("backbone.depths", [10**7, -(10**7)]), LIMIT),
    "image_size": (setting("backbone.image_size", 10**6), LIMIT),
    # the index of a window has window^4 numbers, which no tensor of the file shows
    "masks": (
        both(
            setting("backbone.window_size", 128), setting("backbone.image_size", 1024), tensors(enlarge_windows),
            text("preprocessing.json", json.dumps(asdict(ImageTransform(1024)))),
        ),
        "bytes of masks and tables",
    ),
    # sizes that no backbone has
    "unknown backbone": (setting("backbone.name", "swin_of_nobody"), "timm does not know"),
    # the confidence
    "an infinite confidence": (text("confidence.json", confidence("1e999")), "confidence.json.*bias"),
    # structure of config.yaml
    "no name": (without("name"), "name must be the model's name, found NoneType"),
    "no text": (text("config.yaml", b"\xff\xfe\0"), "config.yaml cannot be read"),
    "a tag": (text("config.yaml", "!!python/object/apply:os.system [touch x]"), "config.yaml cannot be read"),
    "an alias bomb": (text("config.yaml", BOMB), "more than 100000 values"),
    "aliases of a long text": (text("config.yaml", LONG_TEXT), "expands to more than 1048576 characters"),
    "deep YAML": (text("config.yaml", "[" * DEEP), "nested more than 50 deep"),
    # vocabulary.json and preprocessing.json
    "deep vocabulary": (text("vocabulary.json", "[" * DEEP), "nested too deeply"),
    "half a character": (text("vocabulary.json", '{"words": ["\\ud800"]}'), "vocabulary.json cannot be read"),
    "a large vocabulary": (text("vocabulary.json", " " * (16 * 2**20 + 1)), "larger than 16777216 bytes"),
    **{
        f"a transform of {key} {value}": (transform(key, value), words)
        for key, value, words in (
            ("resize_to", 10**9, "must be"), ("image_size", 33, "config.yaml says 32"), ("more", 1, "unknown key more"),
            ("std", [0.2, 0.0, 0.2], "expected 3 numbers above 0"), ("interpolation", "x", "expected one of nearest"),
        )
    },
    # files that are none
    "a pipe of weights": (pipe("model.safetensors"), "lacks model.safetensors"),
    "a pipe of preprocessing": (pipe("preprocessing.json"), "not a regular file"),
    # model.safetensors
    "a tebibyte": (sparse, "no readable safetensors file .it has 1099511627776 bytes; the memory"),
    "a header of 2^63": (header(b"{}", length=2**63), "its header has 9223372036854775808 bytes"),
    "a shape that lies": (header(entry([0, 64], [2**40])), "no readable safetensors file"),
    "offsets that overlap": (header(TWICE, 48), "no readable safetensors file"),
    "one tensor": (header(entry([0, 64], [16])), "lacks 'backbone.swin.*has 'model.x'"),
    "integers": (
        tensors(lambda weights: weights.update({"model.lm_head.weight": weights["model.lm_head.weight"].int()})),
        "as torch.int.*; expected torch.float32",
    ),
    "not finite": (tensors(lambda weights: weights["model.lm_head.weight"].fill_(torch.inf)), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("bounded")
def test_a_crafted_bundle_is_refused_in_one_sentence(bundle: Path, tmp_path: Path, case: str) -> None:
    """Its digests fit, because a stranger can compute them."""
    craft, expected = CASES[case]
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    (folder / "digests.json").unlink()
    craft(folder)
    if all(path.is_file() for path in folder.iterdir()) and case != "a tebibyte":  # others have no digest
        seal(folder)
    generator = torch.get_rng_state()
    with pytest.raises(UserError, match=expected) as refused:
        load_bundle(folder)
    message = str(refused.value)
    assert message.isprintable() and str(folder) in message and len(message) < 1000
    if case != "not finite":  # this is seen only after the captioner is built
        assert torch.equal(torch.get_rng_state(), generator), "nothing was built"


def test_each_flipped_bit_is_found_and_its_file_named(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "config.yaml", "digests.json", "model.safetensors", "preprocessing.json", "vocabulary.json",
    ]  # fmt: skip
    for name in names:
        data = (folder / name).read_bytes()
        places = range(0, 8 * len(data), max(8 * len(data) // 50, 1) | 1)  # an odd step meets every bit of a byte
        for place in places:
            changed = bytearray(data)
            changed[place // 8] ^= 1 << place % 8
            (folder / name).write_bytes(changed)
            with pytest.raises(UserError, match=re.escape(name)):
                load_bundle(folder)
        (folder / name).write_bytes(data)
    load_bundle(folder)


def shared_tuple(depth: int) -> bytes:
    """A dictionary whose key is a tuple of two times the same tuple, and so on. Its hash visits 2**depth tuples."""
    return b"\x80\x04})" + b"2\x86" * depth + b"K\x01s."


def colliding_numbers(count: int) -> bytes:
    """A dictionary whose keys are numbers with one hash."""
    numbers = (index * (2**61 - 1) for index in range(1, count))
    return b"\x80\x04}(" + b"".join(b"\x8a\x0b" + each.to_bytes(11, "little") + b"K\x01" for each in numbers) + b"u."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (shared_tuple(60), "takes more than 1 s"),
        (colliding_numbers(60_000), "takes more than 1 s"),
        (b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s.", "takes more than 1 s .* or crashes"),
        (b"\x80\x04]r\xff\xff\xff\x7f.", "MemoryError"),
        (b"\x80\x04" + b"]" * 4_000 + b"a" * 3_999 + b".", "expected 'idx2word_list'|expected 'itos'"),
        (b"\x80\x04c" + b"\x1b" * 5_000 + b"\nx\n.", "it names"),
    ],
)
def test_pickles_that_would_take_long_or_much_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.setattr(tensor_files, "READING_S", 1)
    path = tmp_path / "v.pickle"
    path.write_bytes(content)
    for read in (read_expansionnet_vocabulary, read_meshed_vocabulary):
        with pytest.raises(ValueError, match=words) as refused:
            read(path)
        assert len(str(refused.value)) < 1000 and str(refused.value).isprintable()
