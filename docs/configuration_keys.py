"""The reference of all configuration keys, made from the schema.

Type, limits and default come from pydantic. The meaning is the key's row in a table of docs/configuration.md or
docs/search.md; without one it is the field's docstring in the source.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.search.spec import SearchConfig

MARK = "<!-- keys -->"
DOCS = Path(__file__).resolve().parent
# Keys in the tables below these headings are relative to a section.
TABLE_SECTIONS = {
    "Learning rates and frozen parameters": "stages[].",
    "Decoding": "evaluation.decoding.",
}
KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`"}


class Key(NamedTuple):
    """A row of the reference. path: such as `stages[].lr`. default: None for a key that has to be given."""

    path: str
    kind: str
    default: str | None
    comment: str


class Group(NamedTuple):
    """A section. path: empty for the keys at the top. about: what its class says."""

    path: str
    about: str
    keys: list[Key]

    @property
    def heading(self) -> str:
        """The path, and for the section of a model its systems."""
        systems = next((key.kind for key in self.keys if key.path == "model.name"), "")
        return f"`{self.path}`" + (f" with the name {systems.replace(', ', ' or ')}" if systems else "")


def groups(root: type[Any]) -> list[Group]:
    """All sections of a configuration, depth first, and their keys."""
    schema = root.model_json_schema()
    found: list[Group] = []

    def visit(node: dict[str, Any], path: str) -> None:
        prefix = f"{path}." if path else ""
        group = Group(path, section_text(node.get("description", "")) if path else "", [])
        found.append(group)
        for name, value in node["properties"].items():
            sections = list(sections_of(value))
            if not sections:
                default = yaml_text(value["default"]) if "default" in value else None
                comment = " ".join(value.get("description", "").split())
                group.keys.append(Key(prefix + name, kind_of(value), default, comment))
            for suffix, section in sections:
                visit(schema["$defs"][section], prefix + name + suffix)

    visit(schema, "")
    return found


def sections_of(value: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The sections that a key's value may be, by the end of their path: empty, [] for a list, or .KEY for a map."""
    if "$ref" in value:
        yield "", value["$ref"].rsplit("/", 1)[1]
    for choice in [*value.get("anyOf", []), *value.get("oneOf", [])]:
        yield from sections_of(choice)
    if isinstance(value.get("items"), dict):
        yield from (("[]" + suffix, section) for suffix, section in sections_of(value["items"]))
    if isinstance(value.get("additionalProperties"), dict):
        yield from ((".KEY" + suffix, section) for suffix, section in sections_of(value["additionalProperties"]))


def kind_of(value: dict[str, Any]) -> str:
    """A key's type and limits in words."""
    if "anyOf" in value:
        return ", or ".join(kind_of(choice) for choice in value["anyOf"])
    if "const" in value:
        return f"`{yaml_text(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{yaml_text(choice)}`" for choice in value["enum"])
    match value.get("type"):
        case "null":
            return "`null`"
        case "array":
            places = value.get("prefixItems")
            return (
                f"list of {len(places)}: {kind_of(places[0])}" if places else f"list: {kind_of(value.get('items', {}))}"
            )
        case "object":
            inner = value.get("additionalProperties")
            return f"map to {kind_of(inner)}" if isinstance(inner, dict) else "map"
        case str(name):
            return KINDS[name] + limits_of(value)
    return "any value"


def limits_of(value: dict[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {value[key]:,g}" for key, word in words.items() if key in value and abs(value[key]) < 10**5]
    return f" ({', '.join(limits)})" if limits else ""


def yaml_text(value: Any) -> str:
    """A plain value as YAML writes it in a line."""
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def section_text(description: str) -> str:
    """A class's docstring as what the page says of its section. Lines that each explain a key become a list."""
    text = inspect.cleandoc(description)
    if len(re.findall(r"^\w+: ", text, re.MULTILINE)) > 3:
        text = re.sub(r"^(\w+|\w+ to \w+): ", r"- \1: ", text, flags=re.MULTILINE)
    return re.sub(r"\bNone\b", "`null`", re.sub(r"(?<!\*)\*(?!\*)", r"\\*", text))


def table_rows(document: str) -> Iterator[tuple[str, str]]:
    """(key, meaning) of the rows of a document's tables that have a key in the first cell and a meaning in the last."""
    section, in_keys = "", False
    for line in (DOCS / document).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section, in_keys = TABLE_SECTIONS.get(line.lstrip("# "), ""), False
        if not line.startswith("|"):
            in_keys = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[0].startswith("key"):
            in_keys = cells[-1] == "meaning"
        elif in_keys and "`" in cells[0]:
            first = ""
            for name in re.findall(r"`([^`]+)`", cells[0]):
                parent = first.rsplit(".", 1)[0]
                full = parent + name if name.startswith(".") else section + name
                if first and not name.startswith(".") and "." not in name and not section:
                    full = f"{parent}.{name}" if "." in first else name
                first = first or full
                yield full, cells[-1].replace("](#", f"]({document}#")


def reference() -> str:
    """The reference as Markdown."""
    runs = groups(RunConfig)
    searches = groups(SearchConfig)
    parts = ["## Runs\n", *rendered(runs, dict(table_rows("configuration.md")))]
    return "\n".join([*parts, "## Searches\n", *rendered(searches, dict(table_rows("search.md")))])


def rendered(found: list[Group], meanings: dict[str, str]) -> Iterator[str]:
    for group in found:
        if group.path:
            yield f"### {group.heading}\n"
        meaning = meanings.get(group.path.removesuffix(".KEY"), "")
        yield "\n\n".join(filter(None, [group.about, meaning[:1].upper() + meaning[1:]])) + "\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        for key in group.keys:
            default = "*must be given*" if key.default is None else f"`{key.default}`"
            meaning = meanings.get(key.path) or re.sub(r"\bNone\b", "`null`", key.comment)
            cells = (
                f"`{key.path.removeprefix(group.path + '.')}`",
                key.kind,
                default,
                re.sub(r"(?<!\\)\|", r"\\|", meaning),
            )
            yield f"| {' | '.join(cells)} |"
        yield ""
