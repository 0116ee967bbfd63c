"""One micro-step of each objective: from a batch to a loss that `backward` can run on, and numbers worth logging.

SCST as it stands here, by default: captions sampled from the model with the key-value cache and no gradient (without
dropout unless `sampling_dropout`), CIDEr-D with document frequencies over the training images as the reward, the
leave-one-out mean of an image's other samples as the baseline, one teacher-forced pass with the stage's dropout for the
log-probabilities that carry the gradient; EOS is part of reward and log-probability unless the stage says otherwise;
mean over images and samples of the sum over a caption's tokens (divided by `fixed_length` where that is set).
`scst_signature` says it in SacreEOS form.
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
from pipeline.data.vocabulary import Vocabulary
from pipeline.scoring.diagnostics import OPEN_ENDINGS
from pipeline.storage.cache import cache_folder
from pipeline.training.batches import Batch
from pipeline.training.reward import CaptionReward


@dataclass(frozen=True)
class StepOutput:
    """`loss` is this worker's part of the global mean: sums over workers and micro-steps give it."""

    loss: Tensor
    numbers: dict[str, float]  # this part of global means: summed over micro-steps and workers


Objective = Callable[[nn.Module, Captioner, Batch, torch.Generator], StepOutput]


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
    """Self-critical sequence training; see the head of this file for every choice.

    `image_ids` maps rows of the data set to the ids that the reward knows.
    """
    section = stage.sampling
    ending = torch.tensor([word in OPEN_ENDINGS for word in words])

    def run(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        eos = captioner.model.sizes.eos
        ids = image_ids[batch.images]
        tokens, single = _sampled(captioner, batch, section, generator)
        rewards = reward(tokens, ids.repeat_interleave(section.num_samples).tolist()).view(-1, section.num_samples)
        if single is not None:
            baseline = reward(single, ids.tolist())[:, None]
        elif section.baseline == "mean":
            baseline = rewards.mean(1, keepdim=True)
        else:
            baseline = (rewards.sum(1, keepdim=True) - rewards) / (section.num_samples - 1)
        advantage = (rewards - baseline).reshape(-1)

        scored = tokens if section.eos_in_loss else tokens.masked_fill(tokens == eos, pad)
        log_probs = caption_log_probs(wrapped(batch.features, tokens[:, :-1]), scored, pad)
        count = batch.global_images * section.num_samples
        loss = -(advantage.to(log_probs) * log_probs).sum() / (count * (section.fixed_length or 1))
        words_and_ends = int((scored[:, 1:] != pad).sum())
        numbers = {
            "loss": float(loss.detach()),
            "reward": float(rewards.sum()) / count,
            "reward_square": float(rewards.square().sum()) / count,
            "advantage_size": float(advantage.abs().sum()) / count,
            # minus log p of what was drawn, a token: an estimate of the entropy of the model's choice
            "entropy": -float(log_probs.detach().sum()) / max(words_and_ends, 1) * len(tokens) / count,
            **_habits(tokens.cpu(), eos, pad, ending, count),
        }
        return StepOutput(loss, numbers)

    return run


def stage_reward(
    stage: StageSection, references: Mapping[int, Sequence[str]], vocabulary: Vocabulary, device: torch.device
) -> CaptionReward:
    """The reward that an SCST stage asks for, over the training references by image id; its index is cached."""
    section = stage.sampling
    by_caption = section.document_frequency == "captions"
    eos, cache = section.eos_in_reward, cache_folder()
    return CaptionReward(references, vocabulary, eos=eos, caption_documents=by_caption, device=device, cache=cache)


def check_reward(stage: StageSection, reward: CaptionReward) -> str:
    """What people wrote must score far above zero, and EOS must reach the score; a line for the log.

    Raises ValueError otherwise: the data or the reward is broken, and SCST would climb towards nothing.
    """
    text = f"SCST {scst_signature(stage.sampling)}"
    found = reward.ground_truth
    if found is None:
        return f"{text}; no image has two captions, so ground truth cannot be scored against the others"
    whole, cut = found
    if whole < 0.05:
        raise ValueError(
            f"stage {stage.name}: ground-truth captions score {whole:.4f} against their image's other captions: the "
            "captions of an image have nothing in common, or are not its own; check the data"
        )
    text += f"; ground truth scores {whole:.3f} against its image's other captions"
    if not stage.sampling.eos_in_reward:
        return text
    if cut == whole:
        raise ValueError(f"stage {stage.name}: captions score {whole:.4f} with EOS and without it; it is not rewarded")
    return f"{text}, {cut:.3f} without EOS"


def scst_signature(section: ScstSection) -> str:
    """The setting in SacreEOS form (Hu et al. 2023), the default's being the reference's of ExpansionNet v2."""
    mode = "STANDARD_wInit" if section.eos_in_reward else "NO<EOS>MODE_wInit"
    base = {"leave_one_out": "average", "mean": "average_all", "greedy": "greedy"}[section.baseline]
    kind = "nspi" if section.sampler == "multinomial" else "beam"
    return f"{mode}+Cider-D[n4,s6.0]+{base}[{kind}{section.num_samples}]+1.0.0"


def _sampled(
    captioner: Captioner, batch: Batch, section: ScstSection, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Token ids (B * n, T) of n captions an image, SOS first, PAD after EOS; and (B, T) of the greedy baseline's."""
    training, model = captioner.training, captioner.model
    captioner.train(section.sampling_dropout)
    try:
        with torch.no_grad():
            memory = captioner.encode(batch.features)
            count, longest = section.num_samples, section.max_length
            if section.sampler == "beam":
                found = beam_search(
                    model, memory, beam_size=count, max_length=longest, num_results=count, length_normalization=False
                )
            else:
                found = sample(
                    model,
                    memory,
                    num_samples=count,
                    max_length=longest,
                    temperature=section.temperature,
                    generator=generator,
                )
            single = greedy(model, memory, max_length=longest) if section.baseline == "greedy" else None
    finally:
        captioner.train(training)
    return found.tokens.flatten(0, 1), None if single is None else single.tokens[:, 0]


def _habits(tokens: Tensor, eos: int, pad: int, ending: Tensor, count: int) -> dict[str, float]:
    """What goes wrong first when SCST goes wrong: length, captions that end on a preposition, no end at all."""
    real = (tokens[:, 1:] != pad) & (tokens[:, 1:] != eos)
    lengths = real.sum(1)
    last = tokens.gather(1, lengths[:, None]).squeeze(1)
    triples = tokens[:, 1:].unfold(1, 3, 1) if tokens.shape[1] > 3 else tokens.new_zeros(len(tokens), 0, 3)
    whole = real.unfold(1, 3, 1).all(-1) if tokens.shape[1] > 3 else real[:, :0]
    same = (triples[:, :, None] == triples[:, None]).all(-1) & whole[:, :, None] & whole[:, None]
    return {
        "length": float(lengths.sum()) / count,
        "broken_endings": float((ending[last] & (lengths > 0)).sum()) / count,
        "repeated_trigrams": float(same.triu(1).any(-1).any(-1).sum()) / count,
        "ended": float((tokens == eos).any(1).sum()) / count,
    }


# Losses, normalized by the global count so that one process and many give the same gradient.


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, pad: int, smoothing: float) -> Tensor:
    """Sum over real targets of the label-smoothed loss, in the reference's form.

    The target keeps 1 - smoothing and the other V - 1 classes share `smoothing`; the loss is the Kullback-Leibler
    divergence from that distribution (its entropy subtracted: 0 at a perfect prediction). Divide by the number of
    target tokens of the whole batch. logits (..., V) of any float dtype, targets (...) int64.
    """
    real = targets != pad
    logits, targets = logits[real].float() if logits.dtype != torch.float64 else logits[real], targets[real]
    if smoothing == 0:
        return F.cross_entropy(logits, targets, reduction="sum")
    log_probs = logits.log_softmax(-1)
    rest = smoothing / (logits.shape[-1] - 1)
    hit = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    cross = (1 - smoothing - rest) * hit + rest * log_probs.sum(-1)
    entropy = (1 - smoothing) * _log(1 - smoothing) + smoothing * _log(rest)
    return entropy * len(targets) - cross.sum()


def caption_log_probs(logits: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """Sum of log-probabilities of each caption's tokens after SOS, EOS included, PAD left out.

    logits (R, T, V) for inputs tokens[:, :-1] of tokens (R, T + 1); returns (R,) in float32 or float64.
    """
    targets = tokens[:, 1:]
    logits = logits.float() if logits.dtype != torch.float64 else logits
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return (chosen * (targets != pad)).sum(-1)


def _log(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log())
