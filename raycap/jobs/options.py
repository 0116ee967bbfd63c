"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raycap.pipeline.config.shipped import named_config

Config = Annotated[
    Path,
    typer.Argument(
        help="The run's YAML file, or the name of a shipped one, such as demo.", metavar="CONFIG", callback=named_config
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=value", help="Override a key; stages by name: stages.xe_frozen.epochs=1."),
]
Seeds = Annotated[
    int, typer.Option(min=1, max=1000, help="Number of runs with the seeds seed, seed + 1, ... of the configuration.")
]
Address = Annotated[str | None, typer.Option(help="Address of a Ray cluster. The default is a Ray on this machine.")]
