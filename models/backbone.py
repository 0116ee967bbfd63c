"""The visual backbone: a timm Swin that gives grid features, and the image transform that belongs to it.

No other module imports timm. Shapes: B images, N grid tokens (rows x columns, row by row), C feature width.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.layers import DropPath
from torch import Tensor, nn

from models.base import load_strictly
from models.config import BackboneConfig


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
        swin.set_grad_checkpointing(config.gradient_checkpointing)
        self.width: int = swin.num_features
        rows, columns = swin.patch_embed.grid_size
        for _ in range(len(swin.layers) - 1):
            rows, columns = (rows + 1) // 2, (columns + 1) // 2  # merging patches halves each side and pads odd ones
        self.grid: tuple[int, int] = (rows, columns)
        self.num_tokens = self.grid[0] * self.grid[1]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.swin.forward_features(images)  # (B, rows, columns, C)
        return features.flatten(1, 2)


def _create_swin(config: BackboneConfig, *, pretrained: bool) -> Any:
    """timm's Swin for a configuration, whose weights are random unless `pretrained`. See `Backbone` for the errors."""
    sizes = {key: getattr(config, key) for key in ("embed_dim", "depths", "num_heads", "window_size")}
    overrides = {key: value for key, value in sizes.items() if value is not None}
    names = timm.list_models("swin_*")
    if config.name not in names:
        raise ValueError(f"backbone.name is {config.name!r}, which timm does not know; known: {', '.join(names)}")
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


class _Ignored:
    """Replaces the NumPy objects of a training checkpoint (random states, scores), whose content is not read."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


# NumPy renamed its package `core` to `_core`; checkpoints contain either name
_NUMPY_NAMES = [f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")]
_NUMPY_NAMES += ["numpy.ndarray", "numpy.dtype"]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint: a safetensors file, or a PyTorch file read with `weights_only` (no code in it runs).

    The tensors may be in a dictionary under `model`, `state_dict` or `model_state_dict`. The rest of such a training
    checkpoint (optimizer, scheduler, random states) is left out. Raises ValueError for any other content.
    """
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            with torch.serialization.safe_globals([(_Ignored, name) for name in _NUMPY_NAMES]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        # torch's message is not shown, because it advises to turn `weights_only` off
        raise ValueError(
            f"{path} is refused: it is no PyTorch file, or holds more than tensors, plain values and random "
            f"states; save the model's state dict alone"
        ) from error
    except OSError as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error}") from error
    except Exception as error:  # a damaged file can raise almost any exception
        reason = type(error).__name__
        if str(error) and "weights_only" not in str(error):
            reason += f": {str(error).splitlines()[0]}"
        raise ValueError(f"{path} is no readable checkpoint ({reason})") from error
    for key in ("model_state_dict", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{path} is not a checkpoint: expected a dictionary of tensors, also under 'model' or 'state_dict'"
        )
    _check_tensors(path, content)
    return content


def _check_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError for a tensor that is not plain, or whose shape needs more bytes than the file contains."""
    for name, tensor in tensors.items():
        wrong = None
        if not isinstance(name, str):
            wrong = "its name is no string"
        elif tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            wrong = f"it is no plain tensor ({tensor.layout}, {tensor.device})"
        elif tensor.is_complex():
            wrong = "its numbers are complex"
        elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            wrong = f"its shape {tuple(tensor.shape)} claims more than the file holds"
        if wrong is not None:
            raise ValueError(f"{path}: the tensor {name!r} is refused: {wrong}")


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
