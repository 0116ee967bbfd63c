"""The Swin backbone: its grid, stochastic depth, gradient checkpointing, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.encoders.backbone import (
    Backbone,
    TensorDropPath,
)
from tests.support.models import (
    SMALL_SWIN,
)


@pytest.mark.proof
@torch._dynamo.config.patch(recompile_limit=2)  # monkeypatch would delete it afterwards
def test_every_block_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles a limited number of forms of a piece of code, which is set to two here."""
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
