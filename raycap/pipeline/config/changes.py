"""What a configuration changes: the keys whose values differ from their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from raycap.pipeline.config.run import RunConfig

REQUIRED = PydanticUndefined  # in place of the default of a key that has none


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
