"""The Swin backbone: its grid, stochastic depth, gradient checkpointing, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raycap.models.captioner import Captioner
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.encoders.backbone import (
    Backbone,
    TensorDropPath,
    load_tensors,
    prepare_to_compile,
    set_drop_path,
)
from raycap.models.registry import build_model
from tests.support.models import (
    SMALL_SWIN,
    small_captioner,
)


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
    set_drop_path(Captioner(small_captioner(False)[0].model, backbone), 0.6)
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
    ("name", "message"),
    [
        ("swin_large_patch4_window12_384.ms_in22k", None),
        ("swin_large_patch4_window12_384.laion", "whose tag timm does not know; known: .*ms_in22k"),
        ("swin_large_patch4_window12_384.", "whose tag timm does not know"),
        ("swin_huge.ms_in22k", "which timm does not know"),
    ],
)
def test_pretrained_weights_are_chosen_by_a_tag(name: str, message: str | None) -> None:
    config = BackboneConfig(name, image_size=32, embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=4)
    if message is None:
        assert Backbone(config).num_tokens == 16
        return
    with pytest.raises(ValueError, match=message):
        Backbone(config)


@torch._dynamo.config.patch(recompile_limit=2)  # monkeypatch would delete it afterwards
def test_every_block_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles only few forms of a piece of code: here two."""
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        def run(*arguments: torch.Tensor) -> object:
            calls.append("block")
            return graph.forward(*arguments)

        return run

    plain_compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: plain_compile(module, backend=backend))
    backbone = Backbone(BackboneConfig(**vars(SMALL_SWIN) | {"depths": (1, 3), "drop_path": 0.1}))
    sizes = ModelSizes(backbone.width, 12, 8, 1, 2, 0)
    captioner = Captioner(build_model(ExpansionNetConfig(d_model=8, d_ff=8, num_heads=2), sizes), backbone)
    captioner.compile_layers()
    captioner.train()
    backbone(torch.randn(2, 3, 32, 32))
    assert len(calls) >= 4, f"only {len(calls)} of 4 blocks are compiled"


def test_blocks_with_different_drop_paths_are_one_form() -> None:
    """Eight blocks: one without a drop path, and the others with and without a shift."""
    backbone = Backbone(
        BackboneConfig(**vars(SMALL_SWIN) | {"image_size": 64, "depths": (8,), "num_heads": (2,), "drop_path": 0.1})
    )
    prepare_to_compile(backbone)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    for block in backbone.train().blocks:
        block.compile(backend=backend, dynamic=False)
    backbone(torch.randn(2, 3, 64, 64))
    assert len(graphs) == 3


def test_a_drop_path_with_its_rate_in_a_tensor() -> None:
    torch.manual_seed(0)
    layer, x = TensorDropPath(0.25, torch.device("cpu")), torch.ones(4000, 2, 3)
    assert torch.equal(layer.eval()(x), x) and not layer.state_dict()
    dropped = layer.train()(x)
    assert dropped.mean().item() == pytest.approx(1, abs=0.05) and set(dropped[:, 0, 0].tolist()) == {
        0.0,
        x.new_tensor(1 / 0.75).item(),
    }
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "swin_enormous"}, "which timm does not know; close names: .*swin_"),
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
        load_tensors(Backbone(SMALL_SWIN), other)
    other.pop("norm.weight")
    with pytest.raises(ValueError, match="lacks 'norm.weight'"):
        load_tensors(Backbone(SMALL_SWIN), other)
