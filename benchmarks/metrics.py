"""BLEU, ROUGE-L and CIDEr-D with tokenization, beside pycocoevalcap on the same captions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.data.synthetic.scenes import make_scene
from raycap.pipeline.evaluation.scores import words as ptb
from raycap.pipeline.evaluation.scores.metrics import BLEU, Score, score_captions

from measuring import References, median_seconds

METRICS = (*BLEU, "ROUGE-L", "CIDEr-D")
NUM_REFERENCES = 5  # captions per image


def bench_metrics(
    images: Annotated[int, typer.Option(min=1, help="Number of images, each with five references.")] = 5000,
    references: References = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; medians are printed.")] = 3,
) -> None:
    """Time of the caption metrics beside pycocoevalcap.

    BLEU, ROUGE-L and CIDEr-D are computed with tokenization, and the largest difference of their values is printed. A
    prediction is one of the image's references with words left out and swapped. By default the references are captions
    of the demo's scenes. pycocoevalcap's time has no tokenization.

    Example: python benchmarks/metrics.py --images 5000
    """
    if references is None:
        source, captions = "captions of scenes", {image: make_scene(0, image)[1] for image in range(images)}
    else:
        source, captions = references.name, _captions_from(references, images)
    predictions = _predictions(captions)
    print(f"{len(captions)} images x {NUM_REFERENCES} references ({source}), median of {repeats}")

    def score() -> dict[str, Score]:
        ptb._plain_tokens.cache_clear()  # without this, later runs would find their tokens in the cache
        return score_captions(captions, predictions, metrics=METRICS).by_name

    ours, seconds = median_seconds(score, repeats)
    print(f"  raycap         {seconds:6.2f} s  tokenization, BLEU-1..4, ROUGE-L, CIDEr-D")
    theirs = _pycocoevalcap(captions, predictions, repeats)
    difference = max(_difference(ours[name], theirs[name]) for name in METRICS)
    print(f"  largest difference of a value, over all images or per image: {difference:.1e}")


def _pycocoevalcap(
    captions: dict[ImageId, list[str]], predictions: dict[ImageId, str], repeats: int
) -> dict[str, Score]:
    """Computes the metrics with pycocoevalcap, and prints how long it took."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    def tokenized(texts_of: dict[ImageId, list[str]]) -> dict[ImageId, list[str]]:
        """The captions of each image, tokenized by raycap, because pycocoevalcap's tokenizer needs Java."""
        lines = iter(ptb.tokenize_all([text for texts in texts_of.values() for text in texts]))
        return {image: [" ".join(next(lines)) for _ in texts] for image, texts in texts_of.items()}

    of_references, of_predictions = tokenized(captions), tokenized({image: [predictions[image]] for image in captions})

    def score() -> dict[str, Score]:
        values, per_image = Bleu(len(BLEU)).compute_score(of_references, of_predictions, verbose=0)
        scores = {name: Score(values[n], per_image[n]) for n, name in enumerate(BLEU)}
        for name, scorer in (("ROUGE-L", Rouge()), ("CIDEr-D", Cider())):
            value, per_image = scorer.compute_score(of_references, of_predictions)
            scores[name] = Score(float(value), list(map(float, per_image)))
        return scores

    scores, seconds = median_seconds(score, repeats)
    print(f"  pycocoevalcap  {seconds:6.2f} s  the same, without tokenization")
    return scores


def _difference(ours: Score, theirs: Score) -> float:
    """The largest difference of the values, over all images and per image."""
    pairs = zip([ours.value, *(ours.per_image or [])], [theirs.value, *(theirs.per_image or [])], strict=True)
    return max(abs((a or 0.0) - (b or 0.0)) for a, b in pairs)  # a metric without a value counts as 0


def _captions_from(path: Path, images: int) -> dict[ImageId, list[str]]:
    """The first five captions of the first `images` images in a file that have five; an error if fewer have."""
    references = read_references(path).references()
    enough = {image: texts[:NUM_REFERENCES] for image, texts in references.items() if len(texts) >= NUM_REFERENCES}
    if len(enough) < images:
        raise typer.BadParameter(
            f"{path} has {len(enough)} images with {NUM_REFERENCES} captions; give --images {len(enough)}"
        )
    return dict(list(enough.items())[:images])


def _predictions(captions: dict[ImageId, list[str]]) -> dict[ImageId, str]:
    """For each image one of its captions, without some words and in half of the cases with two words swapped."""
    generator = random.Random(1)
    predictions: dict[ImageId, str] = {}
    for image, texts in captions.items():
        words = [word for word in generator.choice(texts).split() if generator.random() > 0.15]
        if len(words) > 3 and generator.random() < 0.5:
            first = generator.randrange(len(words) - 1)
            words[first : first + 2] = words[first + 1], words[first]
        predictions[image] = " ".join(words)
    return predictions


if __name__ == "__main__":
    typer.run(bench_metrics)
