"""METEOR and SPICE with a Java that is missing, hangs, dies or prints garbage: reported, within the deadline.

What hangs or dies is in `make proof`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from raycap.pipeline.evaluation.scores import java as java_module
from raycap.pipeline.evaluation.scores.metrics import Score, score_captions, why_unavailable
from tests.conftest import METEOR, write_java

REFERENCES = {n: [f"a dog number {n} runs", "the dog is here"] for n in range(20)}
PREDICTIONS = {n: f"a dog runs {n}" for n in range(20)}
DEADLINE_S = 2.0
SLACK_S = 5.0  # for starting processes on a busy machine; programs that hang do so for 1000 s


@pytest.fixture(autouse=True)
def _everything_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process and no temporary file is left behind."""
    if importlib.util.find_spec("pycocoevalcap") is None:
        pytest.skip("the package pycocoevalcap is missing")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a Python program in place of java."""

    def install(program: str) -> None:
        write_java(tmp_path / "bin", textwrap.dedent(program))
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    return install


def meteor(deadline_s: float = DEADLINE_S) -> Score:
    """METEOR's score; checks that the other metrics have values and that the deadline held."""
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(java_module, "METEOR_DEADLINE_S", (deadline_s, 0))
        scores = score_captions(REFERENCES, PREDICTIONS, metrics=["BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D"])
    assert time.monotonic() - start < deadline_s + SLACK_S
    for name in ("BLEU-4", "ROUGE-L", "CIDEr-D"):
        assert scores.by_name[name].value is not None and scores.by_name[name].unavailable is None
    score = scores.by_name["METEOR"]
    assert (score.value is None) == (score.unavailable is not None)
    return score


def test_no_java_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "java not found on the PATH" in (meteor().unavailable or "")
    spice = score_captions(REFERENCES, PREDICTIONS, metrics=["SPICE"]).by_name["SPICE"]
    assert spice.value is None and "java not found" in (spice.unavailable or "")


def test_a_working_stand_in_scores(java) -> None:
    java(METEOR)
    score = meteor(60)
    assert score.value == 0.25 and score.per_image == [0.25] * 20


@pytest.mark.proof
@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.stdout.buffer.write(bytes(range(128, 256)) + b'\\n')",
        "import sys\nwhile True: sys.stdout.write('1' * 4096)",
        METEOR.replace('"0.25"', '"zero"'),
    ],
)
def test_prints_garbage(java, program: str) -> None:
    java(program)
    reason = meteor(10).unavailable or ""
    assert "what is not a score" in reason


# SPICE ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for jar in java_module.SPICE_MODELS:
        (folder / jar).touch()
    monkeypatch.setenv(java_module.SPICE_MODELS_VARIABLE, str(folder))
    monkeypatch.setattr(java_module, "free_memory_mb", lambda: 16_000.0)


def spice(deadline_s: float = DEADLINE_S):
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(java_module, "SPICE_DEADLINE_S", (deadline_s, 0))
        scores = score_captions(REFERENCES, PREDICTIONS, metrics=["SPICE"])
    assert time.monotonic() - start < deadline_s + SLACK_S
    return scores.by_name["SPICE"]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(1000)", "no answer within the deadline"),
        ("raise SystemExit(4)", "exit code 4"),
        ("import sys; open(sys.argv[sys.argv.index('-out') + 1], 'w').write('[{}]')", "java failed"),
    ],
)
def test_spice_failures_are_reported(java, models: None, program: str, reason: str) -> None:
    java(program)
    score = spice(DEADLINE_S if "sleep" in program else 20)
    assert score.value is None and reason in (score.unavailable or "")


# A stand-in for SPICE's programs. Its database lists the parsed sentences, one per line. F is the last number of a
# prediction, divided by 20.
SPICE = """
import json, sys
def scores(text):
    return {"All": {"f": int(text.split()[-1]) / 20}, "Object": {"f": 0.5}}
if "parse.js" in sys.argv:
    for line in sys.stdin:
        with open("parsed/data.mdb", "a") as database:
            database.writelines(f"{sentence}\\n" for sentence in json.loads(line))
        print("parsed", flush=True)
else:
    items = json.load(open("in.json"))
    if "-cache" in sys.argv:
        parsed = open("parsed/data.mdb").read().splitlines()
        assert {text for item in items for text in (item["test"], *item["refs"])} <= set(parsed)
    out = [{"image_id": item["image_id"], "scores": scores(item["test"])} for item in reversed(items)]
    json.dump(out, open(sys.argv[sys.argv.index("-out") + 1], "w"))
"""
VALUES = [n / 20 for n in range(20)]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of parsed sentences, in a new cache."""
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spice" / "parsed.gz"


def sentences_in(kept: Path) -> list[str]:
    return gzip.decompress(kept.read_bytes()).decode().splitlines()


def test_spice_reads_scores_and_keeps_sentences_once(java, models: None, kept: Path) -> None:
    java(SPICE)
    score = spice(60)
    assert score.per_image == VALUES and score.value == pytest.approx(0.475)
    assert sorted(sentences_in(kept)) == sorted(
        {*PREDICTIONS.values(), *(text for n in range(20) for text in REFERENCES[n])}
    )


def test_equal_images_are_scored_once(java, models: None, kept: Path) -> None:
    java(SPICE.replace("    out =", "    assert len(items) == 2\n    out ="))
    words, others = ["dog", "4"], ["dog", "6"]
    assert java_module.spice([words, others, words], [[words], [words], [words]]) == [0.2, 0.3, 0.2]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "garbage", "folder", "another user", "too large"])
def test_a_damaged_file_of_sentences_is_replaced(
    java, models: None, kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    java(SPICE)
    spice(60)
    whole, content = sentences_in(kept), bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 8
    if damage == "folder":
        kept.unlink()
        kept.mkdir()
    elif damage == "another user":
        monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    elif damage == "too large":
        monkeypatch.setattr(java_module, "MOST_KEPT_BYTES", 10)
    else:
        cut = kept.read_bytes()[:-20]
        kept.write_bytes({"cut": cut, "flipped": bytes(content), "empty": b"", "garbage": b"garbage"}[damage])
    caplog.clear()
    assert spice(60).per_image == VALUES
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if damage == "folder":  # cannot be replaced either
        assert len(warnings) == 2 and "not kept for later calls" in warnings[1]
    else:
        assert len(warnings) == (damage != "empty") and sentences_in(kept) == whole


@pytest.mark.parametrize("program", ["raise SystemExit('no such class')", "print('garbage', flush=True)"])
def test_without_a_cache_that_works_spice_parses_all(
    java, models: None, kept: Path, caplog: pytest.LogCaptureFixture, program: str
) -> None:
    java(SPICE.replace("def scores", f"if 'parse.js' in sys.argv or '-cache' in sys.argv:\n    {program}\ndef scores"))
    assert spice(60).per_image == VALUES and not kept.exists()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "runs without its cache" in warning


def test_a_cache_that_cannot_be_written_costs_a_warning(
    java, models: None, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    java(SPICE)
    kept.parent.parent.mkdir()
    kept.parent.touch()  # a file instead of a folder
    assert spice(60).per_image == VALUES
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "not kept for later calls" in warning


@pytest.mark.proof
def test_spice_itself_scores_the_same_with_and_without_its_cache(
    shared: Path, real_java: None, kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call parses in two requests, the second reads all parses, the third replaces what is damaged, and the
    last works as if there was no cache.
    """
    if reason := why_unavailable("SPICE"):
        pytest.skip(reason)
    content = json.loads((shared / "data" / "flickr8k_subset" / "dataset.json").read_text())
    captions = [[sentence["tokens"] for sentence in image["sentences"]] for image in content["images"][:25]]
    predictions = [image[0] for image in captions[1:]] + [captions[0][0]]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    first, second = (java_module.spice(predictions, captions) for _ in range(2))
    assert first == second and sum(first) > 0 and not caplog.records and kept.stat().st_size > 10_000
    kept.write_bytes(b"garbage")
    assert java_module.spice(predictions, captions) == first and len(caplog.records) == 1
    program = java_module.PARSE_SCRIPT.replace("parser.parse", "broken.parse")
    monkeypatch.setattr(java_module, "PARSE_SCRIPT", program)
    assert java_module.spice(predictions, captions) == first and "runs without its cache" in caplog.text
