"""A small run in another language, without Ray: from captions to scores, the bundle and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.synthetic.scenes import write_dataset
from raycap.pipeline.data.vocabulary import UNK
from raycap.pipeline.evaluation.captioning.bundle import bundle_protocol, load_bundle
from raycap.pipeline.evaluation.evaluate import Options, evaluate
from raycap.pipeline.evaluation.reports.page import report_html
from raycap.pipeline.evaluation.reports.report import report, score_table
from raycap.pipeline.evaluation.results import RankedCaption
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.search.trial import split_captions
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.support.captioning import captions_of
from tests.support.runs import FROZEN_STAGES, prepare_run
from tests.support.scripts import in_devanagari

SCENES = {"num_images": 60, "image_size": 32, "seed": 3}


def changes(folder: Path, language: str, tokenizer: str) -> dict[str, Any]:
    """The keys of a run on scenes in a language. The captions in hi, which has no grammar, are written to a folder."""
    keys = {"data__tokenizer": tokenizer, "data__subword_vocabulary": 400, "evaluation__max_length": 20}
    if language != "hi":
        return keys | {"data__synthetic": SCENES | {"language": language}, "data__language": language}
    write_dataset(folder / "scenes", SceneConfig(**SCENES))
    content = json.loads((folder / "scenes/dataset.json").read_text())
    for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
        sentence["raw"] = in_devanagari(sentence["raw"])
    (folder / "scenes/dataset.json").write_text(json.dumps(content))
    return keys | {"data__synthetic": None, "data__root": str(folder / "scenes"), "data__language": language}


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [pytest.param("hi", "unicode", marks=pytest.mark.proof), ("zh", "characters"), ("hi", "subword")],
)
def test_a_run_in_another_language(tmp_path: Path, language: str, tokenizer: str) -> None:
    folder, store = prepare_run(tmp_path, **changes(tmp_path, language, tokenizer))
    references = folder.dataset.references()
    encoded = [folder.vocabulary.encode(folder.vocabulary.tokenize(text)) for text in references[1]]
    assert folder.vocabulary.tokenizer == tokenizer and folder.vocabulary.ids[UNK] not in {
        each for row in encoded for each in row
    }
    job = StageJob(folder, FROZEN_STAGES, store)
    train_stages(LocalContext("cpu"), job)
    captions = {split: captions_of(split_captions(job, split)) for split in ("val", "test", "novel")}
    bundle, images = bundle_run(folder), {split: folder.dataset.split(split) for split in captions}
    features = folder.config.features.model_copy(update={"store": "never"})
    config = folder.config.model_copy(update={"features": features})
    scores = evaluate([storage_path(bundle)], images, config, None, Options(captions=captions))
    test = scores.splits[1]
    assert test.signature.startswith(f"tok:{'characters' if language == 'zh' else 'unicode'}-1|lang:{language}|")
    assert (test.main_object is None) == (language == "hi") and test.values["CIDEr-D"] is not None
    assert test.values["METEOR"] is None and scores.unavailable == {}
    assert "METEOR is defined for English captions only" in str(score_table(scores.splits))
    stored = scores.to_json()
    assert (stored["protocol"]["language"], f"captions in {language}" in stored["signature"]) == (language, True)
    loaded = load_bundle(bundle)
    assert loaded.vocabulary == folder.vocabulary and bundle_protocol(loaded.config).language == language
    page = report_html(report(scores, config.storage.options, title="a", run_id="a", pictured=["test"]))
    assert f'lang="{language}" dir="auto" data-reference' in page


def test_validations_of_subwords_score_words(tmp_path: Path) -> None:
    folder, store = prepare_run(tmp_path, **changes(tmp_path, "en", "subword"))
    run = StageRun(LocalContext("cpu"), folder, folder.config.stage(FROZEN_STAGES[0]), StageJob(folder, (), store))
    run.output.close()
    vocabulary, references = run.vocabulary, folder.dataset.split("val").references()
    texts = {image: captions[number % 5] for number, (image, captions) in enumerate(references.items())}
    best = {
        image: RankedCaption(text, 0.0, ids=tuple(vocabulary.encode(vocabulary.tokenize(text))))
        for image, text in texts.items()
    }
    value = score_captions(references, texts, metrics=("CIDEr-D",)).values["CIDEr-D"]
    assert value is not None and value > 1
    assert run._score(best) == pytest.approx(value, rel=1e-9)
