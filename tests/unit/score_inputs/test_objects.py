"""Words for objects and annotated objects, and CHAIR and diversity as commands give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.score import score
from raycap.pipeline.config.sections import DataSection, ScoreInputsSection
from raycap.pipeline.data.synthetic.scene_captions import GRAMMARS
from raycap.pipeline.data.synthetic.scenes import make_scene
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.grounding import read_instances, read_names
from raycap.pipeline.evaluation.scores.metrics import ScoreInputs, score_captions

NAMES = "dog, puppy\nhot dog, hot dogs\nperson, man, woman\n\ntraffic light, stoplight\n"
INSTANCES = {
    "categories": [{"id": 1, "name": "dog"}, {"id": 9, "name": "traffic light"}],
    "annotations": [{"image_id": 7, "category_id": 9}, {"image_id": 7, "category_id": 1}],
}


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_files_are_read(tmp_path: Path) -> None:
    names = read_names(write(tmp_path / "names.txt", NAMES))
    assert list(names) == ["dog", "hot dog", "person", "traffic light"] and names["dog"] == ("dog", "puppy")
    assert read_instances(write(tmp_path / "instances.json", INSTANCES), names) == {7: {"dog", "traffic light"}}


@pytest.mark.parametrize("language", GRAMMARS)
def test_objects_of_the_synthetic_data_set_are_those_of_its_scenes(language: str) -> None:
    """In every language the references name the shapes of the scene and no others."""
    data = DataSection.model_validate({"synthetic": {"num_images": 60, "language": language}, "language": language})
    inputs = ScoreInputs.read(ScoreInputsSection(), language, data=data)
    scenes = [make_scene(3, index, language) for index in range(40)]
    references = {index: captions for index, (_, captions) in enumerate(scenes)}
    truth = {
        index: {item.shape for item in (scene.main, scene.second) if item} for index, (scene, _) in enumerate(scenes)
    }
    right = {index: captions[0] for index, captions in references.items()}
    scores = score_captions(references, right, metrics=["CHAIR-i", "CHAIR-s"], language=language, inputs=inputs)
    assert scores.values == {"CHAIR-i": 0.0, "CHAIR-s": 0.0}
    wrong = {index: references[index - 1][0] for index in references if index}
    named = {
        index: [item.shape for item in (scenes[index - 1][0].main, scenes[index - 1][0].second) if item]
        for index in wrong
    }
    missing = {index: [name not in truth[index] for name in names] for index, names in named.items()}
    scores = score_captions(references, wrong, metrics=["CHAIR-i", "CHAIR-s"], language=language, inputs=inputs)
    assert scores.by_name["CHAIR-s"].per_image == [float(any(each)) for each in missing.values()]
    total = sum(map(len, missing.values()))
    assert scores.values["CHAIR-i"] == pytest.approx(sum(map(sum, missing.values())) / total)


def test_score_reads_objects_and_several_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    references = {7: ["two men walk"], 8: ["a puppy sleeps"]}
    rows = [{"image_id": image, "caption": text} for image, texts in references.items() for text in texts]
    captions = {7: "a man at the traffic lights", 8: "a woman with a dog"}
    n_best = [
        {"image_id": image, "n_best": [{"caption": text}, {"caption": "a dog"}]} for image, text in captions.items()
    ]
    write(tmp_path / "names.txt", NAMES)
    inputs = {"objects": str(tmp_path / "names.txt"), "instances": str(write(tmp_path / "instances.json", INSTANCES))}
    scores = score(
        write(tmp_path / "refs.json", {"annotations": rows}),
        write(tmp_path / "res.json", [{"image_id": image, "caption": text} for image, text in captions.items()]),
        metrics=["CHAIR-i", "CHAIR-s", "Div-1"],
        inputs=write(tmp_path / "inputs.yaml", inputs),
        n_best=write(tmp_path / "n-best.jsonl", "\n".join(map(json.dumps, n_best))),
    )
    assert scores.values == {"CHAIR-i": 0.25, "CHAIR-s": 0.5, "Div-1": pytest.approx((7 / 8 + 4 / 7) / 2)}
    assert "CHAIR-i   0.250" in capsys.readouterr().out
    write(tmp_path / "inputs.yaml", {"things": "names.txt"})
    with pytest.raises(UserError, match=r"unknown key evaluation\.inputs\.things"):
        score(tmp_path / "refs.json", tmp_path / "res.json", inputs=tmp_path / "inputs.yaml")
