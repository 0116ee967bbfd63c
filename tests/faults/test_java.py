"""METEOR and SPICE with a Java that is missing, hangs, dies or prints garbage: reported, within the deadline.

What hangs or dies is in `make proof`.
"""

from __future__ import annotations

import importlib.util
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from raycap.pipeline.evaluation.scores import java as java_module
from raycap.pipeline.evaluation.scores.metrics import Score, score_captions
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


def test_spice_reads_scores(java, models: None) -> None:
    java("""
        import json, sys
        items = json.load(open(sys.argv[sys.argv.index("-out") - 1]))
        assert items[3] == {"image_id": 3, "test": "a dog runs 3", "refs": ["a dog number 3 runs", "the dog is here"]}
        def scores(n):
            return {"All": {"f": n / 20}, "Object": {"f": 0.5}}
        out = [{"image_id": item["image_id"], "scores": scores(item["image_id"])} for item in reversed(items)]
        json.dump(out, open(sys.argv[sys.argv.index("-out") + 1], "w"))
    """)
    score = spice(10)
    assert score.per_image == [n / 20 for n in range(20)] and score.value == pytest.approx(0.475)
