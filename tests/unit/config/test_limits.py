"""Numbers and texts that cannot be meant are refused in one short sentence, before anything else is looked at."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from raycap.models.config import MODEL_CONFIGS
from raycap.models.values import read_number
from raycap.pipeline.config.load import load_config, parse_config, parse_given, set_value
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError
from tests.conftest import ROOT, small_config

DEMO = ROOT / "raycap" / "configs" / "demo.yaml"
NEVER: list[Any] = [10**39, 10**400, -(10**39), math.nan, math.inf, -math.inf, True, "many", "0x10", "1_0", {}]
SOMETIMES: list[Any] = [1e308, 1e30, 10**32, 10**9, -1.0, -1, 0, 0.5, None, [1]]  # each is right for some numbers


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("backbone.image_size=1000000", "backbone.image_size = 1000000: input should be less than or equal to 4096"),
        ("backbone.image_size=30", "backbone.image_size is 30; it must be a multiple of the patches' 4 px"),
        ("backbone.embed_dim=0", "backbone.embed_dim is 0; it must be 1 or more"),
        ("backbone.depths=[]", "backbone.depths is (); it must be 1 or more"),
        ("backbone.depths=[1, 1, 1]", "backbone.depths asks for 3 stages, and backbone.num_heads has 2 numbers"),
        ("backbone.depths=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", "backbone.depths = [1, 1"),
        ("model.dynamic_expansion=1000000000", "model.dynamic_expansion = 1000000000: input should be less than"),
        ("model.static_expansion=[1000000000000]", "model.static_expansion.0 = 1000000000000: input should be"),
        ("model.d_model=1000000", "model.d_model = 1000000: input should be less than or equal to 131072"),
        ("model.num_encoder_layers=1000000", "model.num_encoder_layers = 1000000: input should be less than"),
        ("model.d_model=128.0", "model.d_model = 128.0: input should be a valid integer"),
        ("model.d_model=true", "model.d_model = True: input should be a valid integer"),
        ("stages.0.batch_size=1" + "0" * 32, "stages.xe_frozen.batch_size = 1" + "0" * 32 + ": input should be less"),
        ("stages.0.epochs=1.0e+308", "stages.xe_frozen.epochs = 1e+308: input should be less than"),
        ("evaluation.max_length=1000000000", "evaluation.max_length = 1000000000: input should be less than"),
        ("workers.cpus_per_worker=1.0e+308", "workers.cpus_per_worker = 1e+308: input should be less than"),
        ("workers.gpus_per_worker=1.5", "workers.gpus_per_worker: 1.5 GPUs are neither a whole number nor a part"),
        ("features.gpus_per_actor=-1", "features.gpus_per_actor = -1: input should be greater than or equal to 0"),
        ("data.synthetic.image_size=100000", "data.synthetic.image_size = 100000: input should be less than"),
        ("data.synthetic.num_images=1000000000000", "data.synthetic.num_images = 1000000000000: input should be"),
        ("data.max_pixels=1000", "data.synthetic.image_size = 64 gives images of more than data.max_pixels = 1000"),
        ("data.annotations=other.json", "data.annotations belongs to a data set in data.root"),
        ("storage=''", "storage.uri: the text is empty; give a value"),
        ("storage=~nobody-has-this-name/x", "storage.uri: the text begins with ~ and names no user's home folder"),
        ("storage=s3://", "storage.uri: 's3://' is neither a folder nor of the form s3://BUCKET/FOLDER"),
        ("storage=s3:/bucket", "storage.uri: 's3:/bucket' is neither a folder nor"),
        ("init_from=https://example.org/model", "init_from: 'https://example.org/model' is neither a folder nor"),
        ("backbone.depths=[150, 100]", "backbone.depths asks for 250 blocks"),
        ('storage="a\\0b"', "storage.uri: the text has control characters"),
        ('init_from="a\\0b"', "init_from: the text has control characters"),
        ('init_from="\\ud800"', "init_from: the text has control characters or is not UTF-8"),
        ('data.test_splits=["a\\eb"]', "data.test_splits.0: the text has control characters"),
        ('stages.0.name="a\\nb"', ".name: the text has control characters"),
        ("name=" + "a" * 101, "has 101 characters; the limit is 100"),
    ],
)
def test_what_cannot_be_meant_is_refused(override: str, found: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(DEMO, [override])
    assert found in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize(
    "override",
    ["name={}", "stages.0.name={}", "model.name={}", "seed={}", "storage={}", "{}=1", "name.{}=1", "model={{{}: 1}}",
     "{}", "stages.{}.lr=1", "model.gates={}", "data.split_lists={{{}: {}}}", "storage.endpoint_url={}",
     "backbone.name={}"],
)  # fmt: skip
def test_a_long_value_makes_no_long_message(override: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(DEMO, [override.format("a" * 100_000, "b" * 100_000)])
    assert len(str(error.value)) < 1500


def test_texts_that_spell_numbers_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML 1.1 reads 1e-3 as a text, and an environment variable is one."""
    monkeypatch.setenv("SOME_SEED", "17")
    config = load_config(DEMO, ["stages.0.lr=1e-3", "seed=${SOME_SEED}"])
    assert config.stages[0].lr == 1e-3 and config.seed == 17
    assert [read_number(text) for text in ("-5", "+.5", "2.", "1E3", "-1e-3")] == [-5, 0.5, 2.0, 1000.0, -0.001]
    for text in ("", " 1", "1 ", "1_0", "0x1", "nan", "inf", "1e", "e1", "1" * 5000, "１"):
        assert read_number(text) is text


def numbers(kind: Any, key: str = "") -> Iterator[str]:
    """The dotted keys of all numbers in a section or in an annotation; the stages' begin with `stages.0`."""
    if get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from numbers(member, key)
    elif get_origin(kind) is tuple:
        for index in range(
            1 if key in ("stages", "data.sources") or get_args(kind)[-1] is ... else len(get_args(kind))
        ):
            yield from numbers(get_args(kind)[0], f"{key}.{index}")
    elif kind in (int, float):
        yield key
    elif is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind.model_fields)
        hints = get_type_hints(kind)
        for name in names:
            yield from numbers(hints[name], f"{key}.{name}".removeprefix("."))


def all_numbers() -> list[tuple[str, str]]:
    """(key, model) of every number of a run; the numbers of each model are those of its own section."""
    keys = [(key, "expansionnet_v2") for key in numbers(RunConfig) if not key.startswith("model.")]
    return keys + [(f"model.{key}", name) for name, kind in MODEL_CONFIGS.items() for key in numbers(kind)]


@functools.cache
def base() -> dict[str, Any]:
    return small_config(Path("results"))


def with_value(key: str, model: str, value: Any) -> dict[str, Any]:
    """A small configuration with this value. A key's last part may be an index into a list, which gets one item."""
    values = copy.deepcopy(base())
    if model != "expansionnet_v2":
        values["model"] = {"name": model, "d_model": 16, "num_heads": 2}
    parent, _, last = key.rpartition(".")
    if last.isdigit():
        key, value = parent, [value] * (2 if key.split(".")[-2] in ("betas", "grid") else 1)
    if ".scst." in key or ".plateau." in key:
        values["stages"] = values["stages"][2:3]
    set_value(values, key, value, "test")
    return values


def test_every_number_is_found() -> None:
    keys = {key for key, _ in all_numbers()}
    assert len(keys) > 80
    assert {"seed", "stages.0.scst.temperature", "backbone.depths.0", "model.grid.0", "data.synthetic.seed"} <= keys


@pytest.mark.parametrize(("key", "model"), all_numbers(), ids=lambda value: value)
def test_hostile_numbers_are_refused_or_accepted(key: str, model: str) -> None:
    for value in NEVER:
        with pytest.raises(UserError) as error:
            parse_config(with_value(key, model, value))
        assert len(str(error.value)) < 700 and "\n" not in str(error.value), f"{key} = {value}"
    for value in SOMETIMES:
        with contextlib.suppress(UserError):
            parse_config(with_value(key, model, value))


def test_settings_of_an_import_have_the_same_limits() -> None:
    for values in ({"d_model": 10**9}, {"d_model": True}, {"dropout": "much"}, {"word_vectors": "a\0b"}):
        with pytest.raises(UserError, match=f"model.{next(iter(values))}"):
            parse_given(MODEL_CONFIGS["expansionnet_v2"], values, "model")


def test_a_huge_number_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(tmp_path)) + f"\nseed: {'9' * 900}\n")
    with pytest.raises(UserError, match=r"seed = 999.* \(900 characters\): input should be less than"):
        load_config(path)
