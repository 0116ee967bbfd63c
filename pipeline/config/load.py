"""A configuration from a file: read, overridden (`--set`), with `${VARIABLE}` expanded, checked, written again."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from models.config import MODEL_CONFIGS, BackboneConfig
from pipeline.config.run import RunConfig
from pipeline.config.sections import Section
from pipeline.errors import UserError

SectionType = TypeVar("SectionType", bound=Section)


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
