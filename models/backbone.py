"""The visual backbone: a timm Swin that gives grid features, and the image transform that belongs to it.

No other module imports timm. Shapes: B images, N grid tokens (rows x columns, row by row), C feature width.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import timm
from timm.layers import DropPath
from torch import Tensor, nn

from models.base import load_strictly
from models.config import BackboneConfig
from models.tensor_files import read_tensors


class Backbone(nn.Module):
    """Computes features (B, N, C), after Swin's final norm, from normalized images (B, 3, H, W)."""

    def __init__(self, config: BackboneConfig, *, with_weights: bool = True) -> None:
        """with_weights: False leaves the weights random, for a caller that loads others, and reads or downloads none.

        Raises ValueError for a configuration that gives no backbone, and ConnectionError when the download of
        pretrained weights fails.
        """
        super().__init__()
        self.config = config
        self.swin = swin = _create_swin(config, pretrained=with_weights and config.weights == "pretrained")
        if with_weights and config.weights not in ("none", "pretrained"):
            load_swin(self, read_tensors(Path(config.weights)))
        self.set_gradient_checkpointing(config.gradient_checkpointing is True)
        self.width: int = swin.num_features
        rows, columns = swin.patch_embed.grid_size
        for _ in range(len(swin.layers) - 1):
            rows, columns = (rows + 1) // 2, (columns + 1) // 2  # merging patches halves each side and pads odd ones
        self.grid: tuple[int, int] = (rows, columns)
        self.num_tokens = self.grid[0] * self.grid[1]

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Whether a backward pass computes the blocks' activations again, which takes less memory and more time."""
        self.swin.set_grad_checkpointing(enabled)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.swin.forward_features(images)  # (B, rows, columns, C)
        return features.flatten(1, 2)


def _create_swin(config: BackboneConfig, *, pretrained: bool) -> Any:
    """timm's Swin for a configuration, whose weights are random unless `pretrained`. See `Backbone` for the errors."""
    sizes = {key: getattr(config, key) for key in ("embed_dim", "depths", "num_heads", "window_size")}
    overrides = {key: value for key, value in sizes.items() if value is not None}
    names = timm.list_models("swin_*")
    architecture, dot, _ = config.name.partition(".")
    if architecture not in names:
        raise ValueError(f"backbone.name is {config.name!r}, which timm does not know; known: {', '.join(names)}")
    if dot and config.name not in (tags := timm.list_models(f"{architecture}.*", pretrained=True)):
        raise ValueError(f"backbone.name is {config.name!r}, whose tag timm does not know; known: {', '.join(tags)}")
    # another window size is allowed: timm resizes the pretrained position tables to it
    incompatible = sorted(overrides.keys() - {"window_size"})
    if pretrained and incompatible:
        raise ValueError(
            f"backbone.weights is 'pretrained', but {', '.join(incompatible)} make it another model; "
            f"leave them out, or set backbone.weights to none"
        )
    try:
        return timm.create_model(
            config.name,
            pretrained=pretrained,
            img_size=config.image_size,
            num_classes=0,
            drop_path_rate=config.drop_path,
            **overrides,
        )
    except (RuntimeError, ValueError, AssertionError, TypeError):  # timm refuses the settings
        raise
    except Exception as error:  # the libraries for downloads have exceptions of their own
        if not pretrained:
            raise
        reason = " ".join(str(error).split())
        raise ConnectionError(f"the pretrained weights of {config.name} could not be downloaded: {reason}") from error


def set_drop_path(module: nn.Module, rate: float) -> None:
    """Sets the stochastic depth of all backbones in `module`: 0 in the first block, rising to `rate` in the last one.

    Raises ValueError for a rate outside [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"drop_path is {rate}; it must be at least 0 and below 1")
    for backbone in (child for child in module.modules() if isinstance(child, Backbone)):
        blocks = [block for stage in backbone.swin.layers for block in stage.blocks]
        for index, block in enumerate(blocks):
            block_rate = rate * index / max(len(blocks) - 1, 1)
            for name in ("drop_path1", "drop_path2"):
                setattr(block, name, DropPath(block_rate) if block_rate else nn.Identity())


def load_swin(backbone: Backbone, tensors: dict[str, Tensor]) -> None:
    """Loads a Swin checkpoint in timm's or the original naming.

    In the original naming a downsampling layer belongs to the stage before it, in timm's to the stage after it. The
    classifier and computed buffers are left out. Raises ValueError for missing, unknown or misshapen entries.
    """
    original = "layers.0.downsample.reduction.weight" in tensors
    state = {}
    for name, tensor in tensors.items():
        if name.endswith(("relative_position_index", "attn_mask")) or name.startswith("head."):
            continue
        if original:  # downsampling moves to the next stage
            name = re.sub(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample", name)
        state[name] = tensor
    load_strictly(backbone.swin, state, f"a Swin checkpoint for {backbone.config.name}")
