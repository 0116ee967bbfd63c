"""Backbones of other families than Swin: tokens, transforms, training, weights, bundles, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.layers import DropPath
from torch import Tensor, nn

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.convert.tensor_files import read_tensors
from raycap.models.encoders.backbone import (
    PACKAGES,
    Backbone,
    image_transform,
    local_file,
    set_drop_path,
)
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.load import parse_section
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, save_bundle
from raycap.pipeline.storage.weights import save_weights
from tests.support.backbones import FAMILIES
from tests.support.bundles import WORDS, write_images

ROOT = Path(__file__).resolve().parents[3]
WITH_PREFIX = {"vit": 1, "vit with registers": 4, "clip": 1, "dinov2": 5, "dinov3": 5, "eva02": 1, "beit": 1, "deit": 2}


QUICK = ("vit with registers", "swin", "convnext", "resnet", "maxvit")  # `make proof` tests the others


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.proof] * (name not in QUICK)) for name in FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(config: BackboneConfig, **changes: Any) -> Backbone:
    """A backbone with random weights, even those that timm sets to zero, because zeros would hide the blocks."""
    torch.manual_seed(0)
    backbone = Backbone(replace(config, **changes)).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.ndim == 1 and parameter.abs().max() < 1e-3:
                parameter.normal_(std=0.2)
    return backbone


def make_captioner(backbone: Backbone) -> Captioner:
    sizes = ModelSizes(backbone.width, len(WORDS), 12, WORDS.sos, WORDS.eos, WORDS.pad)
    config = ExpansionNetConfig(
        d_model=16, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, static_expansion=(4,)
    )
    return Captioner(build_model(config, sizes), backbone)


def images_for(backbone: Backbone, count: int = 2) -> Tensor:
    side = backbone.config.image_size
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_tokens_come_row_by_row(family: str) -> None:
    """When the pixels of one cell change, its own token changes most."""
    backbone = make(FAMILIES[family])
    images, (rows, columns) = images_for(backbone, 1), backbone.grid
    tokens = backbone(images)
    assert tokens.shape == (1, backbone.num_tokens, backbone.width) and backbone.num_tokens == rows * columns > 1
    assert backbone.layout.num_prefix == WITH_PREFIX.get(family, 0)
    side = images.shape[-1] // rows
    shift = side // 2 if family == "resnet" else 0  # its padded convolutions look at the cell's upper left corner
    for cell in range(rows * columns):
        height, width = (
            slice(max(0, side * index - shift), side * (index + 1) - shift) for index in divmod(cell, columns)
        )
        changed = images.clone()
        changed[:, :, height, width] *= -3
        change = (backbone(changed) - tokens)[0].norm(dim=1)
        assert change.argmax() == cell, f"cell {cell} of {rows} x {columns}"


@torch.no_grad()
def test_features_are_timms_with_its_final_norm(family: str) -> None:
    backbone = make(FAMILIES[family])
    images = images_for(backbone)
    tokens = backbone(images)
    if not hasattr(backbone.network, "forward_intermediates") or family in ("coatnet", "maxvit", "pvt"):
        return
    (expected,) = backbone.network.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)
    expected = expected.flatten(2).mT
    if backbone.layout.norm:
        assert family in ("beit", "convnext", "eva02", "vit with registers")
        norm = backbone.network.get_submodule(backbone.layout.norm)
        expected = nn.functional.layer_norm(expected, expected.shape[-1:], norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)


def test_each_family_has_timms_transform(family: str) -> None:
    """Pixel by pixel, on images of several aspect ratios, sizes above and below the scaled one."""
    config = FAMILIES[family]
    if config.is_swin:
        assert image_transform(config) == ImageTransform(config.image_size)
        return
    size = config.image_size
    known = timm.get_pretrained_cfg(config.name).to_dict()  # type: ignore[union-attr]
    data = timm.data.resolve_data_config({"input_size": (3, size, size)}, pretrained_cfg=known)
    theirs, ours = timm.data.create_transform(**data), image_transform(config)
    generator = np.random.default_rng(0)
    for width, height in ((90, 90), (200, 71), (71, 200), (20, 31), (size, size + 1)):
        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        assert torch.equal(ours(image), theirs(image)), (width, height)
    assert parse_section(ImageTransform, json.loads(json.dumps(asdict(ours)))) == ours


def step(captioner: Captioner, images: Tensor) -> Tensor:
    """The loss of a training step on two captions, after the backward pass."""
    tokens = torch.tensor([WORDS.encode(["a", "red", "cat"]), WORDS.encode(["the", "mat", "sits"])])
    logits = captioner(Features(images), tokens[:, :-1])
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss


def test_end_to_end_and_frozen_steps(family: str) -> None:
    """End to end, each weight gets a gradient, for which data-parallel workers wait. Buffers stay equal."""
    backbone = make(FAMILIES[family])
    captioner, images = make_captioner(backbone).train(), images_for(backbone)
    buffers = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
    first = step(captioner, images)
    missing = [name for name, parameter in captioner.named_parameters() if parameter.grad is None]
    if family == "beit":  # the bias of the keys is a buffer in some versions of timm
        missing = [name for name in missing if not name.endswith("k_bias")]
    assert not missing
    torch.optim.SGD(captioner.parameters(), lr=0.05).step()
    assert step(captioner, images) != first
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in backbone.named_buffers())
    frozen = make_captioner(backbone.eval())
    with torch.no_grad():
        features = backbone(images)
    stored = Captioner(frozen.model)
    assert torch.isfinite(step(stored, features))


def test_gradient_checkpointing_gives_the_same_gradient(family: str) -> None:
    plain, saving = make(FAMILIES[family]), make(FAMILIES[family], gradient_checkpointing=True)
    saving.load_state_dict(plain.state_dict())
    images = images_for(plain)
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    numbers = []
    for backbone in (plain.train(), saving.train()):
        saved = 0
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = backbone(images).square().sum()
        numbers.append(saved)
        loss.backward()
    assert numbers[1] < numbers[0], "no activations are saved"
    for ours, theirs in zip(plain.parameters(), saving.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_stochastic_depth_can_be_set(family: str) -> None:
    backbone = make(FAMILIES[family]).train()
    images = images_for(backbone, 16)
    before = backbone(images)
    assert torch.equal(before, backbone(images)), "no drop path by default"
    set_drop_path(backbone, 0.6)
    rates = [module.drop_prob for module in backbone.modules() if isinstance(module, DropPath)]
    assert rates == sorted(rates) and rates[-1] == pytest.approx(0.6) and min(rates) > 0
    assert not torch.equal(backbone(images), backbone(images))
    assert torch.equal(backbone.eval()(images), before)
    set_drop_path(backbone, 0.0)
    assert torch.equal(backbone.train()(images), before)


@torch.no_grad()
def test_pooling_averages_neighbors(family: str) -> None:
    config = FAMILIES[family]
    plain, pooled = make(config), make(config, pool=2)
    images, (rows, columns) = images_for(plain), plain.grid
    grid = plain(images).numpy().reshape(2, rows, columns, -1)
    expected = [
        np.mean([grid[:, 2 * row + i, 2 * column + j] for i in (0, 1) for j in (0, 1)], axis=0)
        for row in range(rows // 2)
        for column in range(columns // 2)
    ]
    assert pooled.grid == (rows // 2, columns // 2) and pooled.num_tokens == rows * columns // 4
    np.testing.assert_allclose(pooled(images).numpy(), np.stack(expected, 1), atol=1e-6)


def test_a_bundle_captions_as_before(family: str, tmp_path: Path) -> None:
    """Saved and loaded, with its transform; `backbone.weights` also takes the file of a run."""
    backbone = make(FAMILIES[family], pool=2)
    captioner, images = make_captioner(backbone).eval(), images_for(backbone)
    save_bundle(tmp_path / "bundle", captioner, WORDS, name="tiny", info={})
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.transform == image_transform(backbone.config)
    with torch.no_grad():
        memories = [each.encode(Features(images)).states for each in (captioner, bundle.captioner)]
    assert torch.equal(*memories)
    save_weights(backbone, tmp_path / "backbone.safetensors")
    again = Backbone(replace(backbone.config, weights=str(tmp_path / "backbone.safetensors"))).eval()
    with torch.no_grad():
        assert torch.equal(again(images), backbone(images))


def test_a_timm_checkpoint_with_a_classifier_is_loaded_at_another_size(family: str, tmp_path: Path) -> None:
    """The file has the classifier and modules for pooling, which are left out; timm resizes position tables."""
    config = FAMILIES[family]
    small = make(config)
    larger = replace(config, image_size=2 * config.image_size, weights=str(tmp_path / "file.safetensors"))
    state = {name: tensor.contiguous().clone() for name, tensor in small.network.state_dict().items()}
    classifiers = small.network.pretrained_cfg["classifier"]
    for name in (classifiers,) if isinstance(classifiers, str) else classifiers:
        state |= {f"{name}.weight": torch.zeros(7, small.width), f"{name}.bias": torch.zeros(7)}
    save_file(state, tmp_path / "file.safetensors")
    backbone = Backbone(larger).eval()
    assert backbone.num_tokens == 4 * small.num_tokens
    tables = {name for name, tensor in backbone.network.state_dict().items() if state[name].shape != tensor.shape}
    expected = {"beit": "relative_position", "maxvit": "relative_position", "coatnet": "relative_position"}
    assert all(any(part in name for part in ("pos_embed", expected.get(family, "pos_embed"))) for name in tables)
    assert torch.isfinite(backbone(images_for(backbone))).all()


def test_weights_of_five_dimensions() -> None:
    """Only the weights of convolutions of images are channels-last, a format that torch has for four dimensions."""
    backbone = make(BackboneConfig("lambda_resnet26t", image_size=64, weights="none"))
    (weight, *_) = [each for each in backbone.parameters() if each.ndim == 4]
    assert weight.is_contiguous(memory_format=torch.channels_last) and any(p.ndim == 5 for p in backbone.parameters())
    assert torch.isfinite(backbone(images_for(backbone))).all()


def test_a_checkpoint_with_other_names_in_timms_order(tmp_path: Path) -> None:
    """Names are given by order only if every shape fits, so that two tensors in the wrong order are refused."""
    torch.manual_seed(1)
    state = timm.create_model("resnet18").state_dict()  # with the classifier, as in the packages' files
    config = BackboneConfig("resnet18", image_size=32, weights=str(tmp_path / "file.pth"))
    torch.save({f"{i:03}": tensor for i, tensor in enumerate(state.values())}, tmp_path / "file.pth")
    loaded = Backbone(config).network.state_dict()
    assert len(loaded) == len(state) - 2 and all(torch.equal(loaded[name], state[name]) for name in loaded)
    wrong = list(state.values())
    wrong[0], wrong[6] = wrong[6], wrong[0]
    torch.save({f"{i:03}": tensor for i, tensor in enumerate(wrong)}, tmp_path / "file.pth")
    with pytest.raises(ValueError, match="a checkpoint for resnet18 lacks"):
        Backbone(config)


def test_pretrained_weights_of_a_package_recognize_a_photograph(shared: Path) -> None:
    """A black and white dog that jumps, with the classifier of the package."""
    pytest.importorskip(PACKAGES["tf_efficientnet_lite2"], reason="raycap[photos] is not installed")
    file = local_file(timm.get_pretrained_cfg("tf_efficientnet_lite2"))
    assert file is not None
    image = shared / "data" / "flickr8k_subset" / "images" / "1020651753_06077ec457.jpg"
    if not image.is_file():
        pytest.skip("no flickr8k_subset")
    backbone = Backbone(BackboneConfig("tf_efficientnet_lite2", image_size=260, weights="pretrained")).eval()
    *_, weight, bias = read_tensors(file).values()
    with torch.no_grad(), Image.open(image) as picture:
        tokens = backbone(torch.as_tensor(backbone.transform(picture.convert("RGB")))[None])
        label = int((weight @ tokens.mean(1)[0] + bias).argmax())
    assert label in range(151, 269)  # the breeds of dogs


def test_without_a_hub_one_sentence_names_the_ways(tmp_path: Path) -> None:
    values = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "TORCH_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "raycap", "extract", "demo_vit", "--set", f"storage={tmp_path}"]
    command += ["--set", "backbone={name: resnet18, image_size: 64, weights: pretrained}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | values, check=False)
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "the hub does not answer" in line and "install raycap[photos]" in line


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "vit_bas_patch16_224"}, "which timm does not know; close names: .*vit_base_patch16_224"),
        ({"name": "vit_base_patch16_clip_224.nobody"}, "whose tag timm does not know; known: .*openai"),
        ({"name": "crossvit_9_240", "image_size": 240}, "gives neither a grid nor a sequence"),
        ({"name": "pit_ti_224", "image_size": 224}, "1 tokens per image, and these form no square grid"),
        ({"name": "vit_tiny_patch16_224", "image_size": 40}, "must be a multiple of the patches' 16 px"),
        ({"name": "vit_tiny_patch16_224", "window_size": 4}, "window_size does not apply to vit_tiny_patch16_224: it"),
        ({"name": "pvt_v2_b0", "embed_dim": 4}, "embed_dim does not apply to pvt_v2_b0: its sizes are fixed"),
        ({"name": "resnet18", "weights": "pretrained", "embed_dim": 8}, "embed_dim make it another model"),
    ],
)
def test_what_gives_no_backbone_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        Backbone(BackboneConfig(**({"image_size": 32} | values)))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_macs_are_those_of_the_literature() -> None:
    """timm's published GMACs count attention's products for these models, and no element-wise work."""
    for name, expected in (("resnet50", 4.11), ("swin_tiny_patch4_window7_224", 4.51)):
        with torch.device("meta"):
            backbone = Backbone(BackboneConfig(name, image_size=224), with_weights=False)
        assert backbone.macs() / 1e9 == pytest.approx(expected, rel=0.01), name


def test_decoding_tasks_import_neither_torch_nor_timm(tmp_path: Path) -> None:
    """They unpickle the transform that the driver has chosen."""
    (name,) = write_images(tmp_path, 1)
    pickled = pickle.dumps(image_transform(FAMILIES["clip"]))
    code = (
        "import pickle, sys; from raycap.pipeline.data.images import decode_batch\n"
        f"transform = pickle.loads({pickled!r})\n"
        f"batch = decode_batch({{'uri': [{name!r}], 'key': ['']}}, transform, 10**6)\n"
        "assert batch['pixels'].shape == (1, 32, 32, 3) and not {'torch', 'timm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
