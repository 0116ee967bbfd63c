"""Masks that the steps and the teacher-forced pass of sampled captions share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig
from raycap.models.decoding.search import Beams, Captions, Decoder, sample, search
from raycap.models.dropout import CaptionMasks, Dropout, PrefixMasks, new_masks
from raycap.models.encoder_decoder import EncoderDecoder
from raycap.models.registry import build_model
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
    "literal": ClustFormerConfig(**SMALL, attention="literal"),  # type: ignore[arg-type]
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


class Recorded(CaptionMasks):
    """Keeps what each dropout gets, by kind, number and position (None in a pass)."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, LENGTH - 1, CPU)
        self.given: dict[tuple[str, int], dict[int | None, Tensor]] = defaultdict(dict)

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        found = super().of_tokens(shape, p)
        self.given["tokens", self.calls][self.position] = found
        return found

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        found = super().of_pairs(shape, p)
        self.given["pairs", self.calls][self.position] = found
        return found


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_masks_of_steps_are_columns_of_those_of_the_pass(name: str) -> None:
    model, memory = training_model(CONFIGS[name])
    model.lm_head.register_forward_hook(  # type: ignore[union-attr]
        lambda _, __, logits: logits.index_fill(-1, torch.tensor([SIZES.eos]), -1e4)  # no caption ends
    )
    masks = Recorded(memory.batch_size * SAMPLES)
    with masks.in_use(model):
        tokens = sample(model, memory, num_samples=SAMPLES, max_length=LENGTH).tokens.flatten(0, 1)
        model.decode(memory, tokens[:, :-1])
    assert {calls for _, calls in masks.given} == set(range(1, len(masks.drawn) + 1))
    for (kind, call), given in masks.given.items():
        whole = given.pop(None)
        assert sorted(given) == list(range(LENGTH - 1)), (kind, call)  # type: ignore[type-var]
        for t, part in given.items():
            assert t is not None
            if kind == "tokens":
                assert torch.equal(part[:, 0], whole[:, t])
            else:
                assert torch.equal(part[0], whole[:, t, : t + 1]) and torch.equal(part[1], whole[:, : t + 1, t])


@torch.no_grad()
def test_every_dropout_of_the_decoder_has_masks_of_its_own() -> None:
    """The number of masks per layer, and that no two dropouts, positions or rows have the same ones."""
    model, memory = training_model(replace(CONFIGS["expansionnet_v2"], d_model=48, d_ff=48))
    rows = memory.batch_size * SAMPLES
    masks = CaptionMasks(rows, LENGTH - 1, CPU)
    with masks.in_use(model):
        model.decode(memory, torch.zeros(rows, LENGTH - 1, dtype=torch.int64))
    # embedding, sum of layers, and per layer: M, two expanded vectors, two streams, three residuals, feed-forward
    assert len(masks.drawn) == 1 + 2 * 9 + 1
    on_m, others = masks.drawn[1], [mask for mask in masks.drawn if mask.shape[-1] == 48]
    assert on_m.shape == (LENGTH - 1, LENGTH - 1, rows, 3) and len(others) == len(masks.drawn) - 2
    slices = [mask[t, row] for mask in others for t in range(LENGTH - 1) for row in range(rows)]
    assert len({tuple(part.flatten().tolist()) for part in slices}) == len(slices)


def test_shares_of_dropped_elements() -> None:
    masks = CaptionMasks(50, 20, CPU)
    masks.begin_pass(20)
    for p, mask in ((0.3, masks.of_tokens((40,), 0.3)), (0.1, masks.of_pairs((3,), 0.1))):
        share, rounded = 1 - mask.double().mean().item(), round(256 * p) / 256
        assert abs(share - rounded) < 5 * (rounded * (1 - rounded) / mask.numel()) ** 0.5
        for dim in range(mask.ndim):  # neighbors along any dimension are independent
            first, second = mask.narrow(dim, 0, mask.shape[dim] - 1), mask.narrow(dim, 1, mask.shape[dim] - 1)
            both = ((first == 0) & (second == 0)).double().mean().item()
            assert abs(both - rounded**2) < 6 * (rounded**2 / first.numel()) ** 0.5


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
