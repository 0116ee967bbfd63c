"""Scores of captions as pycocoevalcap computes them: BLEU, METEOR, ROUGE-L, CIDEr-D, SPICE; and what else is worth a look.

BLEU, ROUGE-L and CIDEr-D run in this process (`ngrams.py`, on tokens from `ptb.py`). METEOR and SPICE are Java
programs that pycocoevalcap ships; this file is the only one that starts them. What cannot run is reported as
unavailable with its reason, never as 0, and nothing here waits for ever: every call has a deadline.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pipeline import ngrams, ptb

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

    References without a prediction are left out, also of the document frequencies, as coco-caption does (their number
    is `extras["references_without_prediction"]`). `java_deadline_s` is the longest that METEOR, and SPICE, may take
    altogether, a restart included (None: two minutes and 50 ms an image). `training_captions` adds the share of
    captions seen word for word in training. An empty caption matches nothing and scores 0.

    Raises ValueError for an unknown metric, for predictions without references and where there is nothing to score.
    """
    metrics = tuple(metrics)
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ValueError(f"unknown metric {unknown[0]!r}; the known ones are {', '.join(METRICS)}")
    if not predictions:
        raise ValueError("there are no predictions to score; give one caption for at least one image")
    if strays := [image for image in predictions if not references.get(image)]:
        shown = ", ".join(map(str, strays[:10])) + (", ..." if len(strays) > 10 else "")
        raise ValueError(
            f"{len(strays)} predictions have no reference captions (image ids {shown}); score each against its own"
        )
    image_ids = list(predictions)
    predicted = [ptb.tokenize(predictions[image]) for image in image_ids]
    referenced = [[ptb.tokenize(caption) for caption in references[image]] for image in image_ids]
    if java_deadline_s is None:
        java_deadline_s = 120 + 0.05 * len(image_ids)

    by_name = _python_scores(metrics, predicted, referenced)
    extras: dict[str, Any] = {"references_without_prediction": sum(image not in predictions for image in references)}
    if "METEOR" in metrics:
        by_name["METEOR"] = _or_unavailable(lambda: meteor(predicted, referenced, deadline_s=java_deadline_s))
    if "SPICE" in metrics:
        by_name["SPICE"] = _or_unavailable(lambda: spice(predicted, referenced, extras, deadline_s=java_deadline_s))
    extras |= describe(predicted, training_captions)
    return Scores({name: by_name[name] for name in metrics}, image_ids, signature(metrics, referenced), extras)


def signature(metrics: Iterable[str], references: Sequence[Sequence[object]]) -> str:
    """What must be equal for two scores to be comparable: tokenizer, document frequencies, EOS rule, data, versions."""
    fewest, most = min(map(len, references)), max(map(len, references))
    try:
        version = importlib.metadata.version("raycap")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        version = "unknown"
    parts = {
        "metrics": "+".join(metrics),
        "tok": ptb.SIGNATURE,
        "df": f"corpus({len(references)} images)",
        "eos": "none",
        "refs": str(fewest) if fewest == most else f"{fewest}-{most}",
        "as": "pycocoevalcap-1.2",
        "raycap": version,
    }
    return "|".join(f"{key}:{value}" for key, value in parts.items())


def _python_scores(
    metrics: Sequence[str], predictions: list[list[str]], references: list[list[list[str]]]
) -> dict[str, Score]:
    scores = {}

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


# What the usual metrics do not show -------------------------------------------------------------------------------

# Words that cannot end an English caption: articles, possessives, conjunctions, copulas and prepositions that need
# an object (those that often close a clause, like "on" in "the shelf it stands on", are left out).
_OPEN_ENDINGS = frozenset(
    [
        "a",
        "an",
        "the",
        "his",
        "her",
        "its",
        "their",
        "my",
        "your",
        "our",
        "this",
        "these",
        "those",
        "some",
        "and",
        "or",
        "but",
        "while",
        "as",
        "that",
        "which",
        "who",
        "with",
        "of",
        "for",
        "at",
        "from",
        "into",
        "onto",
        "to",
        "by",
        "is",
        "are",
        "was",
        "were",
        "be",
        "being",
        "has",
        "have",
        "near",
        "beside",
        "between",
        "behind",
        "above",
        "next",
    ]
)


def describe(captions: Sequence[Sequence[str]], training_captions: Iterable[str] | None = None) -> dict[str, Any]:
    """Shares (0..1) and counts over tokenized captions.

    broken_endings: share that ends in a word which needs another behind it; empty: share without a word;
    repeated_ngrams: by n, share of captions that use an n-gram twice; doubled_words: share with a word directly
    repeated; lengths: {words: captions}; distinct_words; seen_in_training (where training captions are given).
    """
    total = len(captions)

    def share(hit: Callable[[Sequence[str]], bool]) -> float:
        return sum(map(hit, captions)) / total

    def repeats(tokens: Sequence[str], order: int) -> bool:
        grams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
        return len(set(grams)) < len(grams)

    result: dict[str, Any] = {
        "empty": share(lambda tokens: not tokens),
        "broken_endings": share(lambda tokens: bool(tokens) and tokens[-1] in _OPEN_ENDINGS),
        "doubled_words": share(lambda tokens: any(a == b for a, b in zip(tokens, tokens[1:], strict=False))),
        "repeated_ngrams": {str(n): share(lambda tokens, n=n: repeats(tokens, n)) for n in (2, 3, 4)},  # type: ignore[misc]
        "lengths": {str(k): v for k, v in sorted(Counter(map(len, captions)).items())},
        "mean_length": sum(map(len, captions)) / total,
        "distinct_words": len({word for tokens in captions for word in tokens}),
    }
    if training_captions is not None:
        seen = {tuple(ptb.tokenize(caption)) for caption in training_captions}
        result["seen_in_training"] = share(lambda tokens: tuple(tokens) in seen)
    return result


# Java -------------------------------------------------------------------------------------------------------------


class JavaError(Exception):
    """Why a Java scorer gave no score, in words."""


def _or_unavailable(scorer: Callable[[], Score]) -> Score:
    try:
        return scorer()
    except JavaError as error:
        return Score(unavailable=str(error))


def java_command(heap_mb: tuple[int, int], *options: str) -> list[str]:
    """`java` from the PATH with a heap of half the free memory, between the two bounds. Raises JavaError."""
    java = shutil.which("java")
    if java is None:
        raise JavaError("java not found on the PATH; install a Java runtime (version 8 or later)")
    fewest, most = heap_mb
    free = _free_memory_mb()
    if free < fewest * 1.25:
        raise JavaError(f"it needs a Java heap of {fewest} MB, and only {free:.0f} MB of memory are free")
    heap = int(min(most, max(fewest, free / 2)))
    return [java, f"-Xmx{heap}m", "-Dfile.encoding=UTF-8", "-Djava.awt.headless=true", *options]


def _free_memory_mb() -> float:
    """What the machine or the container has left, whichever is less."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        if limit.strip() != "max":
            free = min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup v2 here
        pass
    return free / 2**20


def _package_folder() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise JavaError("the package pycocoevalcap is not installed, which brings the jar")
    return Path(next(iter(spec.submodule_search_locations)))


class _Java:
    """A Java process that answers line by line; its stderr goes to a file. Use as a context manager."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._stderr = folder / "stderr.txt"
        with self._stderr.open("wb") as stderr:
            try:
                # A group of its own, so that `stop` also ends what a wrapper script called java has started.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=folder, process_group=0
                )
            except OSError as error:
                raise JavaError(f"java could not be started: {error}") from error
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> _Java:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, lines: Sequence[str]) -> None:
        """Writes from a thread: a Java that does not read fills the pipe, and that must not hold the caller."""

        def write() -> None:
            assert self._process.stdin is not None
            try:
                for line in lines:
                    self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                pass  # it ended, or `stop` closed the pipe; the reader tells

        threading.Thread(target=write, daemon=True).start()

    def receive(self, until: float) -> str:
        """The next line. Raises JavaError when it does not come before the time `until` (monotonic), or never can."""
        try:
            line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise JavaError("java gave no answer within the deadline" + self._said()) from None
        if line is None:
            try:
                code: object = self._process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                code = "unknown"
            raise JavaError(f"java ended early with exit code {code}" + self._said())
        return line.decode(errors="replace").strip()

    def finish(self, until: float) -> None:
        """Waits for the process's end. Raises JavaError past `until` or for an exit code other than 0."""
        try:
            code = self._process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise JavaError("java was not ready within the deadline" + self._said()) from None
        if code:
            raise JavaError(f"java ended with exit code {code}" + self._said())

    def _said(self) -> str:
        lines = self._stderr.read_bytes()[:4000].decode(errors="replace").strip().splitlines()
        return f"; it said: {lines[0][:300]}" if lines else ""

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _with_one_restart(attempt: Callable[[float], Any], deadline_s: float) -> Any:
    """`attempt(until)` twice at most, both within the deadline: the first may take two thirds of it."""
    start = time.monotonic()
    try:
        return attempt(start + deadline_s * 2 / 3)
    except JavaError as first:
        try:
            return attempt(start + deadline_s)
        except JavaError as second:
            again = "the same again" if str(first) == str(second) else str(second)
            raise JavaError(f"{first}; after one restart: {again} (deadline {deadline_s:.0f} s)") from second


def meteor(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]], *, deadline_s: float
) -> Score:
    """METEOR 1.5 (English, normalized) over tokenized captions, through the jar's line protocol.

    What a process answered before it died is kept: the restarted one goes on from there. Raises JavaError.
    """
    jar = _package_folder() / "meteor" / "meteor-1.5.jar"
    command = java_command(_METEOR_HEAP_MB, "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm")
    if not jar.is_file():
        raise JavaError(f"{jar.name} is missing from the package pycocoevalcap; install it again")

    def text(tokens: Sequence[str]) -> str:
        return " ".join(tokens).replace("|||", "")  # the protocol's separator

    requests = [
        " ||| ".join(("SCORE", *map(text, captions), text(prediction)))
        for prediction, captions in zip(predictions, references, strict=True)
    ]
    statistics: list[str] = []

    def attempt(until: float) -> Score:
        with tempfile.TemporaryDirectory(prefix="raycap-meteor-") as folder, _Java(command, Path(folder)) as java:
            java.send(requests[len(statistics) :])
            while len(statistics) < len(requests):
                statistics.append(_expect(_STATISTICS, java.receive(until)))
            java.send([" ||| ".join(("EVAL", *statistics))])
            values = [float(_expect(_NUMBER, java.receive(until))) for _ in range(len(requests) + 1)]
            return Score(values[-1], values[:-1])

    return _with_one_restart(attempt, deadline_s)


def _expect(pattern: re.Pattern[str], line: str) -> str:
    if not pattern.fullmatch(line):
        raise JavaError(f"java answered what is not a score: {line[:80]!r}")
    return line


def spice_models() -> Path:
    """The folder with SPICE's parser models. Raises JavaError with the remedy where they are not."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raycap" / "spice"
    candidates = [Path(os.environ.get(SPICE_MODELS_VARIABLE) or default), _package_folder() / "spice" / "lib"]
    for folder in candidates:
        if all((folder / jar).is_file() for jar in SPICE_MODELS):
            return folder
    raise JavaError(
        f"SPICE's parser models are not in {candidates[0]}; `make spice` fetches them, or name the folder that holds "
        f"{' and '.join(SPICE_MODELS)} in {SPICE_MODELS_VARIABLE}"
    )


def spice(
    predictions: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    extras: dict[str, Any],
    *,
    deadline_s: float,
) -> Score:
    """SPICE 1.0 over tokenized captions; its sub-categories' mean F-scores go to `extras["SPICE categories"]`.

    A category that neither caption nor references mention has no F-score in an image, and the mean leaves it out,
    as pycocoevalcap does. Raises JavaError.
    """
    folder = _package_folder() / "spice"
    heap = java_command(_SPICE_HEAP_MB)
    models = spice_models()
    # Java 16 and later close these packages, which SPICE's serializer reads.
    opens = [
        f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.lang", "java.util", "java.math", "java.net")
    ]
    paths = [folder / "spice-1.0.jar", folder / "lib" / "*", *(models / jar for jar in SPICE_MODELS)]
    data = [
        {"image_id": i, "test": " ".join(prediction), "refs": [" ".join(caption) for caption in captions]}
        for i, (prediction, captions) in enumerate(zip(predictions, references, strict=True))
    ]

    def attempt(until: float) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="raycap-spice-") as temporary:
            source, target = Path(temporary, "in.json"), Path(temporary, "out.json")
            source.write_text(json.dumps(data), encoding="utf-8")
            main = ["edu.anu.spice.SpiceScorer", str(source), "-out", str(target), "-subset", "-silent"]
            with _Java([*heap, *opens, "-cp", os.pathsep.join(map(str, paths)), *main], Path(temporary)) as java:
                java.finish(until)
            try:
                items = sorted(json.loads(target.read_text(encoding="utf-8")), key=lambda item: item["image_id"])
                return [item["scores"] | {"All": {"f": float(item["scores"]["All"]["f"])}} for item in items]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise JavaError(f"SPICE wrote no readable result ({error})") from error

    results = _with_one_restart(attempt, deadline_s)
    if len(results) != len(data):
        raise JavaError(f"SPICE scored {len(results)} of {len(data)} images")
    categories = {}
    for theirs, ours in SPICE_CATEGORIES.items():
        values = [
            item[theirs]["f"] for item in results if theirs in item and isinstance(item[theirs]["f"], int | float)
        ]
        values = [value for value in values if value == value]
        categories[ours] = float(np.mean(values)) if values else None
    extras["SPICE categories"] = categories
    values = [item["All"]["f"] for item in results]
    return Score(float(np.mean(values)), values)
