"""Searches: the space, configurations refused before anything starts, and points as configurations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config, parse_section
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.comparison.published import published_tables
from raycap.pipeline.search.results import selection_note
from raycap.pipeline.search.space import Dimension, Space, show_value
from raycap.pipeline.search.spec import Search, SearchConfig, load_search
from tests.conftest import ROOT, small_config
from tests.support.checkout import own
from tests.support.searches import LR, N_E, G, small_search

XE = small_config(ROOT)["stages"][:1]
SHIPPED = own((ROOT / "raycap" / "configs").glob("search_*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_search_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYCAP_COCO", "RAYCAP_DATA", "RAYCAP_REGIONS"):
        monkeypatch.setenv(name, "/somewhere")
    search = load_search(path)
    assert search.space.size >= 2
    assert f"raycap tune {path.stem}" in path.read_text().split("\nname:")[0], "its header names its command"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("search_table1", ""),
        ("search_meshed_memory_connection", "Table 1,"),
        ("search_meshed_memory_slots", "Table 6,"),
        ("search_clustformer_table1", "Table 1 "),
    ],
)
def test_the_ablations_are_the_papers(name: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points are the published rows, in order."""
    for variable in ("RAYCAP_COCO", "RAYCAP_REGIONS"):
        monkeypatch.setenv(variable, "/somewhere")
    search = load_search(ROOT / "raycap" / "configs" / f"{name}.yaml")
    configs = [search.trial_config(point, 0) for point in search.space.points()]
    table = next(each for each in published_tables(search.config.compare) if each.title.startswith(title))
    found = [{key: getattr(config.model, key) for key in table.keys} for config in configs]
    assert found == [row.settings for row in table.rows]
    if not title:
        trained = {(c.evaluation.beam_size, c.stages[0].epochs, len(c.stages), c.stages[0].lr) for c in configs}
        assert trained == {(3, 8, 1, 2e-4)}, "the recipe's first stage, validated with beam 3"
        return
    assert search.stages == tuple(stage.name for stage in search.base.stages), "the whole recipe"
    assert set(table.columns) <= set(search.config.metrics)


def test_points_and_labels() -> None:
    listed, step, rate = (
        Dimension(choices=([32, 64],)),
        Dimension(low=2, high=6, step=2),
        Dimension(low=1e-4, high=1e-2),
    )
    space, point = Space({G: listed, N_E: step, LR: rate}), {G: "32 64", N_E: 4, LR: 1e-3}
    assert space.size == float("inf") and Space({N_E: Dimension(low=2, high=6)}).size == 5
    assert space.changes(point) == {G: [32, 64], N_E: 4, LR: 1e-3}
    assert space.describe(point) == "G 32 64, N_E 4, xe_frozen lr 0.001"
    assert [show_value(v) for v in (None, [128] * 5, [8, 16], 0.5)] == ["null", "128 x 5", "8 16", "0.5"]
    finite = Space({G: Dimension(choices=([4], [4, 8])), N_E: Dimension(choices=(2, None))})
    labels = [finite.describe(point) for point in finite.points()]
    assert labels == ["G 4, N_E 2", "G 4, N_E null", "G 4 8, N_E 2", "G 4 8, N_E null"]
    assert Dimension(low=0.1, high=0.4, step=0.1).listed() == [0.1, 0.2, 0.3, 0.4]
    assert Dimension(low=2, high=5, step=2).ends() == [2, 4]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"space": {"model.d_modle": [1, 2]}}, ["space, at d_modle 1: unknown key model.d_modle: did you mean d_mod"]),
        ({"space": {"stages.nothere.lr": [1, 2]}}, ["nothere.lr: the stages of a trial are xe_frozen"]),
        ({"space": {"model.num_heads": [2, 3]}}, ["space, at num_heads 3: ", "d_model = 16 does not"]),
        ({"space": {N_E: ["x"]}}, ["space, at N_E x: model.dynamic_expansion = 'x': input should be"]),
        ({"space": {"row": [4]}}, ["space.row lists mappings of keys to values"]),
        ({"space": {"row": [{"model": {"dynamic_expansion": 2}}], N_E: [4]}}, ["space.row sets this key too"]),
        ({"space": {N_E: {"choices": [2, 4], "log": True}}}, ["low, high, log and step do not go with choices"]),
        ({"trial": {"set": {"evaluation.beam_sise": 1}}}, ["unknown key evaluation.beam_sise: did you mean beam_size"]),
        ({"space": {N_E: {"low": 1, "high": 10**12, "step": 1}}}, ["more than 100,000 numbers", "give a larger step"]),
        ({"score_split": "train"}, ["score_split is train, which is neither data.val_split (val)", "(test, novel)"]),
        ({"space": {"backbone.image_size": [32, 64]}}, ["space.backbone.image_size cannot", "use the key set"]),
        ({"space": {"stages.scst_frozen.lr": [1.0, 2.0]}}, ["the stages of a trial are xe_frozen"]),
        ({"objectives": {"CIDEr": "max"}}, ["no trial reports 'CIDEr'", "known: CIDEr-D, macs"]),
        ({"trial": {"stages": ["xe_finetune", "scst_frozen"]}}, ["need new features", "extracts them once"]),
        ({"scheduler": "pbt"}, ["space.model.static_expansion", "copies weights"]),
        ({"scheduler": "pbt", "algorithm": "tpe"}, ["algorithm random, not tpe; change it, or drop the sch"]),
        ({"space": {LR: {"low": 0.1, "high": 0.3}}, "algorithm": "grid", "budget": None}, ["the space is infinite"]),
        ({"budget": None}, ["algorithm random needs an end"]),
        ({"scheduler": {"name": "asha", "grace_epochs": 2}}, ["scheduler.grace_epochs = 2 is more than the 0.7"]),
        ({"space": {"model.d_model": [16, 12], "model.num_heads": [2, 8]}}, ["space, at d_model 12, num_heads 8: "]),
        (
            {"scheduler": {"name": "asha", "grace_epochs": 0.5}, "trial": {"set": {"stages.xe_frozen.epochs": 0.2}}},
            ["scheduler.grace_epochs = 0.5 is more than the 0.2"],
        ),
        ({"backbone": "run", "set": {"stages": XE}}, ["no stage of the base configuration trains it; set it to base"]),
        ({"base": "absent.yaml"}, ["absent.yaml does not exist"]),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(tmp_path: Path, changes: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(UserError) as error:
        small_search(tmp_path, **changes)
    for part in expected:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_point_is_the_base_with_its_changes(tmp_path: Path) -> None:
    search = small_search(tmp_path, trial={"epochs": 2, "set": {"evaluation.beam_size": 1}}, seeds=[3, 4])
    point = {G: "4 8", N_E: "4"}
    trial = search.trial_config(point, 4, tmp_path / "backbone.safetensors")
    assert [stage.name for stage in trial.stages] == ["xe_frozen"] and trial.stages[0].epochs == 2
    assert (trial.model.static_expansion, trial.model.dynamic_expansion, trial.seed) == ((4, 8), 4, 4)
    assert trial.evaluation.beam_size == 1 and not trial.tracking.enabled
    assert trial.backbone.weights.endswith("backbone.safetensors")
    ready = parse_config(search.run_values(point))
    assert ready.stages == search.base.stages and ready.evaluation == search.base.evaluation
    assert (ready.model.static_expansion, ready.name) == ((4, 8), "demo-small-best")
    assert ready.backbone == search.base.backbone


def test_identity_covers_settings_that_affect_results(tmp_path: Path) -> None:
    """A larger budget or machine and more seeds continue the same search. Longer trials are another search."""
    one = small_search(tmp_path)
    same: list[dict[str, Any]] = [{"budget": {"trials": 6, "hours": 1}, "resources": {"cpus": 2}}, {"seeds": 2}]
    other = [{"trial": {"epochs": 3}}, {"set": {"model.d_ff": 64}}, {"score_split": "test"}]
    assert {small_search(tmp_path, **changes).identity("x") for changes in same} == {one.identity("x")}
    different = [small_search(tmp_path, **changes).identity("x") for changes in other]
    assert len({*different, one.identity("x"), one.identity("y")}) == 5
    again = Search(parse_section(SearchConfig, one.config.model_dump(mode="json")), copy.deepcopy(one.values))
    assert again.config == one.config and again.identity() == one.identity()


def test_the_split_whose_scores_are_reported_is_named(tmp_path: Path) -> None:
    validation, test = small_search(tmp_path, score_split="val"), small_search(tmp_path, score_split="test")
    assert [search.reported("CIDEr-D") for search in (validation, test)] == ["CIDEr-D", "test CIDEr-D"]
    assert selection_note(validation).startswith("Chosen and reported on val: ")
    assert "Reported on test: the chosen weights caption it once, with beam 2, at most" in selection_note(test)
    beams = small_search(tmp_path, score_split="test", space={"evaluation.beam_size": [1, 2]}, budget={"trials": 2})
    assert "with each point's evaluation" in selection_note(beams)


def test_nested_rows_change_only_their_keys(tmp_path: Path) -> None:
    space = {"row": [{"model": {"static_expansion": [4]}}, {N_E: 2}], LR: [0.1]}
    search = small_search(tmp_path, space=space, algorithm="grid", budget={})
    point, other = search.space.points()
    model = search.trial_config(point, 0).model
    assert model.static_expansion == (4,) and model.d_model == search.base.model.d_model
    assert search.space.describe(other) == "N_E 2, xe_frozen lr 0.1" and search.space.keys == [G, N_E, LR]
