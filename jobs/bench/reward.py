"""`raycap bench reward`: CIDEr-D rewards per second on one core, beside a plain Python scorer in the same run."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from jobs.bench.measuring import median_seconds
from jobs.bench.reference_cider import PlainCiderD
from jobs.options import References
from pipeline.data.vocabulary import tokenize
from pipeline.runtime.cpu import prepare_processor
from pipeline.scoring.cider import CiderD
from pipeline.scoring.result_files import read_references

CAPTIONS = 2000  # one step of 400 images with 5 samples each
PLAIN_CAPTIONS = 400  # how many of them the plain scorer scores
REPEATS = 20


def bench_reward(references: References = None) -> None:
    """CIDEr-D rewards per second beside a plain Python scorer.

    Both use one core. The median of 20 scorings of 2,000 captions is printed; the plain scorer scores 400 of them.
    Of a Karpathy file the restval split is used.

    Example: raycap bench reward --references dataset_coco_val2014_karpathy.json.gz
    """
    prepare_processor(1)
    captions = _coded(references)
    begin = time.perf_counter()
    scorer = CiderD.build(captions)
    built = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    images = rng.integers(0, len(captions), CAPTIONS)
    # Every third caption is that of another image, so that captions match in part, as sampled ones do.
    sampled = [captions[(image + (row % 3 == 0)) % len(captions)][0] for row, image in enumerate(images)]
    lengths = torch.tensor([len(words) for words in sampled])
    tokens = torch.tensor([words + [0] * (int(lengths.max()) - len(words)) for words in sampled])
    rows = torch.from_numpy(images)
    rewards, seconds = median_seconds(lambda: scorer.score(tokens, lengths, rows), REPEATS)
    plain, pairs = PlainCiderD(captions), list(zip(sampled, images, strict=True))[:PLAIN_CAPTIONS]
    expected, plain_seconds = median_seconds(lambda: [plain.score(words, captions[image]) for words, image in pairs], 1)
    rate, plain_rate = CAPTIONS / seconds, PLAIN_CAPTIONS / plain_seconds
    difference = np.abs(np.array(expected) - rewards[:PLAIN_CAPTIONS].numpy()).max()
    print(f"references           {len(captions):,} images, {sum(map(len, captions)):,} captions")
    print(f"index                {built:.2f} s from tokens")
    print(f"reward               {rate:,.0f} captions/s on one core (median of {REPEATS}, {CAPTIONS:,} captions)")
    print(f"plain Python scorer  {plain_rate:,.0f} captions/s, index not counted")
    print(f"ratio                {rate / plain_rate:.1f}, largest difference {difference:.1e}")


def _coded(references: Path | None) -> list[list[list[int]]]:
    """Captions per image as word numbers: those of a file, or generated ones with Zipf's distribution of words."""
    ids: dict[str, int] = {}
    if references is not None:
        texts = read_references(references, split="restval" if "karpathy" in references.name else None).values()
        return [[[ids.setdefault(word, len(ids)) for word in tokenize(text)] for text in image] for image in texts]
    rng = np.random.default_rng(1)
    words = (rng.zipf(1.3, size=5_000_000) % 12_000).tolist()
    lengths = iter(rng.integers(8, 14, size=30_000 * 5).tolist())
    position, captions = 0, []
    for _ in range(30_000):
        image = []
        for _ in range(5):
            length = next(lengths)
            image.append(words[position : position + length])
            position += length
        captions.append(image)
    return captions
