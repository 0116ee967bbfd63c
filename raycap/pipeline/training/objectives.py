"""The training objectives: functions that compute the loss and the metrics of one micro-step from a batch.

Self-critical sequence training (SCST, Rennie et al. 2017), with the defaults of `ScstSection`:

- samples: multinomial, drawn with the key-value cache, without gradient and without dropout. `Decoding.top_k` and
  `top_p` are not used, because they would change the distribution of samples, but not the loss below;
- reward: CIDEr-D with document frequencies over the training images; EOS counts as a word of captions and references;
  the setting `reward` can name other rewards with weights;
- baseline: the mean reward of the image's other samples (leave one out);
- advantage: reward - baseline, which `divide_by_deviation` divides by a standard deviation (see `advantages_of`);
- log-probabilities: of all words and EOS, from one teacher-forced pass with the stage's dropout;
- loss: the mean over images and samples of -advantage x the sum of a caption's log-probabilities + `kl` x the sum of
  its divergences (see `caption_divergences`), divided by `fixed_length` if that is set.

With `sampling_dropout`, captions are sampled in training mode, as in the published code of the three systems. The
decoder runs twice, to sample and to compute the loss. Both passes share one pass of the backbone and the encoder, and
use the same dropout masks (`models/dropout.py`), so that the gradient is that of the distribution of the samples. A
greedy baseline has no dropout.

`ScstSection.signature` describes these settings in the notation of SacreEOS.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raycap.models.base import CaptionModel, Memory, evaluating
from raycap.models.captioner import Captioner
from raycap.models.config import Decoding
from raycap.models.decoding.search import Beams, Decoder, ScoreRules, greedy, sample, search
from raycap.models.dropout import CaptionMasks, new_masks
from raycap.pipeline.config.sections import ScstSection, StageSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.rewards.reward import CiderDReward, WeightedReward

DEVIATION_EPS = 1e-4  # avoids division by 0, and is small beside CIDEr-D's standard deviation of 0.1 to 1


@dataclass(frozen=True)
class StepOutput:
    """The loss and metrics of one micro-step. Sums over micro-steps and workers give the values of the global batch.

    The metrics stay on the device, because reading a number makes the processor wait for a GPU.
    """

    loss: Tensor
    metrics: dict[str, Tensor]  # float64 scalars without gradient


# A reward takes captions (R, T) and the rows (R,) of their images. The result is the rewards (R,) float64, and the
# summands of the rewards by name (`WeightedReward`).
Reward = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

# An objective takes the wrapped module, the captioner inside it, the batch, and a generator for sampling. The loss must
# come from the forward pass of the wrapped module, so that DDP averages its gradients.
Objective = Callable[[nn.Module, Captioner, Batch, torch.Generator], StepOutput]


def make_objective(
    stage: StageSection, captioner: Captioner, train: Dataset, vocabulary: Vocabulary, language: str
) -> Objective:
    """The objective of a stage.

    train: the stage's training images. captioner: has the weights that the stage starts from, on the stage's device. If
    `kl` is set, the objective copies these weights, so a resumed stage must call this function before it restores its
    checkpoint. language: the language of the captions.
    """
    if stage.objective == "cross_entropy":
        return cross_entropy_objective(stage)
    section, device = stage.sampling, next(captioner.parameters()).device
    cider_d = CiderDReward(
        train.texts_by_image(vocabulary.tokenizer),
        vocabulary,
        eos=section.eos_in_reward,
        caption_documents=section.document_frequency == "captions",
        device=device,
        language=language,
    )
    captions = train.table["captions"].combine_chunks()  # a row of one chunk is found faster than one of many
    reward = WeightedReward(section.reward, cider_d, lambda row: captions[row].as_py(), vocabulary, language)
    reference = copy.deepcopy(captioner).eval().requires_grad_(False) if section.kl else None
    return scst_objective(stage, reward, vocabulary.pad, reference)


def cross_entropy_objective(stage: StageSection) -> Objective:
    """Label-smoothed cross entropy, averaged over the target tokens of the global batch."""

    def compute(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        positions = batch.target_positions
        decode = partial(captioner.model.decode, tokens=batch.tokens[:, :-1], positions=positions)
        logits = wrapped(batch.features, decode)
        targets = batch.tokens[:, 1:].flatten()[positions]
        loss = smoothed_cross_entropy(logits, targets, stage.label_smoothing) / batch.global_targets
        return StepOutput(loss, {"loss": loss.detach().double()})

    return compute


def scst_objective(stage: StageSection, reward: Reward, pad: int, reference: Captioner | None = None) -> Objective:
    """Self-critical sequence training as described at the top of this file.

    reference: the reference model of `kl`, in evaluation mode. The reference needs memory for its weights, and adds a
    pass of encoder and decoder without gradient to each step. An end-to-end stage adds a pass of its backbone.
    """
    section = stage.sampling

    def compute(wrapped: nn.Module, captioner: Captioner, batch: Batch, generator: torch.Generator) -> StepOutput:
        eos = captioner.model.sizes.eos
        tokens, logits, greedy_tokens = _sample_captions(wrapped, captioner, batch, section, generator)
        weighted_sums, summands = reward(tokens, batch.images.repeat_interleave(section.num_samples))
        rewards = weighted_sums.view(-1, section.num_samples)
        greedy_rewards = None if greedy_tokens is None else reward(greedy_tokens, batch.images)[0]
        advantage = advantages_of(rewards, section, greedy_rewards).reshape(-1)

        scored_tokens = tokens if section.eos_in_loss else tokens.masked_fill(tokens == eos, pad)
        if logits is None:
            logits = wrapped(batch.features, tokens[:, :-1])
        log_probs = caption_log_probs(logits, scored_tokens, pad)
        count = batch.global_images * section.num_samples
        loss = -(advantage.to(log_probs) * log_probs).sum() / (count * (section.fixed_length or 1))
        extra = {f"reward_{name}": values.sum() / count for name, values in summands.items() if len(summands) > 1}
        if reference is not None:
            with torch.no_grad():
                reference_logits = reference(batch.features, tokens[:, :-1])
            divergence = caption_divergences(logits, reference_logits, tokens, pad).sum() / count
            loss = loss + section.kl * divergence / (section.fixed_length or 1)
            extra["kl"] = divergence.detach().double()
        num_scored = (scored_tokens[:, 1:] != pad).sum().clamp(min=1)
        metrics = {
            "loss": loss.detach().double(),
            "reward": rewards.sum() / count,
            "reward_sq_mean": rewards.square().sum() / count,
            "advantage_abs_mean": advantage.abs().sum() / count,
            # The mean of -log p over sampled tokens estimates the entropy of the model's distribution. The values of
            # micro-steps are summed, so the mean is multiplied by this micro-step's share of the captions.
            "entropy": -log_probs.detach().sum().double() / num_scored * len(tokens) / count,
            "length": ((tokens[:, 1:] != pad) & (tokens[:, 1:] != eos)).sum().double() / count,
            **extra,
        }
        return StepOutput(loss, metrics)

    return compute


def advantages_of(rewards: Tensor, section: ScstSection, greedy_rewards: Tensor | None = None) -> Tensor:
    """The advantages (B, n) of n samples per image. rewards: (B, n). greedy_rewards: (B,), for a greedy baseline.

    The advantages of `leave_one_out` are n / (n - 1) times those of `mean`, because
    reward - (sum - reward) / (n - 1) = n / (n - 1) x (reward - sum / n).

    With `divide_by_deviation`, the advantages of an image are divided by the standard deviation of its n rewards,
    sqrt(mean of (reward - mean)^2), plus DEVIATION_EPS. So an image whose rewards differ little counts as much as an
    image whose rewards differ much. If all rewards are equal, the advantages are 0. With the baseline `mean`, the
    advantages are those of GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).
    """
    if greedy_rewards is not None:
        baseline = greedy_rewards[:, None]
    elif section.baseline == "mean":
        baseline = rewards.mean(1, keepdim=True)
    else:
        baseline = (rewards.sum(1, keepdim=True) - rewards) / (section.num_samples - 1)
    advantages = rewards - baseline
    if section.divide_by_deviation:
        return advantages / (rewards.std(1, correction=0, keepdim=True) + DEVIATION_EPS)
    return advantages


def _sample_captions(
    wrapped: nn.Module, captioner: Captioner, batch: Batch, section: ScstSection, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Samples n captions per image. Returns their token ids (B * n, T), their logits, and greedy token ids (B, T).

    A caption starts with SOS and has PAD after EOS. The logits (B * n, T - 1, V) are those for tokens[:, :-1]. Without
    `sampling_dropout`, the logits are None, because the caller computes them in another pass. If the baseline is not
    greedy, the greedy token ids are None.
    """
    model = captioner.model
    if not section.sampling_dropout:
        with torch.no_grad(), evaluating(captioner):
            memory = captioner.encode(batch.features)
            return _draw(model, memory, section, generator), None, _greedy_baseline(model, memory, section)
    greedy_tokens = None
    if section.baseline == "greedy":
        with torch.no_grad(), evaluating(captioner):
            greedy_tokens = _greedy_baseline(model, captioner.encode(batch.features), section)
    tokens, logits = wrapped(batch.features, lambda memory: _draw_and_score(model, memory, section, generator))
    return tokens, logits, greedy_tokens


def _greedy_baseline(model: CaptionModel, memory: Memory, section: ScstSection) -> Tensor | None:
    """Token ids (B, T) of greedy captions if the baseline is greedy, else None."""
    if section.baseline != "greedy":
        return None
    return greedy(model, memory, max_length=section.max_length).tokens[:, 0]


@torch.no_grad()
def _draw(
    model: CaptionModel,
    memory: Memory,
    section: ScstSection,
    generator: torch.Generator,
    masks: CaptionMasks | None = None,
) -> Tensor:
    """Draws n captions per image. Returns token ids (B * n, T). masks: dropout masks that the model uses, or None."""
    count, length = section.num_samples, section.max_length
    if section.sampler == "multinomial":
        rules = ScoreRules(Decoding(sampling=True, temperature=section.temperature))
        captions = sample(model, memory, num_samples=count, max_length=length, rules=rules, generator=generator)
    else:
        decoder = Decoder(model, memory, count, length)
        beams = search(decoder, Beams.start(decoder, length), length)
        captions, order = beams.ranked(count, length_normalization=False)
        if masks is not None:
            masks.reorder(order)
    return captions.tokens.flatten(0, 1)


def _draw_and_score(
    model: CaptionModel, memory: Memory, section: ScstSection, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Samples captions with dropout. Returns tokens (B * n, T), and logits for tokens[:, :-1] with the same masks."""
    rows = memory.batch_size * section.num_samples
    masks = new_masks(model, rows, section.max_length - 1, memory.states.device)
    with masks.in_use(model):
        tokens = _draw(model, memory, section, generator, masks)
        return tokens, model.decode(memory, tokens[:, :-1])


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The label-smoothed loss summed over the target tokens, as ExpansionNet v2's code computes it.

    The target class has probability 1 - smoothing, and the other V - 1 classes share `smoothing`. The loss is the
    Kullback-Leibler divergence from that distribution, so it is 0 for a perfect prediction. The caller divides the sum
    by the number of target tokens of the global batch, so that the gradient does not depend on the number of workers.

    logits (P, V) of any float dtype and targets (P,) int64, at the positions that have a target.
    """
    scores = _at_least_float32(logits)
    if smoothing == 0:
        return F.cross_entropy(scores, targets, reduction="sum")
    log_probs = scores.log_softmax(-1)
    rest = smoothing / (logits.shape[-1] - 1)  # the probability of each class that is not the target
    of_target = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    # The sum over all classes gives the target the weight `rest`, so the first term adds only the difference.
    negative_cross_entropy = (1 - smoothing - rest) * of_target + rest * log_probs.sum(-1)
    negative_entropy = (1 - smoothing) * math.log(1 - smoothing) + smoothing * math.log(rest)
    return negative_entropy * len(targets) - negative_cross_entropy.sum()


def caption_log_probs(logits: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """The log-probability of each caption: the sum over its tokens after SOS, including EOS.

    tokens: (R, T + 1). logits: (R, T, V), the model's output for tokens[:, :-1]. Returns (R,), float64 for float64
    logits, else float32.
    """
    targets = tokens[:, 1:]
    scores = _at_least_float32(logits)
    log_probs = scores.gather(-1, targets[..., None]).squeeze(-1) - scores.logsumexp(-1)
    return (log_probs * (targets != pad)).sum(-1)


def caption_divergences(logits: Tensor, reference_logits: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """The divergence KL(p || q) of the model p from a reference q, summed over the positions of each caption.

    At each position, the value is the exact sum over the vocabulary of p (log p - log q), given the words before it.
    If the captions are sampled from p, the expected value of this function is the divergence between the distributions
    of whole captions.

    InstructGPT (Ouyang et al. 2022, equation 2) and GRPO (arXiv 2402.03300, equation 4) estimate the divergence from
    the probabilities of the sampled words alone. Their estimates vary more, and InstructGPT's can be negative. As in
    GRPO, the gradient ignores that p also decides about the words before.

    p has the stage's dropout, as in the rest of the loss, but q has no dropout, so the divergence starts above 0.

    tokens: (R, T + 1). logits, reference_logits: (R, T, V), for tokens[:, :-1]. Returns (R,), float64 for float64
    logits, else float32.
    """
    log_p = _at_least_float32(logits).log_softmax(-1)
    log_q = _at_least_float32(reference_logits).log_softmax(-1)
    divergences = (log_p.exp() * (log_p - log_q)).sum(-1)
    return (divergences * (tokens[:, 1:] != pad)).sum(-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
