"""Masks that the steps and the teacher-forced pass of sampled captions share."""

from __future__ import annotations

import pytest
import torch

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.captioner import build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig
from raycap.models.decoding.search import Beams, Captions, Decoder, sample, search
from raycap.models.dropout import CaptionMasks, Dropout, PrefixMasks, new_masks
from raycap.models.layers import EncoderDecoder
from tests.support.models import SIZES

LENGTH, SAMPLES = 9, 4
CPU = torch.device("cpu")
SMALL = {"d_model": 8, "d_ff": 12, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2, "dropout": 0.4}
CONFIGS: dict[str, ModelConfig] = {
    "expansionnet_v2": ExpansionNetConfig(**SMALL, static_expansion=(3,), dynamic_expansion=3),  # type: ignore[arg-type]
    "factorized": ExpansionNetConfig(
        **SMALL,
        static_expansion=(3,),
        dynamic_expansion=3,
        expansion_dropout="factorized",  # type: ignore[arg-type]
    ),
    "transformer": ExpansionNetConfig(**SMALL, name="transformer"),  # type: ignore[arg-type]
    "meshed_memory": MeshedMemoryConfig(**SMALL),  # type: ignore[arg-type]
    "clustformer": ClustFormerConfig(**SMALL, decoder_clusters="none"),  # type: ignore[arg-type]
    "conditional": ClustFormerConfig(**SMALL, stacking="conditional"),  # type: ignore[arg-type]
    "on_attention": MeshedMemoryConfig(**SMALL, attention="on_attention", gates="softmax"),  # type: ignore[arg-type]
}
MASK_TOKEN = {
    "mask_token": ClustFormerConfig(
        **SMALL,
        decoder="mask_token",
        input_dropout=0.5,
        cross_attention_dropout=True,  # type: ignore[arg-type]
    ),
    "mask_token_conditional": ClustFormerConfig(**SMALL, decoder="mask_token", stacking="conditional"),  # type: ignore[arg-type]
}


def training_model(config: ModelConfig, images: int = 3) -> tuple[CaptionModel, Memory]:
    torch.manual_seed(0)
    model = build_model(config, SIZES).double().train()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # type: ignore[union-attr, operator]
        return model, model.encode(Features(torch.randn(images, 4, 7, dtype=torch.float64)))


def sampled(model: CaptionModel, memory: Memory, masks: CaptionMasks, sampler: str) -> Captions:
    if sampler == "multinomial":
        return sample(model, memory, num_samples=SAMPLES, max_length=LENGTH)
    decoder = Decoder(model, memory, SAMPLES, LENGTH)
    captions, order = search(decoder, Beams.start(decoder, LENGTH), LENGTH).ranked(SAMPLES, length_normalization=True)
    assert not torch.equal(order, torch.arange(SAMPLES).expand_as(order)), "the order must matter here"
    masks.reorder(order)
    return captions


@pytest.mark.parametrize("sampler", ["multinomial", "beam"])
@pytest.mark.parametrize("name", [*CONFIGS, *MASK_TOKEN])
@torch.no_grad()
def test_steps_and_pass_give_the_same_log_probabilities(name: str, sampler: str) -> None:
    model, memory = training_model((CONFIGS | MASK_TOKEN)[name])
    masks = new_masks(model, memory.batch_size * SAMPLES, LENGTH - 1, CPU)
    assert isinstance(masks, PrefixMasks) == (name in MASK_TOKEN)
    with masks.in_use(model):
        captions = sampled(model, memory, masks, sampler)
        tokens = captions.tokens.flatten(0, 1)
        logits = model.decode(memory, tokens[:, :-1])
    log_probs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    valid = torch.arange(1, tokens.shape[1]) < captions.lengths.flatten()[:, None]
    expected = captions.log_probs.flatten(0, 1)[:, 1:]
    torch.testing.assert_close((log_probs * valid).float(), expected, rtol=1e-6, atol=1e-6)
    assert all(module.masks is None for module in model.modules() if isinstance(module, Dropout | EncoderDecoder))
    others = model.decode(memory, tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    assert not torch.allclose((others * valid).float(), expected, atol=1e-2), "other masks give other numbers"


def test_beams_take_over_the_masks_of_the_beams_that_they_continue() -> None:
    """Two images with two beams; the first image leaves after the second step."""
    masks = CaptionMasks(4, 3, CPU)
    masks.begin_step(0)
    masks.select(torch.tensor([0, 0, 3, 2]))
    masks.begin_step(1)
    masks.select(torch.tensor([1, 0, 2, 2]))
    masks.keep_images(torch.tensor([1]), beams=2)
    masks.begin_step(2)
    assert masks.of_tokens((5,), 0.5).shape == (2, 1, 5)
    masks.select(torch.tensor([1, 0]))
    masks.reorder(torch.tensor([[0, 1], [1, 0]]))
    expected = torch.tensor([[0, 1, 0], [0, 0, 1], [3, 2, 2], [3, 2, 3]])
    assert torch.equal(masks.sources, expected)
    masks.begin_pass(3)
    mask = masks.of_tokens((5,), 0.5)
    assert torch.equal(mask[2], torch.stack([masks.drawn[0][t, row] for t, row in enumerate([3, 2, 2])]))
