"""CIDEr-D rewards per second on one core, beside a plain Python scorer in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import typer

from raycap.jobs.bench_gpu.measuring import timed
from raycap.pipeline.data.caption_files import read_references
from raycap.pipeline.data.language.tokenizers import tokenize
from raycap.pipeline.runtime.processor import prepare_processor
from raycap.pipeline.training.rewards.cider import build_index

from measuring import References, median_seconds
from reference_cider import PlainCiderD

CAPTIONS = 2000  # one step of 400 images with 5 samples each
PLAIN_CAPTIONS = 400  # the plain scorer scores only the first of them
REPEATS = 20  # scorings of all captions, of which the median is taken
PER_IMAGE = 5
WORDS = 10_000  # of the vocabulary; their frequencies follow Zipf's law
_IMAGES = 4096  # generated at a time


def bench_reward(references: References = None) -> None:
    """CIDEr-D rewards per second beside a plain Python scorer.

    Both use one core. The median of 20 scorings of 2,000 captions is printed; the plain scorer scores 400 of them.
    Of a Karpathy file the restval split is used.

    Example: python benchmarks/reward.py --references dataset_coco_val2014_karpathy.json.gz
    """
    prepare_processor(1)
    captions = _word_numbers(references) if references else list(generated_captions(30_000))
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
    size = scorer.num_bytes / sum(map(len, captions))
    print(f"index                {build_seconds:.2f} s from tokens, {size:.0f} bytes per caption")
    print(f"reward               {rate:,.0f} captions/s on one core (median of {REPEATS}, {CAPTIONS:,} captions)")
    print(f"plain Python scorer  {plain_rate:,.0f} captions/s, index not counted")
    print(f"ratio                {rate / plain_rate:.1f}, largest difference {difference:.1e}")


def _word_numbers(path: Path) -> list[list[list[int]]]:
    """The captions of each image in a file, with each word replaced by a number."""
    numbers: dict[str, int] = {}
    texts = read_references(path, split="restval" if "karpathy" in path.name else None).values()
    return [[[numbers.setdefault(word, len(numbers)) for word in tokenize(text)] for text in image] for image in texts]


def generated_captions(images: int) -> Iterator[list[list[int]]]:
    """The captions of each image: PER_IMAGE of 8 to 12 random words."""
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(1 / np.arange(1, WORDS + 1))
    for begin in range(0, images, _IMAGES):
        lengths = rng.integers(8, 13, min(_IMAGES, images - begin) * PER_IMAGE)
        words = np.searchsorted(cumulative, rng.random(int(lengths.sum())) * cumulative[-1]).tolist()
        ends = np.cumsum(lengths).tolist()
        captions = [words[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
        yield from (captions[first : first + PER_IMAGE] for first in range(0, len(captions), PER_IMAGE))


if __name__ == "__main__":
    typer.run(bench_reward)
