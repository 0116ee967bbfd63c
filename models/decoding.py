"""Decoding as free functions over `init_cache` and `step`: greedy, sampling, beam search; one model or an ensemble.

Shapes: B images, K beams or samples an image, R = B*K rows, T caption tokens, V vocabulary.

`models` and `memories` are one model and its memory, or equally long sequences: an ensemble averages probabilities.
Log-probabilities are float32 (float64 for a float64 model) and outside autocast, whatever the model ran in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import Cache, CaptionModel, Memory, check_positions

Models = CaptionModel | Sequence[CaptionModel]
Memories = Memory | Sequence[Memory]


@dataclass
class Captions:
    """n captions of each of B images, T the longest of them.

    tokens: (B, n, T) int64 with SOS and, where the caption ended, EOS; PAD behind.
    log_probs: (B, n, T) float32, each token's own; 0 at SOS and behind the end.
    lengths: (B, n) int64, tokens counting SOS and EOS.
    scores: (B, n) float32, what they are ranked by: the mean log-probability over `lengths`, or the sum.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    scores: Tensor


class _Decoder:
    """One or several models that read the same tokens."""

    def __init__(self, models: Models, memories: Memories, beams: int, max_length: int) -> None:
        self.models = [models] if isinstance(models, CaptionModel) else list(models)
        memories = [memories] if isinstance(memories, Memory) else list(memories)
        if not self.models or len(self.models) != len(memories):
            raise ValueError(f"{len(self.models)} models and {len(memories)} memories; give one memory for each model")
        self.sizes = self.models[0].sizes
        for index, (model, memory) in enumerate(zip(self.models, memories, strict=True)):
            s, first = model.sizes, self.sizes
            if (s.vocabulary_size, s.sos, s.eos, s.pad) != (first.vocabulary_size, first.sos, first.eos, first.pad):
                raise ValueError(
                    f"model {index + 1} of the ensemble has a vocabulary of {s.vocabulary_size} words "
                    f"(SOS {s.sos}, EOS {s.eos}, PAD {s.pad}), model 1 one of {first.vocabulary_size} "
                    f"(SOS {first.sos}, EOS {first.eos}, PAD {first.pad}); they must share one vocabulary"
                )
            if memory.batch_size != memories[0].batch_size:
                raise ValueError(f"memories of {memories[0].batch_size} and {memory.batch_size} images; expected equal")
            if max_length < 2:
                raise ValueError(f"max_length is {max_length}; it counts SOS and EOS and must be 2 or more")
            check_positions(max_length - 1, s.max_positions)
        self.images = memories[0].batch_size
        self.device = memories[0].states.device
        self.caches: list[Cache] = [
            m.init_cache(memory, beams) for m, memory in zip(self.models, memories, strict=True)
        ]

    def step(self, tokens: Tensor) -> Tensor:
        """Unnormalized log-probabilities (R, V) of the next token: a model's logits, or an ensemble's mean."""
        outputs = []
        for index, model in enumerate(self.models):
            logits, self.caches[index] = model.step(tokens, self.caches[index])
            outputs.append(logits if logits.dtype == torch.float64 else logits.float())
        if len(outputs) == 1:
            return outputs[0]
        return torch.logsumexp(torch.stack([output.log_softmax(-1) for output in outputs]), 0)

    def select(self, index: Tensor) -> None:
        self.caches = [cache.select(index) for cache in self.caches]

    def finish(self, tokens: list[Tensor], log_probs: list[Tensor], ended: Tensor) -> Captions:
        """From R rows of columns to captions; row order kept."""
        shape = (self.images, -1, len(tokens))
        columns = torch.stack(tokens, -1).view(shape)
        values = torch.stack(log_probs, -1).view(shape)
        lengths = caption_lengths(columns, self.sizes.eos)
        return Captions(columns, values.float(), lengths, (values.sum(-1) / lengths).float())


def caption_lengths(tokens: Tensor, eos: int) -> Tensor:
    """(..., T) -> (...): tokens up to and with the first EOS; T where there is none."""
    before = (tokens == eos).cumsum(-1) == 0
    return (before.sum(-1) + 1).clamp_(max=tokens.shape[-1])


@torch.no_grad()
def greedy(models: Models, memories: Memories, *, max_length: int) -> Captions:
    """The most probable token at each step: (B, 1, T). `max_length` counts SOS and EOS."""
    return _roll_out(_Decoder(models, memories, 1, max_length), 1, max_length, lambda logits: logits.argmax(-1))


@torch.no_grad()
def sample(
    models: Models,
    memories: Memories,
    *,
    num_samples: int,
    max_length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Captions:
    """`num_samples` captions an image, each token drawn from softmax(logits / temperature) among the `top_k` best.

    `max_length` counts SOS and EOS; a caption that has not ended by then has no EOS. (The reference's sampler counts
    without SOS: its 20 is 21 here.) `log_probs` are the model's own, at temperature 1 and without top-k.
    The draw is one uniform number a row and step from `generator`, so it is reproducible.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be 1 or more")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (use greedy for the most probable caption)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be 1 or more, or None")

    def draw(logits: Tensor) -> Tensor:
        if temperature != 1.0:
            logits = logits / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            least = logits.topk(top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return categorical(logits.softmax(-1), generator)

    decoder = _Decoder(models, memories, num_samples, max_length)
    return _roll_out(decoder, num_samples, max_length, draw)


def categorical(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index a row (R,) of probabilities (R, V), by inversion: cheaper than V exponentials a row (multinomial)."""
    rows = probabilities.shape[0]
    device = probabilities.device if generator is None else generator.device
    uniform = torch.rand(rows, 1, dtype=torch.float64, generator=generator, device=device).to(probabilities.device)
    distribution = probabilities.cumsum(-1, dtype=torch.float64)
    # right=True: the first index whose cumulated probability is above the draw, so never one of probability 0
    return torch.searchsorted(distribution, uniform * distribution[:, -1:], right=True)[:, 0]


def _roll_out(decoder: _Decoder, count: int, max_length: int, choose) -> Captions:  # type: ignore[no-untyped-def]
    sizes = decoder.sizes
    rows = decoder.images * count
    token = torch.full((rows,), sizes.sos, device=decoder.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=decoder.device)
    tokens, log_probs = [token], [torch.zeros(rows, device=decoder.device)]
    while len(tokens) < max_length:
        logits = decoder.step(token)
        token = choose(logits)
        log_prob = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)
        token = token.masked_fill(ended, sizes.pad)
        tokens.append(token)
        log_probs.append(log_prob.masked_fill_(ended, 0.0))
        ended |= token == sizes.eos
        if ended.all():
            break
    return decoder.finish(tokens, log_probs, ended)


@torch.no_grad()
def beam_search(
    models: Models,
    memories: Memories,
    *,
    beam_size: int,
    max_length: int,
    num_results: int = 1,
    length_normalization: bool = True,
) -> Captions:
    """The `num_results` best captions an image, best first, as the reference searches.

    Each beam offers its `beam_size` best words; the best `beam_size` sums of log-probabilities survive. An ended beam
    keeps its sum and stays a candidate. The search stops when every beam has ended or at `max_length` (counting SOS and
    EOS). Captions are then ranked by their sum divided by the number of tokens counting SOS and EOS, or by the sum.
    Where the tree holds fewer captions than asked for, the surplus has score -inf.
    """
    if beam_size < 1 or not 1 <= num_results <= beam_size:
        raise ValueError(
            f"num_results = {num_results} and beam_size = {beam_size}: expected 1 <= num_results <= beam_size"
        )
    decoder = _Decoder(models, memories, beam_size, max_length)
    sizes, images, device = decoder.sizes, decoder.images, decoder.device
    offered = min(beam_size, sizes.vocabulary_size)
    first_row = torch.arange(images, device=device)[:, None] * beam_size
    tokens = torch.full((images, beam_size, 1), sizes.sos, device=device)
    ended = torch.zeros(images, beam_size, dtype=torch.bool, device=device)
    scores = log_probs = torch.empty(0)
    while tokens.shape[-1] < max_length:
        logits = decoder.step(tokens[:, :, -1].flatten())
        if tokens.shape[-1] == 1:  # one real beam so far: the others are copies that must not be chosen
            scores = logits.new_zeros(images, beam_size)
            scores[:, 1:] = -torch.inf
            log_probs = logits.new_zeros(images, beam_size, 1)
        best, words = logits.topk(offered, -1)
        best = (best - logits.logsumexp(-1, keepdim=True)).view(images, beam_size, offered)
        words = words.view(images, beam_size, offered)
        best = best.masked_fill(ended[:, :, None], -torch.inf)
        best[:, :, 0].masked_fill_(ended, 0.0)
        words = words.masked_fill(ended[:, :, None], sizes.pad)
        scores, chosen = (scores[:, :, None] + best).flatten(1).topk(beam_size, -1)
        parent = chosen // offered
        word = words.flatten(1).gather(1, chosen)
        history = parent[:, :, None].expand(-1, -1, tokens.shape[-1])
        tokens = torch.cat((tokens.gather(1, history), word[:, :, None]), -1)
        log_probs = torch.cat((log_probs.gather(1, history), best.flatten(1).gather(1, chosen)[:, :, None]), -1)
        ended = ended.gather(1, parent) | (word == sizes.eos)
        if ended.all():
            break
        decoder.select((first_row + parent).flatten())
    lengths = caption_lengths(tokens, sizes.eos)
    ranking = scores / lengths if length_normalization else scores
    ranking, order = ranking.topk(num_results, -1)
    lengths = lengths.gather(1, order)
    longest = int(lengths.max())
    order = order[:, :, None].expand(-1, -1, longest)
    return Captions(
        tokens[:, :, :longest].gather(1, order),
        log_probs[:, :, :longest].gather(1, order).float(),
        lengths,
        ranking.float(),
    )
