"""CIDEr-D rewards per second on one core, beside a plain Python scorer in the same run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
import typer

from raycap.jobs.bench_gpu import timed
from raycap.pipeline.data.language.tokenizers import tokenize
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.data.synthetic.scenes import make_scene
from raycap.pipeline.runtime.processor import prepare_processor
from raycap.pipeline.training.rewards.cider import build_index

from measuring import References, median_seconds
from reference_cider import PlainCiderD

CAPTIONS = 2000  # one step of 400 images with 5 samples each
PLAIN_CAPTIONS = 400  # the plain scorer scores only the first of them
REPEATS = 20  # scorings of all captions, of which the median is taken
SCENES = 30_000  # images with captions if no file is given


def bench_reward(references: References = None) -> None:
    """CIDEr-D rewards per second beside a plain Python scorer.

    Both use one core. The median of 20 scorings of 2,000 captions is printed; the plain scorer scores 400 of them.
    Of a Karpathy file the restval split is used.

    Example: python benchmarks/reward.py --references dataset_coco_val2014_karpathy.json.gz
    """
    prepare_processor(1)
    if references is None:
        captions = _word_numbers(make_scene(0, image)[1] for image in range(SCENES))
    else:
        split = "restval" if "karpathy" in references.name else None
        captions = _word_numbers(read_references(references, split=split).references().values())
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
    num_references = sum(map(len, captions))
    print(f"references           {len(captions):,} images, {num_references:,} captions")
    size = scorer.num_bytes / num_references
    print(f"index                {build_seconds:.2f} s from tokens, {size:.0f} bytes per caption")
    print(f"reward               {rate:,.0f} captions/s on one core (median of {REPEATS}, {CAPTIONS:,} captions)")
    print(f"plain Python scorer  {plain_rate:,.0f} captions/s, index not counted")
    print(f"ratio                {rate / plain_rate:.1f}, largest difference {difference:.1e}")


def _word_numbers(images: Iterable[list[str]]) -> list[list[list[int]]]:
    """The captions of each image, with each word replaced by a number."""
    numbers: dict[str, int] = {}

    def numbered(caption: str) -> list[int]:
        return [numbers.setdefault(word, len(numbers)) for word in tokenize(caption)]

    return [list(map(numbered, captions)) for captions in images]


if __name__ == "__main__":
    typer.run(bench_reward)
