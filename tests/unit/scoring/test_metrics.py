"""Metrics against pycocoevalcap's scorers and the published scores, and the files of `raycap score`."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycap.jobs.score import score
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.caption_files import read_predictions, write_predictions
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores import ngrams
from raycap.pipeline.evaluation.scores import words as ptb
from raycap.pipeline.evaluation.scores.metrics import BLEU, score_captions, why_unavailable
from raycap.pipeline.evaluation.scores.words import caption_stats

SHARED = Path(os.environ.get("RAYCAP_SHARED") or Path(__file__).parents[3].parent / "shared")
WITHOUT_JAVA = (*BLEU, "ROUGE-L", "CIDEr-D")
REFERENCES = {1: ["A dog runs.", "The dog is running fast"], 2: ["Two cats sleep", "cats on a bed"], 3: ["A red bus"]}
PREDICTIONS = {1: "a dog is running", 2: "two cats on a bed", 3: "a bus"}


def made_up(images: int, seed: int) -> tuple[dict[int, list[str]], dict[int, str]]:
    """Captions from few words, so that n-grams repeat and overlap; some are empty, of one word, or shared."""
    source = random.Random(seed)
    words = ["a", "the", "man", "dog", "on", "red", "street", "1 1/2", "it's", "t-shirt", "x"]

    def caption() -> str:
        return " ".join(source.choice(words) for _ in range(source.choice([0, 1, 2, 3, 5, 8, 13, 20])))

    references = {image: [caption() for _ in range(source.randint(1, 7))] for image in range(images)}
    predictions = {image: source.choice([caption(), source.choice(references[image])]) for image in range(images)}
    return references, predictions


def upstream(references: dict[int, list[str]], predictions: dict[int, str]) -> dict[str, tuple[float, np.ndarray]]:
    """pycocoevalcap's scorers on our tokens."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    gts = {image: [" ".join(ptb.tokenize(text)) for text in texts] for image, texts in references.items()}
    res = {image: [" ".join(ptb.tokenize(text))] for image, text in predictions.items()}
    values, each = Bleu(4).compute_score(gts, res, verbose=0)
    bleu = {name: (values[n], np.array(each[n])) for n, name in enumerate(BLEU)}
    return bleu | {"ROUGE-L": Rouge().compute_score(gts, res), "CIDEr-D": Cider().compute_score(gts, res)}


@pytest.mark.parametrize(("images", "seed"), [(2, 0), (3, 1), (40, 2), (400, 3)])
def test_equal_to_pycocoevalcap(images: int, seed: int) -> None:
    references, predictions = made_up(images, seed)
    ours = score_captions(references, predictions, metrics=WITHOUT_JAVA)
    for name, (value, each) in upstream(references, predictions).items():
        assert ours.by_name[name].value == pytest.approx(value, abs=1e-9), name
        np.testing.assert_allclose(ours.by_name[name].per_image, each, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.proof
def test_published_scores(real_java: None) -> None:
    folder = SHARED / "data" / "coco_captions"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    references = read_references(folder / "captions_val2014.json.gz").references()
    predictions = read_predictions(folder / "captions_val2014_fakecap_results.json.gz")
    wanted = {"BLEU-1": 0.579, "BLEU-2": 0.404, "BLEU-3": 0.279, "BLEU-4": 0.191, "ROUGE-L": 0.396, "CIDEr-D": 0.600}
    if shutil.which("java"):
        wanted["METEOR"] = 0.195
    scores = score_captions(references, predictions, metrics=tuple(wanted))
    assert len(scores.image_ids) == 1000
    assert {name: score.value for name, score in scores.by_name.items()} == pytest.approx(wanted, abs=0.001)
    assert scores.extras["references_without_prediction"] == 39_504
    # pycocoevalcap 1.2 itself, with its Java tokenizer
    assert scores.by_name["CIDEr-D"].value == pytest.approx(0.5997905185184199, abs=1e-9)
    assert scores.by_name["ROUGE-L"].value == pytest.approx(0.39625269357570847, abs=1e-9)
    if "METEOR" in wanted:
        assert scores.by_name["METEOR"].value == pytest.approx(0.19525467177780284, abs=1e-9)
        assert "meteor-1.5" in scores.signature


def test_meteor_of_a_reference_is_1(real_java: None) -> None:
    if (reason := why_unavailable("METEOR")) is not None:
        pytest.skip(reason)
    predictions = {1: REFERENCES[1][0], 2: "zebra"}
    references = {image: REFERENCES[image] for image in predictions}
    assert score_captions(references, predictions, metrics=["METEOR"]).by_name["METEOR"].per_image == [1.0, 0.0]


def test_ngrams_are_counted_exactly_for_large_vocabularies() -> None:
    """More than 2^15 words: an n-gram key with too few bits per word would merge n-grams."""
    captions = [[f"w{word}" for word in range(start, start + 7)] for start in range(0, 140_000, 7)]
    references = [[caption, ["nothing", "alike", "at", "all"]] for caption in captions]
    corpus = ngrams.Corpus.build(captions, references)
    assert ngrams.bleu(corpus)[0][3] == pytest.approx(1.0)
    np.testing.assert_allclose(ngrams.cider_d(corpus), 5.0)  # 10, half of it from each reference
    shifted = ngrams.Corpus.build([*captions[1:], captions[0]], references)
    assert ngrams.cider_d(shifted).max() == 0.0


def test_references_without_prediction_are_left_out_of_document_frequencies() -> None:
    references, predictions = made_up(60, 6)
    some = {image: text for image, text in predictions.items() if image % 3 == 0}
    ours = score_captions(references, some, metrics=["CIDEr-D"])
    alone = score_captions({image: references[image] for image in some}, some, metrics=["CIDEr-D"])
    assert ours.by_name == alone.by_name
    assert ours.extras["references_without_prediction"] == 40


def test_signature_names_what_scores_depend_on() -> None:
    scores = score_captions(REFERENCES, PREDICTIONS, metrics=WITHOUT_JAVA)
    parts = dict(part.split(":", 1) for part in scores.signature.split("|"))
    assert parts["tok"] == ptb.SIGNATURE and parts["df"] == "corpus(3 images)" and parts["refs"] == "1-2"
    assert parts["eos"] == "none" and parts["as"] == "pycocoevalcap-1.2" and "raycap" in parts


def test_caption_stats() -> None:
    captions = [["a", "man", "a", "man", "on", "a"], ["the", "the", "dog"], [], ["a", "dog", "on", "it"]]
    stats = caption_stats(captions)
    assert stats["broken_endings"] == 0.25  # "... on a"; "on it" is whole
    assert stats["doubled_words"] == 0.25
    assert stats["repeated_ngrams"] == {"2": 0.25, "3": 0.0, "4": 0.0}
    assert stats["mean_length"] == 13 / 4 and stats["distinct_words"] == 6
    assert stats["empty"] == 0.25


# Files ------------------------------------------------------------------------------------------------------------


def write(path: Path, content: Any, zipped: bool = False) -> Path:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def coco(references: dict[int, list[str]]) -> dict[str, Any]:
    annotations = [{"image_id": image, "caption": text} for image, texts in references.items() for text in texts]
    return {"images": [{"id": image} for image in references], "annotations": annotations}


def karpathy(references: dict[int, list[str]], key: str = "cocoid") -> dict[str, Any]:
    return {
        "images": [
            {key: image, "split": "test" if image < 3 else "train", "sentences": [{"raw": text} for text in texts]}
            for image, texts in references.items()
        ]
    }


def results(predictions: dict[Any, str]) -> list[dict[str, Any]]:
    return [{"image_id": image, "caption": text} for image, text in predictions.items()]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("layout", [coco, karpathy, lambda refs: karpathy(refs, "imgid")])
def test_reference_layouts(layout: Any, zipped: bool, tmp_path: Path) -> None:
    assert read_references(write(tmp_path / "refs", layout(REFERENCES), zipped)).references() == REFERENCES


IDS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 9).map(lambda number: f"{number:03d}"),
    st.sampled_from(
        ["img_003", "1_000", "1.0", "-0", "\uff11\uff12", "a,b", 'a "b"', "c\\", " d ", "\u2028", "True", "nan"]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), min_size=1, max_size=5),
)


def write_form(folder: Path, form: str, references: dict[Any, list[str]]) -> Path:
    """An annotation file with these ids. In a CSV file a number is its digits."""
    path = folder / f"set.{form}"
    names = {image: f"{number}.jpg" for number, image in enumerate(references)}
    if form == "coco":
        content = coco(references)
        content["images"] = [{"id": image, "file_name": name} for image, name in names.items()]
        return write(folder / "coco.json", content)
    if form == "karpathy":
        content = karpathy({number: texts for number, texts in enumerate(references.values())}, "imgid")
        for entry, (image, name) in zip(content["images"], names.items(), strict=True):
            entry |= {"filename": name, "imgid": image} if len(str(image)) % 2 else {"filename": name, "cocoid": image}
        return write(folder / "karpathy.json", content)
    rows = [{"image": names[image], "id": image, "captions": texts} for image, texts in references.items()]
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "id", "captions"])
        writer.writeheader()
        writer.writerows({**row, "captions": json.dumps(row["captions"])} for row in rows)
    return path


@pytest.mark.parametrize("form", ["coco", "karpathy", "jsonl", "csv"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(IDS, min_size=2, max_size=6, unique_by=str))
def test_ids_leave_as_they_came(form: str, tmp_path: Path, ids: list[Any]) -> None:
    """Predictions have the ids of the annotation file, with their types, and can be scored against it."""
    references = {image: [f"a dog and {number} cats", "a dog"] for number, image in enumerate(ids)}
    path = write_form(tmp_path, form, references)
    dataset = read_annotations(DataSection(root=str(tmp_path), annotations=path.name), tmp_path).dataset
    found = dataset.source_ids()
    assert list(map(str, found)) == list(map(str, ids))
    assert form == "csv" or list(map(type, found)) == list(map(type, ids))
    assert len({*dataset.column("image_id")}) == len(ids)
    assert read_references(path).references() == dataset.references()
    write_predictions(tmp_path / "results.json", {image: texts[0] for image, texts in dataset.references().items()})
    assert score(path, tmp_path / "results.json", metrics=("BLEU-1",)).values["BLEU-1"] == pytest.approx(1)


# raycap score -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    some = {image: text for image, text in PREDICTIONS.items() if image != 2}
    return write(tmp_path / "refs.json", karpathy(REFERENCES)), write(tmp_path / "res.json", results(some), zipped=True)


def test_score_prints_and_writes(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = files[0].parent
    targets = {"json_file": folder / "s.json", "per_image": folder / "s.csv"}
    scores = score(*files, **targets, metrics=WITHOUT_JAVA)
    printed = capsys.readouterr().out
    assert "1 of 3 reference images have no prediction" in printed and scores.signature in printed
    assert f"CIDEr-D   {scores.by_name['CIDEr-D'].value:.3f}" in printed and "s.csv" in printed
    written = json.loads((folder / "s.json").read_text())
    assert written["scores"]["BLEU-1"] == scores.by_name["BLEU-1"].value and written["images"] == 2
    with (folder / "s.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["image_id"] for row in rows] == ["1", "3"] and rows[0]["caption"] == PREDICTIONS[1]
    assert [float(row["CIDEr-D"]) for row in rows] == scores.by_name["CIDEr-D"].per_image
    assert not list(folder.glob(".*"))


def test_score_needs_every_image_of_a_split(files: tuple[Path, Path]) -> None:
    write(files[1], results({1: PREDICTIONS[1]}))
    with pytest.raises(UserError, match=r"1 of \d images .* no prediction .* \(image ids 2\)"):
        score(*files, split="test", metrics=WITHOUT_JAVA)


def test_score_of_one_image_gives_the_reason(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write(files[1], results({1: ""}))
    score(*files, metrics=WITHOUT_JAVA)
    printed = capsys.readouterr().out
    assert "CIDEr-D   unavailable: one image only" in printed and "1 of the captions have no words" in printed
