"""A JSON schema of a run's YAML, with which an editor completes keys, shows what they mean and marks mistakes."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from typing import Any

from pydantic import BaseModel

from raycap.models import config
from raycap.models.encoders import views
from raycap.pipeline.config import run, sections
from raycap.pipeline.config.run import RunConfig


def config_schema() -> dict[str, Any]:
    """Pydantic's schema of the configuration, with the comments of the code as the descriptions of keys.

    A file that extends another one may lack any key. Checks across keys are not part of the schema.
    """
    schema = RunConfig.model_json_schema()
    classes = _classes()
    definitions = schema["$defs"]
    for name, part in (("RunConfig", schema), *definitions.items()):
        comments = _comments(classes[name]) if name in classes else {}
        for key, description in comments.items():
            if key in part.get("properties", {}):
                part["properties"][key] = {"description": description} | part["properties"][key]
        if part is not schema:
            part.pop("required", None)  # a section may get its other keys from the extended file
    properties = schema["properties"]
    place = {"type": "string", "description": "The folder of all results, or s3://BUCKET/FOLDER."}
    storage = properties["storage"]
    properties["storage"] = {"anyOf": [place, {"$ref": storage["$ref"]}], "default": storage["default"]}
    extends = {"type": "string", "description": "Another YAML file whose values this one overrides; a relative path."}
    properties["model"]["anyOf"] = properties["model"].pop("oneOf")  # a file may leave the name to the extended one
    schema["properties"] = {"extends": extends, **properties}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _classes() -> dict[str, type]:
    """The classes of sections by name."""
    modules = (config, views, sections, run)
    found = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return {each.__name__: each for each in found}


def _comments(section: type) -> dict[str, str]:
    """The comments of a section's keys in the code: those of the lines above a key, and behind it."""
    texts: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if cls in (object, BaseModel) or not cls.__module__.startswith("raycap."):
            continue
        source = textwrap.dedent(inspect.getsource(cls))
        behind, alone = dict[int, str](), dict[int, str]()  # by line
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                is_alone = not token.line[: token.start[1]].strip()
                (alone if is_alone else behind)[token.start[0]] = token.string.lstrip("# ")
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                lines = [alone[line] for line in range(first, node.lineno)] + [behind.get(node.end_lineno or 0, "")]
                if text := " ".join(filter(None, lines)):
                    texts[node.target.id] = text
    return texts
