"""`raycap config`: prints a configuration with the values of `extends`, `--set` and defaults, or all possible keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from raycap.jobs.options import Set
from raycap.models.config import Values
from raycap.pipeline.config.load import load_config, shown_values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config, shipped_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import print_line
from raycap.pipeline.runtime.secrets import without_secrets

DATA_HEADING = "data files, for `raycap evaluate --data`:"


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

    All keys are printed, with the values of extended files, of --set, and the defaults. Variables such as ${NAME} are
    not replaced, and passwords are left out. The output can be run.

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
    values = shown_values(load_config(file, set_ or ()), only_changes=only_changes)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6)
    for line in without_secrets(text).splitlines():
        print_line(line)


def config_schema() -> Values:
    """The JSON schema of a run's YAML file, with which an editor completes and explains keys and marks mistakes.

    The schema allows a file that extends another one to lack any key, and does not check keys against each other.
    """
    schema = RunConfig.model_json_schema()
    for section in schema["$defs"].values():
        section.pop("required", None)  # no key is required, because the extended file may have it
    properties = schema["properties"]
    place = {"type": "string", "description": "The folder of all results, or s3://BUCKET/FOLDER."}
    storage = properties["storage"]
    properties["storage"] = {"anyOf": [place, {"$ref": storage["$ref"]}], "default": storage["default"]}
    extends = {"type": "string", "description": "Another YAML file whose values this one overrides; a relative path."}
    properties["model"]["anyOf"] = properties["model"].pop("oneOf")  # oneOf may refuse a file without a name
    schema["properties"] = {"extends": extends, **properties}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
