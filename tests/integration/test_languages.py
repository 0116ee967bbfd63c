"""A small run in another language, without Ray: from captions to scores, the bundle and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.gallery import compute_maps
from raycap.pipeline.data.caption_files import read_predictions
from raycap.pipeline.data.vocabulary import UNK
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle, bundle_protocol, load_bundle
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.evaluation.scores.split_result import Hypothesis
from raycap.pipeline.runs.run_bundle import bundle_run
from raycap.pipeline.runs.run_report import make_report, report_images, score_table
from raycap.pipeline.runs.run_scores import score_run, split_result
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from raycap.pipeline.training.split_captions import caption_split
from raycap.pipeline.training.stage_output import StageOutput
from tests.support.runs import FROZEN_STAGES, prepare_run

SCENES = {"num_images": 60, "image_size": 32, "seed": 3}


def changes(language: str, tokenizer: str) -> dict[str, Any]:
    scenes = {"data__synthetic": SCENES | {"language": language}, "data__language": language}
    return scenes | {"data__tokenizer": tokenizer, "data__subword_vocabulary": 400, "evaluation__max_length": 20}


@pytest.mark.parametrize(("language", "tokenizer"), [("ar", "unicode"), ("zh", "characters"), ("hi", "subword")])
def test_a_run_in_another_language(tmp_path: Path, language: str, tokenizer: str) -> None:
    folder, store = prepare_run(tmp_path, **changes(language, tokenizer))
    captions = folder.dataset.references()
    encoded = [folder.vocabulary.encode(folder.vocabulary.tokenize(text)) for text in captions[1]]
    assert folder.vocabulary.tokenizer == tokenizer and folder.vocabulary.ids[UNK] not in {
        each for row in encoded for each in row
    }
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    results = []
    output = StageOutput(folder, FROZEN_STAGES[-1], True, "", "")
    for split in ("val", "test", "novel"):
        caption_split(LocalContext("cpu"), folder, split, store, (), output)
        texts = read_predictions(folder.path / "predictions" / f"{split}.json")
        best = {int(image): Hypothesis(text, 0.0) for image, text in texts.items()}
        results.append(split_result(split, best, {}, {}, ""))
    scores = score_run(folder, folder.dataset, results)
    test = scores.splits[1]
    assert test.signature.startswith(f"tok:{'characters' if language == 'zh' else 'unicode'}-1|lang:{language}|")
    assert test.main_object is not None and test.values["CIDEr-D"] is not None
    assert test.values["METEOR"] is None and scores.unavailable == {}
    assert "METEOR is defined for English captions only" in str(score_table(scores.splits))
    stored = json.loads((folder.path / "scores.json").read_text())
    assert (stored["protocol"]["language"], f"captions in {language}" in stored["signature"]) == (language, True)
    bundle = bundle_run(folder)
    loaded = load_bundle(bundle)
    assert loaded.vocabulary == folder.vocabulary and bundle_protocol(loaded.config).language == language
    images = report_images(test, folder.dataset.split("test"), StorageOptions())
    source = StoredBundle(storage_path(bundle))
    maps = dict(compute_maps(images[:2], set(), source, folder.config, store, folder.dataset.split("test")))
    images = [replace(image, **maps.get((image.split, image.image_id), {})) for image in images]
    make_report(folder, folder.dataset, scores, {}, images)
    page = (folder.path / "report.html").read_text()
    assert f'lang="{language}" dir="auto" data-reference' in page


def test_validations_of_subwords_score_words(tmp_path: Path) -> None:
    folder, store = prepare_run(tmp_path, **changes("en", "subword"))
    run = StageRun(LocalContext("cpu"), folder, folder.config.stage(FROZEN_STAGES[0]), StageJob(folder, (), store))
    run.output.close()
    vocabulary, references = run.vocabulary, folder.dataset.split("val").references()
    texts = {image: captions[number % 5] for number, (image, captions) in enumerate(references.items())}
    best = {
        image: Hypothesis(text, 0.0, tokens=tuple(vocabulary.encode(vocabulary.tokenize(text))))
        for image, text in texts.items()
    }
    value = score_captions(references, texts, metrics=("CIDEr-D",)).values["CIDEr-D"]
    assert value is not None and value > 1
    assert run._score(best) == pytest.approx(value, rel=1e-9)
