"""Replaces references `${VARIABLE}` when a configuration is read, and restores them before it is stored.

A stored configuration, such as a run's config.yaml, contains the references, because the values may be secret. Ray's
workers receive the configuration as an object with the values, because they may not have the variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shown
from raycap.pipeline.runtime.secrets import (
    REFERENCE,
    holds_secret,
    is_secret_option,
    remember_address,
    remember_variable,
    without_secrets,
)

Location = tuple[str | int, ...]  # keys and indices from the top of a configuration


class Expanded(str):
    """A text in which each `${VARIABLE}` was replaced by its value.

    written: the text with its references, which `repr` shows, so that no message quotes a value. variables: {name of a
    variable in the text: value}.
    """

    written: str
    variables: dict[str, str]

    def __repr__(self) -> str:
        return repr(self.written)


def variable_names(text: str) -> list[str]:
    """The sorted names of the variables that a text refers to, without repetitions."""
    return sorted(set(REFERENCE.findall(text)))


def expand_variables(value: object, key: str = "", *, known: Mapping[str, str] | None = None) -> Any:
    """Returns a copy of plain values in which each `${VARIABLE}` in a text is replaced.

    key: the dotted key of the values, for messages. known: the only variables that a stored configuration may use, by
    name. Its references to others remain, because a stranger may have written it.

    Raises UserError for a variable that is not set.
    """
    values = os.environ if known is None else known
    if isinstance(value, dict):
        return {name: expand_variables(item, f"{key}.{name}".lstrip("."), known=known) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, f"{key}.{index}", known=known) for index, item in enumerate(value)]
    if not isinstance(value, str) or not (names := variable_names(value)):
        return value
    if missing := [name for name in names if name not in values]:
        if known is not None:
            return value
        raise UserError(
            f"{shown(key)} needs the environment variable {shown(missing[0])}, which is not set; export it, or "
            f"--set {shown(key)}=..."
        )
    expanded = Expanded(REFERENCE.sub(lambda match: values[match[1]], value))
    expanded.written, expanded.variables = value, {name: values[name] for name in names}
    return expanded


def texts_in(value: object, location: Location = ()) -> Iterator[tuple[Location, str]]:
    """Yields (location, text) for each text in nested plain values. location: of `value` itself."""
    if isinstance(value, str):
        yield location, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for part, item in items:
            yield from texts_in(item, (*location, part))


def is_secret(location: Location, text: str) -> bool:
    """True if the content of a configuration's text, or the name of its key, suggests a secret."""
    if holds_secret(text):
        return True
    names = [part for part in location if isinstance(part, str)]
    without_references = REFERENCE.sub("", text)
    if not names or not without_references:
        return False
    return is_secret_option(names[-1], without_references)


def quoted_value(value: object) -> str:
    """A value as a message quotes it. Of a mapping or list that contains a secret, only the size is shown."""
    if isinstance(value, dict | list) and any(is_secret(*found) for found in texts_in(value)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    return quoted(value, without_secrets)


def remember_secrets(values: object) -> dict[Location, Expanded]:
    """Remembers the variables and passwords in plain values, so that messages do not show them.

    Returns {location: text} of the texts in which a `${VARIABLE}` was replaced.
    """
    expanded = {}
    for location, text in texts_in(values):
        remember_address(text)
        if isinstance(text, Expanded):
            expanded[location] = text
            for name, value in text.variables.items():
                remember_variable(name, value)
    return expanded


def restore_references(values: Values, expanded: dict[Location, Expanded]) -> None:
    """Puts `${VARIABLE}` back into the texts of plain values, in place. A text that has changed since is kept."""
    for location, text in expanded.items():
        node: Any = values
        try:
            for part in location[:-1]:
                node = node[part]
            if node[location[-1]] == text:
                node[location[-1]] = text.written
        except (LookupError, TypeError):  # the values no longer have this location
            continue
