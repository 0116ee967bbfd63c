"""Reading configurations: what one extends, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raycap.pipeline.config.load import (
    load_config,
    parse_config,
    read_file,
    read_values,
    referenced_files,
)
from raycap.pipeline.errors import UserError
from tests.conftest import ROOT, small_config
from tests.support.checkout import own


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_overrides_what_it_extends(tmp_path: Path) -> None:
    write(tmp_path / "recipes" / "stages.yaml", "stages: [{name: a, lr: 1, scst: {x: 1, y: 2}}, {name: b, lr: 2}]")
    write(
        tmp_path / "first.yaml",
        "{extends: recipes/stages.yaml, name: first, data: {root: r, splits: [a, b]}, model: {name: m, width: 3}}",
    )
    last = write(
        tmp_path / "last.yaml",
        "{extends: first.yaml, name: last, data: {splits: [c]}, model: {width: null},"
        " stages: [{name: c}, {name: a, scst: {y: 3}}]}",
    )
    assert read_file(last) == {
        "name": "last",
        "data": {"root": "r", "splits": ["c"]},
        "model": {"name": "m", "width": None},
        "stages": [{"name": "a", "lr": 1, "scst": {"x": 1, "y": 3}}, {"name": "b", "lr": 2}, {"name": "c"}],
    }
    assert read_values(last, ["stages.a.lr=7"])["stages"][0]["lr"] == 7
    assert referenced_files(last) == [last, tmp_path / "first.yaml", tmp_path / "recipes" / "stages.yaml"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.yaml": "extends: b.yaml"}, r"a.yaml: extends names b.yaml, which does not exist; give the path"),
        ({"a.yaml": "extends: a.yaml"}, r"extends forms a circle: .*a.yaml -> .*a.yaml; remove"),
        (
            {"a.yaml": "extends: sub/b.yaml", "sub/b.yaml": "extends: ../a.yaml"},
            r"a.yaml -> .*b.yaml -> .*a.yaml; remove one",
        ),
        ({"a.yaml": "extends: ../b.yaml", "../b.yaml": "x: 1"}, r"extends names ../b.yaml, which is outside of"),
        ({"a.yaml": "extends: /etc/hostname"}, "extends names /etc/hostname, which is outside of"),
        ({"a.yaml": "extends: [b.yaml, c.yaml]"}, r"extends must be the path of one YAML file, found \['b.yaml'"),
        ({"a.yaml": "extends: b.yaml", "b.yaml": "[1]"}, "b.yaml must hold a mapping of keys, found a list"),
    ],
)
def test_what_cannot_be_extended_is_answered_in_one_sentence(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    folder = tmp_path / "configs"
    for name, text in files.items():
        write(folder / name, text)
    with pytest.raises(UserError, match=message) as error:
        read_values(folder / "a.yaml")
    assert "\n" not in str(error.value)


def test_a_base_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    search = write(tmp_path / "search.yaml", "extends: recipes/search.yaml\nname: s")
    write(tmp_path / "recipes" / "search.yaml", "base: ../run.yaml\nseed: 1")
    run = write(tmp_path / "run.yaml", "extends: recipes/run.yaml\nname: r")
    write(tmp_path / "recipes" / "run.yaml", "seed: 2")
    assert read_values(search) == {"base": "run.yaml", "seed": 1, "name": "s"}
    names = ["search.yaml", "recipes/search.yaml", "run.yaml", "recipes/run.yaml"]
    assert referenced_files(search) == [tmp_path / name for name in names]
    assert run.is_file()


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "expands to more than"),
        ("data: &d {root: *d}", "an alias contains itself"),
        ("x: " + "[" * 1_100, "nested more than"),
        ("stages: !!set {a, b}", "tag:yaml.org,2002:set is not supported"),
        ("x: [1, 2", "not valid YAML"),
        ("1: 2", "has the key 1, which is not text"),
        ("x: " + "y" * 10**6, "characters of YAML|larger than"),
        ('extends: "a\\0b"', "which does not exist"),
        ("extends: loop.yaml", "which does not exist"),
        ("extends: " + "x" * 5_000, "which does not exist"),
    ],
)
def test_hostile_files_are_answered_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name, content in (("run.yaml", text), ("search.yaml", f"{text}\nname: s\nbase: run.yaml")):
        with pytest.raises(UserError, match=message) as error:
            read_values(write(tmp_path / name, content))
        assert "\n" not in str(error.value) and str(error.value).startswith(str(tmp_path))
        assert len(str(error.value)) < 11_000


def test_keys_of_a_storage_in_its_short_form_can_be_set(tmp_path: Path) -> None:
    values = small_config(tmp_path) | {"storage": "results"}
    path = write(tmp_path / "run.yaml", yaml.safe_dump(values))
    url = "storage.endpoint_url=http://127.0.0.1:9000"
    storage = load_config(path, [url]).storage
    assert (storage.uri, storage.endpoint_url) == ("results", "http://127.0.0.1:9000")
    assert load_config(path, ["storage=s3://data/x", url]).storage.uri == "s3://data/x"
    (tmp_path / "long.yaml").write_text("extends: run.yaml\nstorage: {endpoint_url: 'http://h'}\n")
    long = load_config(tmp_path / "long.yaml").storage
    assert (long.uri, long.endpoint_url) == ("results", "http://h")
    short = load_config(write(tmp_path / "short.yaml", "extends: long.yaml\nstorage: s3://data/x\n")).storage
    assert (short.uri, short.endpoint_url) == ("s3://data/x", "http://h"), "the short form is the key uri"


def test_every_recipe_is_extended() -> None:
    extended = {file for config in own((ROOT / "raycap/configs").glob("*.yaml")) for file in referenced_files(config)}
    assert set(own((ROOT / "raycap/configs/recipes").glob("*.yaml"))) <= extended


def test_a_required_key_with_a_typing_error_is_named_as_it_is_written(tmp_path: Path) -> None:
    values = small_config(tmp_path)
    values["stages"][0]["epohcs"] = values["stages"][0].pop("epochs")
    with pytest.raises(UserError, match=r"unknown key stages\.xe_frozen\.epohcs: did you mean epochs"):
        parse_config(values)
    values["stages"][0]["passes"] = values["stages"][0].pop("epohcs")
    with pytest.raises(UserError, match=r"unknown key stages\.xe_frozen\.passes: known here: .*epochs"):
        parse_config(values)
    del values["stages"][0]["passes"]
    with pytest.raises(UserError, match=r"key stages\.xe_frozen\.epochs is missing; add it"):
        parse_config(values)
