"""The training objectives: from a batch to the loss of one micro-step, and the metrics to log.

Self-critical sequence training (SCST, Rennie et al. 2017), with the defaults of `ScstSection`:

- samples: multinomial, drawn with the key-value cache, without gradient and dropout (`sampling_dropout`: with it);
- reward: CIDEr-D with document frequencies over the training images; EOS is a word of captions and references;
- baseline: the mean reward of the image's other samples (leave one out);
- log-probabilities: one teacher-forced pass with the stage's dropout; the EOS token counts;
- loss: the mean over images and samples of -(reward - baseline) x the sum of a caption's log-probabilities, divided by
  `fixed_length` where that is set.

`scst_signature` gives the setting in SacreEOS form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.captioner import Captioner
from models.decoding import beam_search, greedy, sample
from pipeline.config.sections import ScstSection, StageSection
from pipeline.data.dataset import Dataset
from pipeline.data.vocabulary import Vocabulary
from pipeline.scoring.diagnostics import OPEN_ENDINGS
from pipeline.storage.cache import cache_folder
from pipeline.training.batches import Batch
from pipeline.training.reward import CaptionReward


@dataclass(frozen=True)
class StepOutput:
    """This worker's part of the global means: summed over micro-steps and workers they give the batch's values."""

    loss: Tensor
    metrics: dict[str, float]


# (module for the forward pass that carries the gradient, the captioner below it, batch, generator for sampling)
Objective = Callable[[nn.Module, Captioner, Batch, torch.Generator], StepOutput]


def make_objective(
    stage: StageSection, train: Dataset, vocabulary: Vocabulary, device: torch.device
) -> tuple[Objective, CaptionReward | None]:
    """The objective of a stage over its training images, and for SCST its reward."""
    if stage.objective == "cross_entropy":
        return cross_entropy_objective(stage, vocabulary.pad), None
    reward = stage_reward(stage, train.references(), vocabulary, device)
    image_ids = torch.tensor(train.column("image_id"))
    return scst_objective(stage, reward, image_ids, vocabulary.pad, vocabulary.words), reward


def cross_entropy_objective(stage: StageSection, pad: int) -> Objective:
    """Label-smoothed cross entropy, averaged over the target tokens of the global batch."""

    def run(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        logits = wrapped(batch.features, batch.tokens[:, :-1])
        loss = smoothed_cross_entropy(logits, batch.tokens[:, 1:], pad, stage.label_smoothing) / batch.global_targets
        return StepOutput(loss, {"loss": float(loss.detach())})

    return run


def scst_objective(
    stage: StageSection, reward: CaptionReward, image_ids: torch.Tensor, pad: int, words: tuple[str, ...]
) -> Objective:
    """Self-critical sequence training as described at the top of this file.

    image_ids: the image id of each row of the data set. words: the vocabulary by token id.
    """
    section = stage.sampling
    is_open_ending = torch.tensor([word in OPEN_ENDINGS for word in words])

    def run(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        eos = captioner.model.sizes.eos
        ids = image_ids[batch.images]
        tokens, greedy_tokens = _sample_captions(captioner, batch, section, generator)
        rewards = reward(tokens, ids.repeat_interleave(section.num_samples).tolist()).view(-1, section.num_samples)
        if greedy_tokens is not None:
            baseline = reward(greedy_tokens, ids.tolist())[:, None]
        elif section.baseline == "mean":
            baseline = rewards.mean(1, keepdim=True)
        else:
            baseline = (rewards.sum(1, keepdim=True) - rewards) / (section.num_samples - 1)
        advantage = (rewards - baseline).reshape(-1)

        scored = tokens if section.eos_in_loss else tokens.masked_fill(tokens == eos, pad)
        log_probs = caption_log_probs(wrapped(batch.features, tokens[:, :-1]), scored, pad)
        count = batch.global_images * section.num_samples
        loss = -(advantage.to(log_probs) * log_probs).sum() / (count * (section.fixed_length or 1))
        num_scored = int((scored[:, 1:] != pad).sum())
        metrics = {
            "loss": float(loss.detach()),
            "reward": float(rewards.sum()) / count,
            "reward_sq_mean": float(rewards.square().sum()) / count,
            "advantage_abs_mean": float(advantage.abs().sum()) / count,
            # the mean of -log p over sampled tokens, which estimates the entropy of the model's distribution
            "entropy": -float(log_probs.detach().sum()) / max(num_scored, 1) * len(tokens) / count,
            **_caption_stats(tokens.cpu(), eos, pad, is_open_ending, count),
        }
        return StepOutput(loss, metrics)

    return run


def stage_reward(
    stage: StageSection, references: Mapping[int, Sequence[str]], vocabulary: Vocabulary, device: torch.device
) -> CaptionReward:
    """The reward that an SCST stage asks for, over the training references by image id; its index is cached."""
    return CaptionReward(
        references,
        vocabulary,
        eos=stage.sampling.eos_in_reward,
        caption_documents=stage.sampling.document_frequency == "captions",
        device=device,
        cache=cache_folder(),
    )


def check_reward(stage: StageSection, reward: CaptionReward) -> str:
    """A line for the log with the signature and the reward of ground-truth captions.

    Raises ValueError when ground truth scores near zero, or equally with EOS and without it although EOS is in the
    reward: the data or the reward is broken, and SCST would optimize nothing.
    """
    text = f"SCST {scst_signature(stage.sampling)}"
    if reward.ground_truth is None:
        return f"{text}; no image has two captions, so ground truth cannot be scored against the others"
    with_eos, without_eos = reward.ground_truth
    if with_eos < 0.05:
        raise ValueError(
            f"stage {stage.name}: ground-truth captions score {with_eos:.4f} against the other captions of their "
            "image: these captions have nothing in common, or belong to other images; check the data"
        )
    text += f"; ground truth scores {with_eos:.3f} against its image's other captions"
    if not stage.sampling.eos_in_reward:
        return text
    if without_eos == with_eos:
        raise ValueError(
            f"stage {stage.name}: captions score {with_eos:.4f} with EOS and without it; it is not rewarded"
        )
    return f"{text}, {without_eos:.3f} without EOS"


def scst_signature(section: ScstSection) -> str:
    """The setting in SacreEOS form (Hu et al. 2023); that of the default is the one of ExpansionNet v2's reference."""
    mode = "STANDARD_wInit" if section.eos_in_reward else "NO<EOS>MODE_wInit"
    base = {"leave_one_out": "average", "mean": "average_all", "greedy": "greedy"}[section.baseline]
    kind = "nspi" if section.sampler == "multinomial" else "beam"
    return f"{mode}+Cider-D[n4,s6.0]+{base}[{kind}{section.num_samples}]+1.0.0"


def _sample_captions(
    captioner: Captioner, batch: Batch, section: ScstSection, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Token ids (B * n, T) of n captions per image, SOS first, PAD after EOS; and (B, T) for the greedy baseline."""
    training, model = captioner.training, captioner.model
    captioner.train(section.sampling_dropout)
    try:
        with torch.no_grad():
            memory = captioner.encode(batch.features)
            count, length = section.num_samples, section.max_length
            if section.sampler == "beam":
                captions = beam_search(
                    model, memory, beam_size=count, max_length=length, num_results=count, length_normalization=False
                )
            else:
                captions = sample(
                    model,
                    memory,
                    num_samples=count,
                    max_length=length,
                    temperature=section.temperature,
                    generator=generator,
                )
            baseline = greedy(model, memory, max_length=length) if section.baseline == "greedy" else None
    finally:
        captioner.train(training)
    return captions.tokens.flatten(0, 1), None if baseline is None else baseline.tokens[:, 0]


def _caption_stats(tokens: Tensor, eos: int, pad: int, is_open_ending: Tensor, count: int) -> dict[str, float]:
    """Symptoms of a failing SCST: length, captions that end on a preposition, repetitions, captions without EOS."""
    valid_mask = (tokens[:, 1:] != pad) & (tokens[:, 1:] != eos)
    lengths = valid_mask.sum(1)
    last = tokens.gather(1, lengths[:, None]).squeeze(1)
    trigrams = tokens[:, 1:].unfold(1, 3, 1) if tokens.shape[1] > 3 else tokens.new_zeros(len(tokens), 0, 3)
    complete = valid_mask.unfold(1, 3, 1).all(-1) if tokens.shape[1] > 3 else valid_mask[:, :0]
    same = (trigrams[:, :, None] == trigrams[:, None]).all(-1) & complete[:, :, None] & complete[:, None]
    return {
        "length": float(lengths.sum()) / count,
        "broken_endings": float((is_open_ending[last] & (lengths > 0)).sum()) / count,
        "repeated_trigrams": float(same.triu(1).any(-1).any(-1).sum()) / count,
        "ended": float((tokens == eos).any(1).sum()) / count,
    }


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, pad: int, smoothing: float) -> Tensor:
    """Sum over the target tokens of the label-smoothed loss, as ExpansionNet v2's reference computes it.

    The target class has probability 1 - smoothing and the other V - 1 classes share `smoothing`; the loss is the
    Kullback-Leibler divergence from that distribution, which is 0 at a perfect prediction. Divide it by the number of
    target tokens of the global batch, so that any number of workers gives the same gradient.

    logits (..., V) of any float dtype; targets (...) int64, `pad` where there is no target.
    """
    valid_mask = targets != pad
    logits, targets = logits[valid_mask], targets[valid_mask]
    logits = logits.float() if logits.dtype != torch.float64 else logits
    if smoothing == 0:
        return F.cross_entropy(logits, targets, reduction="sum")
    log_probs = logits.log_softmax(-1)
    rest = smoothing / (logits.shape[-1] - 1)
    hit = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    cross = (1 - smoothing - rest) * hit + rest * log_probs.sum(-1)
    entropy = (1 - smoothing) * _log(1 - smoothing) + smoothing * _log(rest)
    return entropy * len(targets) - cross.sum()


def caption_log_probs(logits: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """Sum of the log-probabilities of each caption's tokens after SOS, EOS included, PAD excluded.

    logits (R, T, V) for the inputs tokens[:, :-1] of tokens (R, T + 1); returns (R,), float64 for float64 logits, else
    float32.
    """
    targets = tokens[:, 1:]
    logits = logits.float() if logits.dtype != torch.float64 else logits
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return (chosen * (targets != pad)).sum(-1)


def _log(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log())
