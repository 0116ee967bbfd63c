"""`raycap`: the command line. Exit codes: 0 success, 2 the caller's mistake (one sentence), 1 a failure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import UserError

app = typer.Typer(
    help="Train, tune and evaluate image-captioning models on a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(help="The run's YAML file.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=value", help="Override a key; stages by name: stages.xe_frozen.epochs=1."),
]
Address = Annotated[str | None, typer.Option(help="A Ray cluster's address; without it a local Ray is started.")]


@app.callback()
def _root() -> None:
    pass


@app.command()
def run(config: Config, set_: Set = None, address: Address = None) -> None:
    """From images to a scored, registered model. Finished parts are not done again.

    Example: raycap run configs/demo.yaml --set seed=1
    """
    from pipeline.config import load_config

    parsed = load_config(config, set_ or ())
    from jobs.run import run as run_all

    run_all(parsed, address)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        result = app(args=argv, standalone_mode=False)
    except UserError as error:
        print(f"raycap: {error}", file=sys.stderr)
        return 2
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("raycap: stopped; the same command continues", file=sys.stderr)
        return 130
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # click's own: wrong options
            error.show()
            return int(error.exit_code)
        raise
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
