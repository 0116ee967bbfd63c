"""The configuration of a run: one YAML file, read, overridden, checked as a whole, and the identity that it gives."""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from models.config import MODEL_CONFIGS, BackboneConfig
from pipeline.config.sections import (
    EMBEDDED,
    DataSection,
    EvaluationSection,
    FeatureSection,
    ModelSection,
    RetrainSection,
    Section,
    StageSection,
    StorageSection,
    TrackingSection,
    WorkersSection,
)
from pipeline.errors import UserError
from pipeline.storage.cache import cache_folder
from pipeline.storage.path import StoragePath, is_remote, place

SectionType = TypeVar("SectionType", bound=Section)


class RunConfig(Section):
    """Everything that `raycap run` needs, in one file."""

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    storage: StorageSection = StorageSection()
    data: DataSection
    backbone: BackboneConfig = BackboneConfig()  # may be left out only where features.hdf5 brings a detector's features
    features: FeatureSection = FeatureSection()
    model: ModelSection
    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)]
    init_from: str | None = None  # a model bundle whose weights training starts from, with a fresh optimizer
    workers: WorkersSection = WorkersSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()
    retrain: RetrainSection = RetrainSection()

    @field_validator("storage", mode="before")
    @classmethod
    def _short_storage(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"name {self.name!r} must be letters, digits, '_', '-' and '.', a letter or digit first")
        if "backbone" not in self.model_fields_set and self.features.hdf5 is None:
            raise ValueError(
                "key backbone is missing; add it to the configuration, or features.hdf5 for region features"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stage names must differ, found {', '.join(names)}")
        self._check_regions()
        for stage in self.stages:
            share = math.lcm(*self.workers.counts) * stage.gradient_accumulation_steps
            if stage.batch_size % share:
                counts = " and ".join(map(str, self.workers.counts))
                raise ValueError(
                    f"stages.{stage.name}.batch_size = {stage.batch_size} does not divide by "
                    f"{counts} workers x {stage.gradient_accumulation_steps} accumulated = {share}; "
                    f"take {max(share, round(stage.batch_size / share) * share)} or another workers.num_workers"
                )
        return self

    def _check_regions(self) -> None:
        """Where features come from goes with the data, the model and the stages."""
        if self.features.hdf5 is None:
            self.model.check_inputs(regions=False)
            return
        if self.features.hdf5 == EMBEDDED and self.data.synthetic is None:
            raise ValueError(
                f"features.hdf5 = {EMBEDDED} means the embedded data set's regions, and data.synthetic is not set; "
                "give the path of an HDF5 file"
            )
        self.model.check_inputs(regions=True)
        for stage in self.stages:
            if stage.train_backbone:
                raise ValueError(
                    f"stages.{stage.name}.train_backbone is true, and features.hdf5 stands in place of a backbone: "
                    "set it to false, or leave features.hdf5 out"
                )

    @property
    def working_path(self) -> Path:
        """The local folder to work in: the storage itself, or where the copies of what lies on S3 are."""
        if is_remote(self.storage.uri):
            return cache_folder() / "storage" / hashlib.sha256(self.storage_place.uri.encode()).hexdigest()[:16]
        return Path(self.storage.uri).expanduser().resolve()

    @property
    def storage_path(self) -> Path:
        """The storage as a local folder, for what works on one only."""
        if is_remote(self.storage.uri):
            raise UserError(f"storage {self.storage.uri}: this command needs a local folder; set another storage")
        return self.working_path

    def home(self, name: str) -> StoragePath | None:
        """The place of a folder on S3 that is worked on below `working_path`; None for a local storage."""
        return self.storage_place / name if is_remote(self.storage.uri) else None

    @property
    def storage_place(self) -> StoragePath:
        return place(self.storage.uri, self.storage.options)

    def stage(self, name: str) -> StageSection:
        return next(stage for stage in self.stages if stage.name == name)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, overrides (`a.b=value`, stages by name or number), expands `${VARIABLE}` and checks a configuration.

    Raises UserError in one sentence that names the key, what was found and what is known.
    """
    return parse_config(read_values(path, overrides))


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values of a YAML file after overrides and `${VARIABLE}`; UserError as `load_config`."""
    if not path.is_file():
        raise UserError(
            f"configuration {path} does not exist; give the path of a YAML file, for example configs/demo.yaml"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of keys, found {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    expanded: dict[str, Any] = _expand(data, "")
    return expanded


def parse_config(data: dict[str, Any]) -> RunConfig:
    """A checked configuration from plain values; UserError as `load_config`."""
    return parse_section(RunConfig, data)


def parse_section(kind: type[SectionType], data: dict[str, Any]) -> SectionType:
    """Plain values as a section of any kind; UserError as `load_config`."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UserError(_sentence(error, data, kind)) from error


def dump_config(config: RunConfig) -> str:
    """YAML of the resolved configuration; the tracker's address, which may hold a password, is left out.

    So is the backbone of a run on region features, which has none.
    """
    values = config.model_dump(mode="json", exclude={"tracking": {"uri"}})
    if config.features.hdf5 is not None and config.backbone == BackboneConfig():
        del values["backbone"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r} is not of the form a.b=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: {text!r} is not a YAML value") from error
    set_value(data, key, value, "--set")


def set_value(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Sets a dotted key of plain values, stages by name or number; `where` begins the sentence of a UserError."""
    node: Any = data
    parts = key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            names = [item.get("name") if isinstance(item, dict) else None for item in node]
            index = names.index(part) if part in names else int(part) if part.isascii() and part.isdigit() else -1
            if not 0 <= index < len(node):
                raise UserError(f"{where} {key}: {part!r} is none of {', '.join(str(name) for name in names)}")
            if last:
                node[index] = value
            else:
                node = node[index]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
        else:
            raise UserError(f"{where} {key}: {'.'.join(parts[:depth])} holds a plain value, nothing lies below it")


def _expand(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _expand(item, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, f"{key}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise UserError(
                f"{key} needs the environment variable {name}, which is not set; export {name}=... or --set {key}=..."
            )
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", replace, value)


def _sentence(error: ValidationError, data: Any, kind: type[BaseModel]) -> str:
    """The first error as one sentence with the dotted key; unknown keys name the nearest known one."""
    first = error.errors()[0]
    where = first["loc"]
    if first["type"] == "union_tag_invalid":
        known = sorted(MODEL_CONFIGS)
        near = difflib.get_close_matches(first["ctx"]["tag"], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"model.name is {first['ctx']['tag']!r}, which is unknown: {hint}known: {', '.join(known)}"
    if where[:1] == ("model",):
        where = (where[0], *where[2:])  # pydantic names the system in between, which is no key
    location = _with_stage_names([str(part) for part in where], data)
    key = ".".join(location)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(first["loc"][:-1], kind)
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown key {key}: {hint}known here: {', '.join(known)}"
    if first["type"] in ("missing", "missing_argument"):
        return f"key {key} is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message if not key or key.split(".")[-1] in message else f"{key}: {message}"
    return f"{key} = {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _with_stage_names(location: list[str], data: Any) -> list[str]:
    if len(location) >= 2 and location[0] == "stages" and location[1].isdigit():
        stage = data["stages"][int(location[1])]
        if isinstance(stage, dict) and isinstance(stage.get("name"), str):
            return ["stages", stage["name"], *location[2:]]
    return location


def _known_keys(location: Sequence[int | str], kind: type[BaseModel]) -> list[str]:
    """Keys valid at a location, by walking the types of the sections."""
    if len(location) == 2 and location[0] == "model":
        return sorted(field.name for field in fields(MODEL_CONFIGS[str(location[1])]))
    node: Any = kind
    for part in location:
        if isinstance(part, int):
            continue
        if isinstance(node, type) and issubclass(node, BaseModel):
            node = _section_type(node.model_fields[part].annotation) if part in node.model_fields else node
    if isinstance(node, type) and issubclass(node, BaseModel):
        return sorted(node.model_fields)
    return sorted(field.name for field in fields(node)) if is_dataclass(node) else []


def _section_type(annotation: Any) -> Any:
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_type(inner)
        if found is not None:
            return found
    return None


def total_steps(stage: StageSection, num_samples: int) -> int:
    """Optimizer steps of a stage over `num_samples` samples an epoch; the last step may run into another epoch."""
    return max(1, math.ceil(stage.epochs * num_samples / stage.batch_size))
