"""`raycap import`: checkpoints, backbones and vocabularies that fit, and those that are refused."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raycap.jobs.import_ import import_checkpoint
from raycap.models.convert import tensor_files
from raycap.models.convert.tensor_files import read_tensors, reason_of
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.upstream import read_expansionnet_vocabulary
from tests.support.golden import EXPANSIONNET as GOLDEN
from tests.support.golden import EXPANSIONNET_SETTINGS, MESHED_MEMORY, SWIN_SETTINGS

SWIN, SETTINGS = GOLDEN / "swin_microsoft_format.pth", list(EXPANSIONNET_SETTINGS)


def importing(tmp_path: Path, **options: Any) -> None:
    values: dict[str, Any] = {
        "checkpoint": GOLDEN / "checkpoint.pth",
        "tokens": GOLDEN / "tokens.pickle",
        "out": tmp_path / "out",
        "overrides": SETTINGS,
    }
    import_checkpoint("expansionnet_v2", **(values | options))


def changed(tmp_path: Path, **tensors: torch.Tensor | None) -> Path:
    """The golden checkpoint with changed tensors.

    changes: tensors by name, with two underscores in place of each dot. None leaves a tensor out."""
    state = read_tensors(GOLDEN / "checkpoint.pth")
    for name, tensor in tensors.items():
        key = name.replace("__", ".")
        if tensor is None:
            state.pop(key)
        else:
            state[key] = tensor
    path = tmp_path / "changed.safetensors"
    save_file(state, path)
    return path


def test_imports_that_do_not_fit_are_refused_and_write_nothing(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.pickle"
    words = ["EOS", "PAD", "SOS", "UNK", "a"]
    content = {"word2idx_dict": {w: i for i, w in enumerate(words)}, "idx2word_list": words}
    foreign.write_bytes(pickle.dumps(content | {"sos_str": "SOS", "eos_str": "EOS"}))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"overrides": SETTINGS[1:]}, r"512\] sums to 992, and the checkpoint holds 28 expansion vectors; give --set"),
        ({"overrides": SETTINGS[:1]}, "model.num_heads is missing"),
        ({"overrides": [*SETTINGS, "model.num_head=4"]}, "unknown key model.num_head: did you mean num_heads"),
        ({"overrides": [*SETTINGS, "model.d_model=16"]}, "model.d_model is 16, the checkpoint has 32; leave it out"),
        ({"overrides": [*SETTINGS, "backbone.image_size=48"]}, "backbone.image_size: .* holds no Swin; add --backbone"),
        ({"overrides": ["model.static_expansion=[4,8,15]", *SETTINGS[1:]]}, r"\[4, 8, 15\] sums to 27"),
        ({"tokens": foreign}, "the vocabulary has 5 words, the checkpoint predicts 60"),
        ({"checkpoint": GOLDEN / "tokens.pickle"}, "no PyTorch file"),
        ({"checkpoint": changed(tmp_path, vocab_linear__bias=None)}, "lacks 'vocab_linear.bias'"),
        ({"backbone": SWIN, "overrides": [*SETTINGS, *SWIN_SETTINGS]}, "features of width 32, the captioner takes 40"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            importing(tmp_path, **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"--out: .* cannot be written"):
        importing(tmp_path, out=foreign / "model")
    for content in (b"", b"no checkpoint", bytes(1000)):
        (tmp_path / "no.pth").write_bytes(content)
        with pytest.raises(UserError, match=r"no.pth is (refused|no readable checkpoint)") as refused:
            importing(tmp_path, checkpoint=tmp_path / "no.pth")
        assert "weights_only" not in str(refused.value)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="exists and is not empty"):
        importing(tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_long_name_in_a_checkpoint_makes_no_long_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 unknown") as refused:
        importing(tmp_path, checkpoint=changed(tmp_path, **{"n" * 10_000: torch.zeros(1)}))
    assert len(str(refused.value)) < 1000
    assert reason_of(RuntimeError(f"Error(s):\n\t{'n' * 10_000}")).startswith("RuntimeError: Error(s): nn")
    assert len(reason_of(RuntimeError("n" * 10_000))) < 400


def test_settings_of_variables_and_null_agree_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "32")
    importing(tmp_path, overrides=[*SETTINGS, "model.d_model=${WIDTH}", "model.max_positions=null"])
    assert load_bundle(tmp_path / "out").captioner.model.config.d_model == 32


def test_an_import_with_a_backbone_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_to_end = read_tensors(GOLDEN / "end_to_end_checkpoint.pth")
    save_file({k: v for k, v in end_to_end.items() if not k.startswith("swin_transf.")}, tmp_path / "alone.safetensors")
    alone = tmp_path / "alone.safetensors"
    settings = [*SETTINGS, *SWIN_SETTINGS]
    importing(tmp_path, checkpoint=alone, backbone=SWIN, overrides=settings)
    importing(tmp_path, checkpoint=alone, out=tmp_path / "features")
    other = [*settings, "backbone.depths=[2,2,4]"]
    with pytest.raises(UserError, match=r"Swin checkpoint .* lacks 'layers\.2\.blocks\.2\."):
        importing(tmp_path, checkpoint=alone, backbone=SWIN, overrides=other, out=tmp_path / "other")
    for size, message in (("window_size=3", "has 3; give --set backbone.window_size=3"), ("image_size=48", "at 48; ")):
        forgotten = [each for each in settings if not each.endswith(size)]
        with pytest.raises(UserError, match=message):
            importing(tmp_path, checkpoint=alone, backbone=SWIN, overrides=forgotten, out=tmp_path / "other")
    both = load_bundle(tmp_path / "out")
    assert both.captioner.backbone is not None and both.captioner.backbone.num_tokens == 9
    assert load_bundle(tmp_path / "features").captioner.backbone is None
    assert "captions stored features of width 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("vocab_linear.weight", torch.tensor(1.0), r"'vocab_linear.weight' has shape \(\); expected 2 axes"),
        ("input_linear.weight", torch.zeros(4), r"'input_linear.weight' has shape \(4,\); expected 2 axes"),
        ("pos_encoder.weight", torch.zeros(1, 1).expand(2**40, 32), "claims more than the file holds"),
        ("pos_encoder.weight", torch.zeros(24, 32).to_sparse(), "no plain tensor"),
        ("pos_encoder.weight", torch.zeros(24, 32, device="meta"), "no plain tensor"),
        ("pos_encoder.weight", torch.zeros(24, 32, dtype=torch.complex64), "numbers are complex"),
        ("pos_encoder.weight", torch.zeros(24, 32, dtype=torch.int64), "as torch.int64; expected torch.float32"),
        ("pos_encoder.weight", torch.full((24, 32), torch.nan), "not finite"),
        ("pos_encoder.weight", torch.full((24, 32), 1e300, dtype=torch.float64), "not finite in torch.float32"),
        (7, torch.zeros(1), "its name is no string"),
    ],
)
def test_tensors_that_are_not_what_they_seem_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, words: str
) -> None:
    torch.save(read_tensors(GOLDEN / "checkpoint.pth") | {name: tensor}, tmp_path / "crafted.pth")
    with pytest.raises(UserError, match=words):
        importing(tmp_path, checkpoint=tmp_path / "crafted.pth")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        ("module.", ["model_state_dict"]),
        ("_orig_mod.", []),
        ("module._orig_mod.", ["state_dict"]),
        ("_orig_mod.module.", ["model", "state_dict"]),
        ("model.", ["state_dict", "model"]),
        ("module.model._orig_mod.", ["state_dict"]),
        ("", ["model", "model_state_dict"]),
    ],
)
def test_wrappers_of_the_model_do_not_matter(tmp_path: Path, prefix: str, keys: list[str]) -> None:
    """The backbone may be compiled by itself, so that `_orig_mod` is in the middle of names."""
    plain = read_tensors(GOLDEN / "end_to_end_checkpoint.pth")
    inner = [name.replace("swin_transf.", "swin_transf._orig_mod.") if prefix == "module." else name for name in plain]
    content: Any = {prefix + name: tensor for name, tensor in zip(inner, plain.values(), strict=True)}
    for key in reversed(keys):
        content = {key: content, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}
    torch.save(content, tmp_path / "wrapped.pth")
    overrides = [*SETTINGS, *SWIN_SETTINGS]
    importing(tmp_path, checkpoint=tmp_path / "wrapped.pth", overrides=overrides)
    importing(tmp_path, checkpoint=GOLDEN / "end_to_end_checkpoint.pth", overrides=overrides, out=tmp_path / "plain")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "plain")]
    assert weights[0] == weights[1]


def test_what_is_no_checkpoint_of_the_system_is_told_truly(tmp_path: Path) -> None:
    plain = read_tensors(GOLDEN / "checkpoint.pth")
    part = {name: tensor for name, tensor in plain.items() if name.startswith("encoders.")}
    other = read_tensors(MESHED_MEMORY / "checkpoint.pth")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).state_dict()
    twice = plain | {f"module.{name}": tensor for name, tensor in plain.items()}
    for content, message in (
        (part, rf"lacks 'input_linear.weight' of ExpansionNet v2; its {len(part)} tensors \(first 'encoders.0"),
        (other, r"first 'decoder.fc.weight'\) are of another system, or only a part"),
        ({}, "it has dict; expected"),
        (optimizer, "it has 'state', 'param_groups'; expected"),
        ({"optimizer_state_dict": optimizer, "epoch": 3}, "it has 'optimizer_state_dict', 'epoch'; expected"),
        ([1], "it has list; expected"),
        (twice, rf"the checkpoint has 'module.*\({len(plain)} unknown\)"),
    ):
        torch.save(content, tmp_path / "checkpoint.pth")
        with pytest.raises(UserError, match=message):
            importing(tmp_path, checkpoint=tmp_path / "checkpoint.pth")


def repacked(source: Path, target: Path, method: int, **changes: bytes) -> Path:
    """A checkpoint with each record compressed by `method`; changes: new contents by the last part of the name."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name.rsplit("/", 1)[-1], old.read(name)))
    return target


def test_a_checkpoint_that_is_larger_inside_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": torch.zeros(2**20)}, tmp_path / "plain.pth")
    assert read_tensors(repacked(tmp_path / "plain.pth", tmp_path / "stored.pth", zipfile.ZIP_STORED))["x"].sum() == 0
    packed = repacked(tmp_path / "plain.pth", tmp_path / "packed.pth", zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < 2**15
    claimed = bytearray((tmp_path / "plain.pth").read_bytes())
    place = claimed.rindex(b"PK\x01\x02") + 24  # the size of the last record in the directory
    claimed[place : place + 4] = (2**31).to_bytes(4, "little")
    (tmp_path / "claimed.pth").write_bytes(claimed)
    os.truncate(tmp_path / "plain.pth", 2**40)
    (tmp_path / "plain.safetensors").symlink_to(tmp_path / "plain.pth")
    (tmp_path / "cut.pth").write_bytes(b"PK\3\4" + bytes(1000))
    os.mkfifo(tmp_path / "pipe.pth")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the file was read"))
    for name, words in (
        ("packed.pth", r"unpack to \d{7}; save the model's state dict with torch.save"),
        ("claimed.pth", r"unpack to \d{10}"),
        ("plain.pth", "it has 1099511627776 bytes; the memory of this machine"),
        ("plain.safetensors", "it has 1099511627776 bytes"),
        ("cut.pth", "is no readable checkpoint"),
        ("pipe.pth", "it is not a regular file"),
        ("none.pth", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=rf"{name} .*{words}"):
            read_tensors(tmp_path / name)


def test_a_checkpoint_that_would_take_years_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of its dictionary is a tuple of two times the same tuple, and so on."""
    monkeypatch.setattr(tensor_files, "READING_S", 1)
    nested = b"".join(b"q" + bytes([index]) + b"h" + bytes([index]) + b"\x86" for index in range(60))
    torch.save({}, tmp_path / "plain.pth")
    content = {"data.pkl": b"\x80\x02})" + nested + b"K\x01s."}
    repacked(tmp_path / "plain.pth", tmp_path / "slow.pth", zipfile.ZIP_STORED, **content)
    with pytest.raises(ValueError, match="takes more than 1 s"):
        read_tensors(tmp_path / "slow.pth")


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for protocol in range(2, 6):
        (tmp_path / "trap.pickle").write_bytes(pickle.dumps({"word2idx_dict": Trap(sprung)}, protocol))
        with pytest.raises(ValueError, match="is refused: it names"):
            read_expansionnet_vocabulary(tmp_path / "trap.pickle")
    torch.save({"model_state_dict": {"x": Trap(sprung)}}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match="is refused"):
        read_tensors(tmp_path / "trap.pth")
    assert not sprung.exists()
    pickle.loads((tmp_path / "trap.pickle").read_bytes())  # noqa: S301 - the trap itself works
    assert sprung.exists()
