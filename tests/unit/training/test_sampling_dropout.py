"""SCST with dropout in sampling, against sampling that computes every prefix anew and keeps the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycap.models.base import Features, Memory
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import (
    BackboneConfig,
    ClustFormerConfig,
    ExpansionNetConfig,
    MeshedMemoryConfig,
    ModelConfig,
    ModelSizes,
)
from raycap.models.dropout import CaptionMasks, Dropout, PrefixMasks, new_masks
from raycap.models.encoders.backbone import Backbone
from raycap.models.layers import EncoderDecoder
from raycap.pipeline.config.sections import ScstSection, StageSection
from raycap.pipeline.training import objectives
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.objectives import StepOutput, scst_objective

IMAGES, SAMPLES, MAX_LENGTH = 3, 3, 6
SOS, EOS, PAD, VOCABULARY = 0, 1, 2, 11
SMALL: dict[str, Any] = {"d_model": 8, "d_ff": 12, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
SYSTEMS: dict[str, ModelConfig] = {
    "expansionnet_v2": ExpansionNetConfig(**SMALL, dropout=0.3, static_expansion=(3, 2), dynamic_expansion=3),
    "factorized": ExpansionNetConfig(
        **SMALL, dropout=0.3, static_expansion=(3, 2), dynamic_expansion=2, expansion_dropout="factorized"
    ),
    "transformer": ExpansionNetConfig(**SMALL, name="transformer", dropout=0.3),
    "meshed_memory": MeshedMemoryConfig(**SMALL, dropout=0.3, num_memory_slots=2),
    "clustformer": ClustFormerConfig(**SMALL, dropout=0.3),
    "cross_attention_dropout": ClustFormerConfig(**SMALL, dropout=0.3, input_dropout=0.5, cross_attention_dropout=True),
    "mask_token": ClustFormerConfig(**SMALL, decoder="mask_token", dropout=0.3, cross_attention_dropout=True),
}
# with these, some images end early, and others have long captions
SEEDS = {"expansionnet_v2": 6, "factorized": 2, "transformer": 1, "meshed_memory": 6, "clustformer": 7}
SEEDS |= {"cross_attention_dropout": 7, "mask_token": 7}
SWIN = BackboneConfig(image_size=32, embed_dim=4, depths=(1, 2), num_heads=(1, 2), window_size=4, drop_path=0.5)


def make_captioner(config: ModelConfig, backbone: BackboneConfig | None = None, seed: int = 1) -> Captioner:
    """A float64 captioner in training mode, sharp enough that captions differ in probability."""
    torch.manual_seed(seed)
    swin = None if backbone is None else Backbone(backbone)
    width = 7 if swin is None else swin.width
    model = build_model(config, ModelSizes(width, VOCABULARY, MAX_LENGTH, SOS, EOS, PAD))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # type: ignore[union-attr, operator]
    # captions end early, and PAD is no word of them
    offset = torch.zeros(VOCABULARY, dtype=torch.float64).index_put(
        (torch.tensor([EOS, PAD]),), torch.tensor([3.0, -1e4]).double()
    )
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + offset)  # type: ignore[union-attr]
    return Captioner(model, swin).double().train()


def reward_of(tokens: Tensor, indices: Tensor) -> Tensor:
    """Any number that depends on the words and the image."""
    places = torch.arange(1, tokens.shape[1] + 1)
    return ((tokens * places).masked_fill(tokens == PAD, 0).sum(1) * (indices + 2) % 7).double()


def run_objective(captioner: Captioner, wrapped: nn.Module | None = None, **settings: Any) -> tuple[StepOutput, Batch]:
    """One step of SCST with its gradients in the captioner, seeded as the training loop does."""
    section = {"num_samples": SAMPLES, "max_length": MAX_LENGTH, "sampling_dropout": True} | settings
    stage = StageSection(name="s", objective="scst", epochs=1, batch_size=IMAGES, lr=1, scst=section)
    generator = torch.Generator().manual_seed(7)
    shape = (IMAGES, 4, 7) if captioner.backbone is None else (IMAGES, 3, 32, 32)
    features = Features(torch.randn(shape, dtype=torch.float64, generator=generator))
    empty = torch.zeros(IMAGES, 2, dtype=torch.int64)
    batch = Batch(features, empty, torch.arange(0), torch.arange(IMAGES), IMAGES, IMAGES)
    run = scst_objective(stage, lambda *captions: (reward_of(*captions), {}), PAD)
    torch.manual_seed(5)
    captioner.zero_grad()
    output = run(wrapped or captioner, captioner, batch, torch.Generator().manual_seed(3))
    output.loss.backward()
    return output, batch


def gradients(captioner: Captioner) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in captioner.named_parameters() if each.grad is not None}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[CaptionMasks]:
    """The masks of the steps of SCST."""
    made: list[CaptionMasks] = []

    def recording(*arguments: Any) -> CaptionMasks:
        made.append(new_masks(*arguments))
        return made[-1]

    monkeypatch.setattr(objectives, "new_masks", recording)
    return made


class SlowMasks:
    """The same masks for teacher-forced passes over prefixes, looked up element by element.

    sources[r][t] is the row that had the caption of row r at position t.
    """

    def __init__(self, drawn: list[Tensor]) -> None:
        self.drawn, self.calls, self.sources = drawn, 0, [[0]]

    def begin_pass(self, length: int) -> None:
        assert all(len(row) == length for row in self.sources)
        self.calls = 0

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        mask = self._next()
        return torch.stack([torch.stack([mask[t, source] for t, source in enumerate(row)]) for row in self.sources])

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        mask, positions = self._next(), range(len(self.sources[0]))

        def of_row(row: list[int]) -> Tensor:
            return torch.stack([torch.stack([mask[s, t, row[max(s, t)]] for t in positions]) for s in positions])

        return torch.stack([of_row(row) for row in self.sources])

    def _next(self) -> Tensor:
        self.calls += 1
        return self.drawn[self.calls - 1]


class SlowPrefixMasks(SlowMasks):
    """The masks of a decoder that computes all tokens so far and a mask token in every step."""

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        mask, size = self._next(), len(self.sources[0]) + 1
        return torch.stack([mask[t, source, :size] for row in self.sources for t, source in enumerate(row)])

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        mask, size = self._next(), len(self.sources[0]) + 1
        return torch.stack([mask[t, source, :size, :size] for row in self.sources for t, source in enumerate(row)])


def prefix_log_probs(model: EncoderDecoder, memory: Memory, masks: SlowMasks, prefixes: Sequence[Any]) -> Tensor:
    """Log-probabilities (R, V) of the word after each prefix, with the graph. A row is (tokens, sources, ...)."""
    masks.sources = [row[1] for row in prefixes]
    return model.decode(memory, torch.tensor([row[0] for row in prefixes])).log_softmax(-1)[:, -1]


Row = tuple[list[int], list[int], Tensor, bool]  # tokens, sources of masks, summed log-probability, whether it ended


def slow_samples(step: Callable[[list[Row]], Tensor], temperature: float) -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    rows: list[Row] = [([SOS], [], torch.zeros(()), False) for _ in range(IMAGES * SAMPLES)]
    for _ in range(MAX_LENGTH - 1):
        rows = [(tokens, [*sources, r], total, ended) for r, (tokens, sources, total, ended) in enumerate(rows)]
        log_probs = step(rows)
        uniform = torch.rand(len(rows), dtype=torch.float64, generator=generator)
        offered = (log_probs.detach() / temperature).softmax(-1).cumsum(-1)
        for r, (tokens, sources, total, ended) in enumerate(rows):
            word = PAD if ended else int((offered[r] <= uniform[r]).sum())
            total = total if ended else total + log_probs[r, word]
            rows[r] = ([*tokens, word], sources, total, ended or word == EOS)
    return rows


def slow_beams(step: Callable[[list[Row]], Tensor]) -> list[Row]:
    rows: list[Row] = [([SOS], [], torch.zeros(()), False) for _ in range(IMAGES * SAMPLES)]
    for position in range(MAX_LENGTH - 1):
        rows = [(tokens, [*sources, r], total, ended) for r, (tokens, sources, total, ended) in enumerate(rows)]
        log_probs = step(rows)
        found: list[Row] = []
        for image in range(IMAGES):
            candidates: list[Row] = []
            for r in range(image * SAMPLES, image * SAMPLES + (SAMPLES if position else 1)):
                tokens, sources, total, ended = rows[r]
                if ended:
                    candidates.append(([*tokens, PAD], sources, total, True))
                else:
                    continued = log_probs[r] + total
                    candidates += [([*tokens, w], sources, continued[w], w == EOS) for w in range(VOCABULARY)]
            found += sorted(candidates, key=lambda row: -row[2].item())[:SAMPLES]
        rows = found
    return rows


def slow_loss(captioner: Captioner, batch: Batch, drawn: list[Tensor], section: ScstSection) -> tuple[Tensor, Tensor]:
    """The loss of sampling that keeps the graph, and its captions (R, MAX_LENGTH)."""
    model = captioner.model
    assert isinstance(model, EncoderDecoder)
    masks = (SlowPrefixMasks if model.steps_compute_prefix else SlowMasks)(drawn)
    torch.manual_seed(5)
    memory = captioner.encode(batch.features)
    decoder = [module for module in model.modules() if isinstance(module, Dropout | EncoderDecoder)]
    for module in decoder:
        module.masks = masks  # type: ignore[assignment]

    def step(rows: list[Row]) -> Tensor:
        return prefix_log_probs(model, memory, masks, rows)

    rows = slow_beams(step) if section.sampler == "beam" else slow_samples(step, section.temperature)
    for module in decoder:
        module.masks = None
    tokens = torch.tensor([row[0] for row in rows])
    rewards = reward_of(tokens, torch.arange(IMAGES).repeat_interleave(SAMPLES)).view(IMAGES, SAMPLES)
    advantage = rewards - (rewards.sum(1, keepdim=True) - rewards) / (SAMPLES - 1)
    return -(advantage.flatten() * torch.stack([row[2] for row in rows])).mean(), tokens


@pytest.mark.parametrize("settings", [{"temperature": 1.5}, {"sampler": "beam"}], ids=str)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_gradient_is_that_of_sampling_with_the_graph(
    system: str, settings: dict[str, Any], recorded: list[CaptionMasks]
) -> None:
    captioner = make_captioner(SYSTEMS[system], seed=SEEDS[system])
    output, batch = run_objective(captioner, **settings)
    ours = gradients(captioner)
    captioner.zero_grad()
    loss, tokens = slow_loss(captioner, batch, recorded[0].drawn, ScstSection(**settings))
    assert isinstance(recorded[0], PrefixMasks) == (system == "mask_token")
    loss.backward()
    assert len(recorded[0].rows) < len(tokens), "no image left sampling early"
    assert bool((tokens[:, 3] != PAD).any()) and len(set(map(tuple, tokens.tolist()))) > IMAGES
    torch.testing.assert_close(output.loss, loss, rtol=1e-9, atol=1e-9)
    theirs = gradients(captioner)
    assert ours.keys() == theirs.keys() == dict(captioner.named_parameters()).keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-8, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_passes_through_stochastic_depth(checkpointing: bool, recorded: list[CaptionMasks]) -> None:
    """The stage is end to end. The backbone runs once, even if its activations are computed again for the gradient."""
    captioner = make_captioner(SYSTEMS["expansionnet_v2"], SWIN)
    assert captioner.backbone is not None
    captioner.backbone.network.set_grad_checkpointing(checkpointing)
    output, batch = run_objective(captioner)
    ours = gradients(captioner)
    captioner.backbone.network.set_grad_checkpointing(False)
    captioner.zero_grad()
    loss, _ = slow_loss(captioner, batch, recorded[0].drawn, ScstSection())
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-9)
    for name, gradient in gradients(captioner).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-8, atol=1e-10)
