"""`raycap bench reward`: CIDEr-D rewards per second on one core, beside a plain Python scorer in the same run."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from jobs.bench.measuring import median_seconds, timed
from jobs.bench.reference_cider import PlainCiderD
from jobs.options import References
from pipeline.language.english import tokenize
from pipeline.rewards.cider_index import build_index
from pipeline.runtime.cpu import prepare_processor
from pipeline.scoring.result_files import read_references

CAPTIONS = 2000  # one step of 400 images with 5 samples each
PLAIN_CAPTIONS = 400  # the plain scorer scores only the first of them
REPEATS = 20  # scorings of all captions, of which the median is taken


def bench_reward(references: References = None) -> None:
    """CIDEr-D rewards per second beside a plain Python scorer.

    Both use one core. The median of 20 scorings of 2,000 captions is printed; the plain scorer scores 400 of them.
    Of a Karpathy file the restval split is used.

    Example: raycap bench reward --references dataset_coco_val2014_karpathy.json.gz
    """
    prepare_processor(1)
    captions = _word_numbers(references) if references else _generated()
    scorer, build_seconds = timed(partial(build_index, captions))
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
