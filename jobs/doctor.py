"""`raycap doctor`: checks what this machine or a cluster can run, and gives a remedy for each problem."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from jobs.options import Set
from pipeline.cluster.doctor import Finding, examine
from pipeline.config.load import parse_config, read_values
from pipeline.config.run import RunConfig


def doctor(
    config: Annotated[Path | None, typer.Argument(help="The YAML file to run here.", metavar="[CONFIG]")] = None,
    set_: Set = None,
    address: Annotated[str | None, typer.Option(help="A cluster's dashboard, for example http://head:8265.")] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False,
) -> int:
    """Check what this machine or a cluster can run.

    Each line names a capability and, where it is missing, the remedy. The exit code is 1 when CONFIG cannot run.
    `raycap submit doctor CONFIG --address URL` checks the nodes of a cluster.

    Example: raycap doctor configs/demo.yaml
    """
    findings: list[Finding] = []
    for finding in examine(_read_config(config, set_ or ()), address):
        findings.append(finding)
        if not print_json:
            print(finding.line)
    failed = [finding.name for finding in findings if finding.level == "fail"]
    if print_json:
        report = {"ok": not failed, "findings": [vars(finding) for finding in findings]}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        subject = str(config) if config is not None else "raycap"
        print(f"{subject} cannot run here: {', '.join(failed)}" if failed else f"{subject} can run here")
    return 1 if failed else 0


def _read_config(path: Path | None, overrides: Sequence[str]) -> RunConfig | None:
    """The run's configuration in a YAML file. For a search, it is the one that the search starts from."""
    if path is None:
        return None
    values = read_values(path, overrides)
    if "space" in values or "rows" in values:  # only the file of a search has these keys
        from pipeline.search.spec import load_search

        return load_search(path, overrides).base
    return parse_config(values)
