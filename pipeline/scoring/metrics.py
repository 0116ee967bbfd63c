"""Scores of captions as pycocoevalcap computes them: BLEU, METEOR, ROUGE-L, CIDEr-D and SPICE.

BLEU, ROUGE-L and CIDEr-D run in this process (`ngrams.py`, on tokens from `ptb.py`). METEOR and SPICE are Java
programs that pycocoevalcap ships; this file is the only one that starts them (`java.py`). What cannot run is reported
as unavailable with its reason, never as 0.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.scoring import ngrams, ptb
from pipeline.scoring.diagnostics import describe
from pipeline.scoring.java import JavaError, finish, java_command, java_process, talk, with_one_restart
from pipeline.scoring.result_files import shorten

BLEU = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
METRICS = (*BLEU, "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
SPICE_CATEGORIES = {
    "Object": "object",
    "Attribute": "attribute",
    "Relation": "relation",
    "Color": "color",
    "Cardinality": "count",
    "Size": "size",
}
JARS = {"METEOR": "meteor-1.5", "SPICE": "spice-1.0"}
SPICE_MODELS_VARIABLE = "RAYCAP_SPICE_MODELS"  # the folder with the two jars below
SPICE_MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")

_METEOR_HEAP_MB = (640, 2048)  # fewest with which the paraphrase table loads (512 just did), and pycocoevalcap's own
_SPICE_HEAP_MB = (3072, 8192)
_STATISTICS = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?( -?\d+(\.\d+)?(E-?\d+)?){10,}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?")


@dataclass(frozen=True)
class Score:
    """A metric's value over all images and image by image, or the reason why there is none."""

    value: float | None = None
    per_image: list[float] | None = None
    unavailable: str | None = None


@dataclass(frozen=True)
class Scores:
    """What `score_captions` found. per_image lists follow `image_ids`."""

    by_name: dict[str, Score]
    image_ids: list[Any]
    signature: str
    extras: dict[str, Any] = field(default_factory=dict)


def score_captions(
    references: Mapping[Any, Sequence[str]],
    predictions: Mapping[Any, str],
    *,
    metrics: Iterable[str] = METRICS,
    java_deadline_s: float | None = None,
    training_captions: Iterable[str] | None = None,
) -> Scores:
    """Scores of one raw caption an image against that image's raw reference captions.

    Images are taken in the order of `references`, as coco-caption does; those without a prediction are left out, also
    of the document frequencies (`extras["references_without_prediction"]` counts them). An empty caption matches
    nothing. `java_deadline_s` is the longest that METEOR, and again SPICE, may take altogether, a restart included
    (None: 120 s and 50 ms an image for METEOR, 300 s and 1 s an image for SPICE). `training_captions` (raw) adds the
    share of captions seen word for word in training to the extras.

    Raises UserError (a ValueError) for an unknown metric, for predictions without references and for no predictions.
    """
    metrics = tuple(metrics)
    if unknown := [name for name in metrics if name not in METRICS]:
        raise UserError(f"unknown metric {unknown[0]!r}; the known ones are {', '.join(METRICS)}")
    if not predictions:
        raise UserError("there are no predictions to score; give a caption for at least one image")
    if strays := [image for image in predictions if not references.get(image)]:
        kinds = {type(image).__name__ for image in references} ^ {type(image).__name__ for image in strays}
        hint = "; ids are numbers on one side and text on the other" if kinds == {"int", "str"} else ""
        raise UserError(
            f"{len(strays)} of {len(predictions)} predictions have no reference captions (image ids "
            f"{shorten(strays)}){hint}; score them against the references of their own images"
        )
    image_ids = [image for image in references if image in predictions]
    predicted = ptb.tokenize_all([predictions[image] for image in image_ids])
    lines = iter(ptb.tokenize_all([caption for image in image_ids for caption in references[image]]))
    referenced = [[next(lines) for _ in references[image]] for image in image_ids]

    by_name = _python_scores(metrics, predicted, referenced)
    extras: dict[str, Any] = {"references_without_prediction": len(references) - len(image_ids)}
    if "METEOR" in metrics:
        deadline_s = 120 + 0.05 * len(image_ids) if java_deadline_s is None else java_deadline_s
        by_name["METEOR"] = _or_unavailable(lambda: meteor(predicted, referenced, deadline_s=deadline_s))
    if "SPICE" in metrics:
        deadline_s = 300 + len(image_ids) if java_deadline_s is None else java_deadline_s

        def scored() -> Score:
            score, extras["spice_categories"] = spice(predicted, referenced, deadline_s=deadline_s)
            return score

        by_name["SPICE"] = _or_unavailable(scored)
    extras |= describe(predicted, training_captions)
    return Scores({name: by_name[name] for name in metrics}, image_ids, signature(by_name, referenced), extras)


def signature(scores: Mapping[str, Score], references: Sequence[Sequence[object]]) -> str:
    """What must be equal for two scores to be comparable: tokenizer, document frequencies, EOS rule, data, versions."""
    fewest, most = min(map(len, references)), max(map(len, references))
    try:
        version = importlib.metadata.version("raycap")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        version = "unknown"
    parts = {
        "tok": ptb.SIGNATURE,
        "df": f"corpus({len(references)} images)",
        "eos": "none",
        "refs": str(fewest) if fewest == most else f"{fewest}-{most}",
        "as": "+".join(["pycocoevalcap-1.2", *(jar for name, jar in JARS.items() if _available(scores, name))]),
        "raycap": version,
    }
    return "|".join(f"{key}:{value}" for key, value in parts.items())


def _available(scores: Mapping[str, Score], name: str) -> bool:
    return name in scores and scores[name].unavailable is None


def _python_scores(
    metrics: Sequence[str], predictions: list[list[str]], references: list[list[list[str]]]
) -> dict[str, Score]:
    scores: dict[str, Score] = {}

    # BLEU and CIDEr-D split on any white space; the tokenizer's tokens ("1 1/2") may hold a no-break space.
    def split(tokens: list[str]) -> list[str]:
        return " ".join(tokens).split()

    corpus = ngrams.Corpus.build(
        [split(caption) for caption in predictions], [[split(caption) for caption in image] for image in references]
    )
    if set(BLEU) & set(metrics):
        values, per_image = ngrams.bleu(corpus)
        scores |= {name: Score(float(values[n]), per_image[n].tolist()) for n, name in enumerate(BLEU)}
    if "ROUGE-L" in metrics:
        rouge = ngrams.rouge_l(predictions, references)
        scores["ROUGE-L"] = Score(float(rouge.mean()), rouge.tolist())
    if "CIDEr-D" in metrics:
        if corpus.images == 1:
            reason = "one image only: its document frequencies mean nothing; score two images or more"
            scores["CIDEr-D"] = Score(unavailable=reason)
        else:
            cider = ngrams.cider_d(corpus)
            scores["CIDEr-D"] = Score(float(cider.mean()), cider.tolist())
    return scores


def _or_unavailable(scorer: Callable[[], Score]) -> Score:
    try:
        return scorer()
    except JavaError as error:
        return Score(unavailable=str(error))


def why_unavailable(metric: str) -> str | None:
    """Why a metric could not be computed on this machine, from what is installed; None where nothing is missing."""
    try:
        if metric in ("METEOR", "SPICE"):
            java_command(_METEOR_HEAP_MB)
        if metric == "SPICE":
            spice_models()
    except JavaError as error:
        return str(error)
    return None


def _package_folder() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise JavaError("the package pycocoevalcap, which brings the jar, is not installed; install it")
    return Path(next(iter(spec.submodule_search_locations)))


def meteor(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]], *, deadline_s: float
) -> Score:
    """METEOR 1.5 (English, normalized) over tokenized captions, through the jar's line protocol.

    What a process answered before it failed is kept: the restarted one goes on from there. Raises JavaError.
    """
    jar = _package_folder() / "meteor" / "meteor-1.5.jar"
    command = java_command(_METEOR_HEAP_MB, "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm")
    if not jar.is_file():
        raise JavaError(f"{jar.name} is missing from the package pycocoevalcap; install it again")

    def text(tokens: Sequence[str]) -> str:
        return " ".join(tokens).replace("|||", "")  # the protocol's separator

    requests = [
        " ||| ".join(("SCORE", *map(text, captions), text(prediction))) + "\n"
        for prediction, captions in zip(predictions, references, strict=True)
    ]
    statistics: list[str] = []
    values: list[float] = []

    def take(into: list[Any], pattern: re.Pattern[str], wanted: int, convert: Callable[[str], Any], line: str) -> bool:
        if not pattern.fullmatch(line):
            raise JavaError(f"java answered what is not a score: {line[:60]!r}")
        into.append(convert(line))
        return len(into) == wanted

    def attempt(folder: Path, until: float) -> Score:
        values.clear()
        with java_process(command, folder, talks=True) as process:
            if missing := requests[len(statistics) :]:
                on_line = partial(take, statistics, _STATISTICS, len(requests), str)
                talk(process, "".join(missing), on_line, until)
            evaluation = " ||| ".join(("EVAL", *statistics)) + "\n"
            talk(process, evaluation, partial(take, values, _NUMBER, len(requests) + 1, float), until)
        return Score(values[-1], values[:-1])

    return with_one_restart(attempt, deadline_s)


def spice_models() -> Path:
    """The folder with SPICE's parser models. Raises JavaError with the remedy where they are not."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raycap" / "spice"
    candidates = [Path(os.environ.get(SPICE_MODELS_VARIABLE) or default), _package_folder() / "spice" / "lib"]
    for folder in candidates:
        if all((folder / jar).is_file() for jar in SPICE_MODELS):
            return folder.absolute()
    raise JavaError(
        f"SPICE's parser models are not in {candidates[0]}; run `make spice`, or name the folder that holds "
        f"{' and '.join(SPICE_MODELS)} in {SPICE_MODELS_VARIABLE}"
    )


def spice(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]], *, deadline_s: float
) -> tuple[Score, dict[str, float | None]]:
    """SPICE 1.0 over tokenized captions, and the mean F-scores of its sub-categories.

    A category that neither caption nor references of an image mention has no F-score there, and its mean is over the
    other images (None where there are none). Raises JavaError.
    """
    folder = _package_folder() / "spice"
    java = java_command(_SPICE_HEAP_MB)
    models = spice_models()
    # Java 16 and later close these packages, which SPICE's serializer reads.
    opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "util", "math")]
    paths = [folder / "spice-1.0.jar", folder / "lib" / "*", models / "*"]
    data = [
        {"image_id": i, "test": " ".join(prediction), "refs": [" ".join(caption) for caption in captions]}
        for i, (prediction, captions) in enumerate(zip(predictions, references, strict=True))
    ]

    def attempt(temporary: Path, until: float) -> list[dict[str, dict[str, Any]]]:
        source, target = temporary / "in.json", temporary / "out.json"
        source.write_text(json.dumps(data), encoding="utf-8")
        options = ["-XX:+IgnoreUnrecognizedVMOptions", *opens, "-cp", os.pathsep.join(map(str, paths))]
        main = ["edu.anu.spice.SpiceScorer", str(source), "-out", str(target), "-subset", "-silent"]
        with java_process([*java, *options, *main], temporary, talks=False) as process:
            finish(process, until)
        try:
            items = {item["image_id"]: item["scores"] for item in json.loads(target.read_text(encoding="utf-8"))}
            return [items[image] | {"All": {"f": float(items[image]["All"]["f"])}} for image in range(len(data))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JavaError(f"java left no readable result ({type(error).__name__}: {error})") from error

    images = with_one_restart(attempt, deadline_s)
    categories: dict[str, float | None] = {}
    for theirs, ours in SPICE_CATEGORIES.items():
        found = [float(scores[theirs]["f"]) for scores in images if (scores.get(theirs) or {}).get("f") is not None]
        found = [value for value in found if not math.isnan(value)]
        categories[ours] = sum(found) / len(found) if found else None
    values = [scores["All"]["f"] for scores in images]
    return Score(sum(values) / len(values), values), categories
