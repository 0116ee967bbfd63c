"""METEOR and SPICE: Java programs in the package pycocoevalcap, which `java.py` runs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.evaluation.scores.java import JavaError, finish, java_command, java_process, talk, with_one_restart

Caption = Sequence[str]  # tokens

SPICE_CATEGORIES = {
    "Object": "object",
    "Attribute": "attribute",
    "Relation": "relation",
    "Color": "color",
    "Cardinality": "count",
    "Size": "size",
}
SPICE_MODELS_VARIABLE = "RAYCAP_SPICE_MODELS"  # the folder with the two jars below
SPICE_MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")

# The smallest and largest Java heap in MB. METEOR's paraphrase table needs more than 512 MB. pycocoevalcap always uses
# the largest heap.
_METEOR_HEAP_MB = (640, 2048)
_SPICE_HEAP_MB = (3072, 8192)
# METEOR answers a caption with a line of more than ten numbers, and the final request with lines of one number.
_STATISTICS = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?( -?\d+(\.\d+)?(E-?\d+)?){10,}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?")


def check_meteor() -> None:
    """Raises JavaError when METEOR cannot run on this machine."""
    java_command(_METEOR_HEAP_MB)


def check_spice() -> None:
    """Raises JavaError when SPICE cannot run on this machine."""
    java_command(_METEOR_HEAP_MB)
    spice_models()


def meteor(
    predictions: Sequence[Caption], references: Sequence[Sequence[Caption]], deadline_s: float | None
) -> tuple[float, list[float]]:
    """METEOR 1.5 (English, normalized) of tokenized captions: the score over all images, and that of each image.

    After a failure the process is restarted once, and scores only the images without an answer. deadline_s: by default
    120 s plus 50 ms per image. Raises JavaError.
    """
    jar = _package_folder() / "meteor" / "meteor-1.5.jar"
    command = java_command(_METEOR_HEAP_MB, "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm")
    if not jar.is_file():
        raise JavaError(f"{jar.name} is missing from the package pycocoevalcap; install it again")

    def to_text(tokens: Caption) -> str:
        return " ".join(tokens).replace("|||", "")  # METEOR separates captions by |||

    requests = [
        " ||| ".join(("SCORE", *map(to_text, captions), to_text(prediction)))
        for prediction, captions in zip(predictions, references, strict=True)
    ]
    statistics: list[str] = []

    def attempt(folder: Path, until: float) -> tuple[float, list[float]]:
        """Asks one METEOR process for the missing statistics, and then for the scores that follow from all of them."""
        with java_process(command, folder, talks=True) as process:
            for line in talk(process, requests[len(statistics) :], len(requests) - len(statistics), until):
                statistics.append(_checked(line, _STATISTICS))
            evaluation = " ||| ".join(("EVAL", *statistics))
            lines = talk(process, [evaluation], len(requests) + 1, until)
            *per_image, value = [float(_checked(line, _NUMBER)) for line in lines]
        return value, per_image

    return with_one_restart(attempt, 120 + 0.05 * len(requests) if deadline_s is None else deadline_s)


def _checked(line: str, pattern: re.Pattern[str]) -> str:
    """Returns a line of METEOR's output. Raises JavaError if it does not match the pattern."""
    if not pattern.fullmatch(line):
        raise JavaError(f"java answered what is not a score: {line[:60]!r}")
    return line


def spice(
    predictions: Sequence[Caption], references: Sequence[Sequence[Caption]], deadline_s: float | None
) -> tuple[list[float], dict[str, float | None]]:
    """SPICE 1.0 of tokenized captions: the F-score of each image, and the mean F-score of each sub-category.

    The mean is over the images whose caption or references mention the category; None when no image does.
    deadline_s: by default 300 s plus 1 s per image. Raises JavaError.
    """
    folder = _package_folder() / "spice"
    java = java_command(_SPICE_HEAP_MB)
    models = spice_models()
    # SPICE's serializer needs access to these packages, which Java forbids by default since version 16.
    opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "util", "math")]
    paths = os.pathsep.join(map(str, (folder / "spice-1.0.jar", folder / "lib" / "*", models / "*")))
    data = [
        {"image_id": i, "test": " ".join(prediction), "refs": [" ".join(caption) for caption in captions]}
        for i, (prediction, captions) in enumerate(zip(predictions, references, strict=True))
    ]

    def attempt(temporary: Path, until: float) -> list[dict[str, dict[str, Any]]]:
        """Runs SPICE once. For each image, the result has the scores {category: {"f": ...}}; "All" is the total."""
        source, target = temporary / "in.json", temporary / "out.json"
        source.write_text(json.dumps(data), encoding="utf-8")
        options = ["-XX:+IgnoreUnrecognizedVMOptions", *opens, "-cp", paths]
        main = ["edu.anu.spice.SpiceScorer", str(source), "-out", str(target), "-subset", "-silent"]
        with java_process([*java, *options, *main], temporary, talks=False) as process:
            finish(process, until)
        try:
            items = {item["image_id"]: item["scores"] for item in json.loads(target.read_text(encoding="utf-8"))}
            return [items[image] | {"All": {"f": float(items[image]["All"]["f"])}} for image in range(len(data))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JavaError(f"java left no readable result ({type(error).__name__}: {error})") from error

    scores_by_image = with_one_restart(attempt, 300 + len(data) if deadline_s is None else deadline_s)
    categories = {name: _mean_f(scores_by_image, category) for category, name in SPICE_CATEGORIES.items()}
    return [scores["All"]["f"] for scores in scores_by_image], categories


def _mean_f(images: Sequence[dict[str, dict[str, Any]]], category: str) -> float | None:
    """Mean F-score of a category over the images that have a finite one."""
    values = [float(scores[category]["f"]) for scores in images if (scores.get(category) or {}).get("f") is not None]
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else None


def spice_models() -> Path:
    """The folder with SPICE's parser models. Raises JavaError with the remedy when they are missing."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raycap" / "spice"
    candidates = [Path(os.environ.get(SPICE_MODELS_VARIABLE) or default), _package_folder() / "spice" / "lib"]
    for folder in candidates:
        if all((folder / jar).is_file() for jar in SPICE_MODELS):
            return folder.absolute()
    remedy = f"run `make spice`, or name the folder that holds {' and '.join(SPICE_MODELS)} in {SPICE_MODELS_VARIABLE}"
    raise JavaError(f"SPICE's parser models are not in {candidates[0]}; {remedy}")


def _package_folder() -> Path:
    """The folder of the package pycocoevalcap. Raises JavaError when it is not installed."""
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise JavaError("the package pycocoevalcap, which contains the jar, is not installed; install it")
    return Path(next(iter(spec.submodule_search_locations)))
