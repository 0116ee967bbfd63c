"""One micro-step of each objective: from a batch to a loss that `backward` can run on, and numbers worth logging.

SCST as it stands here: captions sampled from the model with the key-value cache and no gradient (without dropout
unless `sampling_dropout`), CIDEr-D with document frequencies over the training images as the reward, the leave-one-out
mean of an image's other samples as the baseline, one teacher-forced pass for the log-probabilities that carry the
gradient; EOS is part of reward and log-probability unless the stage says otherwise; mean over images and samples.
SacreEOS signature: STANDARD_wInit+Cider-D[n4,s6.0]+average[nspi5]+1.0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.captioner import Captioner
from models.decoding import sample
from pipeline.batches import Batch
from pipeline.config import ScstSection, StageSection
from pipeline.losses import caption_log_probs, smoothed_cross_entropy
from pipeline.rewards import CaptionReward

BROKEN_ENDINGS = frozenset(
    [
        "a",
        "an",
        "the",
        "of",
        "in",
        "on",
        "at",
        "to",
        "with",
        "and",
        "or",
        "by",
        "for",
        "from",
        "near",
        "next",
        "into",
        "onto",
        "over",
        "under",
        "behind",
        "above",
        "below",
        "its",
        "his",
        "her",
        "their",
        "this",
        "that",
        "is",
        "are",
    ]
)


@dataclass(frozen=True)
class StepOutput:
    """`loss` is this worker's part of the global mean: sums over workers and micro-steps give it."""

    loss: Tensor
    numbers: dict[str, float]  # summed over micro-steps and workers, then divided by the counts named count_*


Objective = Callable[[nn.Module, Captioner, Batch, torch.Generator], StepOutput]


def cross_entropy_objective(stage: StageSection, pad: int) -> Objective:
    """Label-smoothed cross entropy, averaged over the target tokens of the global batch."""

    def run(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        logits = wrapped(batch.inputs, None, batch.tokens[:, :-1])
        loss = smoothed_cross_entropy(logits, batch.tokens[:, 1:], pad, stage.label_smoothing) / batch.global_targets
        return StepOutput(loss, {"loss": float(loss.detach())})

    return run


def scst_objective(
    stage: StageSection, reward: CaptionReward, image_ids: torch.Tensor, pad: int, words: tuple[str, ...]
) -> Objective:
    """Self-critical sequence training; see the head of this file for every choice.

    `image_ids` maps rows of the data set to the ids that the reward knows.
    """
    section = stage.sampling
    ending = torch.tensor([word in BROKEN_ENDINGS for word in words])

    def run(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        tokens = _sample(captioner, batch.inputs, section, generator)
        images = image_ids[batch.images].repeat_interleave(section.num_samples).tolist()
        rewards = torch.from_numpy(reward(tokens.cpu().numpy(), images)).to(batch.inputs.device)
        by_image = rewards.view(-1, section.num_samples)
        baseline = (by_image.sum(1, keepdim=True) - by_image) / (section.num_samples - 1)
        advantage = (by_image - baseline).reshape(-1)

        scored = tokens if section.eos_in_reward else tokens.masked_fill(tokens == captioner.model.sizes.eos, pad)
        log_probs = caption_log_probs(wrapped(batch.inputs, None, tokens[:, :-1]), scored, pad)
        count = batch.global_images * section.num_samples
        loss = -(advantage.to(log_probs.dtype) * log_probs).sum() / count
        numbers = {
            "loss": float(loss.detach()),
            "reward": float(rewards.sum()) / count,
            "reward_square": float(rewards.square().sum()) / count,
            "advantage_size": float(advantage.abs().sum()) / count,
            "nll": -float(log_probs.detach().sum()) / count,
            **_habits(tokens.cpu(), captioner.model.sizes.eos, pad, ending, count),
        }
        return StepOutput(loss, numbers)

    return run


def _sample(captioner: Captioner, inputs: Tensor, section: ScstSection, generator: torch.Generator) -> Tensor:
    """Token ids (B * n, T) of n samples an image, SOS first, PAD after EOS."""
    training = captioner.training
    captioner.train(section.sampling_dropout)
    try:
        with torch.no_grad():
            memory = captioner.encode(inputs)
            captions = sample(
                captioner.model,
                memory,
                num_samples=section.num_samples,
                max_length=section.max_length,
                temperature=section.temperature,
                generator=generator,
            )
    finally:
        captioner.train(training)
    longest = int(captions.lengths.max())
    return captions.tokens[..., :longest].reshape(-1, longest)


def _habits(tokens: Tensor, eos: int, pad: int, ending: Tensor, count: int) -> dict[str, float]:
    """What goes wrong first when SCST goes wrong: length, captions that end on a preposition, no end at all."""
    real = (tokens[:, 1:] != pad) & (tokens[:, 1:] != eos)
    lengths = real.sum(1)
    last = tokens.gather(1, lengths[:, None]).squeeze(1)
    return {
        "length": float(lengths.sum()) / count,
        "broken_endings": float((ending[last] & (lengths > 0)).sum()) / count,
        "ended": float((tokens == eos).any(1).sum()) / count,
    }
