"""CIDEr-D of token ids against raw reference captions: the reward of SCST and the score of validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.data.vocabulary import EOS, Vocabulary
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.training.rewards.cider import build_index


class CiderDReward:
    """CIDEr-D of sampled token ids (SOS ... EOS PAD) against reference captions, which the vocabulary tokenizes.

    References keep all their words, including those outside the model's vocabulary. If the vocabulary has subwords,
    sampled captions and references are split into the words of the language's metrics. This happens on the host, once
    per distinct caption of a call, and takes 0.1 to 0.3 ms per caption.

    eos: if true, EOS counts as a word at the end of every reference and of every caption that ended. A caption that was
    cut off at the length limit then scores lower.
    caption_documents: if true, the document frequencies count captions instead of images.
    device: of the captions to score, and of the index, whose size `build_index` states.
    ground_truth: how well the first caption of an image scores against its other captions, as the mean CIDEr-D over the
    first 1000 images with several captions. The two values are with EOS and without it. None if no image has several.
    """

    def __init__(
        self,
        references: Iterable[Sequence[str]],
        vocabulary: Vocabulary,
        *,
        eos: bool,
        caption_documents: bool = False,
        device: torch.device | str = "cpu",
        language: str = ENGLISH,
    ) -> None:
        """references: the captions of each image, as `Vocabulary.tokenize` takes them."""
        self.eos, self.eos_id = eos, vocabulary.eos
        self._vocabulary, self._language = vocabulary, language
        with_several: list[list[list[int]]] = []
        # The ids of words: those of the vocabulary or, if that has subwords, new ones for the references' words.
        ids = dict(vocabulary.ids) if vocabulary.subwords is None else {EOS: 0}

        def encoded() -> Iterator[list[list[int]]]:
            """The captions of each image. A word without an id gets the next free one."""
            for texts in references:
                captions = [[ids.setdefault(word, len(ids)) for word in self._words(text)] for text in texts]
                if len(captions) > 1 and len(with_several) < 1000:
                    with_several.append(captions)
                yield captions

        self.scorer = build_index(encoded(), caption_documents=caption_documents).to(device)
        self.ground_truth = _ground_truth(with_several, eos)
        self._word_ids = None if vocabulary.subwords is None else ids
        ignored = [vocabulary.pad, vocabulary.sos]
        ignored += [number for word, number in vocabulary.ids.items() if not word.strip()]  # tokens of white space
        self._ignored = torch.tensor(ignored, device=device)

    def __call__(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """CIDEr-D, a float64 tensor (R,) in the usual scale of 0 to 10, of R captions.

        tokens: (R, T) on the reward's device; those after the first EOS are ignored. indices: (R,) int64 on this
        device, the number of each caption's image in the order of the references.
        """
        if self._word_ids is not None:
            return self.scorer.score(*self._metric_words(tokens, self._word_ids), indices)
        is_eos = tokens == self.eos_id
        num_eos_before = is_eos.cumsum(1) - is_eos.long()
        is_word = (num_eos_before == 0) & ~torch.isin(tokens, self._ignored)
        if not self.eos:
            is_word &= ~is_eos
        order = (~is_word).long().argsort(stable=True, dim=1)  # moves the words to the front and keeps their order
        return self.scorer.score(tokens.gather(1, order), is_word.sum(1), indices)

    def _words(self, caption: str) -> list[str]:
        """The words of a reference, with EOS if that counts."""
        vocabulary = self._vocabulary
        is_subwords = vocabulary.subwords is not None
        words = _words_of(caption, self._language) if is_subwords else vocabulary.tokenize(caption)
        return [word for word in words if word.strip()] + [EOS] * self.eos

    def _metric_words(self, tokens: Tensor, word_ids: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        """Splits captions of subwords into the metrics' words: ids (R, W) with padding, and the lengths (R,)."""
        rows = [tuple(row) for row in tokens.tolist()]
        encoded: dict[tuple[int, ...], Tensor] = {}
        for row in dict.fromkeys(rows):
            words = _words_of(self._vocabulary.decode(row), self._language)
            words += [EOS] if self.eos and self.eos_id in row else []
            new_ids: dict[str, int] = {}  # of words that no reference has
            ids = [
                word_ids[word] if word in word_ids else len(word_ids) + new_ids.setdefault(word, len(new_ids))
                for word in words
            ]
            encoded[row] = torch.tensor(ids, dtype=torch.int64)
        captions = [encoded[row] for row in rows]
        lengths = torch.tensor([len(caption) for caption in captions], device=tokens.device)
        return pad_sequence(captions, batch_first=True).to(tokens.device), lengths


def _words_of(caption: str, language: str) -> list[str]:
    """The words of a raw caption for CIDEr-D. A PTB token with a space in it ("1 1/2") is two words."""
    return [word for token in metric_words(caption, language) for word in token.split()]


def _ground_truth(images: list[list[list[int]]], eos: bool) -> tuple[float, float] | None:
    """The mean CIDEr-D of each image's first caption against its others, with EOS and without it."""
    if not images:
        return None
    others = build_index(captions[1:] for captions in images)
    first = [torch.tensor(captions[0], dtype=torch.int64) for captions in images]
    lengths, indices = torch.tensor([len(caption) for caption in first]), torch.arange(len(first))
    tokens = pad_sequence(first, batch_first=True)
    # A caption without its last token is one without EOS.
    whole, cut = (others.score(tokens, (lengths - last).clamp(min=0), indices).mean().item() for last in (0, int(eos)))
    return whole, cut
