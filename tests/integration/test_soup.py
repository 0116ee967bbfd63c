"""`raycap soup --front` on Ray: the members' features are extracted once, by the run's settings, and used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from raycap.jobs.soup import soup
from raycap.models.captioner import Captioner
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, save_bundle
from tests.conftest import small_config, write_karpathy
from tests.support.bundles import make_bundle


@pytest.mark.ray
def test_a_front_of_models_with_one_backbone(tmp_path: Path, ray_session: None, log_lines: list[str]) -> None:
    write_karpathy(tmp_path / "data", {"train": 3, "val": 4, "test": 2})
    values = small_config(tmp_path / "results")
    values["data"] = {"root": str(tmp_path / "data"), "annotations": "dataset.json", "images": ".", "min_count": 1}
    values["data"] |= {"train_splits": ["train"], "val_split": "val", "test_splits": ["test"]}
    values["evaluation"] = {"beam_size": 2, "max_length": 9, "batch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    first, second = (make_bundle(tmp_path / name, seed) for seed, name in enumerate("ab"))
    backbone = load_bundle(first).captioner.backbone
    model = load_bundle(second)
    save_bundle(tmp_path / "c", Captioner(model.captioner.model, backbone), model.vocabulary, name="c", info={})

    for folder, count in ((tmp_path / "c", 1), (second, 1)):
        out = tmp_path / f"front-{folder.name}"
        options = {"config": tmp_path / "run.yaml", "metrics": "cider,bleu1", "out": str(out)}
        assert soup([str(first), str(folder)], front=2, **options) == 0  # type: ignore[arg-type]
        points = json.loads((out / "front.json").read_text())["points"]
        assert [point["weights"] for point in points] == [[1, 0], [0.5, 0.5], [0, 1]]
        assert len(list((tmp_path / "results" / "features").iterdir())) == count, "other backbones store no features"
    assert log_lines[-1] == f"front        {tmp_path / 'front-b'}" and (tmp_path / "front-b" / "front.png").is_file()
