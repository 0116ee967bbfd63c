"""`raycap check`: it finds what makes a data set unfit, and only warns of what is odd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.jobs.cli import main
from tests.conftest import ROOT, small_config, write_karpathy


def check(tmp_path: Path, root: Path, **data: Any) -> tuple[int, dict[str, Any]]:
    config = small_config(tmp_path / "storage", data={"root": str(root), "train_splits": ["train"], **data})
    config["data"].setdefault("min_count", 1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code = main(["check", str(tmp_path / "run.yaml"), "--json", str(tmp_path / "found.json")])
    return code, json.loads((tmp_path / "found.json").read_text())


def texts(found: dict[str, Any], kind: str) -> str:
    return "\n".join(finding["text"] for finding in found["findings"] if finding["kind"] == kind)


def change(root: Path, number: int, **values: Any) -> None:
    data = json.loads((root / "dataset.json").read_text())
    data["images"][number].update(values)
    (root / "dataset.json").write_text(json.dumps(data))


def test_a_sound_set_is_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 2})
    code, found = check(tmp_path, root)
    assert code == 0 and found["ok"] and not texts(found, "error")
    assert found["splits"] == {"test": 2, "train": 5, "val": 2}
    assert found["captions_per_image"]["train"] == {"5": 5} and len(found["fingerprint"]) == 64
    assert "mostly noise" in texts(found, "warning") and "fit to train on" in capsys.readouterr().out


def test_test_images_in_training_are_an_error(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 2})
    (root / "images" / "8.png").write_bytes((root / "images" / "0.png").read_bytes())
    code, found = check(tmp_path, root)
    assert code == 1 and "in training and in a held-out split" in texts(found, "error")
    assert found["duplicates"] == {"across_splits": 1, "elsewhere": 0}


def test_a_held_out_split_that_is_trained_on_is_a_warning(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 2})
    code, found = check(tmp_path, root, train_splits=["train", "Val "])
    warning = "split val is also in data.train_splits: its scores are those of images trained on"
    assert code == 0 and warning in texts(found, "warning") and "split test is also" not in texts(found, "warning")


def test_images_that_a_model_captioned_as_well_are_no_duplicates(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 2})
    (root / "images" / "1.png").write_bytes((root / "images" / "0.png").read_bytes())
    lines = [{"image": str(root / f"images/{number}.png"), "caption": "a color"} for number in range(4)]
    (root / "teacher.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources = [{"annotations": "dataset.json"}, {"annotations": "teacher.jsonl", "split": "model", "rewarded": False}]
    code, found = check(tmp_path, root, sources=sources, train_splits=["train", "model"])
    assert code == 0 and found["duplicates"] == {"across_splits": 0, "elsewhere": 1}
    assert "1 images repeat another image of their split" in texts(found, "warning")


def test_missing_and_broken_images_count_against_the_tolerance(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 16, "val": 2, "test": 2})
    (root / "images" / "1.png").unlink()
    (root / "images" / "2.png").write_bytes((root / "images" / "2.png").read_bytes()[:50])
    code, found = check(tmp_path, root, max_bad_fraction=0.1)
    assert code == 0 and len(found["unreadable"]) == 2 and "2 of 20 images" in texts(found, "warning")
    code, found = check(tmp_path, root, max_bad_fraction=0.05)
    assert code == 1 and "2 of 20 images" in texts(found, "error")


@pytest.mark.parametrize(("number", "code"), [(2, 1), (17, 0)])
def test_no_extraction_leaves_out_a_broken_training_image(tmp_path: Path, number: int, code: int) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 16, "val": 2, "test": 2})
    (root / "images" / f"{number}.png").write_bytes(b"")
    config = small_config(tmp_path / "storage", data={"root": str(root), "min_count": 1, "max_bad_fraction": 0.1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = ["check", str(tmp_path / "run.yaml"), "--json", str(tmp_path / "found.json"), "--set"]
    for store, expected in (("always", 0), ("never", code)):
        assert main([*command, f"features.store={store}"]) == expected
        errors = texts(json.loads((tmp_path / "found.json").read_text()), "error")
        assert ("1 training image cannot be decoded, and with features.store = never" in errors) is bool(expected)


def test_special_files_and_strange_names_are_reported(tmp_path: Path) -> None:
    """A pipe without a writer, an endless device, and a name that would clear the screen. Nothing hangs."""
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 2})
    for name in ("0.png", "1.png", "2.png"):
        (root / "images" / name).unlink()
    os.mkfifo(root / "images" / "0.png")
    (root / "images" / "1.png").symlink_to("/dev/zero")
    change(root, 2, filename="\x1b[2J\x1b]0;owned\x07.png", split="train")
    config = small_config(tmp_path / "storage", data={"root": str(root), "train_splits": ["train"], "min_count": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code = (
        "import resource, sys; from raycap.jobs.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))\n"
        "sys.exit(main(['check', *sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.yaml"), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "3 of 9 images cannot be used" in done.stdout and r"\x1b[2J\x1b]0;owned\x07.png" in done.stdout
    assert done.stdout.replace("\n", "").isprintable()
    unreadable = json.loads((tmp_path / "found.json").read_text())["unreadable"]
    reasons = {Path(uri).name: reason for uri, reason in unreadable.items()}
    assert reasons["0.png"] == reasons["1.png"] == "not a regular file"
    assert reasons["\x1b[2J\x1b]0;owned\x07.png"] == "No such file or directory"


@pytest.mark.parametrize(
    ("sentences", "kind", "text"),
    [
        ([{"raw": "a cat"}, {"raw": " . "}], "warning", "1 captions are empty"),
        ([{"raw": "a cat"}, {"raw": "word " * 100}], "warning", "1 captions have more than 60 words"),
        ([{"raw": "a cat"}, {"raw": 3}], "error", "captions are not text"),
        ([{"raw": "  "}], "error", "no caption with a word"),
    ],
)
def test_odd_captions_are_found(tmp_path: Path, sentences: list[Any], kind: str, text: str) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 2})
    change(root, 0, sentences=sentences)
    code, found = check(tmp_path, root)
    assert text in texts(found, kind) and code == (kind == "error")


def test_a_split_of_one_image_is_an_error_and_an_empty_one_a_mistake(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 5, "val": 2, "test": 1})
    code, found = check(tmp_path, root)
    assert code == 1 and "split test has too few images for CIDEr-D: 1, and 2" in texts(found, "error")
    config = small_config(tmp_path / "storage", data={"root": str(root), "test_splits": ["novel"], "min_count": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2


def with_captions(tmp_path: Path, splits: dict[str, list[str]]) -> Path:
    """A data set in which all images of a split have these captions."""
    root = write_karpathy(tmp_path / "set", {"train": 4, "val": 2, "test": 2})
    data = json.loads((root / "dataset.json").read_text())
    for entry in data["images"]:
        entry["sentences"] = [{"raw": caption} for caption in splits[entry["split"]]]
    (root / "dataset.json").write_text(json.dumps(data))
    return root


def test_unknown_words_of_validation_captions(tmp_path: Path) -> None:
    captions = {"train": ["a red circle", "a red star"], "val": ["a red cross", "a red star"], "test": ["a star"]}
    _, found = check(tmp_path, with_captions(tmp_path, captions))
    assert "16.7% of the words of validation captions are not in the vocabulary, such as 'cross'" in texts(
        found, "warning"
    )
    assert found["unknown_words"] == 0.1667
    known = captions | {"val": ["a red star"]}
    (tmp_path / "known").mkdir()
    _, found = check(tmp_path / "known", with_captions(tmp_path / "known", known))
    assert "vocabulary" not in texts(found, "warning")
    (tmp_path / "subword").mkdir()
    _, found = check(tmp_path / "subword", with_captions(tmp_path / "subword", captions), tokenizer="subword")
    assert found["unknown_words"] == 0.0
