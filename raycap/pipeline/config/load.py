"""Reads configurations from YAML files, with `extends`, `--set` and `${VARIABLE}`, and checks them.

A file may extend another one: `extends: other.yaml`, with a path relative to the file. The file's values are merged
over those of the other file. Mappings are merged key by key, and lists of named items (the stages) by name. All other
values are replaced. If a section (model, schedule or optimizer) gets another `name`, the whole section is replaced,
because a section of that name has other keys.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from raycap.models.config import MODEL_CONFIGS, Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import long_storage
from raycap.pipeline.config.shipped import is_shipped, referenced_file
from raycap.pipeline.config.variables import expand_variables, is_secret, quoted_value, remember_secrets, texts_in
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import MAX_QUOTED, quoted, shown
from raycap.pipeline.runtime.secrets import holds_secret, remember_address, without_secrets
from raycap.pipeline.storage.untrusted.documents import (
    MAX_YAML_CHARACTERS,
    is_file,
    is_folder,
    parse_yaml,
    read_regular_file,
    require_mapping,
)

SectionType = TypeVar("SectionType")
DATA_FILE_SECTIONS = ("data", "features", "evaluation")
# pydantic's types of errors for a key that is missing, and for a key that the section does not have
MISSING, UNKNOWN = ("missing", "missing_argument"), ("extra_forbidden", "unexpected_keyword_argument")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks the configuration in a YAML file.

    overrides: assignments `a.b=value`, in which a stage is named by its name or number. Raises UserError, whose message
    is one sentence with the key, its value, and the valid keys or values.
    """
    return parse_config(read_values(path, overrides))


def with_data(config: RunConfig, path: Path) -> RunConfig:
    """A copy of a configuration for the images of a data file.

    The file's section `data` replaces the configuration's. The file's optional sections `features` and `evaluation` are
    merged over the configuration's.

    Raises UserError like `load_config`, and if only one of file and configuration uses region features.
    """
    changes = expand_variables(read_file(path))
    if unknown := sorted(changes.keys() - set(DATA_FILE_SECTIONS)):
        raise UserError(f"unknown key {shown(unknown[0])} in {path}; a data file has {', '.join(DATA_FILE_SECTIONS)}")
    if "data" not in changes:
        raise UserError(f"key data is missing in {path}; add the section of the images")
    features = changes.get("features")
    has_regions = isinstance(features, dict) and features.get("hdf5") is not None
    if has_regions and config.has_backbone:
        raise UserError(f"{path}: features.hdf5 is for a model on region features, which this one is not; leave it out")
    # Ids of two data sets may be equal, so without this check a model could get the regions of other images.
    if not has_regions and not config.has_backbone:
        raise UserError(f"{path}: features.hdf5 is missing; name the HDF5 file with the regions of these images")
    values = config.model_dump(mode="json") | {"data": {}}
    # Defaults of `evaluation` are left out, because a bundle's protocol gives the keys that were not set.
    values["evaluation"] = config.evaluation.model_dump(mode="json", exclude_unset=True)
    return parse_config(merge(values, changes))


def read_values(path: Path, overrides: Sequence[str] = ()) -> Values:
    """The plain values of a YAML file, with `extends`, overrides and `${VARIABLE}` resolved. Raises UserError."""
    values = read_file(path)
    for override in overrides:
        apply_override(values, override)
    expanded: Values = expand_variables(values)
    return expanded


def read_file(path: Path) -> Values:
    """The plain values of a YAML file, merged over those of the file that it extends. Raises UserError."""
    values: Values = {}
    for _, changes in reversed(_chain(path)):
        values = merge(values, changes)
    return values


def referenced_files(path: Path) -> list[Path]:
    """The file and all files that it extends. For a search, also its base and all files that the base extends."""
    chain = _chain(path)
    base = read_file(path).get("base")
    if isinstance(base, str):
        chain += _chain(referenced_file(path.parent, base))
    return [file for file, _ in chain]


def _chain(path: Path) -> list[tuple[Path, Values]]:
    """[(file, its values)] for the file `path`, the file that it extends, and so on.

    A path under the key `base` is made relative to the folder of `path`, because a search looks for its base there.
    """
    values = _read_yaml(path)
    chain = [(path, values)]
    while (name := values.pop("extends", None)) is not None:
        file = _extended_file(name, [earlier for earlier, _ in chain])
        values = _read_yaml(file)
        if isinstance(values.get("base"), str):
            values["base"] = os.path.relpath(referenced_file(file.parent, values["base"]), path.parent)
        chain.append((file, values))
    return chain


def _extended_file(name: object, chain: Sequence[Path]) -> Path:
    """The file that the last file of the chain extends. name: the value of the key `extends` in the last file.

    Raises UserError if the file does not exist, is already in the chain, or is neither a shipped configuration nor
    below the folder of the first file.
    """
    last = chain[-1]
    folder = chain[0].parent.resolve()
    if not isinstance(name, str):
        raise UserError(f"{last}: extends must be the path of one YAML file, found {quoted_value(name)}")
    file = referenced_file(last.parent, name)
    if not is_file(file):
        raise UserError(
            f"{last}: extends names {shown(name)}, which does not exist; give the path of a YAML file, or the name of "
            "a shipped one"
        )
    if Path(name).is_absolute() or not (file.resolve().is_relative_to(folder) or is_shipped(file)):
        raise UserError(
            f"{last}: extends names {shown(name)}, which is outside of {folder}; give a relative path to a file in "
            "this folder or below it"
        )
    if file.resolve() in [earlier.resolve() for earlier in chain]:
        circle = " -> ".join(map(shown, (*chain, file)))
        raise UserError(f"extends forms a circle: {circle}; remove one of these keys")
    return file


def _read_yaml(path: Path) -> Values:
    """The mapping in one YAML file, with the section `storage` in long form (`long_storage`). Raises UserError."""
    if not is_file(path):
        problem = "is a folder" if is_folder(path) else "does not exist"
        raise UserError(f"configuration {shown(path)} {problem}; give the path of a YAML file")
    try:
        text = read_regular_file(path, max_bytes=4 * MAX_YAML_CHARACTERS)
    except OSError as error:
        raise UserError(f"configuration {path} cannot be read: {error}") from error
    values = dict(require_mapping(parse_yaml(text, str(path)), str(path)))
    if "storage" in values:
        values["storage"] = long_storage(values["storage"])
    return values


def merge(base: Values, changes: Values) -> Values:
    """A copy of `base` with `changes` merged over it. The top of this file has the rules."""
    merged = dict(base)
    for key, value in changes.items():
        before = base.get(key)
        merged[key] = value
        if isinstance(before, dict) and isinstance(value, dict):
            has_other_name = "name" in before and value.get("name", before["name"]) != before["name"]
            if not has_other_name:
                merged[key] = merge(before, value)
        elif isinstance(before, list) and _has_names(before) and _has_names(value):
            by_name = {item["name"]: item for item in before}
            for item in value:
                by_name[item["name"]] = merge(by_name.get(item["name"], {}), item)
            merged[key] = list(by_name.values())
    return merged


def _has_names(value: object) -> bool:
    """True if a value is a list of mappings, each with a text as `name`."""
    return isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) for item in value
    )


def apply_override(values: Values, override: str) -> None:
    """Changes plain values, in place, by one `a.b=value` of the command line. Raises UserError."""
    key, separator, text = override.partition("=")
    remember_address(text)  # an error may quote this text
    if not separator or not key:
        raise UserError(f"--set {quoted_value(override)} is not of the form a.b=value")
    value = parse_yaml(text, f"--set {shown(key)}")
    if holds_secret(text) or any(is_secret(*found) for found in texts_in(value, tuple(key.split(".")))):
        raise UserError(
            f"--set {shown(key)} contains a password or token, and other users of a machine or cluster can read a "
            "command line; write it as ${NAME} and set this variable, for a submitted job by --secret NAME"
        )
    set_value(values, key, value, "--set")


def set_value(data: Values, key: str, value: object, source: str) -> None:
    """Sets a dotted key of plain values, in place. Creates missing mappings on the way to the key.

    key: names a stage by its name or number. source: the option or file that sets the key, for the text of UserError.
    """
    if key == "storage" and isinstance(value, str):
        key = "storage.uri"  # so that the server and the other keys of the storage remain
    *outer_parts, last_part = key.split(".")
    node: Any = data
    for part in outer_parts:
        index = _index(node, part, f"{source} {shown(key)}")
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[index]
    node[_index(node, last_part, f"{source} {shown(key)}")] = value


def _index(node: object, part: str, source: str) -> int | str:
    """The key of a mapping, or the index of an item in a list of stages, that a part of a dotted key means.

    part: the name or number of a stage, if `node` is a list. Raises UserError, whose text begins with `source`.
    """
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise UserError(f"{source}: the key before {quoted(part)} has a plain value without keys")
    names = [item.get("name") if isinstance(item, dict) else None for item in node]
    if part in names:
        return names.index(part)
    if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(node):
        return int(part)
    raise UserError(f"{source}: {quoted(part)} is none of {', '.join(map(shown, names))}")


def parse_config(data: Values) -> RunConfig:
    """Makes and checks a configuration from plain values. Raises UserError like `load_config`."""
    data = data | {"storage": long_storage(data.get("storage", {}))}
    remember_secrets(data)  # an error may quote any of these values
    return parse_section(RunConfig, data).with_references(data)


def parse_stored_config(values: Values, variables: Mapping[str, str] = {}) -> RunConfig:
    """Like `parse_config`, for values that `dump_config` has written. Other `${VARIABLE}` than `variables` remain."""
    return parse_config(expand_variables(values, known=variables))


def parse_section(section_type: type[SectionType], data: object, key: str = "") -> SectionType:
    """Makes and checks a pydantic model or dataclass from plain values. Raises UserError like `load_config`.

    key: the section's key in its file, for the message.
    """
    try:
        return TypeAdapter(section_type).validate_python(data)
    except ValidationError as error:
        raise UserError(_sentence(error, data, section_type, key)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration (`RunConfig.stored_values`) as YAML."""
    return yaml.safe_dump(config.stored_values(), sort_keys=False, allow_unicode=True)


def shown_values(config: RunConfig, *, only_changes: bool = False) -> Values:
    """The plain values that `raycap config` prints: those of `dump_config`, and the tracker's address.

    A user or password in the address is left out, unless it is a `${VARIABLE}`. only_changes: whether only keys that
    differ from their defaults are returned.
    """
    values, address = config.stored_values(only_changes=only_changes), config.tracking.uri
    if address is not None:
        values["tracking"]["uri"] = without_secrets(getattr(address, "written", address))
    return values


def _sentence(error: ValidationError, data: object, section_type: object, section: str) -> str:
    """Describes one of pydantic's errors in a sentence with the dotted key.

    An unknown key is described rather than a missing one, because a key is often missing when its name was mistyped.
    """
    errors = error.errors()
    missing = [".".join(map(str, details["loc"])) for details in errors if details["type"] in MISSING]
    if isinstance(data, Mapping) and not section:
        if "data" in missing and "base" in data:
            return "key data is missing; this configuration is for `raycap tune`"
        if "base" in missing and "data" in data:
            return "key base is missing; this configuration is for `raycap run`"
    unknown = [details for details in errors if details["type"] in UNKNOWN]
    first = unknown[0] if unknown and errors[0]["type"] in MISSING else errors[0]
    location = _location((section, *first["loc"]) if section else first["loc"])
    key = _dotted(location, data)
    if first["type"] == "union_tag_invalid":
        name = first["ctx"]["tag"]
        return f"model.name is {quoted_value(name)}, which is unknown: {_hint(name, MODEL_CONFIGS, 'known')}"
    if first["type"] in UNKNOWN:
        valid_keys = _keys_at(first["loc"][:-1], section_type)
        return f"unknown key {key}: {_hint(str(location[-1]), valid_keys, 'known here')}"
    if first["type"] in MISSING:
        return f"key {key} is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        names = [part for part in key.split(".") if part and not part.isdigit()]
        names_key = not names or names[-1] in message
        return message if names_key else f"{key}: {message}"
    return f"{key} = {quoted_value(first['input'])}: {message[:1].lower()}{message[1:]}"


def _hint(name: str, valid_names: Collection[str], introduction: str) -> str:
    """The end of a sentence: "did you mean ...?" if a valid name is similar to `name`, then all valid names."""
    similar = difflib.get_close_matches(name[:MAX_QUOTED], sorted(valid_names), n=1)
    question = f"did you mean {similar[0]}? " if similar else ""
    return f"{question}{introduction}: {', '.join(sorted(valid_names))}"


def _location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The location of a key: pydantic's location without the name of a system after `model` and the type of a value.

    If a mapping has a forbidden key, the result is the mapping's location, because pydantic's message quotes the key.
    """
    if location[-1:] == ("[key]",):
        location = location[:-2]
    last = str(location[-1]) if location else ""
    if last in ("int", "float") or last.startswith("literal["):  # pydantic adds the type if the value may have several
        location = location[:-1]
    if len(location) > 1 and location[0] == "model" and location[1] in MODEL_CONFIGS:
        return (location[0], *location[2:])
    return location


def _dotted(location: Sequence[int | str], data: Any) -> str:
    """A location as a dotted key. A stage is named by its name, or by its number if it has no name."""
    parts = list(map(shown, location))
    if len(location) >= 2 and location[0] == "stages" and isinstance(location[1], int):
        stage = data["stages"][location[1]]
        if isinstance(stage, dict) and isinstance(stage.get("name"), str):
            parts[1] = shown(stage["name"])
    return ".".join(parts)


def _keys_at(location: Sequence[int | str], section_type: object) -> list[str]:
    """The valid keys of the section at a location. section_type: the type of the section at the top."""
    types = _types_of_keys(section_type)
    for part in location:
        if part in MODEL_CONFIGS:  # pydantic inserts the system's name into a location (`_location`)
            types = _types_of_keys(MODEL_CONFIGS[str(part)])
        elif part in types:
            types = _types_of_keys(types[str(part)])
    return list(types)


def _types_of_keys(annotation: Any) -> Values:
    """{key: type} of the section in an annotation such as `Section | None`. Empty if there is no section in it."""
    is_class = isinstance(annotation, type)
    if is_class and is_dataclass(annotation):
        return {field.name: field.type for field in fields(annotation)}
    if is_class and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    for member in get_args(annotation):
        if types := _types_of_keys(member):
            return types
    return {}
