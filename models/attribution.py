"""Attribution: how much each image token adds to the log-probability of each word, by integrated gradients.

Integrated gradients (Sundararajan, Taly, Yan 2017) as the Meshed-Memory paper uses them (section 4.6 and appendix A.3):
along the line from all-zero features to the image's own, the gradient of log p(word | words before it, features) times
the features, integrated. They hold for any model that is differentiable in its features, attention or not.

Complete: over all tokens and channels they add up to log p at the features minus log p at the baseline. The integral is
a Gauss-Legendre sum, exact for polynomials up to degree 2 S - 1; how far it is from complete is measured each time.
More steps do not close every gap: where log p jumps, no gradient sees it. ExpansionNet v2 divides positive parts by
their sums plus 1e-9, so that its weights jump where the last positive score of a row or group goes through 0; a trained
one was found to jump by 0.04 to 0.12 nats on the way from zeros to a photograph. The other systems are continuous.

Shapes: N image tokens, C feature width, T caption tokens with SOS, W = T - 1 words that are predicted, EOS with them,
S steps on the line, R of them at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import CaptionModel, Features


@dataclass(frozen=True)
class Quadrature:
    """How the integral is approximated. ValueError unless steps and rows are 1 or more.

    steps: points of the line, doubled up to `max_steps` while a word's values miss the change by more than `tolerance`
    nats (0.05 is 5 % of a word's probability). rows: points that are computed at a time.
    """

    steps: int = 32
    max_steps: int = 256
    tolerance: float = 0.05
    rows: int = 16

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1:
            raise ValueError(f"steps = {self.steps} and rows = {self.rows}: both must be 1 or more")

    @classmethod
    def exactly(cls, steps: int) -> Quadrature:
        """So many steps, whatever the gap."""
        return cls(steps=steps, max_steps=steps)


@dataclass(frozen=True)
class Attribution:
    """values (W, N) float64, in nats: summed over channels, positive where a token speaks for the word.

    change (W,): log p at the features minus log p at the baseline, which the values of a word add up to.
    steps: how many points of the line were taken.
    """

    values: Tensor
    change: Tensor
    steps: int

    @property
    def gap(self) -> Tensor:
        """(W,) nats by which each word's values miss the change: what the sum over steps has left of the integral."""
        return (self.values.sum(1) - self.change).abs()

    def shares(self) -> Tensor:
        """(W, N): values divided by the size of their sum, as the paper's are (its mean over channels cancels out).

        The size and not the sum itself, so that a token that speaks for a word stays positive where the image as a
        whole speaks against it. A word whose values are all 0 keeps them.
        """
        total = self.values.sum(1, keepdim=True).abs()
        return self.values / torch.where(total > 0, total, 1.0)

    def head(self, words: int) -> Attribution:
        """Of the first `words` words only."""
        return Attribution(self.values[:words], self.change[:words], self.steps)


def integrated_gradients(
    model: CaptionModel,
    features: Features,
    tokens: Tensor,
    *,
    baseline: Tensor | None = None,
    quadrature: Quadrature = Quadrature(),
) -> Attribution:
    """The attribution of every word of one caption, tokens (T,) with SOS, to one image's features (1, N, C).

    `baseline` is (N, C), None for zeros. Doubling the steps ends early when the greatest gap hardly shrinks, as such a
    gap comes from jumps; `Attribution.gap` holds what remains. There is one forward pass for all words and one backward
    pass per word: memory is that of `quadrature.rows` images, whatever the caption's length and the steps. Raises
    ValueError for other shapes.
    """
    if features.tokens.ndim != 3 or len(features) != 1 or tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(
            f"features {tuple(features.tokens.shape)} and tokens {tuple(tokens.shape)}: expected one image "
            "(1, tokens, width) and one caption of SOS and a word or more"
        )
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(False):  # what is made here needs a gradient, wherever this is called
            line = _Line(model, features, tokens.clone(), baseline)
            steps, rows = quadrature.steps, quadrature.rows
            result = Attribution(line.integrate(steps, rows), line.change, steps)
            while float(result.gap.max()) > quadrature.tolerance and 2 * result.steps <= quadrature.max_steps:
                before = float(result.gap.max())
                result = Attribution(line.integrate(2 * result.steps, rows), line.change, 2 * result.steps)
                if float(result.gap.max()) > 0.75 * before:
                    break
            return result
    finally:
        model.train(training)


class _Line:
    """The line from the baseline to one image's features, and the log-probabilities of the words on it."""

    def __init__(self, model: CaptionModel, features: Features, tokens: Tensor, baseline: Tensor | None) -> None:
        self.model, self.tokens = model, tokens
        self.lengths = None if features.lengths is None else features.lengths.clone()
        self.boxes = None if features.boxes is None else features.boxes.clone()
        end = features.tokens[0].detach().clone().to(next(model.parameters()).dtype)
        self.start = torch.zeros_like(end) if baseline is None else baseline.detach().to(end)
        self.way = end - self.start
        with torch.no_grad():
            ends = self.log_probs(torch.stack((self.start, end))).double()
        self.change = ends[1] - ends[0]

    def log_probs(self, features: Tensor) -> Tensor:
        """(R, W) of the caption's words, teacher-forced, at features (R, N, C)."""
        rows = features.shape[0]
        lengths = None if self.lengths is None else self.lengths.expand(rows)
        boxes = None if self.boxes is None else self.boxes.expand(rows, -1, -1)
        logits = self.model(Features(features, lengths, boxes), self.tokens[:-1].expand(rows, -1))
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return log_probs.gather(2, self.tokens[1:].expand(rows, -1)[:, :, None])[:, :, 0]

    def integrate(self, steps: int, rows: int) -> Tensor:
        """(W, N) by `steps` points, `rows` at a time."""
        words = len(self.tokens) - 1
        places, weights = (part.to(self.way.device) for part in gauss_legendre(steps))
        values = torch.zeros(words, len(self.way), dtype=torch.float64, device=self.way.device)
        for start in range(0, steps, rows):
            here, weight = places[start : start + rows], weights[start : start + rows]
            inputs = (self.start + here[:, None, None].to(self.way.dtype) * self.way).requires_grad_()
            with torch.enable_grad():
                log_probs = self.log_probs(inputs).sum(0)  # rows are images of their own: gradients stay apart
            for word in range(words):
                (gradient,) = torch.autograd.grad(log_probs[word], inputs, retain_graph=word + 1 < words)
                values[word] += weight @ (gradient * self.way).sum(2, dtype=torch.float64)
        return values


def gauss_legendre(count: int) -> tuple[Tensor, Tensor]:
    """Places and weights (count,) in float64 of the quadrature on [0, 1] (Golub and Welsch 1969)."""
    index = torch.arange(1, count, dtype=torch.float64)
    beside = index / (4 * index * index - 1).sqrt()
    places, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return (places + 1) / 2, vectors[0] ** 2
