"""Mistakes in a configuration, and numbers and texts out of range: one sentence with key, value and remedy."""

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
from pydantic import BaseModel

from raycap.jobs.cli import main
from raycap.models.config import MODEL_CONFIGS, read_number
from raycap.pipeline.config.load import load_config, parse_config, set_value
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.errors import UserError
from tests.conftest import ROOT, small_config

DEMO = ROOT / "raycap" / "configs" / "demo.yaml"
NEVER: list[Any] = [10**39, 10**400, -(10**39), math.nan, math.inf, -math.inf, True, "many", "0x10", "1_0", {}]
SOMETIMES: list[Any] = [1e308, 1e30, 10**32, 10**9, -1.0, -1, 0, 0.5, None, [1]]  # each is valid for some keys


def test_texts_that_spell_numbers_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML 1.1 reads 1e-3 as a text, and an environment variable is always a text."""
    monkeypatch.setenv("SOME_SEED", "17")
    config = load_config(DEMO, ["stages.0.lr=1e-3", "seed=${SOME_SEED}"])
    assert config.stages[0].lr == 1e-3 and config.seed == 17
    assert [read_number(text) for text in ("-5", "+.5", "2.", "1E3", "-1e-3")] == [-5, 0.5, 2.0, 1000.0, -0.001]
    for text in ("", " 1", "1 ", "1_0", "0x1", "nan", "inf", "1e", "e1", "1" * 5000, "１"):
        assert read_number(text) is text


def numbers(kind: Any, key: str = "") -> Iterator[str]:
    """The dotted keys of all numbers in a section or an annotation. Those of stages begin with `stages.0`."""
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
    """(key, model) of every number of a run's configuration. Each model has its own section."""
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
    assert {"seed", "stages.0.scst.temperature", "backbone.depths.0", "data.synthetic.seed"} <= keys


@pytest.mark.parametrize(("key", "model"), all_numbers(), ids=lambda value: value)
def test_hostile_numbers_are_refused_or_accepted(key: str, model: str) -> None:
    for value in NEVER:
        with pytest.raises(UserError) as error:
            parse_config(with_value(key, model, value))
        assert len(str(error.value)) < 700 and "\n" not in str(error.value), f"{key} = {value}"
    for value in SOMETIMES:
        with contextlib.suppress(UserError):
            parse_config(with_value(key, model, value))


MISTAKES = [
    ("model.d_modle=64", "unknown key model.d_modle: did you mean d_model"),
    ("stages.xe_frozen.epohcs=1", "unknown key stages.xe_frozen.epohcs: did you mean epochs"),
    ("stages.nothere.epochs=1", "'nothere' is none of xe_frozen"),
    ("model.name=meshed_memory", "unknown key model.static_expansion: known here: attended_regions"),
    ("model.name=expansionet_v2", "model.name is 'expansionet_v2', which is unknown: did you mean expansionnet_v2"),
    ("model={name: meshed_memory, num_memory_slots: many}", "model.num_memory_slots = 'many'"),
    ("model.num_heads=3", "model.d_model = 128 does not divide by model.num_heads = 3"),
    ("model.d_model=1000000", "model.d_model = 1000000: input should be less than or equal to 131072"),
    ("model.dropout=1", "model.dropout = 1: input should be less than 1"),
    (
        "evaluation.decoding={min_length: 1}",
        "decoding.min_length = 1: input should be greater than or equal to 2",
    ),
    ("evaluation.decoding={sampling: true, beam_groups: 2}", "beam_groups is 2; set one of them only"),
    ("model.d_model=true", "model.d_model = True: input should be a valid integer"),
    ("workers.num_workers=21", "batch_size = 20 is below 21 workers x 1 accumulated"),
    ("workers={gpus_per_worker: 0.5, num_workers: 2}", "gives two of 2 workers the same GPU"),
    ("workers.gpus_per_worker=1.5", "workers.gpus_per_worker: 1.5 GPUs are neither a whole number nor a part"),
    ("stages.xe_frozen.epochs=0", "stages.xe_frozen.epochs = 0"),
    ("stages.0.epochs=.inf", "stages.xe_frozen.epochs"),
    ("stages.xe_frozen.optimizer.layer_decay=0.8", "train_backbone is false; leave it out"),
    ("stages.xe_frozen.schedule={name: cosine, min_lr: 1}", "schedule.min_lr = 1 above lr = 0.001"),
    ("data.language=pt-BR", "'pt-BR' is not a language code"),
    ("data.language=de", "data.synthetic.language = en and data.language = de"),
    ("data.synthetic=null", "exactly one of data.synthetic and data.root"),
    ("data.annotations=other.json", "data.annotations belongs to a data set in data.root"),
    ("evaluation={num_results: 9}", "num_results = 9 is above evaluation.beam_size = 5 (the default); raise"),
    ("evaluation.metrics=[Div-1, Div-1]", "evaluation.metrics contains Div-1 more than once"),
    ("features={store: never, hdf5: synthetic}", "features.store is never, and without a backbone"),
    ("backbone.name=hf-hub:a/b", "backbone.name is 'hf-hub:a/b'"),
    ("backbone.image_size=30", "backbone.image_size is 30; it must be a multiple of the patches' 4 px"),
    ("name=..", "name '..' must be letters"),
    ("name=" + "a" * 101, "has 101 characters; the limit is 100"),
    ("storage=s3:/bucket", "storage.uri: 's3:/bucket' is neither a folder nor"),
    ("storage=~nobody-has-this-name/x", "storage.uri: the text begins with ~"),
    ('init_from="\\ud800"', "init_from: the text has control characters or is not UTF-8"),
    ("nonsense", "--set 'nonsense' is not of the form a.b=value"),
    ("seed=" + "[" * 1_100, "--set seed is nested more than"),
    ("seed=" + "9" * 900, "(900 characters): input should be less than"),
    ("a" * 100_000 + "=1", "characters)"),
    ("data.root=${NOT_SET_ANYWHERE}", "needs the environment variable NOT_SET_ANYWHERE"),
]


@pytest.mark.parametrize(("override", "said"), MISTAKES)
def test_mistakes_are_one_short_sentence(override: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "demo", "--set", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.isprintable() and len(line) < 700
