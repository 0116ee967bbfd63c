"""`raycap bench metrics`: BLEU, ROUGE-L and CIDEr-D with tokenization, beside pycocoevalcap on the same captions."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.options import References
from pipeline.errors import UserError
from pipeline.scoring.metrics import BLEU, Score, score_captions
from pipeline.scoring.result_files import ImageId, read_references

_METRICS = (*BLEU, "ROUGE-L", "CIDEr-D")
_REFERENCES = 5

_SCENE = (
    (
        "A man",
        "A young woman in a red hat",
        "Two dogs",
        "A black-and-white cat",
        "Several people",
        "The boy's brother",
        "A group of tourists",
        "An old truck",
        "A bowl of fruit",
        'A street sign that says "Main St."',
        "Three zebras",
        "A pizza, cut in slices,",
    ),
    (
        "sitting on",
        "standing next to",
        "is parked in front of",
        "looking at",
        "leaning against",
        "walks past",
        "doesn't notice",
        "riding along",
        "lies beneath",
        "is being held over",
    ),
    (
        "a wooden table",
        "the busy street",
        "a snow-covered hill",
        "a large body of water",
        "an open refrigerator",
        "a tennis court",
        "the 2nd floor window",
        "a laptop computer",
        "a brick building",
        "green grass",
        "a kite at 10:30 a.m.",
    ),
    (
        "",
        " on a sunny day",
        " in the city",
        " with a dog nearby",
        " at night",
        " near the beach",
        ", smiling",
        " together",
    ),
)


def bench_metrics(
    images: Annotated[int, typer.Option(min=1, help="Number of images, each with five references.")] = 5000,
    references: References = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; medians are printed.")] = 3,
) -> dict[str, Any]:
    """Time of the caption metrics beside pycocoevalcap.

    BLEU, ROUGE-L and CIDEr-D are computed with tokenization, and the largest difference of their values is printed.
    A prediction is one of the image's references with words left out and swapped. Generated captions are shorter than
    COCO's and have fewer distinct words. pycocoevalcap's time includes its tokenizer only where Java is installed.

    Example: raycap bench metrics --images 5000
    """
    captions = _captions_from(references, images) if references else _made_up(images)
    predictions = _predictions(captions)
    source = references.name if references else "made-up captions"
    print(f"{len(captions)} images x {_REFERENCES} references ({source}), median of {repeats}")

    from pipeline.scoring import ptb

    def ours() -> dict[str, Score]:
        ptb._plain_tokens.cache_clear()  # a first run's speed, not a second one's
        return score_captions(captions, predictions, metrics=_METRICS).by_name

    mine, seconds = _timed(ours, repeats)
    print(f"  raycap         {seconds:6.2f} s  tokenization, BLEU-1..4, ROUGE-L, CIDEr-D")
    theirs, upstream_seconds, parts = _pycocoevalcap(captions, predictions, repeats)
    print(f"  pycocoevalcap  {upstream_seconds:6.2f} s  {parts}")
    difference = max(_difference(mine[name], theirs[name]) for name in _METRICS)
    print(f"  largest difference of a value, of all images and of each: {difference:.1e}")
    return {"raycap_s": seconds, "pycocoevalcap_s": upstream_seconds, "parts": parts, "difference": difference}


def _timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    seconds = []
    result = None
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def _pycocoevalcap(
    captions: dict[ImageId, list[str]], predictions: dict[ImageId, str], repeats: int
) -> tuple[dict[str, Score], float, str]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    from pipeline.scoring import ptb

    raw = [{image: [{"caption": text} for text in texts] for image, texts in captions.items()}]
    raw.append({image: [{"caption": predictions[image]}] for image in captions})
    try:
        tokenized, tokenizer_seconds = _timed(lambda: [PTBTokenizer().tokenize(part) for part in raw], repeats)
        parts = f"its tokenizer (Java) {tokenizer_seconds:.2f} s"
    except OSError as error:  # no java, or its package folder cannot be written
        rows = ptb.tokenize_all([text["caption"] for part in raw for texts in part.values() for text in texts])
        lines = iter(" ".join(tokens) for tokens in rows)
        tokenized = [{image: [next(lines) for _ in texts] for image, texts in part.items()} for part in raw]
        tokenizer_seconds, parts = 0.0, f"without its tokenizer ({error})"

    def scorers() -> dict[str, Score]:
        bleu, bleu_each = Bleu(len(BLEU)).compute_score(*tokenized, verbose=0)
        found = {name: Score(bleu[n], bleu_each[n]) for n, name in enumerate(BLEU)}
        for name, scorer in (("ROUGE-L", Rouge()), ("CIDEr-D", Cider())):
            value, each = scorer.compute_score(*tokenized)
            found[name] = Score(float(value), list(map(float, each)))
        return found

    found, seconds = _timed(scorers, repeats)
    return found, tokenizer_seconds + seconds, f"{parts}, scorers {seconds:.2f} s"


def _difference(mine: Score, theirs: Score) -> float:
    pairs = zip([mine.value, *(mine.per_image or [])], [theirs.value, *(theirs.per_image or [])], strict=True)
    return max(abs((a or 0.0) - (b or 0.0)) for a, b in pairs)


def _captions_from(path: Path, images: int) -> dict[ImageId, list[str]]:
    found = {image: texts[:_REFERENCES] for image, texts in read_references(path).items() if len(texts) >= _REFERENCES}
    if len(found) < images:
        raise UserError(
            f"{path} has {len(found)} images with {_REFERENCES} captions, fewer than the {images} asked for"
        )
    return dict(list(found.items())[:images])


def _made_up(images: int) -> dict[ImageId, list[str]]:
    source = random.Random(0)

    def caption() -> str:
        subject, verb, place, end = (source.choice(part) for part in _SCENE)
        return f"{subject} {verb} {place}{end}."

    return {image: [caption() for _ in range(_REFERENCES)] for image in range(images)}


def _predictions(captions: dict[ImageId, list[str]]) -> dict[ImageId, str]:
    source = random.Random(1)
    predictions: dict[ImageId, str] = {}
    for image, texts in captions.items():
        words = [word for word in source.choice(texts).split() if source.random() > 0.15]
        if len(words) > 3 and source.random() < 0.5:
            at = source.randrange(len(words) - 1)
            words[at], words[at + 1] = words[at + 1], words[at]
        predictions[image] = " ".join(words)
    return predictions
