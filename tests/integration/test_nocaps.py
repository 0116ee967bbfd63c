"""The shipped configurations for nocaps, on small files in COCO's and nocaps' formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import ROOT
from tests.support.runs import with_features

CONFIGS = ROOT / "raycap" / "configs"
DOMAINS = {"in-domain": range(3), "near-domain": range(3, 6), "out-domain": range(6, 9)}
SCENES = ("a dog on the grass", "a red ball and a dog", "a man with a ball", "the grass is red")
NOVEL = "seahorse"  # a word of no training caption, which has a vector and is among the classes
SMALL = {
    "model.d_model": 16, "model.d_ff": 16, "model.num_heads": 2, "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1, "workers.num_workers": 1, "workers.gpus_per_worker": 0, "workers.cpus_per_worker": 1,
    "workers.threads_per_worker": 1, "workers.num_decode_threads": 0, "tracking.enabled": "false",
    "evaluation.max_length": 12,
}  # fmt: skip
SWIN = {
    "backbone.name": "swin_tiny_patch4_window7_224", "backbone.weights": "none", "backbone.image_size": 32,
    "backbone.embed_dim": 8, "backbone.depths": [1, 1], "backbone.num_heads": [1, 2], "backbone.window_size": 4,
    "features.compute_dtype": "float32", "features.gpus_per_actor": 0, "features.batch_size": 8,
}  # fmt: skip
GLOVE: dict[str, Any] = {"model.word_vector_width": 6}
SYSTEMS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "expansionnet_v2": (
        ("xe_frozen", "xe_finetune"), {"model.static_expansion": [4], "model.dynamic_expansion": 2} | SWIN
    ),
    "meshed_memory": (("xe",), {"features.max_regions": 3, "model.num_memory_slots": 2} | GLOVE),
    "clustformer": (("xe",), GLOVE | SWIN),
}  # fmt: skip


def write_image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 24), (number * 37 % 256, number * 91 % 256, 90)).save(path)


def write_regions(path: Path, ids: Sequence[int]) -> None:
    generator = np.random.default_rng(len(ids))
    with h5py.File(path, "w") as file:
        for image in ids:
            file[f"{image}_features"] = generator.normal(size=(3, 8)).astype(np.float32)
            file[f"{image}_boxes"] = np.array([[0, 0, 9, 9], [2, 2, 8, 8], [5, 5, 20, 20]], np.float32)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """COCO in Karpathy's layout, nocaps in its own with the same image ids, and the other files that both need."""
    coco, nocaps = tmp_path / "coco", tmp_path / "nocaps"
    splits = ["train"] * 6 + ["val"] * 2 + ["test"] * 2
    entries = [
        {"filepath": "val2014", "filename": f"{number}.jpg", "cocoid": number, "split": split,
         "sentences": [{"raw": SCENES[(number + k) % 4], "tokens": SCENES[(number + k) % 4].split()} for k in range(5)]}
        for number, split in enumerate(splits)
    ]  # fmt: skip
    for number in range(len(entries)):
        write_image(coco / "val2014" / f"{number}.jpg", number)
    (coco / "dataset_coco.json").write_text(json.dumps({"images": entries}))
    images = [
        {"id": image, "file_name": f"{image:016x}.jpg", "open_images_id": f"{image:016x}", "domain": domain}
        for domain, ids in DOMAINS.items()
        for image in ids
    ]
    for image in images:
        write_image(nocaps / "val" / str(image["file_name"]), 50 + int(str(image["id"])))
    annotations = [
        {"image_id": image["id"], "id": 10 * number + k, "caption": f"A {NOVEL} near {SCENES[k % 4]}."}
        for number, image in enumerate(images)
        for k in range(10)
    ]
    content = {"images": images, "annotations": annotations, "info": {}, "licenses": []}
    (nocaps / "nocaps_val_4500_captions.json").write_text(json.dumps(content))
    write_regions(tmp_path / "coco.hdf5", range(len(entries)))
    write_regions(tmp_path / "nocaps.hdf5", range(9))
    generator = np.random.default_rng(0)
    words = sorted({word for scene in SCENES for word in scene.split()} | {NOVEL})
    vectors = "".join(f"{word} {' '.join(f'{value:.3f}' for value in generator.normal(size=6))}\n" for word in words)
    (tmp_path / "glove.txt").write_text(vectors)
    (tmp_path / "classes.txt").write_text("Seahorse\nDog\nBall\n")
    for name, file in (("COCO", "coco"), ("NOCAPS", "nocaps"), ("REGIONS", "coco.hdf5"), ("GLOVE", "glove.txt"),
                       ("NOCAPS_REGIONS", "nocaps.hdf5"), ("CLASSES", "classes.txt")):  # fmt: skip
        monkeypatch.setenv(f"RAYCAP_{name}", str(tmp_path / file))
    return tmp_path


@pytest.mark.ray
@pytest.mark.parametrize(
    "system", [pytest.param(name, marks=[pytest.mark.proof] * (name != "clustformer")) for name in SYSTEMS]
)
def test_a_model_is_trained_on_coco_and_scored_on_nocaps(
    files: Path, system: str, ray_session: None, without_ray: None
) -> None:
    """Captions must hold two of three words, of which one is in no training caption."""
    stages, settings = SYSTEMS[system]
    values = SMALL | settings | {"storage": files / "results", "data.min_count": 1}
    values |= {
        f"stages.{stage}.{key}": value for stage in stages for key, value in (("epochs", 0.2), ("batch_size", 6))
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    config = CONFIGS / f"nocaps_{system}.yaml"
    folder, store = with_features(load_config(config, overrides))
    train_stages(LocalContext("cpu"), StageJob(folder, stages, store))
    rows = [{"image_id": image, "constraints": ["seahorse", "dog", "red ball"], "at_least": 2} for image in range(9)]
    (files / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = CONFIGS / "data" / ("nocaps_val_regions.yaml" if system == "meshed_memory" else "nocaps_val.yaml")
    has_novel_words = settings.keys() >= GLOVE.keys()
    constraints = ["--constraints", str(files / "words.jsonl")] if has_novel_words else []
    out = files / "scores"
    options = [word for override in overrides for word in ("--set", override)]
    options += ["--stage", stages[-1], "--data", str(data), *constraints, "--out", str(out)]
    assert main(["evaluate", str(config), *options]) == 0

    results = json.loads((out / "scores.json").read_text())
    protocol = results["protocol"]
    assert (protocol["beam_size"], protocol["max_length"]) == (3, 12), "the data file's beam, the configuration's rest"
    assert protocol["objective"] == "cross_entropy" and protocol["constrained"] == bool(constraints)
    assert list(results["splits"]) == [*DOMAINS, "all"]
    assert [entry["images"] for entry in results["splits"].values()] == [3, 3, 3, 9]
    assert all(entry["scores"]["CIDEr-D"] is not None for entry in results["splits"].values())
    rows = json.loads((out / "predictions-all.json").read_text())
    captions = {row["image_id"]: row["caption"] for row in rows}
    assert sorted(captions) == list(range(9))
    for domain, ids in DOMAINS.items():
        part = json.loads((out / f"predictions-{domain}.json").read_text())
        assert part == [{"image_id": image, "caption": captions[image]} for image in ids]
    if has_novel_words:
        assert results["splits"]["all"]["constraints"] == {"images": 9, "not_held": []}
        assert all(sum(words in caption for words in ("seahorse", "dog", "red ball")) >= 2
                   for caption in captions.values())  # fmt: skip
        assert any(NOVEL in caption for caption in captions.values())
    assert ("nocaps all (paper)" in (out / "report-all.html").read_text()) == (system != "clustformer")
