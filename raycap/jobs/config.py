"""`raycap config`: what a configuration says after `extends`, `--set` and variables, and which keys there are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from raycap.jobs.options import Set
from raycap.pipeline.config.load import load_config, shown_values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.schema import config_schema
from raycap.pipeline.config.shipped import named_config, shipped_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.runtime.secrets import without_secrets

DATA_HEADING = "data files, for `raycap evaluate --data`:"
REQUIRED = PydanticUndefined  # in place of the default of a key that has none


def config(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The run's YAML file, or the name of a shipped one.", metavar="[CONFIG]", callback=named_config
        ),
    ] = None,
    set_: Set = None,
    only_changes: Annotated[
        bool, typer.Option("--changes", help="Print only the keys that differ from their defaults.")
    ] = False,
    as_written: Annotated[
        bool, typer.Option("--file", help="Print the file as it is, to copy a shipped one, also of a search.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema for editors. Needs no CONFIG.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names of shipped files. Needs no CONFIG.")] = False,
) -> None:
    """Print a configuration as it will be used.

    All keys are printed, with the values of extended files, of --set, and the defaults. Texts contain ${NAME} as they
    were written, and passwords are left out. The output can be run.

    Example: raycap config demo --changes
    """
    if names:
        print("\n".join([*shipped_names(), "", DATA_HEADING, *shipped_names("data")]))
        return
    if schema:
        print(json.dumps(config_schema(), indent=1, ensure_ascii=False))
        return
    if file is None:
        raise UserError(
            "raycap config prints a configuration; give its YAML file, or --schema for all keys, or --list for the "
            "names of the shipped configurations"
        )
    if as_written:
        print(file.read_text(encoding="utf-8", errors="replace"), end="")
        return
    run_config = load_config(file, set_ or ())
    values = shown_values(run_config)
    if only_changes:
        lines = [f"{each.key}: {_flow(each.value)}  # {_origin(each.default)}" for each in changes(run_config, values)]
        text = "\n".join(lines)
    else:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6)
    for line in without_secrets(text).splitlines():
        print(printable(line))


def _flow(value: Any) -> str:
    """A plain value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _origin(default: Any) -> str:
    return "no default" if default is REQUIRED else f"default: {_flow(default)}"


class Change(NamedTuple):
    """A key with its value and its default, both as plain values. The default may be REQUIRED."""

    key: str
    value: Any
    default: Any


def changes(config: RunConfig, values: Mapping[str, Any]) -> Iterator[Change]:
    """The keys whose values differ from the defaults, in the order of the sections; stages by name.

    values: the plain values of the configuration, which are shown. The keys of a section that is not set by default are
    compared with those of an empty one, which is shown as {}.
    """
    for change in _changes(config, values, None, ""):
        if config.has_backbone or not change.key.startswith("backbone."):
            yield change


def _changes(section: Any, values: Mapping[str, Any], reference: Any, prefix: str) -> Iterator[Change]:
    """The changes of a section. reference: a section with the defaults; None for those of the section's class."""
    for name, default in _defaults(section).items():
        if name not in values:  # left out, because it may contain a password
            continue
        key, found = f"{prefix}{name}", getattr(section, name)
        if reference is not None:
            default = getattr(reference, name)
        if name == "stages":
            for stage, plain in zip(found, values[name], strict=True):
                yield from _changes(stage, plain, None, f"{key}.{stage.name}.")
        elif _is_section(found) and (default is REQUIRED or type(default) is type(found)):
            yield from _changes(found, values[name], None if default is REQUIRED else default, f"{key}.")
        elif _is_section(found) and default is None:
            inside = list(_changes(found, values[name], None, f"{key}."))
            yield from inside or [Change(key, {}, None)]
        elif found != default:
            yield Change(key, values[name], _plain(default))


def _is_section(value: Any) -> bool:
    return isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type))


def _defaults(section: Any) -> dict[str, Any]:
    """The default of each key of a section; REQUIRED for a key without one."""
    if isinstance(section, BaseModel):
        section_fields = type(section).model_fields.items()
        return {name: field.get_default(call_default_factory=True) for name, field in section_fields}
    return {
        field.name: field.default
        if field.default is not MISSING
        else REQUIRED
        if field.default_factory is MISSING
        else field.default_factory()
        for field in fields(section)
    }


def _plain(default: Any) -> Any:
    """A default as a plain value."""
    if isinstance(default, tuple):
        return [_plain(each) for each in default]
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default
