"""Tiny backbones of timm's families, with random weights, and captioners with them."""

from __future__ import annotations

from typing import Any

import torch

from raycap.models.captioner import Captioner, build_model
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.encoders.backbone import Backbone

_PLAIN: dict[str, Any] = {"image_size": 32, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "patch_size": 8}
_STAGES: dict[str, Any] = {"image_size": 64, "embed_dim": 8, "depths": (1, 1, 1, 1)}
_WINDOWS: dict[str, Any] = {
    "image_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4,
}  # fmt: skip

FAMILIES = {
    "vit": BackboneConfig("vit_tiny_patch16_224", **_PLAIN),
    "vit with registers": BackboneConfig("vit_medium_patch16_reg4_gap_256", **_PLAIN),
    "clip": BackboneConfig("vit_base_patch16_clip_224", **_PLAIN),
    "siglip": BackboneConfig("vit_base_patch16_siglip_224", **_PLAIN),
    "dinov2": BackboneConfig("vit_small_patch14_reg4_dinov2", **_PLAIN),
    "dinov3": BackboneConfig("vit_small_patch16_dinov3", **_PLAIN),
    "eva02": BackboneConfig("eva02_tiny_patch14_224", **_PLAIN),
    "beit": BackboneConfig("beit_base_patch16_224", **_PLAIN),
    "deit": BackboneConfig("deit_tiny_distilled_patch16_224", **_PLAIN),
    "swin": BackboneConfig("swin_tiny_patch4_window7_224", **_WINDOWS),
    "swin v2": BackboneConfig("swinv2_tiny_window8_256", **_WINDOWS),
    "convnext": BackboneConfig("convnext_tiny", **_STAGES),
    "resnet": BackboneConfig("resnet18", **_STAGES | {"image_size": 128}),
    "maxvit": BackboneConfig("maxvit_tiny_tf_224", **_STAGES | {"embed_dim": 32}),
    "coatnet": BackboneConfig("coatnet_0_rw_224", **_STAGES | {"embed_dim": 32}),
    "pvt": BackboneConfig("pvt_v2_b0", image_size=64),  # its sizes are fixed
}


def small_captioner(family: str) -> Captioner:
    """A captioner with a backbone of FAMILIES."""
    torch.manual_seed(0)
    backbone = Backbone(FAMILIES[family])
    sizes = ModelSizes(backbone.width, 12, 10, sos=0, eos=1, pad=2)
    config = ExpansionNetConfig(d_model=8, d_ff=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1,
                                static_expansion=(4,), dynamic_expansion=2)  # fmt: skip
    return Captioner(build_model(config, sizes), backbone)
