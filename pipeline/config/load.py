"""Configurations from YAML files: `extends`, `--set`, `${VARIABLE}`, checks whose errors are one sentence.

A file may begin with `extends: other.yaml`, a path relative to the file. Its own values are merged over those of the
other file: mappings key by key, lists of named items (the stages) by name. Everything else is replaced, and so is a
section that gets another `name` (another model, schedule or optimizer), because that has different keys.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from models.config import MODEL_CONFIGS, BackboneConfig, ModelConfig
from pipeline.config.renamed import new_key
from pipeline.config.run import RunConfig
from pipeline.config.sections import ModelSection
from pipeline.errors import UserError

SectionType = TypeVar("SectionType")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a YAML file; overrides are `a.b=value`, stages by name or number.

    Raises UserError in one sentence that names the key, what was found and what is known.
    """
    return parse_config(read_values(path, overrides))


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values of a YAML file after `extends`, overrides and `${VARIABLE}`; UserError as `load_config`."""
    values = read_file(path)
    for override in overrides:
        apply_override(values, override)
    return expand_variables(values)


def read_file(path: Path) -> dict[str, Any]:
    """The plain values of a YAML file, merged over those of the file that it extends; UserError as `load_config`."""
    values: dict[str, Any] = {}
    for _, changes in reversed(_chain(path)):
        values = merge(values, changes)
    return values


def referenced_files(path: Path) -> list[Path]:
    """The configuration, the files that it extends and, of a search, its base with the files that this one extends."""
    files = [file for file, _ in _chain(path)]
    base = read_file(path).get("base")
    return files + (referenced_files(path.parent / base) if isinstance(base, str) else [])


def _chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file, the file that it extends, and so on, each with its own values.

    A path under `base` is made relative to the first file's folder, from which a search reads it.
    """
    chain = [(path, _read_yaml(path))]
    while (name := chain[-1][1].pop("extends", None)) is not None:
        file = _extended_file(name, [file for file, _ in chain])
        values = _read_yaml(file)
        if isinstance(values.get("base"), str):
            values["base"] = os.path.relpath(file.parent / values["base"], path.parent)
        chain.append((file, values))
    return chain


def _extended_file(name: Any, chain: Sequence[Path]) -> Path:
    """The file that the last one of the chain extends; UserError for one that is missing, outside, or extended before.

    A file is outside if it is neither in the first file's folder nor below it.
    """
    last, folder = chain[-1], chain[0].parent.resolve()
    if not isinstance(name, str):
        raise UserError(f"{last}: extends must be the path of one YAML file, found {name!r}")
    file = last.parent / name
    if Path(name).is_absolute() or not file.resolve().is_relative_to(folder):
        raise UserError(
            f"{last}: extends names {name}, which is outside of {folder}; give a relative path to a file in this "
            "folder or below it"
        )
    if not file.is_file():
        raise UserError(f"{last}: extends names {name}, and {file} does not exist; give the path of a YAML file")
    if file.resolve() in [earlier.resolve() for earlier in chain]:
        circle = " -> ".join(str(link) for link in (*chain, file))
        raise UserError(f"extends forms a circle: {circle}; remove one of these keys")
    return file


def _read_yaml(path: Path) -> dict[str, Any]:
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
    return data


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, by the rules in this module's docstring; neither is modified."""
    merged = dict(base)
    for key, value in changes.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict) and not _is_renamed(before, value):
            merged[key] = merge(before, value)
        elif isinstance(before, list) and _has_names(before) and _has_names(value):
            merged[key] = _merge_items(before, value)
        else:
            merged[key] = value
    return merged


def _merge_items(before: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = {item["name"]: item for item in before}
    return list((items | {item["name"]: merge(items.get(item["name"], {}), item) for item in changes}).values())


def _is_renamed(before: dict[str, Any], value: dict[str, Any]) -> bool:
    return "name" in before and "name" in value and before["name"] != value["name"]


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets one `a.b=value` of the command line in plain values; UserError as `load_config`."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r} is not of the form a.b=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: {text!r} is not a YAML value") from error
    set_value(values, key, value, "--set")


def set_value(data: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Sets a dotted key of plain values, stages by name or number; a UserError begins with `source`."""
    node: Any = data
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        if isinstance(node, list):
            node = node[_stage_index(node, part, f"{source} {key}")]
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise UserError(f"{source} {key}: {'.'.join(parents[:depth])} is a plain value without keys")
    if isinstance(node, list):
        node[_stage_index(node, last, f"{source} {key}")] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise UserError(f"{source} {key}: {'.'.join(parents)} is a plain value without keys")


def _stage_index(items: list[Any], part: str, source: str) -> int:
    """The index of the stage that `part` names or numbers; a UserError begins with `source`."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if part in names:
        return names.index(part)
    if part.isascii() and part.isdigit() and int(part) < len(items):
        return int(part)
    raise UserError(f"{source}: {part!r} is none of {', '.join(str(name) for name in names)}")


def expand_variables(values: dict[str, Any]) -> dict[str, Any]:
    """The values with each `${VARIABLE}` replaced from the environment; UserError where one is not set."""
    expanded: dict[str, Any] = _expand(values, "")
    return expanded


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


def parse_config(data: dict[str, Any]) -> RunConfig:
    """A checked configuration from plain values; UserError as `load_config`."""
    return parse_section(RunConfig, data)


def parse_section(section_type: type[SectionType], data: Any, key: str = "") -> SectionType:
    """Plain values as a pydantic model or dataclass; UserError as `load_config`.

    `key` is the section's place in its file, for the error's sentence.
    """
    section: SectionType = _validated(section_type, data, key)
    return section


def parse_model(data: Any) -> ModelConfig:
    """Plain values of a section `model` as the configuration of the system that its `name` gives; UserError."""
    config: ModelConfig = _validated(ModelSection, data, "model")
    return config


def parse_given(section_type: type, data: dict[str, Any], key: str) -> dict[str, Any]:
    """Some of a dataclass's values. Only the type of each is checked, not whether they fit together. UserError."""
    hints = get_type_hints(section_type)
    options: dict[str, Any] = {field.name: (hints[field.name], None) for field in fields(section_type)}
    partial = create_model(section_type.__name__, __config__=ConfigDict(extra="forbid"), **options)
    return parse_section(partial, data, key).model_dump(exclude_unset=True)


def _validated(section_type: Any, data: Any, key: str) -> Any:
    try:
        return TypeAdapter(section_type).validate_python(data)
    except ValidationError as error:
        raise UserError(_sentence(error, data, section_type, key)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, without the tracker's address, which may contain a password.

    A run on region features has no backbone, so that its default section `backbone` is left out, too.
    """
    values = config.model_dump(mode="json", exclude={"tracking": {"uri"}})
    if not config.has_backbone and config.backbone == BackboneConfig():
        del values["backbone"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _sentence(error: ValidationError, data: Any, section_type: Any, section: str) -> str:
    """One error as a sentence with the dotted key: a renamed key if there is one, otherwise pydantic's first error."""
    prefix = (section,) if section else ()
    errors = [(_location((*prefix, *each["loc"])), each) for each in error.errors()]
    unknown = ("extra_forbidden", "unexpected_keyword_argument")
    for location, error_details in errors:
        new = new_key(location) if error_details["type"] in unknown else None
        if new is not None:
            return f"{_dotted(location, data)}: `{location[-1]}` is now `{new}`"
    location, first = errors[0]
    key = _dotted(location, data)
    if first["type"] == "union_tag_invalid":
        name = first["ctx"]["tag"]
        return f"model.name is {name!r}, which is unknown: {_hint(name, list(MODEL_CONFIGS))}"
    if first["type"] in unknown:
        known = _known_keys(first["loc"][:-1], section_type)
        return f"unknown key {key}: {_hint(str(location[-1]), known, 'known here')}"
    if first["type"] in ("missing", "missing_argument"):
        return f"key {key} is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message if not key or key.split(".")[-1] in message else f"{key}: {message}"
    return f"{key} = {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _hint(name: str, known: Sequence[str], introduction: str = "known") -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}{introduction}: {', '.join(sorted(known))}"


def _location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic's location without the system's name. Pydantic adds it after `model`, but it is not a key."""
    is_tagged = location[:1] == ("model",) and len(location) > 1 and location[1] in MODEL_CONFIGS
    return (location[0], *location[2:]) if is_tagged else location


def _dotted(location: Sequence[int | str], data: Any) -> str:
    """A location as a dotted key, in which a stage is given by its name if it has one."""
    parts = [str(part) for part in location]
    if len(location) >= 2 and location[0] == "stages" and isinstance(location[1], int):
        stage = data["stages"][location[1]]
        if isinstance(stage, dict) and isinstance(stage.get("name"), str):
            parts[1] = stage["name"]
    return ".".join(parts)


def _known_keys(location: Sequence[int | str], section_type: Any) -> list[str]:
    """The valid keys at a location, found by following the types of the sections."""
    node = section_type
    for part in location:
        if part in MODEL_CONFIGS:  # pydantic puts the system's name into a location (`_location`)
            node = MODEL_CONFIGS[str(part)]
        elif isinstance(node, type) and issubclass(node, BaseModel) and part in node.model_fields:
            node = _section_type(node.model_fields[str(part)].annotation)
    if isinstance(node, type) and issubclass(node, BaseModel):
        return list(node.model_fields)
    return [field.name for field in fields(node)] if is_dataclass(node) else []


def _section_type(annotation: Any) -> Any:
    """The section in an annotation such as `Section | None`; None if it contains no section."""
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        return annotation
    candidates = (_section_type(inner) for inner in getattr(annotation, "__args__", ()))
    return next((candidate for candidate in candidates if candidate is not None), None)
