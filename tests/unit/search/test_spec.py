"""Searches: the space, configurations refused before anything starts, and points as configurations."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.pipeline.config.load import parse_config, parse_section
from raycap.pipeline.errors import UserError
from raycap.pipeline.search.results import selection_note
from raycap.pipeline.search.space import GenerateSection, SpaceSection, show_value, space_of
from raycap.pipeline.search.spec import Search, SearchConfig, flatten, load_search
from tests.conftest import ROOT, small_config
from tests.support.checkout import own
from tests.support.searches import LR, N_E, G, small_search, write_search

SHIPPED = own((ROOT / "raycap" / "configs").glob("search_*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_search_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYCAP_COCO", "RAYCAP_REGIONS"):
        monkeypatch.setenv(name, "/somewhere")
    search = load_search(path)
    assert search.space.size >= 2
    assert f"raycap tune {path.stem}" in path.read_text().split("\nname:")[0], "its header names its command"


def test_the_ablation_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 12 rows are those of Table I, in order; a trial is the recipe's first stage, validated with beam 3."""
    from raycap.pipeline.evaluation.comparison.published import ablation

    monkeypatch.setenv("RAYCAP_COCO", "/somewhere")
    search = load_search(ROOT / "raycap" / "configs" / "search_table1.yaml")
    configs = [search.trial_config(point, 0) for point in search.space.points()]
    settings = [(config.model.static_expansion, config.model.dynamic_expansion) for config in configs]
    assert settings == [(row.static_expansion, row.dynamic_expansion) for row in ablation()]
    assert {(c.evaluation.beam_size, c.stages[0].epochs, len(c.stages), c.stages[0].lr) for c in configs} == {
        (3, 8, 1, 2e-4)
    }


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("search_meshed_memory_connection", "Table 1,"),
        ("search_meshed_memory_slots", "Table 6,"),
        ("search_clustformer_table1", "Table 1 "),
    ],
)
def test_the_other_ablations_are_the_papers(name: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points are the printed rows, in order; each trains the whole recipe."""
    from raycap.pipeline.evaluation.comparison.published import printed_tables

    for variable in ("RAYCAP_COCO", "RAYCAP_REGIONS"):
        monkeypatch.setenv(variable, "/somewhere")
    search = load_search(ROOT / "raycap" / "configs" / f"{name}.yaml")
    table = next(each for each in printed_tables(search.config.compare) if each.title.startswith(title))
    models = [search.trial_config(point, 0).model for point in search.space.points()]
    assert [{key: getattr(model, key) for key in table.keys} for model in models] == [
        row.settings for row in table.rows
    ]
    assert search.stages == tuple(stage.name for stage in search.base.stages)
    assert set(table.columns) <= set(search.config.metrics)


def test_printed_rows_are_those_of_the_paper_tables(shared: Path) -> None:
    from raycap.pipeline.evaluation.comparison.published import printed_tables

    papers = json.loads((shared / "paper_tables.json").read_text())
    memory, connection = papers["meshed_memory_transformer"], papers["meshed_memory_transformer"]["ablation_cider"]
    one, six, seven = printed_tables("meshed_memory")
    order = ("transformer_6_layers", "transformer_3_layers", "transformer_aoa", "one_to_one_no_memory", "one_to_one")
    order += ("no_memory", "softmax_gates", "full")
    assert [100 * row.scores["CIDEr-D"] for row in one.rows] == pytest.approx([connection[name] for name in order])
    for table, key in ((six, "memory_vectors_table_6"), (seven, "layers_table_7")):
        printed = {name: values for name, values in memory[key].items() if name != "columns"}
        assert [row.name.split()[0] for row in table.rows] == list(printed)
        for row, values in zip(table.rows, printed.values(), strict=True):
            assert [100 * score for score in row.scores.values()] == pytest.approx(values)
    (only,) = printed_tables("clustformer")
    printed = papers["ada_clustformer"]["ablation_table_1"]
    for row, name in zip(only.rows, [name for name in printed if name != "columns"], strict=True):
        assert [100 * score for score in row.scores.values()] == pytest.approx(printed[name]), name


def test_keys_of_the_storage_can_be_set(tmp_path: Path) -> None:
    """Those of the base that a search does not change remain, and the search may have the short form."""
    base = small_config({"uri": "results", "region": "eu"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base))
    path, text = tmp_path / "search.yaml", "name: s\nbase: run.yaml\nspace: {model.d_model: [16]}\nalgorithm: grid\n"
    url = "storage.endpoint_url=http://127.0.0.1:9000"
    for line, uri in (("", "results"), ("storage: s3://data/x\n", "s3://data/x")):
        path.write_text(text + line)
        storage = load_search(path, [url]).base.storage
        assert (storage.uri, storage.region, storage.endpoint_url) == (uri, "eu", "http://127.0.0.1:9000")
        assert load_search(path).base.storage.uri == uri


def test_the_accounting_of_another_paper_is_refused(tmp_path: Path) -> None:
    base = small_config(tmp_path / "storage", model={"name": "meshed_memory", "d_model": 16, "num_heads": 2})
    path = write_search(tmp_path, space={"model.num_memory_slots": [0, 2]})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    with pytest.raises(UserError, match="objectives: macs is an accounting of ExpansionNet v2's paper"):
        load_search(path)


def test_groups_by_rule() -> None:
    both = GenerateSection(groups=(1, 3), smallest=16, largest=64, spacing=("doubling", "equal"))
    assert both.generated() == [[16], [32], [64], [16, 32, 64], [16] * 3, [32] * 3, [64] * 3]
    paper = GenerateSection(groups=(5,), smallest=32, largest=512)
    assert paper.generated() == [[32, 64, 128, 256, 512]]
    assert GenerateSection(groups=(2,), smallest=3, largest=12).generated() == [[3, 6], [6, 12]]


def test_labels_have_no_control_characters() -> None:
    """matplotlib raises TypeError for a NUL."""
    assert show_value("a\0b") == "a\\x00b" and show_value(["\x1b", "c"]) == "\\x1b c"


def test_points_and_labels() -> None:
    space = space_of(
        {
            G: SpaceSection(groups={"none": None, "paper": (32, 64)}),
            N_E: SpaceSection(low=2, high=6, step=2),
            LR: SpaceSection(low=1e-4, high=1e-2, log=True),
        }
    )
    assert space.size == float("inf") and space_of({N_E: SpaceSection(low=2, high=6)}).size == 5
    point = {G: "paper", N_E: 4, LR: 1e-3}
    assert space.changes(point) == {G: [32, 64], N_E: 4, LR: 1e-3}
    assert space.describe(point) == "G paper, N_E 4, xe_frozen lr 0.001"
    assert [show_value(v) for v in (None, [128] * 5, [8, 16], 0.5)] == ["attention", "128 x 5", "8 16", "0.5"]
    finite = space_of({G: SpaceSection(choices=([4], [4, 8])), N_E: SpaceSection(choices=(2, None))})
    assert [finite.describe(p) for p in finite.points()] == [
        "G 4, N_E 2", "G 4, N_E attention", "G 4 8, N_E 2", "G 4 8, N_E attention",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"space": {"model.d_modle": [1, 2]}}, ["unknown key model.d_modle", "did you mean d_model"]),
        ({"space": {"stages.nothere.lr": [1, 2]}}, ["'nothere' is none of xe_frozen"]),
        ({"space": {"model.num_heads": [2, 3]}}, ["space.model.num_heads: the choice 3", "d_model = 16 does not"]),
        ({"space": {G: [[4], []]}}, ["the choice ", "empty list"]),
        ({"space": {G: {"groups": {"fine": [4], "bad": [0]}}}}, ["space.model.static_expansion", "greater than 0"]),
        ({"space": {G: {"generate": {"groups": [3], "smallest": 8, "largest": 16}}}}, ["no 3 groups fit between"]),
        ({"space": {N_E: {"low": 8, "high": 2}}}, ["low = 8 must be below high = 2"]),
        ({"space": {N_E: {"low": 2}}}, ["exactly one of a list of choices, groups, generate, or low and high"]),
        ({"space": {N_E: {"low": 2, "hihg": 4}}}, ["unknown key space.model.dynamic_expansion.hihg", "high"]),
        ({"space": {N_E: [2, 2]}}, ["the choice 2 occurs twice"]),
        ({"space": {G: {"generate": {"groups": [10**9], "smallest": 8, "largest": 16}}}}, ["groups.0 = 1000000000"]),
        ({"space": {G: {"generate": {"groups": [2], "smallest": 1, "largest": 10**90}}}}, ["largest = 1", "less than"]),
        ({"space": {N_E: {"low": 1, "high": 10**12, "step": 1}}}, ["more than 100,000 numbers", "give a larger step"]),
        ({"space": {N_E: {"low": 1, "high": 10**12}}}, ["more than 100,000 numbers"]),
        ({"space": {N_E: {"low": True, "high": 4}}}, ["space.model.dynamic_expansion.low = True"]),
        ({"space": {LR: {"low": 1e-4, "high": float("inf")}}}, [f"space.{LR}.high = inf"]),
        ({"space": {N_E: list(range(1, 1002))}}, ["choices", "at most 1000 items"]),
        ({"space": {"model.d_model": [16, 10**9]}}, ["choice 1000000000 is refused", "equal to 131072"]),
        ({"space": {"model.num_encoder_layers": [1, 10**5]}}, ["the choice 100000 is refused", "equal to 200"]),
        ({"space": {G: [[4], [10**10] * 9]}}, ["parameters, and the limit is 100,000,000,000"]),
        ({"rows": [{"name": "x" * 10**5}], "space": None, "algorithm": "grid"}, ["cannot be searched"]),
        ({"space": {G: {"groups": {"x" * 10**5: [4]}}}}, ["bytes; the limit is 1024"]),
        ({"seeds": [10**400]}, ["seeds.0 = 1", "less than"]),
        ({"seeds": 0}, ["seeds", "at least 1 item"]),
        ({"seeds": 10**12}, ["seeds", "at most 1000 items"]),
        ({"seeds": True}, ["seeds = True"]),
        ({"score_split": "train"}, ["score_split is train, which is neither data.val_split (val)", "(test, novel)"]),
        ({"score_split": "test", "set": {"evaluation.constraints": "words.json"}}, ["captions without constraints"]),
        ({"budget": {"trials": 10**12}}, ["budget.trials = 1000000000000", "less than"]),
        ({"scheduler": {"name": "asha", "reduction": 1.0000001}}, ["scheduler.reduction", "equal to 1.1"]),
        ({"storage": ""}, ["storage.uri: the text is empty"]),
        ({"space": {"seed": [1, 2]}}, ["space.seed cannot be searched", "seeds"]),
        ({"space": {"backbone.image_size": [32, 64]}}, ["space.backbone.image_size cannot", "extracted once"]),
        ({"space": {"stages.scst_frozen.lr": [1.0, 2.0]}}, ["no trial runs the stage scst_frozen", "trial.stages"]),
        ({"space": None}, ["exactly one of space and rows"]),
        ({"objectives": {"CIDEr": "max"}}, ["no trial reports 'CIDEr'", "known: CIDEr-D, macs"]),
        ({"objectives": {"CIDEr-D": "up"}}, ["objectives.CIDEr-D = 'up'"]),
        ({"metrics": ["BLEU-5"]}, ["'BLEU-5' is unknown", "BLEU-4"]),
        ({"trial": {"stages": ["xe"]}}, ["the base configuration has no 'xe'", "xe_frozen"]),
        ({"trial": {"stages": ["xe_finetune", "scst_frozen"]}}, ["need new features", "extracts them once"]),
        ({"trial": {"set": {"evaluation": {"beam": 3}}}}, ["unknown key evaluation.beam"]),
        ({"trial": {"set": {"evaluation": {"precision": "auto"}}}}, ["evaluation.precision is auto, and"]),
        ({"set": {"evaluation.precision": "auto"}}, ["evaluation.precision is auto, and", "float32 or bfloat16"]),
        ({"space": {"evaluation.precision": ["auto", "float32"]}}, ["evaluation.precision: the choice"]),
        ({"budget": {"trials": 5}, "seeds": [0, 1]}, ["budget.trials = 5 does not divide by 2 seeds", "take 4"]),
        ({"budget": {}, "algorithm": "tpe"}, ["algorithm tpe needs an end"]),
        ({"algorithm": "pbt"}, ["space.model.static_expansion", "copies weights"]),
        ({"algorithm": "pbt", "space": {"stages.xe_frozen.ema": [0.9, 0.99]}}, ["ema: algorithm pbt copies averages"]),
        ({"scheduler": {"name": "asha", "grace_epochs": 9}}, ["grace_epochs = 9 is more than the 0.7 epochs"]),
        ({"trial": {"set": {"model.dropout": 0.2}}, "space": {"model.dropout": [0.1, 0.3]}}, ["trial.set gives"]),
        ({"trial": {"set": {"features.views": 3}}}, ["trial.set: features.views cannot be set", "extracted once"]),
        ({"trial": {"epochs": 2}, "space": {"stages.xe_frozen.epochs": [1, 2]}}, ["trial.epochs gives all trials"]),
        ({"space": {"model.dropout": {"low": 0.1, "high": 0.3}}, "algorithm": "grid"}, ["the space is infinite"]),
        ({"bse": "x"}, ["unknown key bse", "did you mean base"]),
        ({"base": "absent.yaml"}, ["absent.yaml does not exist"]),
        ({"set": {"model.d_model": 15}}, ["model.d_model = 15 does not divide"]),
        ({"resources": {"workers": 16}}, ["batch_size = 8 is below 16 workers"]),
        ({"rows": [{G: [4]}], "space": None, "algorithm": "tpe"}, ["does not go with rows"]),
        ({"rows": [{G: [4]}, {G: [0]}], "space": None}, ["algorithm random does not go with rows"]),
        ({"rows": [{G: [4]}, {G: [0]}], "space": None, "algorithm": "grid"}, ["the choice G 0", "1 or more"]),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(tmp_path: Path, changes: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(UserError) as error:
        small_search(tmp_path, **changes)
    for part in expected:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_combinations_that_the_model_refuses_are_found_before_anything_starts(tmp_path: Path) -> None:
    """Each choice is valid with the first ones; d_model 12 with 8 heads is not."""
    with pytest.raises(UserError, match=r"d_model 12, num_heads 8 is refused: .*12 does not divide"):
        small_search(tmp_path, space={"model.d_model": [16, 12], "model.num_heads": [2, 8]})


def test_a_point_is_the_base_with_its_changes(tmp_path: Path) -> None:
    search = small_search(tmp_path, trial={"epochs": 2, "set": {"evaluation.beam_size": 1}}, seeds=[3, 4])
    point = {G: "4 8", N_E: "4"}
    trial = search.trial_config(point, 4, str(tmp_path / "backbone.safetensors"))
    assert [stage.name for stage in trial.stages] == ["xe_frozen"] and trial.stages[0].epochs == 2
    assert (trial.model.static_expansion, trial.model.dynamic_expansion, trial.seed) == ((4, 8), 4, 4)
    assert trial.evaluation.beam_size == 1 and not trial.tracking.enabled
    assert trial.backbone.weights.endswith("backbone.safetensors")
    ready = parse_config(search.run_values(point))
    assert ready.stages == search.base.stages and ready.evaluation == search.base.evaluation
    assert (ready.model.static_expansion, ready.name) == ((4, 8), "demo-small-best")
    assert ready.backbone == search.base.backbone


def test_identity_covers_settings_that_affect_results(tmp_path: Path) -> None:
    """A larger budget or machine resumes the same search; longer trials are another search."""
    one = small_search(tmp_path)
    assert small_search(tmp_path, budget={"trials": 6, "hours": 1}, resources={"cpus": 2}).identity(
        "x"
    ) == one.identity("x")
    assert small_search(tmp_path, trial={"epochs": 3}).identity("x") != one.identity("x")
    assert small_search(tmp_path, set={"model.d_ff": 64}).identity("x") != one.identity("x")
    assert one.identity("y") != one.identity("x")


def test_the_named_split_is_part_of_the_identity_and_the_seeds_are_not(tmp_path: Path) -> None:
    """More seeds continue a search; scores of another split are others."""
    default, validation = small_search(tmp_path), small_search(tmp_path, score_split="val")
    test, seeds = small_search(tmp_path, score_split="test"), small_search(tmp_path, seeds=2)
    assert seeds.config.seeds == (0, 1) and seeds.identity() == default.identity() != test.identity()
    assert [search.reported("CIDEr-D") for search in (default, validation, test)] == [
        "CIDEr-D", "CIDEr-D", "test CIDEr-D",
    ]  # fmt: skip
    assert selection_note(validation).startswith("Chosen and reported on val: ")
    assert "Reported on test: the chosen weights caption it once, with beam 2, at most" in selection_note(test)
    beams = small_search(tmp_path, score_split="test", space={"evaluation.beam_size": [1, 2]}, budget={"trials": 2})
    assert "with each point's evaluation" in selection_note(beams)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_ablations_report_the_split_of_their_papers_tables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table I of ExpansionNet v2 is of the validation split, the tables of the other papers are of the test split."""
    for name in ("RAYCAP_COCO", "RAYCAP_REGIONS"):
        monkeypatch.setenv(name, "/somewhere")
    search = load_search(path)
    if search.config.compare and search.base.data.synthetic is None:
        assert search.score_split == {"expansionnet_v2": "val"}.get(search.config.compare, "test")


def test_number_of_trials(tmp_path: Path) -> None:
    assert small_search(tmp_path).num_trials() == 4
    assert small_search(tmp_path, algorithm="grid", budget={}, seeds=[0, 1]).num_trials() == 12  # 3 groups x 2 x seeds
    assert small_search(tmp_path, budget={"trials": 50}).num_trials() == 6  # there are no more points
    assert small_search(tmp_path, budget={"hours": 1.0}).num_trials() == 6


def test_nested_and_dotted_keys_are_the_same() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "a.d": [1]}) == {"a.b.c": 1, "a.d": [1]}


def test_a_search_is_read_back_from_its_plan(tmp_path: Path) -> None:
    """A trial's process reads the search that the driver checked."""
    search = small_search(tmp_path, trial={"epochs": 2}, scheduler="asha")
    again = Search(parse_section(SearchConfig, search.config.model_dump(mode="json")), copy.deepcopy(search.values))
    assert again.config == search.config and again.identity() == search.identity()


def test_the_processes_of_trials_get_no_password(tmp_path: Path) -> None:
    search = small_search(tmp_path, set={"tracking": {"uri": "https://me:secret-word@host"}})
    sent = pickle.dumps(search.without_tracker())
    assert b"secret-word" in pickle.dumps(search) and b"secret-word" not in sent
    assert pickle.loads(sent).space.keys == search.space.keys  # noqa: S301 - it was written here


def test_nested_rows_change_only_their_keys(tmp_path: Path) -> None:
    search = small_search(
        tmp_path, space=None, rows=[{"model": {"static_expansion": [4]}}], algorithm="grid", budget={}
    )
    (point,) = search.space.points()
    model = search.trial_config(point, 0).model
    assert model.static_expansion == (4,) and model.d_model == search.base.model.d_model
