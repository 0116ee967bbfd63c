"""The teacher of a run: which bundles may teach, its search, and what its digest covers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.models.config import Decoding
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.runs.distillation.teacher import check_teacher, find_teacher
from raycap.pipeline.runs.identity import config_identity
from raycap.pipeline.runs.preflight import check_files
from tests.conftest import small_config
from tests.support.bundles import make_bundle, without_digests
from tests.support.distillation import region_values

RECORDED = Protocol(beam_size=4, max_length=9, ranking=0.6, precision="bfloat16", decoding=Decoding(no_repeat_ngram=2))


def student(storage: Path, bundle: Path, captions_per_image: int = 1, **changes: Any) -> RunConfig:
    distill = {"model": str(bundle), "captions_per_image": captions_per_image}
    return parse_config(small_config(storage, **changes) | {"distill": distill})


def region_student(storage: Path, bundle: Path) -> RunConfig:
    """A run on the synthetic regions."""
    return parse_config(region_values(storage, bundle))


def test_its_search_is_the_recorded_one_with_the_whole_beam(tmp_path: Path) -> None:
    teacher = find_teacher(student(tmp_path, make_bundle(tmp_path / "teacher", protocol=RECORDED)))
    assert teacher is not None and teacher.name == "small"
    search = teacher.search
    assert (search.beam_size, search.num_results, search.max_length, search.ranking) == (4, 4, 9, 0.6)
    assert search.precision == "bfloat16" and search.decoding.no_repeat_ngram == 2
    assert "beam 4" in teacher.signature and "PTB" not in teacher.signature
    longer = make_bundle(tmp_path / "longer", protocol=replace(RECORDED, max_length=30, precision="auto"))
    teacher = find_teacher(student(tmp_path, longer))
    assert teacher is not None
    assert (teacher.search.max_length, teacher.search.precision) == (12, "float32"), "the bundle has 12 positions"
    config = teacher.config_of(student(tmp_path, longer))
    assert (config.evaluation.batch_size, config.evaluation.beam_size) == (8, 4), "batches are those of the run"
    assert find_teacher(parse_config(small_config(tmp_path))) is None


@pytest.mark.parametrize(
    ("bundle", "captions_per_image", "message"),
    [
        ({"protocol": replace(RECORDED, language="de")}, 1, "captions in de, and data.language is en; give a bundle"),
        ({"backbone": False}, 1, "has no backbone, so that it cannot caption the run's image files"),
        ({"protocol": RECORDED}, 5, r"captions_per_image = 5 is above the beam of .*, which is 4; lower it"),
        ({"protocol": Protocol(decoding=Decoding(sampling=True), beam_size=1)}, 2, "is above the beam"),
    ],
)
def test_a_bundle_that_cannot_teach_is_refused(
    tmp_path: Path, bundle: dict[str, Any], captions_per_image: int, message: str
) -> None:
    config = student(tmp_path / "storage", make_bundle(tmp_path / "teacher", **bundle), captions_per_image)
    with pytest.raises(UserError, match=f"^distill.*{message}") as error:
        check_files(config)
    assert "\n" not in str(error.value) and not (tmp_path / "storage").exists()


def test_a_run_on_regions_needs_a_teacher_of_regions(tmp_path: Path) -> None:
    grid = make_bundle(tmp_path / "grid", backbone=False, protocol=Protocol(features="grid"))
    for bundle in (make_bundle(tmp_path / "images"), grid):
        with pytest.raises(UserError, match="does not caption regions, and the run has those of features.hdf5"):
            check_teacher(region_student(tmp_path, bundle))
    regions = make_bundle(tmp_path / "regions", backbone=False, protocol=Protocol(features="regions"))
    check_teacher(region_student(tmp_path, regions))
    teacher = find_teacher(region_student(tmp_path, regions))
    assert teacher is not None
    teacher.require_width(16)
    with pytest.raises(UserError, match="captions regions of width 16, and those of features.hdf5 have 8"):
        teacher.require_width(8)


def test_a_folder_that_is_no_whole_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^distill.model: .*nowhere is not a model bundle: it lacks config.yaml"):
        check_files(student(tmp_path, tmp_path / "nowhere"))
    bundle = make_bundle(tmp_path / "teacher")
    (bundle / "card.md").write_text("changed")
    with pytest.raises(UserError, match=r"^distill.model: .*card.md does not have the digest"):
        check_files(student(tmp_path, bundle))
    with pytest.raises(ValueError, match="distill is set, .* stages of cross entropy, of which there is none"):
        student(tmp_path, bundle, stages=small_config(tmp_path)["stages"][2:])


def edited(bundle: Path, folder: Path, *keys: str, value: Any) -> Path:
    """A copy of a bundle with another value in its config.yaml."""
    shutil.copytree(bundle, folder)
    config = yaml.safe_load((without_digests(folder) / "config.yaml").read_text())
    node = config
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_run_is_identified_by_what_decides_the_captions(tmp_path: Path) -> None:
    """Neither by the place nor the name of the teacher, but by its weights, words, transform and search."""
    bundle = make_bundle(tmp_path / "teacher", protocol=RECORDED)
    base = config_identity(student(tmp_path, bundle))
    plain = small_config(tmp_path)
    assert config_identity(parse_config(plain)) == config_identity(parse_config(plain | {"distill": None})) != base
    assert config_identity(student(tmp_path, bundle, 2)) != base
    shutil.copytree(bundle, tmp_path / "copy")
    renamed = edited(bundle, tmp_path / "renamed", "name", value="other")
    scored = edited(bundle, tmp_path / "scored", "info", "score", value=1.0)
    for same in (tmp_path / "copy", renamed, scored):
        assert config_identity(student(tmp_path, same)) == base, same.name
    others = [
        make_bundle(tmp_path / "weights", seed=1, protocol=RECORDED),
        edited(bundle, tmp_path / "beam", "protocol", "beam_size", value=3),
        edited(bundle, tmp_path / "precision", "protocol", "precision", value="float32"),
        edited(bundle, tmp_path / "rules", "protocol", "decoding", "no_repeat_ngram", value=3),
    ]
    transform = edited(bundle, tmp_path / "transform", "name", value="small")
    text = (transform / "preprocessing.json").read_text()
    (transform / "preprocessing.json").write_text(text.replace("0.485", "0.5"))
    identities = [config_identity(student(tmp_path, other)) for other in (*others, transform)]
    assert len({base, *identities}) == 1 + len(identities)
