"""Backbone, captioner, bundle, import, cost count and the bench: round trips, refusals, and what they print."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jobs.bench.models import ModelsReport, bench_models, measure
from jobs.import_ import import_checkpoint
from models import macs_attention as flops_attention
from models.backbone import Backbone, load_swin, read_tensors, set_drop_path
from models.base import CaptionModel, Features, Memory, ModelConfig, ModelSizes
from models.captioner import Captioner
from models.config import BackboneConfig, ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig
from models.convert import PUBLISHED_GROUPS, Inferred, backbone_config, complete_config, infer_swin
from models.decoding import beam_search
from models.expansionnet import ExpansionNet
from models.layers import MASKED_SCORE, attend, kept_for_steps
from models.macs import TABLE_6_SIZES, cost, decoder_macs, encoder_macs, search_macs
from models.registry import build_model
from pipeline.captioning.bundle import load_bundle, save_bundle
from pipeline.captioning.upstream import read_expansionnet_vocabulary
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError
from pipeline.scoring.published import ABLATION

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "parity" / "golden" / "expansionnet_v2"
SMALL_SWIN = BackboneConfig(image_size=32, embed_dim=8, depths=(1, 2), num_heads=(1, 2), window_size=4)

pytestmark = pytest.mark.usefixtures("one_thread")


def captioner(backbone: bool = True) -> tuple[Captioner, Vocabulary]:
    torch.manual_seed(0)
    vocabulary = Vocabulary(tuple(sorted(["PAD", "SOS", "EOS", "UNK", "a", "red", "square"])))
    swin = Backbone(SMALL_SWIN) if backbone else None
    width = swin.width if swin else 6
    sizes = ModelSizes(width, len(vocabulary), 9, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    config = ExpansionNetConfig(d_model=8, d_ff=8, num_heads=2, static_expansion=(3, 2), dynamic_expansion=2)
    return Captioner(build_model(config, sizes), swin).eval(), vocabulary


def test_the_grid_is_what_the_backbone_gives() -> None:
    for size in (32, 36, 44):
        backbone = Backbone(
            BackboneConfig(image_size=size, embed_dim=8, depths=(1, 1, 1), num_heads=(1, 1, 1), window_size=3)
        )
        features = backbone(torch.zeros(2, 3, size, size))
        assert features.shape == (2, backbone.num_tokens, backbone.width)
        assert backbone.num_tokens == backbone.grid[0] * backbone.grid[1]


def test_stochastic_depth_grows_with_the_blocks_and_can_be_set() -> None:
    backbone = Backbone(SMALL_SWIN)
    images = torch.randn(8, 3, 32, 32)
    before = backbone.train()(images)
    assert torch.equal(before, backbone(images))
    set_drop_path(Captioner(captioner(False)[0].model, backbone), 0.6)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for stage in backbone.swin.layers for block in stage.blocks]  # type: ignore[union-attr]
    assert rates == pytest.approx([0.0, 0.3, 0.6])
    assert not torch.equal(backbone(images), backbone(images))
    assert torch.equal(backbone.eval()(images), before)
    set_drop_path(backbone, 0.0)
    assert torch.equal(backbone.train()(images), before)
    with pytest.raises(ValueError, match="drop_path is 1"):
        set_drop_path(backbone, 1.0)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    torch.manual_seed(0)
    plain = Backbone(SMALL_SWIN).train()
    values = {**vars(SMALL_SWIN), "gradient_checkpointing": True}
    saving = Backbone(BackboneConfig(**values)).train()
    saving.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    for backbone in (plain, saving):
        backbone(images).square().sum().backward()
    for ours, theirs in zip(plain.parameters(), saving.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "swin_enormous"}, "which timm does not know; known: .*swin_base"),
        ({"image_size": 30}, "multiple of the patches' 4 px"),
        ({"weights": "pretrained"}, "make it another model"),
        ({"weights": "nowhere.safetensors"}, "nowhere.safetensors"),
    ],
)
def test_backbones_that_do_not_fit_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Backbone(BackboneConfig(**(vars(SMALL_SWIN) | values)))


def test_a_swin_of_another_shape_is_refused() -> None:
    other = Backbone(BackboneConfig(**(vars(SMALL_SWIN) | {"embed_dim": 16}))).swin.state_dict()
    with pytest.raises(ValueError, match=r"with shape \(.*this configuration needs"):
        load_swin(Backbone(SMALL_SWIN), other)
    other.pop("norm.weight")
    with pytest.raises(ValueError, match="lacks 'norm.weight'"):
        load_swin(Backbone(SMALL_SWIN), other)


@torch.no_grad()
@pytest.mark.parametrize("backbone", [True, False])
def test_a_bundle_gives_back_the_captioner(tmp_path: Path, backbone: bool) -> None:
    ours, vocabulary = captioner(backbone)
    folder = tmp_path / "models" / "small"
    inputs = Features(torch.randn(2, 3, 32, 32) if backbone else torch.randn(2, 4, 6))
    tokens = torch.randint(0, len(vocabulary), (4, 5))
    first = ours(inputs, tokens)
    save_bundle(folder, ours, vocabulary, name="small", info={"CIDEr": 1.5, "stages": ("a", "b")})
    for parameter in ours.parameters():
        parameter += 0.1
    assert not torch.equal(ours(inputs, tokens), first)
    bundle = load_bundle(folder)
    assert torch.equal(bundle.captioner(inputs, tokens), first)
    assert bundle.vocabulary.words == vocabulary.words and (bundle.transform is not None) == backbone
    assert bundle.config["info"] == {"CIDEr": 1.5, "stages": ["a", "b"]}
    assert ("stored features" in (folder / "card.md").read_text()) != backbone
    save_bundle(folder, ours, vocabulary, name="small", info={})
    assert not torch.equal(load_bundle(folder).captioner(inputs, tokens), first)
    assert [path.name for path in folder.parent.iterdir()] == ["small"]
    if not backbone:
        with pytest.raises(ValueError, match="has no backbone"):
            bundle.captioner.features(Features(torch.zeros(1, 3, 32, 32)))


def test_a_failed_save_leaves_the_old_bundle(tmp_path: Path) -> None:
    ours, vocabulary = captioner(False)
    folder = tmp_path / "bundle"
    save_bundle(folder, ours, vocabulary, name="small", info={})
    with pytest.raises(Exception, match=r"."):
        save_bundle(folder, ours, vocabulary, name="small", info={"bad": object()})
    with pytest.raises(ValueError, match="the vocabulary has 4 words, the model 7"):
        save_bundle(folder, ours, Vocabulary(("EOS", "PAD", "SOS", "UNK")), name="small", info={})
    load_bundle(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_bundles_that_are_none_are_refused(tmp_path: Path) -> None:
    ours, vocabulary = captioner(False)
    folder = tmp_path / "bundle"
    with pytest.raises(ValueError, match=r"lacks config.yaml, model.safetensors, vocabulary.json"):
        load_bundle(folder)
    save_bundle(folder, ours, vocabulary, name="small", info={})
    text = (folder / "config.yaml").read_text()
    for change, words in (
        (("format: 1", "format: 2"), "format 2; this version of raycap reads up to 1"),
        (("d_model: 8", "d_modle: 8"), "config.yaml: unknown key model.d_modle: did you mean d_model"),
        (("d_model: 8", "d_model: 16"), "this configuration needs"),
        (("num_decoder_layers: 3", "num_decoder_layers: 4"), "lacks 'model.decoder.3"),
        (("vocabulary_size: 7", "vocabulary_size: 8"), "has 7 words, config.yaml says 8"),
    ):
        assert change[0] in text
        (folder / "config.yaml").write_text(text.replace(*change))
        with pytest.raises(ValueError, match=words):
            load_bundle(folder)


def importing(tmp_path: Path, **options: Any) -> None:
    values: dict[str, Any] = {
        "checkpoint": GOLDEN / "checkpoint.pth",
        "tokens": GOLDEN / "tokens.pickle",
        "out": tmp_path / "out",
        "overrides": ["model.static_expansion=[4,8,16]", "model.num_heads=4"],
    }
    import_checkpoint("expansionnet_v2", **(values | options))


def changed(tmp_path: Path, **tensors: torch.Tensor | None) -> Path:
    """The golden checkpoint with some tensors replaced, added or (None) left out; dots written as two underscores."""
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
    config = tmp_path / "config.yaml"
    config.write_text("model: {num_heads: 4, static_expansion: [4, 8, 15]}\ndata: {root: nowhere}\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"overrides": []}, "model.static_expansion is missing: the checkpoint holds 28 expansion vectors"),
        ({"overrides": ["model.static_expansion=[4,8,16]"]}, "model.num_heads is missing"),
        ({"overrides": [], "config": config}, r"\[4, 8, 15\] sums to 27"),
        ({"overrides": ["model.static_expansion=[28]", "model.num_heads=5"]}, "does not divide by model.num_heads = 5"),
        ({"overrides": ["model.head=4"]}, "unknown key model.head: did you mean num_heads"),
        ({"overrides": ["num_heads=4"]}, "not of the form model.key=value"),
        ({"overrides": ["model.num_heads=four"]}, "model.num_heads"),
        (
            {"overrides": ["model.static_expansion=[28]", "model.num_heads=4", "model.d_model=64"]},
            "model.d_model is 64",
        ),
        ({"tokens": foreign}, "the vocabulary has 5 words, the checkpoint predicts 60"),
        ({"tokens": tmp_path / "none.pickle"}, "--tokens .* does not exist"),
        ({"checkpoint": GOLDEN / "tokens.pickle"}, "no PyTorch file"),
        ({"checkpoint": GOLDEN / "swin_microsoft_format.pth"}, "is no ExpansionNet v2"),
        ({"checkpoint": changed(tmp_path, vocab_linear__bias=None)}, "lacks 'vocab_linear.bias'"),
        ({"backbone": GOLDEN / "checkpoint.pth"}, "the backbone file is no Swin"),
        ({"backbone": GOLDEN / "swin_microsoft_format.pth"}, "features of width 32, the captioner takes 40"),
        (
            {"checkpoint": GOLDEN / "end_to_end_checkpoint.pth", "backbone": GOLDEN / "swin_microsoft_format.pth"},
            "contains a Swin",
        ),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            importing(tmp_path, **options)
    for extra, message in (
        ({"mystery__weight": torch.zeros(1)}, "has 'mystery.weight'"),
        ({"pos_encoder__weight": torch.zeros(24, 31)}, r"\(24, 31\).*needs \(24, 32\)"),
    ):
        with pytest.raises(UserError, match=message):
            importing(tmp_path, checkpoint=changed(tmp_path, **extra))
    with pytest.raises(UserError, match="--from 'something' is unknown; known: expansionnet_v2"):
        import_checkpoint("something", checkpoint=foreign, tokens=foreign, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"--out .* cannot be written"):
        importing(tmp_path, out=config / "model")
    with pytest.raises(UserError, match=r"--out .* is a file"):
        importing(tmp_path, out=config)
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


def test_an_import_with_a_backbone_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_to_end = read_tensors(GOLDEN / "end_to_end_checkpoint.pth")
    save_file({k: v for k, v in end_to_end.items() if not k.startswith("swin_transf.")}, tmp_path / "alone.safetensors")
    importing(tmp_path, checkpoint=tmp_path / "alone.safetensors", backbone=GOLDEN / "swin_microsoft_format.pth")
    importing(tmp_path, checkpoint=tmp_path / "alone.safetensors", out=tmp_path / "features")
    both = load_bundle(tmp_path / "out")
    assert both.captioner.backbone is not None and both.captioner.backbone.num_tokens == 9
    assert load_bundle(tmp_path / "features").captioner.backbone is None
    assert "captions stored features of width 32" in capsys.readouterr().out


def test_settings_of_a_backbone_that_is_not_there_are_refused(tmp_path: Path) -> None:
    settings = ["model.static_expansion=[4,8,16]", "model.num_heads=4"]
    with pytest.raises(UserError, match=r"--set backbone.image_size=96: .* holds no Swin"):
        importing(tmp_path, overrides=[*settings, "backbone.image_size=96"])
    config = tmp_path / "config.yaml"
    config.write_text("backbone: {name: swin_large_patch4_window12_384}\n")
    importing(tmp_path, overrides=settings, config=config)  # a run's own file may say more


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
    "change",
    [
        {"layers.0.blocks.0.attn.relative_position_bias_table": torch.zeros(9)},
        {"layers.0.blocks.0.attn.relative_position_bias_table": None},
        {"patch_embed.proj.weight": torch.tensor(0.0)},
        {"layers.a.blocks.0.attn.relative_position_bias_table": torch.zeros(9, 2), "patch_embed.proj.weight": None},
    ],
)
def test_files_that_are_nearly_a_swin_are_refused(tmp_path: Path, change: dict[str, torch.Tensor | None]) -> None:
    state = read_tensors(GOLDEN / "swin_microsoft_format.pth") | change
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "swin.safetensors")
    with pytest.raises(UserError, match="the backbone file is no Swin"):
        importing(tmp_path, backbone=tmp_path / "swin.safetensors")


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"word2idx_dict": {"a": 0}, "idx2word_list": ["b"]}, "contradict each other"),
        (["a"], "is no ExpansionNet v2 vocabulary"),
        ({"word2idx_dict": {"a": 0.5}, "idx2word_list": ["a"]}, "it holds a float"),
        ({"word2idx_dict": {"a": 0}, "idx2word_list": ["a"]}, "lacks PAD, SOS, EOS, UNK"),
        ({"word2idx_dict": {"a": (1,)}, "idx2word_list": ["a"]}, "it holds a tuple"),
        ({"word2idx_dict": {"\ud800": 0}, "idx2word_list": ["\ud800"]}, "is no text"),
    ],
)
def test_vocabularies_that_are_none_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    (tmp_path / "v.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_expansionnet_vocabulary(tmp_path / "v.pickle")
    (tmp_path / "cut.pickle").write_bytes((GOLDEN / "tokens.pickle").read_bytes()[:100])
    with pytest.raises(ValueError, match="is (refused|no readable pickle)"):
        read_expansionnet_vocabulary(tmp_path / "cut.pickle")


def test_the_published_sizes_need_no_settings() -> None:
    published = Inferred(
        {"d_model": 512, "d_ff": 2048, "num_encoder_layers": 3, "num_decoder_layers": 3, "dynamic_expansion": 16},
        1536, 10_000, 74, sum(PUBLISHED_GROUPS),
    )  # fmt: skip
    assert complete_config(published, {}) == ExpansionNetConfig()
    large = {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48), "window_size": 12}
    assert backbone_config(large, {"drop_path": 0.1}) == BackboneConfig(drop_path=0.1)
    with torch.device("meta"):
        swin = Backbone(BackboneConfig()).swin.state_dict()
    assert infer_swin(swin) == large  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backbone.image_size is missing"):
        backbone_config(large | {"embed_dim": 96}, {})


def test_parameters_of_the_paper() -> None:
    for positions, expected in ((52, 38_593_296), (74, 38_604_560)):
        sizes = ModelSizes(1536, 10_000, positions, sos=0, eos=1, pad=2)
        assert cost(ExpansionNetConfig(), sizes, image_tokens=144, caption_tokens=12.5).parameters == expected


def test_table_6() -> None:
    assert len(ABLATION) == 12
    for row in ABLATION:
        groups, vectors, printed = row.static_expansion, row.dynamic_expansion, row.macs
        config = ExpansionNetConfig(static_expansion=groups, dynamic_expansion=vectors)
        counted = cost(config, TABLE_6_SIZES, image_tokens=144, caption_tokens=12.5)
        assert 5000 * counted.paper == pytest.approx(printed, rel=1e-3)
    baseline = cost(ExpansionNetConfig(name="transformer"), TABLE_6_SIZES, image_tokens=144, caption_tokens=12.5)
    assert 5000 * baseline.paper == pytest.approx(9.28e12, rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "mixers",
    [
        {"static_expansion": (3, 5), "dynamic_expansion": 4},
        {"static_expansion": None, "encoder_dynamic_expansion": 3, "dynamic_expansion": None},
        {"static_expansion": None, "dynamic_expansion": None},
    ],
)
def test_the_executed_products_are_those_that_torch_counts(mixers: dict[str, Any]) -> None:
    config = ExpansionNetConfig(d_model=32, d_ff=48, num_heads=4, **mixers)
    sizes = ModelSizes(40, 50, 30, sos=0, eos=1, pad=2)
    model = build_model(config, sizes).eval()
    assert isinstance(model, ExpansionNet)
    model.output.bias[1] = -1e4
    features = torch.randn(2, 9, 40)

    def counted(run: Any) -> tuple[float, Any]:
        in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **options: 2 * a[0] * a[1] * a[2] * b[2]}
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            result = run()
        return (
            counter.get_total_flops() / 2 / 2,
            result,
        )  # two images, two operations a multiply-accumulate

    macs, memory = counted(lambda: model.encode(Features(features)))
    assert macs == encoder_macs(config, sizes, 9)
    macs, _ = counted(lambda: model.decode(memory, torch.zeros(2, 7, dtype=torch.int64)))
    assert macs == decoder_macs(config, sizes, 9, 7)
    macs, _ = counted(lambda: beam_search(model, memory, beam_size=3, max_length=9))
    assert macs == search_macs(config, sizes, 9, 3, 8)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_memory_slots": 0, "connection": "last"}, {"attention": "on_attention"}, {"connection": "one_to_one"}],
)
def test_the_products_of_the_meshed_model_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    values = {
        "d_model": 32,
        "d_ff": 48,
        "num_heads": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_memory_slots": 5,
    }
    same_products(MeshedMemoryConfig(**(values | changes)))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{}, {"encoder_clusters": "1d", "sampling": 4}, {"window": 2}, {"clustered_decoder_layers": (1,), "sampling": 1}],
)
def test_the_products_of_the_clustformer_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    values = {"d_model": 32, "d_ff": 48, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
    same_products(ClustFormerConfig(**(values | changes)))


def same_products(config: ModelConfig) -> None:
    sizes = ModelSizes(40, 50, 30, sos=0, eos=1, pad=2)
    model = build_model(config, sizes).eval()
    features = torch.randn(2, 9, 40)
    memory = model.encode(Features(features))
    runs: list[tuple[Any, float]] = [
        (lambda: model.encode(Features(features)), flops_attention.encoder_macs(config, sizes, 9)),
        (
            lambda: model.decode(memory, torch.zeros(2, 7, dtype=torch.int64)),
            flops_attention.decoder_macs(config, sizes, 9, 7),
        ),
        (lambda: eight_steps(model, memory, beams=3), flops_attention.search_macs(config, sizes, 9, 3, 8)),
    ]
    for run, expected in runs:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() / 2 / 2 == expected
    counted = cost(config, sizes, image_tokens=9, caption_tokens=7, beams=3, steps=8)
    assert counted.paper is None and counted.executed == runs[0][1] + runs[1][1]


def eight_steps(model: CaptionModel, memory: Memory, beams: int) -> None:
    """As captions are decoded: all beams of an image begin as one."""
    cache = model.init_cache(memory, 1)
    _, cache = model.step(torch.zeros(2, dtype=torch.int64), cache)
    cache = cache.widen(beams)
    for _ in range(7):
        _, cache = model.step(torch.zeros(2 * beams, dtype=torch.int64), cache)


def test_the_bench_compares_both_forms_and_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.bench.models.prepare_processor", lambda: None)  # it would be for all tests
    torch.manual_seed(0)
    config = ExpansionNetConfig(
        d_model=16, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, static_expansion=(4,)
    )
    model = build_model(config, ModelSizes(8, 30, 20, sos=0, eos=1, pad=2)).eval()
    assert isinstance(model, ExpansionNet)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report, lines = ModelsReport(), list[str]()
    with torch.no_grad():
        measure(report, model, 2, 1, lines.append)
    assert [row.target for row in report.rows] == [4.0, 1.7, 9.0, 20.0, 9.0, 20.0]
    assert all(row.ratio > 0 for row in report.rows) and report.bfloat16_errors.numel() == 40
    assert sum(line.startswith("|") for line in lines) == 7 and "rows within 0.03" in lines[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="images = 0"):
        bench_models(images=0)


def test_the_bench_imports_no_cluster() -> None:
    code = (
        "import sys, jobs.bench.models\n"
        "print([m for m in ('ray', 'mlflow', 'boto3', 'pydantic', 'timm') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_attention_of_few_queries_is_torchs(precision: torch.dtype, queries: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    query = torch.randn(2, 3, queries, 8, generator=generator).to(precision)
    key, value = (torch.randn(2, 3, 11, 8, generator=generator).to(precision) for _ in range(2))
    bias = torch.zeros(2, 1, 1, 11).masked_fill_(torch.rand(2, 1, 1, 11, generator=generator) < 0.3, MASKED_SCORE)
    bias = bias.to(precision)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=bias.double())
    kept = kept_for_steps(key, value)
    assert kept[0].mT.is_contiguous() and kept[1].is_contiguous()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[precision]
    for pair in ((key, value), kept):
        torch.testing.assert_close(attend(query, *pair, bias).double(), exact, rtol=0, atol=tolerance)
