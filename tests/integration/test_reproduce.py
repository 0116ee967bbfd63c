"""`raycap reproduce` on checkpoints of the reference implementations with small random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from pycocoevalcap.cider.cider import Cider

from raycap.jobs.cli import main
from raycap.jobs.reproduce import PUBLISHED
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.search import collapsed
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.captioning.upstream import read_expansionnet_vocabulary
from tests.support.golden import EXPANSIONNET, EXPANSIONNET_SETTINGS, SWIN_SETTINGS, write_published_form
from tests.support.golden import MESHED_MEMORY as MESHED
from tests.support.golden import MESHED_WORDS as WORDS

IDS = (37209, 91, 500_000)
EXPANSION_SETTINGS = [part for setting in (*EXPANSIONNET_SETTINGS, *SWIN_SETTINGS) for part in ("--set", setting)]
MESHED_SETTINGS = ["--set", "model.num_heads=4", "--set", "model.attended_regions=null"]


def write_splits(folder: Path, words: list[str]) -> dict[int, list[str]]:
    """Writes Karpathy's file for three test images and one training image. Returns the captions of the test images."""
    generator = np.random.default_rng(3)
    entries, references = [], {}
    for number, image in enumerate((*IDS, 7)):
        captions = [" ".join(generator.choice(words, 6)) for _ in range(5)]
        split, name = ("test", "val2014") if number < len(IDS) else ("train", "train2014")
        filename = f"COCO_{name}_{image:012d}.jpg"
        sentences = [{"raw": caption, "tokens": caption.split()} for caption in captions]
        entries.append(
            {"filepath": name, "filename": filename, "cocoid": image, "split": split, "sentences": sentences}
        )
        references[image] = captions
    (folder / "dataset_coco.json").write_text(json.dumps({"images": entries, "dataset": "coco"}))
    return {image: references[image] for image in IDS}


def cider(references: dict[int, list[str]], captions: dict[int, str]) -> float:
    """CIDEr-D by pycocoevalcap, for captions that its tokenizer would not change."""
    value, _ = Cider().compute_score(references, {image: [caption] for image, caption in captions.items()})
    return float(value)


def scores(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation" / "scores.json").read_text())


@pytest.mark.proof
@pytest.mark.ray
def test_expansionnet_from_its_published_files(tmp_path: Path, ray_session: None, log_lines: list[str]) -> None:
    files = tmp_path / "the files"
    (files / "val2014").mkdir(parents=True)
    shutil.copy(EXPANSIONNET / "end_to_end_checkpoint.pth", files / "rf_model.pth")
    shutil.copy(EXPANSIONNET / "tokens.pickle", files / "demo_coco_tokens.pickle")
    words = read_expansionnet_vocabulary(EXPANSIONNET / "tokens.pickle").words
    references = write_splits(files, [word for word in words if word.isalnum() and word.islower()])
    generator = np.random.default_rng(0)
    for image in IDS:
        pixels = generator.integers(0, 256, (6, 6, 3), np.uint8)
        Image.fromarray(pixels).resize((64, 50)).save(files / "val2014" / f"COCO_val2014_{image:012d}.jpg")
    out = tmp_path / "out"
    command = ["reproduce", str(files), "--out", str(out), *EXPANSION_SETTINGS]
    assert main(command) == 0
    entry = scores(out / "expansionnet_v2")
    bundle = load_bundle(out / "expansionnet_v2" / "bundle")
    service = CaptionService(bundle)
    assert service.search.beam_size == 5 and entry["protocol"]["objective"] == "scst"
    captions = {}
    for image in IDS:  # one at a time and without Ray
        content = (files / "val2014" / f"COCO_val2014_{image:012d}.jpg").read_bytes()
        captions[image] = service.caption(service.pixels(content)[None])[0].caption
    assert any(captions.values())
    found = entry["splits"]["test"]["scores"]["CIDEr-D"]
    assert found == pytest.approx(cider(references, captions), abs=1e-6) and found > 0
    (row,) = (row for row in entry["splits"]["test"]["published"] if row["name"] == "ExpansionNet v2, SCST (paper)")
    assert row["scores"]["CIDEr-D"] == 1.404
    reason = "not comparable: published: 5,000 images of Karpathy's COCO test split, ours: 3;"
    assert row["difference"].startswith(reason)
    text = "\n".join(log_lines)
    assert "ExpansionNet v2, SCST (paper)" in text and f"{found - 1.404:+.3f}" in text
    assert log_lines[-1] == f"report       {out / 'expansionnet_v2' / 'evaluation' / 'report-test.html'}"
    (files / "val2014" / f"COCO_val2014_{IDS[1]:012d}.jpg").unlink()
    assert main(command) == 1  # one image cannot be read


@pytest.mark.ray
def test_the_golden_score_of_the_meshed_memory_transformer(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = np.load(MESHED / "expected.npz")
    shutil.copy(MESHED / "checkpoint.pth", tmp_path / "meshed_memory_transformer.pth")
    write_published_form(tmp_path / "vocab.pkl", WORDS, monkeypatch)
    references = write_splits(tmp_path, WORDS[4:])
    with h5py.File(tmp_path / "coco_detections.hdf5", "w") as file:  # of test images only
        for image, features in zip(IDS, recorded["features"], strict=True):
            file[f"{image}_features"] = features
    golden = {}
    for image, ids in zip(IDS, recorded["beam_sequences"][:, 0].tolist(), strict=True):
        golden[image] = collapsed(" ".join(WORDS[word] for word in ids[: ids.index(3)]))
    out = tmp_path / "out"
    length = ["--set", "evaluation.max_length=11"]  # the recorded searches have 10 tokens after the first
    assert main(["reproduce", str(tmp_path), "--out", str(out), *MESHED_SETTINGS, *length]) == 0
    entry = scores(out / "meshed_memory")
    assert entry["splits"]["test"]["scores"]["CIDEr-D"] == pytest.approx(cider(references, golden), abs=1e-6)
    predictions = json.loads((out / "meshed_memory" / "evaluation" / "predictions-test.json").read_text())
    assert {row["image_id"]: row["caption"] for row in predictions} == golden
    assert entry["signature"].startswith("meshed_memory, region features, SCST, no EOS in the reward, beam 5")
    assert entry["protocol"]["ranking"] == "sum" and entry["protocol"]["collapse_repeats"]


def test_missing_files_are_named_with_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*options: str) -> str:
        assert main(["reproduce", str(tmp_path), "--out", str(tmp_path / "out"), *options]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and not (tmp_path / "out").exists()
        return lines[0]

    both = refusal()
    assert "has no published checkpoint; put one of these files there: rf_model.pth (" in both
    assert "meshed_memory_transformer.pth (the checkpoint, linked in the README of github.com/aimagelab/" in both
    published = PUBLISHED["expansionnet_v2"]
    (tmp_path / "rf_model.pth").touch()
    text = refusal("--system", "expansionnet_v2")
    for missing in published.files.keys() - {"rf_model.pth"}:
        assert f"{missing} ({published.files[missing]})" in text
