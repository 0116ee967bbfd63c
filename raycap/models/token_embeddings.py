"""The word embedding and the output layer of a model, with learned word vectors or with given ones such as GloVe's.

Given vectors are used as in the Meshed-Memory paper's section "Novel object captioning". They have width G and are
mapped to D before the first decoder layer. The output of the last layer is mapped back to G, and its products with all
word vectors are the logits. The model can then produce words of no training caption, whose fixed vectors are near those
of training words.

Shapes: D width, G width of given vectors, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import CaptionModel
from raycap.models.config import ModelConfig, ModelSizes


class WordVectors(nn.Embedding):
    """Given word vectors (V, G), and a linear map to D. They are random until `fill_word_vectors` sets them."""

    def __init__(self, count: int, width: int, d_model: int, trained: bool) -> None:
        super().__init__(count, width)
        self.weight.requires_grad_(trained)
        self.to_model = nn.Linear(width, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.to_model(super().forward(tokens))


class TiedOutput(nn.Linear):
    """A linear map from D to G, then the products with all word vectors: (..., D) to logits (..., V)."""

    def __init__(self, words: WordVectors, d_model: int) -> None:
        super().__init__(d_model, words.embedding_dim)
        self.tied = (words,)  # the tuple hides the embedding from PyTorch, which would store its vectors twice

    def forward(self, y: Tensor) -> Tensor:
        return F.linear(super().forward(y), self.tied[0].weight)


def token_embedding(config: ModelConfig, sizes: ModelSizes) -> nn.Embedding:
    """The layer that maps tokens (...) to embeddings (..., D)."""
    if config.word_vector_width is None:
        return nn.Embedding(sizes.vocabulary_size, config.d_model)
    return WordVectors(sizes.vocabulary_size, config.word_vector_width, config.d_model, config.train_word_vectors)


def lm_head(config: ModelConfig, sizes: ModelSizes, embedding: nn.Embedding, bias: bool = True) -> nn.Linear:
    """The layer that maps states (..., D) to logits (..., V); with given vectors it uses those of `embedding`."""
    if isinstance(embedding, WordVectors):
        return TiedOutput(embedding, config.d_model)
    return nn.Linear(config.d_model, sizes.vocabulary_size, bias=bias)


def token_macs(config: ModelConfig, sizes: ModelSizes) -> float:
    """Multiply-accumulates of embedding one token and computing its logits."""
    width = config.word_vector_width
    if width is None:
        return config.d_model * sizes.vocabulary_size
    return 2 * width * config.d_model + width * sizes.vocabulary_size


@torch.no_grad()
def fill_word_vectors(model: CaptionModel, vectors: Tensor, given: Tensor) -> None:
    """Sets a model's word vectors to vectors (V, G) where given (V,) is True.

    The others, special tokens among them, are drawn from a normal distribution with the mean and the deviation of the
    given ones, channel by channel (torch's default generator). Raises ValueError for a model without such words, other
    shapes, and when no vector is given.
    """
    words = getattr(model, "token_embedding", None)
    if not isinstance(words, WordVectors):
        raise ValueError(f"{type(model).__name__} has words of its own; set model.word_vector_width")
    if vectors.shape != words.weight.shape or given.shape != vectors.shape[:1] or not bool(given.any()):
        raise ValueError(
            f"vectors {tuple(vectors.shape)}, {int(given.sum())} of them given: the model takes "
            f"{tuple(words.weight.shape)}, one given or more"
        )
    given_vectors = vectors[given].double()
    drawn = given_vectors.mean(0) + given_vectors.std(0, correction=0) * torch.randn(vectors.shape, dtype=torch.float64)
    words.weight.copy_(torch.where(given[:, None], vectors.double(), drawn))
