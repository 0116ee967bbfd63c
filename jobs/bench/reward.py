"""`raycap bench reward`: CIDEr-D rewards per second on one core, beside a plain Python scorer in the same run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from jobs.bench.measuring import median_seconds, timed
from jobs.options import References
from pipeline.language.english import tokenize
from pipeline.runtime.cpu import prepare_processor
from pipeline.scoring.cider import CiderD
from pipeline.scoring.result_files import read_references

CAPTIONS = 2000  # one step of 400 images with 5 samples each
PLAIN_CAPTIONS = 400  # the plain scorer scores only the first of them
REPEATS = 20  # scorings of all captions, of which the median is taken
Gram = tuple[Hashable, ...]
Caption = Sequence[Hashable]


def bench_reward(references: References = None) -> None:
    """CIDEr-D rewards per second beside a plain Python scorer.

    Both use one core. The median of 20 scorings of 2,000 captions is printed; the plain scorer scores 400 of them.
    Of a Karpathy file the restval split is used.

    Example: raycap bench reward --references dataset_coco_val2014_karpathy.json.gz
    """
    prepare_processor(1)
    captions = _word_numbers(references) if references else _generated()
    scorer, build_seconds = timed(partial(CiderD.build, captions))
    images = np.random.default_rng(0).integers(0, len(captions), CAPTIONS)
    # Every third caption is that of the next image, so that captions match in part, as sampled ones do.
    sources = [image + 1 if row % 3 == 0 else image for row, image in enumerate(images)]
    sampled = [captions[source % len(captions)][0] for source in sources]
    lengths = torch.tensor([len(words) for words in sampled])
    tokens = torch.tensor([words + [0] * (int(lengths.max()) - len(words)) for words in sampled])
    rewards, seconds = median_seconds(partial(scorer.score, tokens, lengths, torch.from_numpy(images)), REPEATS)
    plain, pairs = PlainCiderD(captions), list(zip(sampled, images, strict=True))[:PLAIN_CAPTIONS]
    expected, plain_seconds = timed(lambda: [plain.score(words, captions[image]) for words, image in pairs])
    rate, plain_rate = CAPTIONS / seconds, PLAIN_CAPTIONS / plain_seconds
    difference = np.abs(np.array(expected) - rewards[:PLAIN_CAPTIONS].numpy()).max()
    print(f"references           {len(captions):,} images, {sum(map(len, captions)):,} captions")
    print(f"index                {build_seconds:.2f} s from tokens")
    print(f"reward               {rate:,.0f} captions/s on one core (median of {REPEATS}, {CAPTIONS:,} captions)")
    print(f"plain Python scorer  {plain_rate:,.0f} captions/s, index not counted")
    print(f"ratio                {rate / plain_rate:.1f}, largest difference {difference:.1e}")


def _word_numbers(path: Path) -> list[list[list[int]]]:
    """The captions of each image in a file, with each word replaced by a number."""
    numbers: dict[str, int] = {}
    texts = read_references(path, split="restval" if "karpathy" in path.name else None).values()
    return [[[numbers.setdefault(word, len(numbers)) for word in tokenize(text)] for text in image] for image in texts]


def _generated() -> list[list[list[int]]]:
    """Five random captions for each of 30,000 images; the words have Zipf's distribution."""
    rng = np.random.default_rng(1)
    words = (rng.zipf(1.3, size=5_000_000) % 12_000).tolist()
    ends = np.cumsum(rng.integers(8, 14, size=30_000 * 5)).tolist()
    captions = [words[begin:end] for begin, end in pairwise([0, *ends])]
    return [captions[first : first + 5] for first in range(0, len(captions), 5)]


class PlainCiderD:
    """CIDEr-D written like its definition, slowly, with dictionaries of words; `pipeline.scoring.cider` must equal it.

    A document, for document frequencies, is all captions of one image in `corpus`."""

    def __init__(self, corpus: Sequence[Sequence[Caption]]) -> None:
        self.frequency: Counter[Gram] = Counter()
        for image in corpus:
            self.frequency.update({gram for words in image for gram in grams(words)})
        self.log_documents = math.log(len(corpus))

    def score(self, caption: Caption, references: Sequence[Caption]) -> float:
        """The CIDEr-D score, between 0 and 10 as in coco-caption.

        It is the mean over the references and over n = 1..4 of the clipped cosine between tf-idf vectors, times a
        Gaussian penalty on the difference of lengths with sigma 6, times 10.
        """
        vectors, total = self._vectors(caption), 0.0
        for reference in references:
            delta = max(len(caption) - 1, 0) - max(len(reference) - 1, 0)  # coco-caption counts bigrams as the length
            for ours, theirs in zip(vectors, self._vectors(reference), strict=True):
                dot = sum(min(value, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, value in ours.items())
                if dot:
                    total += dot / norm(ours) / norm(theirs) * math.exp(-(delta**2) / (2 * 6**2))
        return 10 * total / 4 / len(references)

    def _vectors(self, words: Caption) -> list[dict[Gram, float]]:
        """tf-idf weights of the n-grams, one dictionary for each n."""
        parts: list[dict[Gram, float]] = [{}, {}, {}, {}]
        for gram, count in grams(words).items():
            parts[len(gram) - 1][gram] = count * (self.log_documents - math.log(max(1, self.frequency[gram])))
        return parts


def grams(words: Caption) -> Counter[Gram]:
    """All n-grams of a caption for n = 1..4."""
    return Counter(tuple(words[i : i + n]) for n in range(1, 5) for i in range(len(words) - n + 1))


def norm(part: dict[Gram, float]) -> float:
    """The Euclidean norm of a sparse vector."""
    return math.sqrt(sum(value**2 for value in part.values()))
