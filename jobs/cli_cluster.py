"""The commands for clusters: `raycap submit` and `raycap doctor`, registered by `jobs.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def submit(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="A command that takes a CONFIG; or status, logs, stop.")],
    config: Annotated[str, typer.Argument(help="The command's YAML file; a job's id.", metavar="CONFIG|ID")],
    address: Annotated[str, typer.Option(help="The cluster's dashboard, for example http://head:8265.")],
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for the job; anyone may see it.")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable that the cluster's nodes have themselves.")
    ] = None,
    with_dependencies: Annotated[
        bool, typer.Option("--with-dependencies", help="Install requirements.lock for the job; for development.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the job.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="With logs: to the job's end.")] = False,
) -> int:
    """Runs a command as a job on a Ray cluster and follows it; other options, such as --set, go to the command.

    The exit code is the job's. Ctrl-C asks whether to stop the job too. A token comes from RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH. `submit status ID`, `submit logs ID`, `submit stop ID` look after a job.

    Example: raycap submit run configs/demo.yaml --address http://head:8265 --set storage=s3://bucket/prefix
    """
    from jobs.submit import refuse_options
    from jobs.submit import submit as submit_job

    if command in ("status", "logs", "stop"):
        from jobs import submit as jobs

        refuse_options(
            command, context.args, env=env, secret=secret, detach=detach, with_dependencies=with_dependencies
        )
        if command == "logs":
            return jobs.logs(config, address, follow)
        return jobs.status(config, address) if command == "status" else jobs.stop(config, address)
    refuse_options(command, [config] if config.startswith("-") else [], follow=follow)
    return submit_job(
        command,
        Path(config),
        context.args,
        address,
        env=env or (),
        secrets=secret or (),
        with_dependencies=with_dependencies,
        detach=detach,
    )


def doctor(
    config: Annotated[Path | None, typer.Argument(help="A YAML file that is to run here.", metavar="[CONFIG]")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override a key.")] = None,
    address: Annotated[str | None, typer.Option(help="A cluster's dashboard, for example http://head:8265.")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON in place of lines.")] = False,
) -> int:
    """Says what this machine or a cluster can and cannot do, with the remedy. Exit code 1 when CONFIG cannot run.

    `raycap submit doctor CONFIG --address URL` runs it on the cluster itself.

    Example: raycap doctor configs/demo.yaml
    """
    from jobs.doctor import doctor as examine

    return examine(config, set_ or (), address, as_lines=not json)
