"""`raycap evaluate`: one model, an ensemble, a comparison, the server's file, and unreadable images."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from raycap.jobs.evaluate import evaluate
from raycap.models.config import PLAIN
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.evaluation.captioning.on_cluster import SplitTask, TaskModel, caption_on_cluster
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.features.store import mark_complete, write_shard
from raycap.pipeline.storage.path import storage_path
from tests.conftest import ROOT, colors_config
from tests.support.bundles import make_bundle
from tests.support.golden import EXPANSIONNET, GOLDEN
from tests.support.golden import import_expansionnet as imported
from tests.support.runs import write_config
from tests.unit.score_inputs.test_encoders import write_tiny_clip


def configuration(folder: Path) -> Path:
    """Writes a data set and a configuration."""
    values = colors_config(folder)
    values["evaluation"] = {"beam_size": 3, "max_length": 9, "batch_size": 2, "num_results": 2}
    values["workers"]["num_workers"] = 2
    return write_config(folder / "run.yaml", values)


def scores(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "scores.json").read_text())["splits"]["test"]


def test_an_ensemble_of_one_model_with_itself_scores_as_the_model(tmp_path: Path, without_ray: None) -> None:
    config, model = configuration(tmp_path), str(make_bundle(tmp_path / "a"))
    assert evaluate(config, models=[model], out=str(tmp_path / "one")) == 0
    assert evaluate(config, models=[model, model], out=str(tmp_path / "two")) == 0
    one, two = scores(tmp_path / "one"), scores(tmp_path / "two")
    assert one["scores"] == two["scores"] and one["per_image_CIDEr-D"] == two["per_image_CIDEr-D"]
    predictions = json.loads((tmp_path / "one" / "predictions-test.json").read_text())
    assert predictions == json.loads((tmp_path / "two" / "predictions-test.json").read_text())
    assert [row["image_id"] for row in predictions] == [106, 107, 108, 109, 110]
    lines = [json.loads(line) for line in (tmp_path / "one" / "n-best-test.jsonl").read_text().splitlines()]
    assert [len(line["n_best"]) for line in lines] == [2] * 5
    assert [line["n_best"][0]["caption"] for line in lines] == [row["caption"] for row in predictions]
    page = (tmp_path / "one" / "report-test.html").read_text()
    assert page.count("not comparable: published: ") == 1 and "4 rows of papers" in page

    (tmp_path / "images" / "images" / "7.png").write_bytes(b"")
    assert evaluate(config, models=[model], out=str(tmp_path / "three")) == 1
    three = scores(tmp_path / "three")
    assert three["unreadable"] == {"107": "empty file"} and three["images"] == 4


def test_further_metrics_are_computed(tmp_path: Path, without_ray: None) -> None:
    """Some metrics need several captions per image, and some need the images."""
    config, model = configuration(tmp_path), str(make_bundle(tmp_path / "a"))
    write_tiny_clip(tmp_path / "clip.safetensors")
    settings = [
        "evaluation.metrics=[CHAIR-s, mBLEU-4, CLIPScore, RefCLIPScore, BERTScore]",
        f"evaluation.inputs.clip={{model: tiny-clip, weights: {tmp_path / 'clip.safetensors'}}}",
        f"evaluation.inputs.bert={{folder: {GOLDEN / 'bert_score' / 'bert'}, layer: 2}}",
    ]
    assert evaluate(config, settings, models=[model], out=str(tmp_path / "out")) == 0
    each = scores(tmp_path / "out")
    assert "evaluation.inputs.objects" in each["unavailable"]["CHAIR-s"]
    assert 0 <= each["scores"]["mBLEU-4"] <= 1 and 0 <= each["scores"]["CLIPScore"] <= 2.5
    assert "|clip:" in each["signature"] and "|bert:" in each["signature"] and each["scores"]["BERTScore"] <= 1


def coco_file(folder: Path, split: str, ids: range, captions: bool) -> None:
    """The annotation file and the images of a COCO split."""
    prefix = "captions" if captions else "image_info"
    names = {image: f"COCO_{split}_{image:012d}.jpg" for image in ids}
    content: dict[str, Any] = {"images": [{"id": image, "file_name": name} for image, name in names.items()]}
    if captions:
        content["annotations"] = [{"image_id": image, "id": image, "caption": "a red cat"} for image in ids]
    for path in (folder / "annotations", folder / split):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "annotations" / f"{prefix}_{split}.json").write_text(json.dumps(content))
    for image, name in names.items():
        Image.new("RGB", (24, 24), (image * 37 % 256, 90, image * 91 % 256)).save(folder / split / name)


@pytest.mark.ray
def test_images_of_cocos_server_are_captioned_and_scored_where_they_have_references(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """The shipped data file with few images: every image once, in the form that COCO's server takes."""
    coco_file(tmp_path / "coco", "test2014", range(1, 6), captions=False)
    coco_file(tmp_path / "coco", "val2014", range(6, 9), captions=True)
    monkeypatch.setenv("RAYCAP_COCO", str(tmp_path / "coco"))
    config, model = configuration(tmp_path), str(make_bundle(tmp_path / "a"))
    data = ROOT / "raycap" / "configs" / "data" / "coco_server.yaml"
    assert evaluate(config, models=[model], data=data) == 0
    (folder,) = (tmp_path / "results" / "evaluations").iterdir()
    assert folder.match("a-??????????-coco_server")
    rows = [json.loads((folder / f"predictions-{split}.json").read_text()) for split in ("test2014", "val2014")]
    assert [[row["image_id"] for row in part] for part in rows] == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert all(row.keys() == {"image_id", "caption"} and row["caption"] for part in rows for row in part)
    (printed,) = [line for line in log_lines if "ExpansionNet v2, ensemble, COCO server, 40 references (paper)" in line]
    assert "CIDEr-D 1.408" in printed and "40,775 images of COCO's test2014, ours: 5" in printed
    splits = json.loads((folder / "scores.json").read_text())["splits"]
    assert "scores" not in splits["test2014"] and "CIDEr-D" in splits["val2014"]["scores"]


def test_the_ranking_and_repeated_words_are_as_configured(tmp_path: Path, without_ray: None) -> None:
    config, model = configuration(tmp_path), str(make_bundle(tmp_path / "a"))
    settings = ["evaluation.num_results=3", "evaluation.beam_size=3"]
    published = [*settings, "evaluation.ranking=sum", "evaluation.collapse_repeats=true"]

    def n_best(name: str, overrides: list[str], bundle: str = model) -> list[list[dict[str, Any]]]:
        assert evaluate(config, overrides, models=[bundle], out=str(tmp_path / name)) == 0
        return [json.loads(line)["n_best"] for line in (tmp_path / name / "n-best-test.jsonl").read_text().splitlines()]

    def repeats(ranked: list[dict[str, Any]]) -> int:
        captions = [entry["caption"].split() for entry in ranked]
        return sum(first == second for words in captions for first, second in itertools.pairwise(words))

    plain, found = n_best("plain", settings), n_best("published", published)
    assert sum(map(repeats, plain)) > 0, "nothing would be seen"
    for before, ranked in zip(plain, found, strict=True):
        sums = [entry["log_prob"] for entry in ranked]
        assert sums == sorted(sums, reverse=True) and repeats(ranked) == 0
        assert sums == pytest.approx(sorted((entry["log_prob"] for entry in before), reverse=True), abs=1e-4)
    page = (tmp_path / "published" / "report-test.html").read_text()
    assert "ranked by the sum of log-probabilities, repeated words collapsed" in page
    recorded = Protocol(beam_size=3, ranking="sum", collapse_repeats=True)
    of_protocol = str(make_bundle(tmp_path / "b", protocol=recorded))
    assert n_best("recorded", ["evaluation.num_results=3"], of_protocol) == found
    assert n_best("given", ["evaluation.num_results=3", "evaluation.collapse_repeats=false"], of_protocol) != found
    other = str(make_bundle(tmp_path / "c", protocol=Protocol(ranking="mean")))
    with pytest.raises(UserError, match="evaluated in different ways: .* by the mean .* set evaluation.ranking"):
        evaluate(config, [], models=[of_protocol, other], out=str(tmp_path / "refused"))


@pytest.mark.ray
def test_captions_satisfy_the_constraints_of_a_file(tmp_path: Path, ray_session: None, log_lines: list[str]) -> None:
    config, model = configuration(tmp_path), str(make_bundle(tmp_path / "a"))
    file = tmp_path / "words.jsonl"
    file.write_text(
        '{"image_id": 107, "constraints": ["mat", ["the cat", "red"]]}\n{"image_id": 5, "constraints": []}\n'
    )
    assert evaluate(config, models=[model], constraints=file, out=str(tmp_path / "out")) == 0
    entry = scores(tmp_path / "out")
    assert entry["constraints"] == {"images": 1, "not_held": []}
    assert "search    test: 1 of 1 captions satisfy the required constraints" in log_lines
    predictions = {row["image_id"]: row["caption"] for row in json.loads(
        (tmp_path / "out" / "predictions-test.json").read_text())}  # fmt: skip
    assert "mat" in predictions[107].split() and ("the cat" in predictions[107] or "red" in predictions[107].split())
    file.write_text('{"image_id": 107, "constraints": ["zebra"]}\n')
    with pytest.raises(UserError, match="image 107 needs the word 'zebra'"):
        evaluate(config, models=[model], constraints=file)
    with pytest.raises(UserError, match="zebra"):
        evaluate(config, [f"evaluation.constraints={file}"], models=[model])
    file.write_text('{"image_id": 1, "constraints": ["cat"]}\n')
    with pytest.raises(UserError, match="none of its images is in test"):
        evaluate(config, models=[model], constraints=file)


@pytest.mark.ray
def test_the_golden_ensemble_holds_through_bundles_and_a_store(tmp_path: Path, ray_session: None) -> None:
    """Two reference models, imported as bundles without a backbone, on the recorded features from a store."""
    features = np.load(EXPANSIONNET / "expected.npz")["features"]
    recorded = json.loads((EXPANSIONNET / "expected.json").read_text())
    names = ("checkpoint.pth", "checkpoint_second.pth")
    vocabularies = [imported(name, tmp_path / name).vocabulary for name in names]
    keys = [f"{number:064d}" for number in range(len(features))]
    store = tmp_path / "store"
    write_shard(store, keys, features)
    mark_complete(storage_path(store), {}, len(keys))
    columns = [range(len(keys)), ["test"] * len(keys), keys, [["x"]] * len(keys), keys]
    part = Dataset(pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA))
    config = load_config(configuration(tmp_path)).model_copy(
        update={
            "evaluation": EvaluationSection(
                beam_size=3, num_results=3, max_length=recorded["config"]["beam_len"], decoding=PLAIN
            )
        }
    )
    models = [TaskModel(StoredBundle(storage_path(tmp_path / name)), storage_path(store)) for name in names]
    found = caption_on_cluster(models, {"test": SplitTask(part)}, config)[0]["test"]
    expected = recorded["ensemble_beam_3"]
    assert sorted(found) == list(range(len(features)))
    for image, sequences in enumerate(expected["sequences"]):
        assert [each.caption for each in found[image].n_best] == [vocabularies[0].decode(ids) for ids in sequences]
